"""The CUDA backend: kernels compiled by NVRTC (jit), the overflow arena, the codec, fused steps."""

from . import arena
from .codec import (
    decode,
    decode_list,
    encode,
    ensure_room,
    group_needs,
    group_needs_later,
    lease,
    to_canonical,
)
from .steps import adam, batches, muon, sgd

__all__ = [
    "adam",
    "arena",
    "batches",
    "decode",
    "decode_list",
    "encode",
    "ensure_room",
    "group_needs",
    "group_needs_later",
    "lease",
    "muon",
    "sgd",
    "to_canonical",
]
