"""The ``.lct`` file: records of tensors, an index, a footer (docs/file-format.md, normative)."""

from __future__ import annotations

import hashlib
import json
import os
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Literal

import numpy as np

from ..errors import CorruptFileError
from .header import MAX_HEADER_BYTES, Header, TensorEntry, parse_header

# As PNG's: a byte above 127 and both kinds of line end show a transfer that took the file for text.
MAGIC = b"\x89LCT\r\n\x1a\n"
END_MAGIC = b"\x89LCTEND\n"
FILE_VERSION = 1
PREFIX = struct.Struct("<8sII")  # magic, version, 0
FOOTER = struct.Struct("<QQ32s8s")  # offset and size of the index, digest, end magic
FOOTER_PLACES = struct.Struct("<QQ")  # the part of the footer that its digest covers
# A safetensors header in a JSON string grows by its escapes; the records add about 150 bytes each.
MAX_INDEX_BYTES = 4 * MAX_HEADER_BYTES
RECORD_DIGEST_BYTES = 16
CHUNK_BYTES = 1 << 24

Encoding = Literal["lct", "plain"]


@dataclass(frozen=True)
class Record:
    """How one tensor lies in the file. ``dense_digest``: of the dense bytes of a coded tensor."""

    encoding: Encoding
    offset: int
    size_bytes: int
    digest: str
    dense_digest: str | None


def new_digest() -> Any:
    """The hash of records: BLAKE2b of 128 bits."""
    return hashlib.blake2b(digest_size=RECORD_DIGEST_BYTES)


def digest_of(*parts: bytes | memoryview) -> str:
    """Hexadecimal digest of ``parts``, one after the other."""
    digest = new_digest()
    for part in parts:
        digest.update(part)
    return str(digest.hexdigest())


class ContainerWriter:
    """Writes records in the order of ``header.entries``, then index and footer. Needs no seek."""

    def __init__(self, file: BinaryIO, header: Header) -> None:
        self._file = file
        self._header = header
        self._records: list[dict[str, Any]] = []
        self._prefix = PREFIX.pack(MAGIC, FILE_VERSION, 0)
        self._position = file.write(self._prefix)

    def add_coded(self, payload: bytes, dense_digest: str) -> None:
        """A tensor as the canonical bytes of the payload format."""
        self._add("lct", [payload], dense_blake2b=dense_digest)

    def add_plain(self, parts: Iterable[bytes | memoryview]) -> None:
        """A tensor as its dense bytes."""
        self._add("plain", parts)

    def _add(self, encoding: Encoding, parts: Iterable[bytes | memoryview], **more: str) -> None:
        digest, size = new_digest(), 0
        for part in parts:
            digest.update(part)
            size += self._file.write(part)
        self._position += size
        fields = {"encoding": encoding, "size_bytes": size, "blake2b": digest.hexdigest(), **more}
        self._records.append(fields)

    def finish(self) -> int:
        """Write index and footer; returns the file's size."""
        assert len(self._records) == len(self._header.entries)
        index = json.dumps(
            {"header": self._header.text.decode("utf-8"), "records": self._records},
            separators=(",", ":"),
        ).encode("ascii")
        places = FOOTER_PLACES.pack(self._position, len(index))
        self._file.write(index)
        self._file.write(places + _index_digest(self._prefix, index, places) + END_MAGIC)
        return self._position + len(index) + FOOTER.size


def _index_digest(prefix: bytes, index: bytes, places: bytes) -> bytes:
    return hashlib.blake2b(prefix + index + places, digest_size=32).digest()


