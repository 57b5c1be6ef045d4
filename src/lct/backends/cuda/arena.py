"""The overflow arena of a CUDA device, and the credit that lets launches never run out of it.

Chunks of 8,192 bytes lie in segments; a bitmap and a counter of free chunks live on the device
(kernels/arena.cuh). A launch is admitted only while the free chunks that the host knows of cover
the worst case of every launch in flight: then no launch can fail, and nothing is overwritten that
could not be stored. What finished launches really took a kernel of one thread writes where the
host looks, without waiting in the common case. Hardly any launch takes its worst case: most of it
is backed by pinned memory of the host, which kernels take chunks of only where the device's own
have run out, and the device's part grows when that happens. During CUDA graph capture the host
cannot step in: kernels take credit on the device, and a group that finds none stays as it was and
is counted (``check``).

The arena grows for what spills, and what has not been needed for a while goes back to torch's
allocator (``trim``): the device closes segments, and the host hears of it as of all else.
"""

from __future__ import annotations

import contextlib
import struct
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ...config import arena_host_bytes, arena_limit_bytes, arena_own_bytes
from ...dtypes import DTYPES
from ...errors import ArenaExhaustedError, LctError
from ...layout import CHUNK_BYTES
from ...presets import PRESETS
from . import jit

SEGMENT_CHUNKS = 512
HOST_CHUNKS = 1 << 20  # the number of the first chunk in the host's memory, as in arena.cuh
MAX_CHUNKS = HOST_CHUNKS  # 8 GiB of spilled exponents; references have 24 bits
MAX_HOST_CHUNKS = 1 << 18  # 2 GiB
_SEGMENT_WORDS = SEGMENT_CHUNKS // 32  # of the bitmap; close.cu has a lane for each
CONTROL = struct.Struct("<iIIIIIiIQQ")  # mirrors struct Arena in arena.cuh
_CONTROL_BYTES = 64
_BITMAP_BYTES = (MAX_CHUNKS + MAX_HOST_CHUNKS) // 8
_FAILED_OFFSET = 4  # of failed_groups in the control block
_COUNTERS = 8  # at the head of the control block
_REPORT_WORDS = _COUNTERS + 1  # report.cu: and a number
_SEGMENTS_BYTES = (MAX_CHUNKS + MAX_HOST_CHUNKS) // SEGMENT_CHUNKS * 8
# The counters are written for the host every this many launches.
_CHECKPOINT_LAUNCHES = 16
# The serial numbers of the chunks' owners stand behind the chunks (chunk_owner in arena.cuh).
SEGMENT_BYTES = SEGMENT_CHUNKS * (CHUNK_BYTES + 4)
# Pinned at once: torch rounds pinned memory up to a power of two, here 64 MiB.
_HOST_BLOCK_SEGMENTS = 15
# A sweep comes when so many payloads are gone; the second where more is in use than the arena
# ordinarily holds, so that what is taken for long finds room in the segments that stay.
_SWEEP_PAYLOADS = 4096
_SWEEP_PAYLOADS_OF_MANY = 256
_BF16 = DTYPES["bfloat16"]


@dataclass
class Counters:
    """What the device's counters said at some moment."""

    free_chunks: int
    failed_groups: int
    taken_total: int
    total_chunks: int  # in open segments
    host_free_chunks: int = 0  # the same of those in the host's memory
    host_chunks: int = 0

    @property
    def host_used_chunks(self) -> int:
        """Chunks in use then in the host's memory."""
        return self.host_chunks - self.host_free_chunks

    @property
    def used_chunks(self) -> int:
        """Chunks in use then, those of payloads that are gone included until a sweep."""
        return self.total_chunks - self.free_chunks + self.host_used_chunks


