"""``save_file`` and ``load_file``: named tensors in a ``.lct`` file."""

from __future__ import annotations

import os
from collections.abc import Mapping

import torch

from ..atomic import atomic_write
from ..nn import CompressedWeight
from ..tensor import CompressedTensor
from .container import ContainerReader, ContainerWriter, Record
from .convert import add_compressed, add_dense, read_compressed, read_dense
from .dense import bytes_of, empty_tensor, is_coded
from .header import TensorEntry, file_dtype, make_header


def save_file(
    tensors: Mapping[str, torch.Tensor | CompressedTensor],
    path: str | os.PathLike[str],
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Write ``tensors`` into a ``.lct`` file, which appears whole or not at all.

    Dense tensors of a dtype that LCT codes are compressed, others stored as they are; a
    ``CompressedTensor`` and the payload of a compressed weight are written as they are. TypeError
    for anything else, OSError where the file cannot be written.
    """
    for name, tensor in tensors.items():
        _check_saveable(name, tensor)
    for key, value in (metadata or {}).items():
        if not isinstance(key, str) or not isinstance(value, str):
            raise TypeError(f"metadata must map strings to strings, got {key!r}: {value!r}")
    header = make_header({n: (t.dtype, tuple(t.shape)) for n, t in tensors.items()}, metadata)
    with atomic_write(path) as out:
        writer = ContainerWriter(out, header)
        for entry in header.entries:
            tensor = held_tensor(tensors[entry.name])
            if isinstance(tensor, CompressedTensor):
                if not add_compressed(writer, entry.name, tensor):
                    writer.add_plain([bytes_of(tensor.decode()).data])
            elif is_coded(entry.dtype):
                add_dense(writer, entry.name, tensor)
            else:
                writer.add_plain([bytes_of(tensor).data])
        writer.finish()


def held_tensor(tensor: torch.Tensor | CompressedTensor) -> torch.Tensor | CompressedTensor:
    """What a compressed weight holds; its dense values where those are a view of that.

    Anything else as it is.
    """
    if not isinstance(tensor, CompressedWeight):
        return tensor
    return tensor.compressed if tensor._whole else tensor.dense()


def _check_saveable(name: object, tensor: object) -> None:
    if not isinstance(name, str):
        raise TypeError(f"names of tensors must be strings, got {name!r}")
    if isinstance(tensor, CompressedTensor):
        return
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"save_file takes tensors, got {type(tensor).__name__} for {name!r}")
    if tensor.layout != torch.strided or tensor.is_quantized:
        raise TypeError(
            f"save_file takes dense tensors, got {tensor.layout}, {tensor.dtype} for {name!r}"
        )
    file_dtype(tensor.dtype)


def load_file(
    path: str | os.PathLike[str], device: torch.device | str = "cpu", *, dense: bool = False
) -> dict[str, torch.Tensor | CompressedTensor]:
    """The tensors of a ``.lct`` file on ``device``: compressed ones stay compressed.

    ``dense=True`` decodes them all, as ``model.load_state_dict`` takes them. CorruptFileError where
    the file is truncated, damaged or of another kind; TypeError where it holds a dtype that this
    torch does not have.
    """
    with ContainerReader(path) as reader:
        return {
            entry.name: read_tensor(reader, entry, record, device, dense)
            for entry, record in reader
        }


def read_tensor(
    reader: ContainerReader,
    entry: TensorEntry,
    record: Record,
    device: torch.device | str = "cpu",
    dense: bool = False,
) -> torch.Tensor | CompressedTensor:
    """The tensor of one record; decoded, and its bits checked, where ``dense``."""
    if record.encoding == "lct":
        if dense:
            return read_dense(reader, entry, record).to(device)
        return read_compressed(reader, entry, record, device)
    tensor = empty_tensor(entry)
    bytes_of(tensor)[:] = reader.read(entry, record)
    return tensor.to(device)


def read_metadata(path: str | os.PathLike[str]) -> dict[str, str] | None:
    """The ``__metadata__`` of a ``.lct`` file; None where it has none."""
    with ContainerReader(path) as reader:
        return reader.header.metadata
