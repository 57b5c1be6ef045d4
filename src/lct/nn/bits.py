"""Masks as bits: eight ``bool`` values a byte."""

from __future__ import annotations

from dataclasses import dataclass

import torch

# Multiplied by this, the eight bytes (0 or 1) of a little-endian int64 meet in its top byte: byte i
# is shifted by 56 - 7i, so that its bit lands on 56 + i, and no two products touch the same bit.
_GATHER = 0x0102040810204080
# Eight copies of a byte, and bit i of byte i.
_SPREAD = 0x0101010101010101
_PICK = 0x8040201008040201 - (1 << 64)  # as int64
_TO_BIT_7 = 0x7F7F7F7F7F7F7F7F


@dataclass(frozen=True)
class PackedBits:
    """``payload``: uint8 (ceil(num_values / 8),); bit i of byte k is value 8k + i."""

    payload: torch.Tensor
    num_values: int

    @property
    def device(self) -> torch.device:
        """Device of the payload."""
        return self.payload.device

    def decode(self) -> torch.Tensor:
        """The values, bool (num_values,)."""
        words = (self.payload.to(torch.int64) * _SPREAD).bitwise_and_(_PICK)
        # A byte is 0 or 2^i: adding 0x7F carries into bit 7 exactly where it is not 0.
        words.add_(_TO_BIT_7).bitwise_right_shift_(7).bitwise_and_(_SPREAD)
        return words.view(torch.uint8).view(torch.bool)[: self.num_values]


def pack_bits(flat: torch.Tensor) -> PackedBits:
    """Pack a flat ``bool`` tensor whose bytes are 0 or 1, as torch makes them."""
    values = flat.view(torch.uint8)
    padding = -len(values) % 8
    if padding:
        values = torch.nn.functional.pad(values, (0, padding))
    elif values.storage_offset() % 8:
        values = values.clone()  # an int64 view must begin on a multiple of its size
    words = values.view(torch.int64) * _GATHER
    packed = words.bitwise_right_shift_(56).bitwise_and_(0xFF).to(torch.uint8)
    return PackedBits(packed, len(flat))