def _counters(head: Sequence[int]) -> Counters:
    """By the first words of the control block (arena.cuh)."""
    free, failed, taken, words, _, _, host_free, host_words = head
    # A bitmap without segments has a word too, which is full.
    total = words // _SEGMENT_WORDS * SEGMENT_CHUNKS
    return Counters(
        free, failed & 0xFFFFFFFF, taken & 0xFFFFFFFF, total, host_free, host_words * 32
    )


class _Snapshot:
    """The counters at a point of a stream, written into the host's memory; used again and again.

    By a kernel of one thread: a copy and an event are two calls of the driver, and each look
    whether they are done is one more; a large step in backward takes one for every launch or two.
    """

    def __init__(self, device: int, control: int) -> None:
        self._pinned = torch.empty(_REPORT_WORDS, dtype=torch.int32, device="cpu", pin_memory=True)
        self._values = self._pinned.numpy()
        self._values[:] = 0
        error, address = jit.driver().cuMemHostGetDevicePointer(self._values.ctypes.data, 0)
        jit.check(error)
        self._args = jit.Args(dense=int(address), arena=control)
        kernel = jit.load("report_counters", PRESETS["pooled"], _BF16, device)
        self._call = jit.Call(kernel, self._args, 1, kernel.warps)
        self._number = 0
        self._stream = 0

    def take(self, stream: int) -> None:
        """Write the head of the control block when ``stream`` comes to it."""
        self._number = self._number % 0x7FFFFFFF + 1
        self._stream = stream
        self._args.serial = self._number
        self._call.launch(stream)

    def is_done(self) -> bool:
        """Whether they have been written."""
        return int(self._values[_REPORT_WORDS - 1]) == self._number

    def wait(self) -> None:
        """Wait for them on the host. LctError where the device fails before."""
        driver = jit.driver()
        while not self.is_done():
            (error,) = driver.cuStreamQuery(self._stream)
            if error == driver.CUresult.CUDA_ERROR_NOT_READY:
                time.sleep(0)  # other threads of Python go on
                continue
            jit.check(error)
            if not self.is_done():
                raise LctError("the device is done and has not reported the arena's counters")

    def wait_on(self, stream: int) -> None:
        """Let what follows on ``stream`` wait for all that the snapshot's stream has by now."""
        driver = jit.driver()
        error, event = driver.cuEventCreate(driver.CUevent_flags.CU_EVENT_DISABLE_TIMING)
        jit.check(error)
        jit.check(driver.cuEventRecord(event, self._stream)[0])
        jit.check(driver.cuStreamWaitEvent(stream, event, 0)[0])
        jit.check(driver.cuEventDestroy(event)[0])  # once the device has come to it

    def counters(self) -> Counters:
        """What was written."""
        return _counters(self._values[:_COUNTERS].tolist())


@dataclass
class _Checkpoint:
    snapshot: _Snapshot
    debited: int  # worst-case chunks of the launches since the checkpoint before
    sequence: int  # number of the last launch that it covers
    closes: bool  # whether it follows the launch that closes segments


