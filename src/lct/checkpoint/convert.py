"""safetensors files to ``.lct`` files and back, one tensor in memory at a time."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np
import torch

from ..atomic import atomic_write
from ..errors import CorruptFileError, CorruptPayloadError, LctError
from ..tensor import CompressedTensor, encode
from .container import CHUNK_BYTES, ContainerReader, ContainerWriter, Record, digest_of
from .dense import bytes_of, empty_tensor, is_coded, is_upcast
from .header import TensorEntry, read_header, write_header

# (name of the tensor in work, dense bytes done, dense bytes of the file)
Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Summary:
    """What a conversion did. ``num_coded``: tensors that are not stored as they are."""

    num_tensors: int
    num_coded: int
    dense_bytes: int
    dense_file_bytes: int
    compressed_file_bytes: int

    @property
    def ratio(self) -> float:
        """Size of the safetensors file over size of the ``.lct`` file."""
        return self.dense_file_bytes / self.compressed_file_bytes


def compress_file(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    preset: str | None = None,
    distribution: str | None = None,
    overwrite: bool = True,
    progress: Progress | None = None,
) -> Summary:
    """Write the safetensors file ``source`` as the ``.lct`` file ``target``, whole or not at all.

    Every coded tensor is decoded again and compared before it is written. CorruptFileError where
    ``source`` is no sound safetensors file, OSError where a file cannot be read or written.
    """
    _check_distinct(source, target)
    with open(source, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        try:
            header = read_header(file, size)
        except CorruptFileError as problem:
            raise CorruptFileError(f"{source}: is not a safetensors file: {problem}") from None
        data_offset = file.tell()
        num_coded = done = 0
        with atomic_write(target, overwrite=overwrite) as out:
            writer = ContainerWriter(out, header)
            for entry in header.entries:
                if progress:
                    progress(entry.name, done, header.data_bytes)
                file.seek(data_offset + entry.begin)
                num_coded += _add_tensor(writer, file, entry, source, preset, distribution)
                done += entry.size_bytes
            if progress:
                progress("", done, header.data_bytes)
            compressed_size = writer.finish()
    return Summary(len(header.entries), num_coded, header.data_bytes, size, compressed_size)


def _add_tensor(
    writer: ContainerWriter,
    file: BinaryIO,
    entry: TensorEntry,
    source: str | os.PathLike[str],
    preset: str | None,
    distribution: str | None,
) -> bool:
    """Copy one tensor from ``file`` at its position; True if LCT coded it."""
    if is_coded(entry.dtype):
        tensor = empty_tensor(entry)
        data = bytes_of(tensor)
        if file.readinto(data.data) != data.size:  # type: ignore[attr-defined]
            raise _became_shorter(source)
        return add_dense(writer, entry.name, tensor, preset=preset, distribution=distribution)
    writer.add_plain(_pieces(file, entry.size_bytes, source))
    return False


def _pieces(file: BinaryIO, size: int, source: str | os.PathLike[str]) -> Iterator[bytes]:
    while size:
        data = file.read(min(size, CHUNK_BYTES))
        if not data:
            raise _became_shorter(source)
        size -= len(data)
        yield data


def _became_shorter(source: str | os.PathLike[str]) -> CorruptFileError:
    return CorruptFileError(f"{source}: is truncated: it became shorter while it was read")


def add_dense(
    writer: ContainerWriter,
    name: str,
    tensor: torch.Tensor,
    *,
    preset: str | None = None,
    distribution: str | None = None,
) -> bool:
    """Add a tensor of a coded dtype; plain where coding does not make it smaller. True if coded."""
    tensor = tensor.detach().resolve_neg().contiguous()
    if tensor.numel():
        compressed = encode_for_file(tensor, preset=preset, distribution=distribution)
        if add_compressed(writer, name, compressed, tensor):
            return True
    writer.add_plain([bytes_of(tensor).data])
    return False


def encode_for_file(
    tensor: torch.Tensor, *, preset: str | None = None, distribution: str | None = None
) -> CompressedTensor:
    """``tensor`` with the capacity that it needs; no lower halves where FP32 holds BF16 values."""
    upcast = is_upcast(tensor) and preset in (None, "pooled")
    return encode(tensor, preset=preset, distribution=distribution, capacity="exact", upcast=upcast)


def stored_size(tensor: torch.Tensor) -> int:
    """Bytes of the record that ``compress_file`` would write for a tensor of a coded dtype."""
    if not tensor.numel():
        return 0
    compressed = encode_for_file(tensor)
    return min(len(compressed.canonical_bytes()), compressed.dense_nbytes)


def add_compressed(
    writer: ContainerWriter,
    name: str,
    compressed: CompressedTensor,
    dense: torch.Tensor | None = None,
) -> bool:
    """Add a compressed tensor if that is smaller than its dense bytes; True if so.

    ``dense``: the values that it must hold. LctError where it decodes to others.
    """
    payload = compressed.canonical_bytes()
    if len(payload) >= compressed.dense_nbytes:
        return False
    decoded = bytes_of(compressed.decode())
    if dense is not None and not np.array_equal(decoded, bytes_of(dense)):
        raise LctError(f"tensor {name!r} does not decode to its own bits; nothing was written")
    writer.add_coded(payload, digest_of(decoded.data))
    return True


def decompress_file(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    overwrite: bool = True,
    progress: Progress | None = None,
) -> Summary:
    """Write the ``.lct`` file ``source`` as the safetensors file ``target``, whole or not at all.

    The result is the compressed file byte for byte. CorruptFileError where ``source`` is damaged.
    """
    _check_distinct(source, target)
    with ContainerReader(source) as reader, atomic_write(target, overwrite=overwrite) as out:
        total, done, num_coded = reader.header.data_bytes, 0, 0
        write_header(out, reader.header)
        for entry, record in reader:
            if progress:
                progress(entry.name, done, total)
            if record.encoding == "lct":
                out.write(bytes_of(read_dense(reader, entry, record)).data)
                num_coded += 1
            else:
                for piece in reader.chunks(entry, record):
                    out.write(piece)
            done += entry.size_bytes
        if progress:
            progress("", done, total)
        dense_size = out.tell()
        return Summary(len(reader.records), num_coded, total, dense_size, reader.size_bytes)


def read_compressed(
    reader: ContainerReader, entry: TensorEntry, record: Record, device: torch.device | str = "cpu"
) -> CompressedTensor:
    """The compressed tensor of an ``lct`` record. CorruptFileError where it is damaged."""
    data = reader.read(entry, record)
    try:
        compressed = CompressedTensor.from_canonical(data, entry.shape, device)
    except CorruptPayloadError as problem:
        raise reader.error(f"tensor {entry.name!r} is damaged: {problem}") from None
    if compressed.dtype != entry.dtype.torch_dtype:
        raise reader.error(
            f"tensor {entry.name!r} is damaged: its payload holds {compressed.dtype}, "
            f"the header says {entry.dtype.name}"
        )
    return compressed


def read_dense(reader: ContainerReader, entry: TensorEntry, record: Record) -> torch.Tensor:
    """The dense tensor of an ``lct`` record, checked against the digest of its dense bytes."""
    tensor = read_compressed(reader, entry, record).decode()
    if digest_of(bytes_of(tensor).data) != record.dense_digest:
        raise reader.damaged(entry)
    return tensor


def _check_distinct(source: str | os.PathLike[str], target: str | os.PathLike[str]) -> None:
    if Path(target).exists() and Path(source).exists() and os.path.samefile(source, target):
        raise ValueError(
            f"output must be another file than the input, got {str(target)!r} for both"
        )
