"""The CUDA backend: kernels compiled by NVRTC (jit), the overflow arena, the codec, fused steps."""

from . import arena
from .codec import (
    decode,
    decode_buffer,
    decode_list,
    encode,
    encode_buffer,
    encode_list,
    ensure_room,
    group_needs,
    group_needs_later,
    launch_counts,
    lease,
    to_canonical,
)
from .steps import adam, muon, sgd, step_batches

__all__ = [
    "adam",
    "arena",
    "decode",
    "decode_buffer",
    "decode_list",
    "encode",
    "encode_buffer",
    "encode_list",
    "ensure_room",
    "group_needs",
    "group_needs_later",
    "launch_counts",
    "lease",
    "muon",
    "sgd",
    "step_batches",
    "to_canonical",
]
