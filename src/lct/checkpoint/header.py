"""The header of a safetensors file: names, dtypes, shapes and places of its tensors.

Source: https://github.com/huggingface/safetensors, section "Format". A ``.lct`` file carries the
same header, byte for byte (docs/file-format.md), so both kinds of file are described here once.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any, BinaryIO

import torch

from ..errors import CorruptFileError

LENGTH = struct.Struct("<Q")  # before the header: its size, bytes
MAX_HEADER_BYTES = 100_000_000  # the limit of safetensors itself
MAX_NUM_BYTES = 1 << 62  # offsets fit every reader's signed 64-bit integers
METADATA_KEY = "__metadata__"


@dataclass(frozen=True)
class FileDType:
    """``name``: as safetensors files say it. ``torch_name``: None where torch has no such dtype.

    ``packed``: values in one torch element.
    """

    name: str
    bits: int
    torch_name: str | None
    packed: int = 1

    @property
    def torch_dtype(self) -> torch.dtype | None:
        """Torch's dtype, None where this torch has none."""
        return getattr(torch, self.torch_name, None) if self.torch_name else None


FILE_DTYPES: dict[str, FileDType] = {
    row.name: row
    for row in (
        FileDType("BOOL", 8, "bool"),
        FileDType("F4", 4, "float4_e2m1fn_x2", packed=2),
        FileDType("F6_E2M3", 6, None),
        FileDType("F6_E3M2", 6, None),
        FileDType("U8", 8, "uint8"),
        FileDType("I8", 8, "int8"),
        FileDType("F8_E5M2", 8, "float8_e5m2"),
        FileDType("F8_E4M3", 8, "float8_e4m3fn"),
        FileDType("F8_E8M0", 8, "float8_e8m0fnu"),
        FileDType("F8_E4M3FNUZ", 8, "float8_e4m3fnuz"),
        FileDType("F8_E5M2FNUZ", 8, "float8_e5m2fnuz"),
        FileDType("I16", 16, "int16"),
        FileDType("U16", 16, "uint16"),
        FileDType("F16", 16, "float16"),
        FileDType("BF16", 16, "bfloat16"),
        FileDType("I32", 32, "int32"),
        FileDType("U32", 32, "uint32"),
        FileDType("F32", 32, "float32"),
        FileDType("C64", 64, "complex64"),
        FileDType("F64", 64, "float64"),
        FileDType("I64", 64, "int64"),
        FileDType("U64", 64, "uint64"),
    )
}
_BY_TORCH_NAME = {row.torch_name: row for row in FILE_DTYPES.values() if row.torch_name}


@dataclass(frozen=True)
class TensorEntry:
    """One tensor of a header. ``shape`` counts values, ``begin`` and ``end`` bytes of the data."""

    name: str
    dtype: FileDType
    shape: tuple[int, ...]
    begin: int
    end: int

    @property
    def size_bytes(self) -> int:
        """Bytes of the dense tensor."""
        return self.end - self.begin

    @property
    def num_values(self) -> int:
        """Number of values."""
        return prod(self.shape)

    def torch_shape(self) -> tuple[int, ...]:
        """Shape of the torch tensor: two values of F4 are one element."""
        if self.dtype.packed == 1:
            return self.shape
        return (*self.shape[:-1], self.shape[-1] // self.dtype.packed)


@dataclass(frozen=True)
class Header:
    """``text``: as it stands in the file. ``entries``: in the order of the data."""

    text: bytes
    entries: tuple[TensorEntry, ...]
    metadata: dict[str, str] | None

    @property
    def data_bytes(self) -> int:
        """Bytes of all dense tensors."""
        return self.entries[-1].end if self.entries else 0


def parse_header(text: bytes) -> Header:
    """Check and read the JSON ``text``. CorruptFileError says what is wrong with it."""
    try:
        fields = json.loads(text.decode("utf-8"), object_pairs_hook=_unique)
        text_of_names = "".join(fields) if isinstance(fields, dict) else ""
        text_of_names.encode("utf-8")  # a lone surrogate is no name
    except CorruptFileError:
        raise
    except (ValueError, RecursionError) as error:
        raise CorruptFileError(f"header is not JSON: {error}") from None
    if not isinstance(fields, dict):
        raise CorruptFileError("header must be a JSON object")
    metadata = fields.pop(METADATA_KEY, None)
    if metadata is not None and not (
        isinstance(metadata, dict) and all(isinstance(value, str) for value in metadata.values())
    ):
        raise CorruptFileError(f"{METADATA_KEY} must map names to strings")
    entries = sorted(
        (_parse_entry(name, value) for name, value in fields.items()),
        key=lambda e: (e.begin, e.end),
    )
    position = 0
    for entry in entries:
        if entry.begin != position:
            raise CorruptFileError(
                f"tensor {entry.name!r} must begin at data byte {position}, got {entry.begin}"
            )
        position = entry.end
    return Header(text, tuple(entries), metadata)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) != len(pairs):
        raise CorruptFileError("header names a tensor or a field twice")
    return fields