class ContainerReader:
    """An open ``.lct`` file whose index has been checked against its digest and the file's size.

    Nothing is allocated by a size that a file only claims: records fill the file from its prefix to
    its index without a gap, so that their sizes add up to the file's own.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._file = open(self.path, "rb")  # noqa: SIM115 - closed by __exit__
        try:
            self.size_bytes = os.fstat(self._file.fileno()).st_size
            self.header, self.records = self._read_index()
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> ContainerReader:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def __iter__(self) -> Iterator[tuple[TensorEntry, Record]]:
        return zip(self.header.entries, self.records, strict=True)

    def error(self, problem: str) -> CorruptFileError:
        """The error for ``problem``, with the file's name."""
        return CorruptFileError(f"{self.path}: {problem}")

    def read(self, entry: TensorEntry, record: Record) -> np.ndarray:
        """The bytes of a record, uint8, checked against its digest."""
        data = np.empty(record.size_bytes, np.uint8)
        self._file.seek(record.offset)
        read_bytes = self._file.readinto(data.data)
        if read_bytes != record.size_bytes or digest_of(data.data) != record.digest:
            raise self.damaged(entry)
        return data

    def chunks(self, entry: TensorEntry, record: Record) -> Iterator[bytes]:
        """The bytes of a record in pieces; the digest is checked after the last one."""
        self._file.seek(record.offset)
        digest, left = new_digest(), record.size_bytes
        while left:
            data = self._file.read(min(left, CHUNK_BYTES))
            if not data:
                raise self.error("is truncated: it became shorter while it was read")
            digest.update(data)
            left -= len(data)
            yield data
        if digest.hexdigest() != record.digest:
            raise self.damaged(entry)

    def damaged(self, entry: TensorEntry) -> CorruptFileError:
        """The error for a tensor whose bytes do not match a digest."""
        return self.error(
            f"tensor {entry.name!r} is damaged: its bytes do not match their checksum"
        )

    def _read_index(self) -> tuple[Header, tuple[Record, ...]]:
        prefix = self._file.read(PREFIX.size)
        if prefix[: len(MAGIC)] != MAGIC:
            if self.size_bytes < len(MAGIC) and MAGIC.startswith(prefix):
                raise self.error(f"is truncated: it has {self.size_bytes} bytes")
            raise self.error(f"is not an LCT file: it begins with {prefix[: len(MAGIC)]!r}")
        if self.size_bytes < PREFIX.size + FOOTER.size:
            raise self.error(f"is truncated: it has {self.size_bytes} bytes")
        _, version, reserved = PREFIX.unpack(prefix)
        if version != FILE_VERSION or reserved:
            raise self.error(f"has file version {version}, this LCT reads version {FILE_VERSION}")
        self._file.seek(self.size_bytes - FOOTER.size)
        footer = self._file.read(FOOTER.size)
        offset, size, digest, end = FOOTER.unpack(footer)
        if end != END_MAGIC:
            raise self.error("is truncated or damaged: it does not end with a footer")
        end_of_index = self.size_bytes - FOOTER.size
        if size > MAX_INDEX_BYTES or offset < PREFIX.size or offset + size != end_of_index:
            raise self.error("is damaged: its footer does not match its size")
        self._file.seek(offset)
        index = self._file.read(size)
        if _index_digest(prefix, index, footer[: FOOTER_PLACES.size]) != digest:
            raise self.error("is damaged: its index does not match its checksum")
        # What is wrong from here on was written so: a digest does not keep a hostile writer out.
        try:
            return _parse_index(index, offset)
        except CorruptFileError as problem:
            raise self.error(f"is damaged: {problem}") from None


def _parse_index(index: bytes, end: int) -> tuple[Header, tuple[Record, ...]]:
    try:
        fields = json.loads(index)
    except (ValueError, RecursionError) as error:
        raise CorruptFileError(f"index is not JSON: {error}") from None
    if not isinstance(fields, dict) or set(fields) != {"header", "records"}:
        raise CorruptFileError("index must have a header and records")
    if not isinstance(fields["header"], str) or not isinstance(fields["records"], list):
        raise CorruptFileError("index must have a text as header and a list of records")
    try:
        text = fields["header"].encode("utf-8")
    except UnicodeEncodeError as error:
        raise CorruptFileError(f"header is not UTF-8: {error}") from None
    header = parse_header(text)
    if len(fields["records"]) != len(header.entries):
        raise CorruptFileError(
            f"index must have {len(header.entries)} records, got {len(fields['records'])}"
        )
    records = []
    position = PREFIX.size
    for entry, value in zip(header.entries, fields["records"], strict=True):
        records.append(_parse_record(entry, value, position))
        position += records[-1].size_bytes
    if position != end:
        raise CorruptFileError(f"records must end where the index begins ({end}), got {position}")
    return header, tuple(records)


def _parse_record(entry: TensorEntry, value: Any, offset: int) -> Record:
    keys = {"encoding", "size_bytes", "blake2b"}
    coded = isinstance(value, dict) and value.get("encoding") == "lct"
    if coded:
        keys.add("dense_blake2b")
    if (
        not isinstance(value, dict)
        or set(value) != keys
        or value["encoding"] not in ("lct", "plain")
    ):
        raise CorruptFileError(f"record of tensor {entry.name!r} has unknown fields or encoding")
    size = value["size_bytes"]
    if type(size) is not int or size < 0:
        raise CorruptFileError(f"record of tensor {entry.name!r} has size {size!r}")
    if not coded and size != entry.size_bytes:
        raise CorruptFileError(
            f"plain record of tensor {entry.name!r} must have {entry.size_bytes} bytes, got {size}"
        )
    digests = [value[key] for key in ("blake2b", "dense_blake2b") if key in value]
    if not all(isinstance(d, str) and len(d) == 2 * RECORD_DIGEST_BYTES for d in digests):
        raise CorruptFileError(f"record of tensor {entry.name!r} has an invalid checksum")
    return Record(value["encoding"], offset, size, value["blake2b"], value.get("dense_blake2b"))
