"""Which saves stay dense because they are little beside the rest of a block.

A save costs the host as much time as a large one, however small it is. What the block before saved
says how many there are of which size: the smallest stay as they are.
"""

from __future__ import annotations

# Below so many bytes, and below the first share of what a block saves, as long as all that stays
# dense is no more than the second share.
LITTLE_BYTES = 4 << 20
LITTLE_SHARE = 1 / 512
MOST_LITTLE_SHARE = 1 / 5


class LittleSaves:
    """Of one block. ``saved_bytes``: what the block ``before`` has compressed."""

    __slots__ = ("_bytes_by_size", "_dense", "_most", "_room", "_smaller")

    def __init__(self, before: LittleSaves | None, saved_bytes: int) -> None:
        self._bytes_by_size: dict[int, int] = {}
        self._dense: set[int] = set()  # storages
        sizes = before._bytes_by_size if before is not None else {}
        total = max(saved_bytes, sum(sizes.values()))
        self._room = total * MOST_LITTLE_SHARE
        # The largest size that stays dense, and bytes of smaller ones that are still to come.
        self._most = self._smaller = smaller = 0
        for size, size_bytes in sorted(sizes.items()):
            if size >= min(LITTLE_BYTES, total * LITTLE_SHARE) or smaller >= self._room:
                break
            self._most, self._smaller = size, smaller
            smaller += size_bytes

    def stays_dense(self, size_bytes: int, storage: int) -> bool:
        """Whether the ``storage`` at this address does, of so many bytes; asked at each save."""
        if size_bytes > self._most:
            return False
        if storage in self._dense:
            return True
        room = self._room
        if size_bytes == self._most:
            room -= self._smaller
        if size_bytes > room:
            return False
        if size_bytes < self._most:
            self._smaller = max(self._smaller - size_bytes, 0)
        self._room -= size_bytes
        self._dense.add(storage)
        self.count(size_bytes)
        return True

    def count(self, size_bytes: int) -> None:
        """A storage that might be compressed."""
        self._bytes_by_size[size_bytes] = self._bytes_by_size.get(size_bytes, 0) + size_bytes