class Arena:
    """The arena of one device; ``of(device)`` gives it."""

    def __init__(self, device: int) -> None:
        self.device = device
        device_bytes = torch.cuda.get_device_properties(device).total_memory
        self.limit_chunks = max(1, arena_limit_bytes(device_bytes) // CHUNK_BYTES)
        # Those that are open, and those of which the host has not heard that they are closed.
        self.segments: list[torch.Tensor] = []
        self._reserved_chunks = 0  # that the user asked for
        # In the host's memory, where they stay.
        self.host_segments: list[torch.Tensor] = []
        self.host_limit_chunks = min(arena_host_bytes() // CHUNK_BYTES, MAX_HOST_CHUNKS)
        # Held from `admit` until the launch is enqueued too: a checkpoint that another thread takes
        # in between would count it as done.
        self.lock = threading.RLock()
        self._control = torch.zeros(
            _CONTROL_BYTES + _BITMAP_BYTES + _SEGMENTS_BYTES,
            dtype=torch.uint8,
            device=torch.device("cuda", device),
        )
        self._control[_CONTROL_BYTES : _CONTROL_BYTES + _BITMAP_BYTES] = 0xFF
        self.pointer = self._control.data_ptr()
        segment_shift = SEGMENT_CHUNKS.bit_length() - 1
        bitmap = self.pointer + _CONTROL_BYTES
        home_words = self._least_segments() * _SEGMENT_WORDS
        tables = bitmap + _BITMAP_BYTES, bitmap
        head = CONTROL.pack(0, 0, 0, 1, segment_shift, home_words, 0, 0, *tables)
        self._control[: CONTROL.size].copy_(torch.frombuffer(bytearray(head), dtype=torch.uint8))
        torch.cuda.current_stream(device).synchronize()
        self._known = Counters(0, 0, 0, 0)
        # Chunks that launches in flight and those to come may take: on the device, on the host.
        self._free = self._free_host = 0
        # What ``_free`` is at most while the host has not heard how many segments a trim closed.
        self._closing: int | None = None
        self._most_used = 0  # chunks in use, as heard since the last trim
        self._spills_to_host = False  # as last heard
        self._captured = False
        self._uncovered = 0
        self._debited = 0  # of the checkpoints that have not been read
        self._launches_since = 0
        self._sequence = 0
        self._checkpoints: deque[_Checkpoint] = deque()
        self._stream: int | None = None
        self._spare: list[_Snapshot] = []
        self._serial = 0
        self._gone: deque[tuple[int, int]] = deque()

    # ---- sizes -------------------------------------------------------------------------------

    @property
    def total_chunks(self) -> int:
        """Chunks in all segments that are held."""
        return len(self.segments) * SEGMENT_CHUNKS

    @property
    def reserved_bytes(self) -> int:
        """Device memory held: segments, bitmap and tables."""
        return self._control.nbytes + sum(s.nbytes for s in self.segments)

    @property
    def host_bytes(self) -> int:
        """Pinned memory of the host that is held."""
        return sum(s.nbytes for s in self.host_segments)

    @property
    def _host_chunks(self) -> int:
        return len(self.host_segments) * SEGMENT_CHUNKS

    @property
    def _spare_chunks(self) -> int:
        """What the device itself has beside what is in use."""
        if self.host_limit_chunks < SEGMENT_CHUNKS:
            return self.limit_chunks
        own = arena_own_bytes(self.limit_chunks * CHUNK_BYTES) // CHUNK_BYTES
        return max(SEGMENT_CHUNKS, own)

    def counters(self) -> Counters:
        """The device's counters now. Synchronises."""
        head = bytes(self._control[: CONTROL.size].cpu().numpy())
        return _counters(CONTROL.unpack(head)[:_COUNTERS])

    # ---- credit ------------------------------------------------------------------------------

    def admit(self, chunks: int, stream: int) -> int:
        """Make sure that a launch on ``stream`` may take ``chunks``; returns its number.

        Waits only where launches in flight might take all that is free, the host's part is as large
        as it may be and the device's has half of its limit, or all of it if ``chunks`` are more.
        ArenaExhaustedError, before anything is launched, where the device has no memory to grow it.
        The caller holds ``lock`` until it has called ``launched``.
        """
        with self.lock:
            self.ensure(chunks, stream)
            self._uncovered += chunks
            self._launches_since += 1
            self._sequence += 1
            return self._sequence

    def ensure(self, chunks: int, stream: int) -> None:
        """Make sure that the next launches on ``stream`` may take ``chunks`` in all, as ``admit``
        does for one.
        """
        with self.lock:
            if self._stream is not None and stream != self._stream:
                self._change_stream(stream)
            self._stream = stream
            self._raise_failures(self._known.failed_groups)
            if self._spills_to_host:
                self._follow_spills()
            if self._missing(chunks) > 0:
                self._find_credit(chunks)

    def launched(self) -> None:
        """Call after the launch: now and then notes a point at which to read the counters."""
        if self._launches_since >= _CHECKPOINT_LAUNCHES or self._uncovered * 4 > self._room():
            with self.lock:
                self._poll()
                self._checkpoint()

    def new_serial(self) -> int:
        """A number for a payload, which marks its chunks."""
        self._serial = self._serial % 0xFFFFFFFF + 1
        return self._serial

    def forget(self, serial: int, last_launch: int) -> None:
        """The payload ``serial``, last written by launch ``last_launch``, is gone.

        Its chunks are free. That costs no launch: a sweep gives them back when many payloads are
        gone or chunks are short, and where nothing ever spilled there is nothing to sweep.
        """
        self._gone.append((serial, last_launch))
        # Called wherever an object ends, whatever locks its thread holds: no waiting for others.
        # The next payload that goes tries again.
        if len(self._gone) >= self._most_gone() and self.lock.acquire(blocking=False):
            try:
                self._poll()
                if len(self._gone) >= self._most_gone():
                    self.collect()
            finally:
                self.lock.release()

    def _most_gone(self) -> int:
        many = self._known.used_chunks > self.limit_chunks
        return _SWEEP_PAYLOADS_OF_MANY if many else _SWEEP_PAYLOADS

    def collect(self) -> None:
        """Give back the chunks of payloads that are gone, in the order of the arena's stream.

        Does not wait for the device. Does nothing while a graph is captured.
        """
        with self.lock:
            if torch.cuda.is_current_stream_capturing():
                return
            # More may go while this runs (garbage collection, other threads): take what is there.
            serials = sorted(self._gone.popleft()[0] for _ in range(len(self._gone)))
            if not serials or not self.segments:
                return
            stream = self._arena_stream()
            with torch.cuda.stream(self._torch_stream(stream)):
                # From pageable memory the copy would wait for all that the stream has to do.
                numbers = torch.tensor(serials, dtype=torch.uint32, device="cpu", pin_memory=True)
                gone = numbers.to(torch.device("cuda", self.device), non_blocking=True)
                args = jit.Args(dense=gone.data_ptr(), arena=self.pointer, capacity=len(serials))
                self._sweep(args, stream)
            # So that a checkpoint follows and the host hears of free chunks.
            self._launches_since += 1
            self._sequence += 1

    def sweep_in_graph(self, serial: int, stream: int) -> None:
        """While a graph is captured: there its replays give back what the one before took for the
        payload ``serial``, which the graph writes anew.
        """
        self._sweep(jit.Args(arena=self.pointer, serial=serial, capacity=1), stream)

    def _sweep(self, args: jit.Args, stream: int) -> None:
        kernel = jit.load("sweep_chunks", PRESETS["pooled"], _BF16, self.device)
        blocks = jit.ceil_div(self.total_chunks + self._host_chunks, kernel.warps * 32)
        blocks = max(blocks, 1)
        jit.Call(kernel, args, blocks, kernel.warps).launch(stream)

    def _arena_stream(self) -> int:
        if self._stream is None:
            return int(torch.cuda.current_stream(self.device).cuda_stream)
        return self._stream

    def _in_flight(self) -> int:
        return self._uncovered + self._debited

    def _room(self) -> int:
        return self._free + self._free_host

    def _missing(self, chunks: int) -> int:
        return self._in_flight() + chunks - self._room()

    def _find_credit(self, chunks: int) -> None:
        self._poll()
        if self._missing(chunks) <= 0:
            return
        if self._known.taken_total:
            self.collect()
        self._back(self._missing(chunks))
        missing = self._missing(chunks)
        if missing <= 0:
            return
        # A wait is short, and memory that only spares it others could use: beside launches in
        # flight the arena grows to half of its limit, or for a launch that needs more by itself.
        most = max(self.limit_chunks // 2, chunks)
        waits = self._in_flight() or self._closing is not None
        if not waits:
            self._grow(missing)
            return
        if self.total_chunks + missing <= most and self._try_to_grow(missing):
            return
        self._checkpoint()
        while self._checkpoints and self._missing(chunks) > 0:
            self._hear()
        missing = self._missing(chunks)
        if missing > 0:
            self._grow(missing)

    def _back(self, chunks: int) -> None:
        """Grow by up to ``chunks`` that are hardly ever taken: the first few on the device, the
        others in the host's memory, as far as the host's limit goes.
        """
        if self.host_limit_chunks < SEGMENT_CHUNKS:
            return
        few = min(self._spare_chunks - self.total_chunks, chunks)
        if few > 0 and self._closing is None:
            free = self._free
            self._try_to_grow(few)
            chunks -= self._free - free
        while chunks > 0 and self._host_chunks + SEGMENT_CHUNKS <= self.host_limit_chunks:
            chunks -= self._grow_on_host()

    def _follow_spills(self) -> None:
        """Data takes chunks of the host's memory: give the device more of its own, for the next."""
        if self._free * 2 >= self._spare_chunks or self._closing is not None:
            return
        self._try_to_grow(self._spare_chunks)

    def _try_to_grow(self, chunks: int) -> bool:
        """Grow where a full device does no harm: there is credit all the same, or a wait."""
        with contextlib.suppress(ArenaExhaustedError):
            self._grow(chunks)
            return True
        return False

    def _grow(self, chunks: int) -> None:
        # The next segment gets the number of the first that is closed.
        self._hear_of_trim()
        for _ in range(jit.ceil_div(chunks, SEGMENT_CHUNKS)):
            if self.total_chunks + SEGMENT_CHUNKS > MAX_CHUNKS:
                raise ArenaExhaustedError(
                    f"the arena holds at most {MAX_CHUNKS} chunks; nothing was overwritten"
                )
            stream = self._arena_stream()
            try:
                with torch.cuda.stream(self._torch_stream(stream)):
                    segment = torch.empty(
                        SEGMENT_BYTES,
                        dtype=torch.uint8,
                        device=torch.device("cuda", self.device),
                    )
            except torch.cuda.OutOfMemoryError as error:
                raise ArenaExhaustedError(
                    f"the overflow arena needs {chunks} more chunks of {CHUNK_BYTES} bytes and "
                    f"the device has no memory for them; nothing was overwritten ({error})"
                ) from error
            self._open(len(self.segments), segment.data_ptr(), stream)
            self.segments.append(segment)
            self._free += SEGMENT_CHUNKS

    def _grow_on_host(self) -> int:
        """Another block of pinned memory; chunks in it. A host that has none is not asked again."""
        count = (self.host_limit_chunks - self._host_chunks) // SEGMENT_CHUNKS
        count = min(count, _HOST_BLOCK_SEGMENTS)
        try:
            block = torch.empty(
                count * SEGMENT_BYTES, dtype=torch.uint8, device="cpu", pin_memory=True
            )
        except RuntimeError:
            self.host_limit_chunks = self._host_chunks
            return count * SEGMENT_CHUNKS
        error, address = jit.driver().cuMemHostGetDevicePointer(block.data_ptr(), 0)
        jit.check(error)
        for number in range(count):
            first = HOST_CHUNKS // SEGMENT_CHUNKS + len(self.host_segments)
            self._open(first, int(address) + number * SEGMENT_BYTES, self._arena_stream())
            self.host_segments.append(block[number * SEGMENT_BYTES :][:SEGMENT_BYTES])
            self._free_host += SEGMENT_CHUNKS
        return count * SEGMENT_CHUNKS

    def _open(self, number: int, address: int, stream: int) -> None:
        """Launch what makes the memory at ``address`` the segment ``number``."""
        args = jit.Args(dense=address, arena=self.pointer)
        args.first_group, args.end_group = number, SEGMENT_CHUNKS
        kernel = jit.load("grow_arena", PRESETS["pooled"], _BF16, self.device)
        jit.Call(kernel, args, 1, kernel.warps).launch(stream)

    def reserve(self, size_bytes: int) -> None:
        """Grow to at least ``size_bytes`` of chunks, for captured graphs; no trim undoes it."""
        with self.lock:
            self._stream = self._arena_stream()
            self._hear_of_trim()
            chunks = jit.ceil_div(size_bytes, CHUNK_BYTES)
            if chunks > self.total_chunks:
                self._grow(chunks - self.total_chunks)
            self._reserved_chunks = max(self._reserved_chunks, chunks)

    # ---- trimming ----------------------------------------------------------------------------

    def trim(self) -> None:
        """Give the segments that nothing has needed since the last call back to torch's allocator.

        As many stay as the most chunks in use since then take, and a few beside them (the arena's
        limit where the host backs nothing): so the arena does not shrink and grow at each step.
        What was reserved stays too. A segment goes only when no chunk in it and in those of higher
        numbers is in use.

        Does not wait for the device: it closes them in the order of the arena's stream, and they
        are given back when the host has heard how many. Does nothing while a graph is captured,
        and nothing any more after a capture that used the arena: replays take chunks of which the
        host knows nothing.
        """
        if self._captured or len(self.segments) <= self._least_segments():
            return
        with self.lock, torch.cuda.device(self.device):
            if torch.cuda.is_current_stream_capturing():
                return
            self._poll()
            if self._closing is not None:
                return
            if self._known.used_chunks > SEGMENT_CHUNKS:
                self.collect()
            keep = self._least_segments(self._most_used)
            self._most_used = 0
            if keep < len(self.segments):
                self._close(keep)

    def _least_segments(self, used_chunks: int = 0) -> int:
        """Segments that no trim closes where so many chunks are in use at most."""
        chunks = max(used_chunks + self._spare_chunks, self._reserved_chunks)
        return jit.ceil_div(chunks, SEGMENT_CHUNKS)

    def _close(self, keep: int) -> None:
        """Close the last segments but for the first ``keep``; some that are in use may stay too."""
        args = jit.Args(arena=self.pointer, first_group=keep, end_group=SEGMENT_CHUNKS)
        args.capacity = self._spare_chunks
        kernel = jit.load("close_segments", PRESETS["pooled"], _BF16, self.device)
        # When the device comes to it, launches before have taken what they take. At least so many
        # are free after it, or all that were: for those that are not admitted yet.
        self._closing = self._in_flight() + self._spare_chunks
        self._free = min(self._free, self._closing)
        jit.Call(kernel, args, 1, kernel.warps).launch(self._arena_stream())
        self._launches_since += 1
        self._sequence += 1
        self._checkpoint(closes=True)

    def note_capture(self) -> None:
        """Call when a launch is captured into a graph: from then on nothing is closed."""
        self._captured = True

    def known_used_chunks(self) -> int:
        """Chunks in use as the host last heard: at most some launches ago. Asks nothing."""
        return self._known.used_chunks

    def known_taken_chunks(self) -> int:
        """Chunks ever taken, modulo 2³², as the host last heard. Asks nothing."""
        return self._known.taken_total

    def settle(self) -> int:
        """Give back the chunks of payloads that are gone; chunks in use then. Synchronises."""
        with self.lock:
            self.collect()
            self._checkpoint()
            if self._checkpoints:
                self._checkpoints[-1].snapshot.wait()
                self._poll()
            return self.known_used_chunks()

    def check(self) -> None:
        """Raise ArenaExhaustedError if a captured launch found no room. Synchronises."""
        with self.lock:
            self._raise_failures(self.counters().failed_groups)

    def _raise_failures(self, failed: int) -> None:
        if failed:
            self._control[_FAILED_OFFSET : _FAILED_OFFSET + 4] = 0
            # Checkpoints on their way may say it again.
            while self._checkpoints:
                self._hear()
            self._known.failed_groups = 0
            raise ArenaExhaustedError(
                f"{failed} groups found no room in the arena of cuda:{self.device} during graph "
                "replay and kept their old values, as did every group after them: reserve more "
                "with lct.reserve_arena(size_bytes) before capture"
            )

    # ---- checkpoints -------------------------------------------------------------------------

    def _checkpoint(self, closes: bool = False) -> None:
        if not self._launches_since or self._stream is None:
            return
        snapshot = self._spare.pop() if self._spare else _Snapshot(self.device, self.pointer)
        snapshot.take(self._stream)
        self._checkpoints.append(_Checkpoint(snapshot, self._uncovered, self._sequence, closes))
        self._debited += self._uncovered
        self._uncovered = self._launches_since = 0

    def _poll(self) -> None:
        with self.lock:
            while self._checkpoints and self._checkpoints[0].snapshot.is_done():
                done = self._checkpoints.popleft()
                self._debited -= done.debited
                self._known = known = done.snapshot.counters()
                self._spare.append(done.snapshot)
                self._most_used = max(self._most_used, known.used_chunks)
                if done.closes:
                    del self.segments[known.total_chunks // SEGMENT_CHUNKS :]
                    self._closing = None
                # And what the arena has grown by since.
                self._free = known.free_chunks + self.total_chunks - known.total_chunks
                self._free_host = known.host_free_chunks + self._host_chunks - known.host_chunks
                self._spills_to_host = known.host_used_chunks > 0
                if self._closing is not None:
                    self._closing -= done.debited
                    self._free = min(self._free, self._closing)
                if not self._known.taken_total:
                    while self._gone and self._gone[0][1] <= done.sequence:
                        self._gone.popleft()

    def _hear(self) -> None:
        """Wait for the first checkpoint, and take in what it says."""
        self._checkpoints[0].snapshot.wait()
        self._poll()

    def _hear_of_trim(self) -> None:
        while self._closing is not None:
            self._hear()

    def _change_stream(self, stream: int) -> None:
        """Order the arena's launches across streams: one set of counters describes them all."""
        self._checkpoint()
        if self._checkpoints:
            self._checkpoints[-1].snapshot.wait_on(stream)

    def _torch_stream(self, stream: int) -> Any:
        if not stream:
            return torch.cuda.default_stream(self.device)
        return torch.cuda.ExternalStream(stream, device=self.device)

    def gather(self, chunks: torch.Tensor) -> torch.Tensor:
        """Contents of ``chunks`` (int64), uint8 (len, 8192); both on the host. Synchronises."""
        out = torch.empty(len(chunks), CHUNK_BYTES, dtype=torch.uint8)
        numbered = dict(enumerate(self.segments))
        numbered |= dict(enumerate(self.host_segments, HOST_CHUNKS // SEGMENT_CHUNKS))
        for number, segment in numbered.items():
            mine = (chunks // SEGMENT_CHUNKS == number).nonzero().flatten()
            if len(mine):
                rows = (chunks[mine] % SEGMENT_CHUNKS).to(segment.device)
                data = segment[: SEGMENT_CHUNKS * CHUNK_BYTES].view(-1, CHUNK_BYTES)
                out[mine] = data.index_select(0, rows).cpu()
        return out


_arenas: dict[int, Arena] = {}
_arenas_lock = threading.Lock()


def of(device: int) -> Arena:
    """The arena of CUDA device ``device``, made at first use."""
    found = _arenas.get(device)
    if found is None:
        with _arenas_lock, jit.outside_capture(device):
            found = _arenas.get(device) or _arenas.setdefault(device, Arena(device))
    return found


def existing() -> dict[int, Arena]:
    """Arenas that exist, by device."""
    return dict(_arenas)
