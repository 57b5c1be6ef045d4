"""How each dtype splits into a 16-bit word and raw low bits (docs/format.md, section 2).

The word has BF16's shape: sign, 8 exponent bits, 7 fraction bits. Its exponent is coded, its
sign-fraction byte is stored, and what does not fit into it goes to the *low plane* as it is.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, eq=False)  # rows of a table: compared and hashed by identity
class DType:
    """One row of the dtype table. ``name``: torch's; ``low_bits``: raw bits beside the word."""

    name: str
    code: int
    itemsize: int
    low_bits: int

    def low_plane_bytes(self, num_values: int) -> int:
        """Bytes of the low plane for ``num_values`` values (packed in units of 8 values)."""
        return (num_values + 7) // 8 * self.low_bits


DTYPES: dict[str, DType] = {
    row.name: row
    for row in (
        DType("bfloat16", 1, itemsize=2, low_bits=0),
        DType("float32", 2, itemsize=4, low_bits=16),
        DType("float16", 3, itemsize=2, low_bits=3),
    )
}
# FP32 tensors whose low halves are zero (exact upcasts of BF16): no low plane; a group that breaks
# the promise is stored wide (docs/format.md, section 8), so the promise costs storage, not bits.
UPCAST = DType("float32", 4, itemsize=4, low_bits=0)
DTYPES_BY_CODE: dict[int, DType] = {d.code: d for d in (*DTYPES.values(), UPCAST)}


def get_dtype(name: str) -> DType:
    """The row for torch dtype ``name`` (without ``torch.``). TypeError if LCT does not code it."""
    if name not in DTYPES:
        raise TypeError(f"dtype must be one of {', '.join(DTYPES)}, got {name}")
    return DTYPES[name]
