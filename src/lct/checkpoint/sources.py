"""Tensors of a file of any kind that the tools read: safetensors, ``.lct``, ``.npy``."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from ..errors import CorruptFileError
from .container import MAGIC, ContainerReader
from .convert import read_dense
from .dense import bytes_of, empty_tensor, is_coded
from .header import TensorEntry, read_header

NPY_MAGIC = b"\x93NUMPY"
SUFFIXES = (".npy", ".safetensors", ".lct")


@dataclass(frozen=True)
class SourceTensor:
    """A tensor of a file. ``load``: reads it; None where LCT does not code its dtype.

    ``stored_bytes``: its size in a ``.lct`` file, None in other files. ``load`` is valid while the
    iteration stands at this tensor.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    dense_bytes: int
    stored_bytes: int | None
    load: Callable[[], torch.Tensor] | None


def read_tensors(path: str | os.PathLike[str]) -> Iterator[SourceTensor]:
    """The tensors of ``path`` one by one; its first bytes say which kind of file it is.

    A ``.npy`` file holds one array: uint16 (bit patterns of BF16), float16 or float32.
    CorruptFileError where the file is none of the three or damaged.
    """
    with open(path, "rb") as file:
        start = file.read(len(MAGIC))
    if start == MAGIC:
        return _read_container(path)
    if start.startswith(NPY_MAGIC):
        return _read_npy(Path(path))
    return _read_safetensors(path)


def find_files(directory: str | os.PathLike[str]) -> list[Path]:
    """Files of ``directory`` that ``read_tensors`` takes, sorted. ValueError for none."""
    if not Path(directory).is_dir():
        raise ValueError(f"no such directory: {str(directory)!r}")
    files = sorted(path for path in Path(directory).iterdir() if path.suffix in SUFFIXES)
    if not files:
        raise ValueError(
            f"a directory of tensors must have {', '.join(SUFFIXES)} files: {str(directory)!r}"
        )
    return files


def _source_of(
    entry: TensorEntry, stored_bytes: int | None, load: Callable[[], torch.Tensor]
) -> SourceTensor:
    coded = is_coded(entry.dtype)
    return SourceTensor(
        entry.name,
        entry.dtype.name,
        entry.shape,
        entry.size_bytes,
        stored_bytes,
        load if coded else None,
    )


def _read_container(path: str | os.PathLike[str]) -> Iterator[SourceTensor]:
    with ContainerReader(path) as reader:
        for entry, record in reader:

            def load(entry=entry, record=record) -> torch.Tensor:  # type: ignore[no-untyped-def]
                if record.encoding == "lct":
                    return read_dense(reader, entry, record)
                tensor = empty_tensor(entry)
                bytes_of(tensor)[:] = reader.read(entry, record)
                return tensor

            yield _source_of(entry, record.size_bytes, load)


def _read_safetensors(path: str | os.PathLike[str]) -> Iterator[SourceTensor]:
    with open(path, "rb") as file:
        try:
            header = read_header(file, os.fstat(file.fileno()).st_size)
        except CorruptFileError as problem:
            raise CorruptFileError(
                f"{path}: is not a safetensors, .lct or .npy file: {problem}"
            ) from None
        data_offset = file.tell()
        for entry in header.entries:

            def load(entry=entry) -> torch.Tensor:  # type: ignore[no-untyped-def]
                tensor = empty_tensor(entry)
                file.seek(data_offset + entry.begin)
                data = bytes_of(tensor)
                if file.readinto(data.data) != data.size:
                    raise CorruptFileError(
                        f"{path}: is truncated: it became shorter while it was read"
                    )
                return tensor

            yield _source_of(entry, None, load)


_NPY_DTYPES = {
    "uint16": ("BF16", torch.bfloat16),
    "float16": ("F16", torch.float16),
    "float32": ("F32", torch.float32),
}


def _read_npy(path: Path) -> Iterator[SourceTensor]:
    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except (ValueError, EOFError) as error:
        raise CorruptFileError(f"{path}: is not a readable .npy file: {error}") from None
    if array.dtype.name not in _NPY_DTYPES or not array.dtype.isnative:
        raise CorruptFileError(
            f"{path}: array must be of {', '.join(_NPY_DTYPES)} (little-endian), got {array.dtype}"
        )
    name, dtype = _NPY_DTYPES[array.dtype.name]

    def load() -> torch.Tensor:
        tensor = torch.empty(array.shape, dtype=dtype)
        bytes_of(tensor)[:] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        return tensor

    yield SourceTensor(path.stem, name, array.shape, array.nbytes, None, load)