def _parse_entry(name: str, value: Any) -> TensorEntry:
    if not isinstance(value, dict) or set(value) != {"dtype", "shape", "data_offsets"}:
        raise CorruptFileError(f"tensor {name!r} must have a dtype, a shape and data_offsets")
    dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if not isinstance(dtype, str) or dtype not in FILE_DTYPES:
        raise CorruptFileError(f"tensor {name!r} has an unknown dtype {dtype!r}")
    if not _is_sizes(shape) or not _is_sizes(offsets) or len(offsets) != 2:
        raise CorruptFileError(f"tensor {name!r} has a shape or offsets that are no sizes")
    row = FILE_DTYPES[dtype]
    bits = _num_values(name, shape) * row.bits
    begin, end = offsets
    if bits % 8 or end - begin != bits // 8:
        raise CorruptFileError(
            f"tensor {name!r} of dtype {dtype} and shape {shape} must have {bits / 8:g} bytes, "
            f"got {end - begin}"
        )
    if row.packed > 1 and (not shape or shape[-1] % row.packed):
        raise CorruptFileError(
            f"tensor {name!r} of dtype {dtype} must have an even last dimension, got {shape}"
        )
    return TensorEntry(name, row, tuple(shape), begin, end)


def _num_values(name: str, shape: list[int]) -> int:
    count = 1
    for size in shape:
        count *= size
        if count > MAX_NUM_BYTES:
            raise CorruptFileError(f"tensor {name!r} has a shape of more than 2^62 values")
    return count


def _is_sizes(value: Any) -> bool:
    return isinstance(value, list) and all(
        type(item) is int and 0 <= item <= MAX_NUM_BYTES for item in value
    )


def make_header(
    tensors: Mapping[str, tuple[torch.dtype, tuple[int, ...]]], metadata: Mapping[str, str] | None
) -> Header:
    """The header for tensors of these dtypes and shapes, in the order that safetensors gives them.

    TypeError for a dtype that safetensors files do not have.
    """
    rows = []
    for name, (dtype, shape) in tensors.items():
        row = file_dtype(dtype)
        if row.packed > 1:
            if not shape:
                raise ValueError(
                    f"a {dtype} tensor must have a dimension, got shape () of {name!r}"
                )
            shape = (*shape[:-1], shape[-1] * row.packed)
        rows.append((name, row, shape))
    # Wide dtypes first: every tensor lies aligned to its values.
    rows.sort(key=lambda item: (-item[1].bits, item[0]))
    fields: dict[str, Any] = {}
    if metadata is not None:
        fields[METADATA_KEY] = dict(metadata)
    position = 0
    for name, row, shape in rows:
        end = position + prod(shape) * row.bits // 8
        fields[name] = {"dtype": row.name, "shape": list(shape), "data_offsets": [position, end]}
        position = end
    text = json.dumps(fields, separators=(",", ":"), ensure_ascii=False).encode("utf-8")
    return parse_header(text + b" " * (-len(text) % LENGTH.size))


def file_dtype(dtype: torch.dtype) -> FileDType:
    """The row for a torch dtype. TypeError where files have no name for it."""
    name = str(dtype).removeprefix("torch.")
    if name not in _BY_TORCH_NAME:
        raise TypeError(f"dtype must be one of {', '.join(_BY_TORCH_NAME)}, got {name}")
    return _BY_TORCH_NAME[name]


def read_header(file: BinaryIO, size_bytes: int) -> Header:
    """The header of an open safetensors file of ``size_bytes``; it then stands at the data."""
    prefix = file.read(LENGTH.size)
    length = LENGTH.unpack(prefix)[0] if len(prefix) == LENGTH.size else 0
    if not 2 <= length <= min(MAX_HEADER_BYTES, size_bytes - LENGTH.size):
        raise CorruptFileError("it does not begin with the size of a header")
    header = parse_header(file.read(length))
    expected = LENGTH.size + length + header.data_bytes
    if expected != size_bytes:
        raise CorruptFileError(f"it must have {expected} bytes, got {size_bytes}")
    return header


def write_header(file: BinaryIO, header: Header) -> None:
    """Write ``header`` with its size in front, as a safetensors file begins."""
    file.write(LENGTH.pack(len(header.text)))
    file.write(header.text)
