"""Other lossless codecs in ``lct bench codec``, each timed in the way that favours it.

A peer codes the exponent plane (one byte a value) that was split off before; splitting, merging and
the sign-fraction plane, which stays raw, cost it no time. Its buffers are allocated beforehand.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from .codec import POISON, Input, check_bits, make_row, poisoned
from .timing import REPETITIONS, measure, rotations_for

DTYPE = torch.bfloat16
PIECE_VALUES = 2**26  # planes are split off and merged in pieces, to bound what that takes


class PlaneCodec(Protocol):
    """A peer at work on sets of buffers, by the number of the set."""

    def encode(self, i: int) -> object:
        """Compress plane ``i`` into the memory kept for it."""

    def decode(self, i: int) -> object:
        """Decompress what ``encode(i)`` wrote into output ``i``."""

    def size_bytes(self, i: int) -> int:
        """Bytes that ``encode(i)`` wrote. Waits for the device."""


# Takes the exponent planes, the outputs to decode into, and the row's options. Work goes to torch's
# current stream.
OpenCodec = Callable[[Sequence[torch.Tensor], Sequence[torch.Tensor], Mapping[str, Any]], Any]


@dataclass(frozen=True)
class Peer:
    """A codec that somebody else made. ``module``: what it is imported as, from ``package``."""

    name: str
    package: str
    module: str
    device_type: str
    open: OpenCodec
    note: str
    options: Mapping[str, Any] = field(default_factory=dict)

    def missing(self, device: torch.device) -> str | None:
        """Why it cannot be measured on ``device``; None where it can."""
        if device.type != self.device_type:
            return f"it needs device {self.device_type}, got {device.type}"
        try:
            importlib.import_module(self.module)
        except ImportError as error:
            return f"{self.package} is not installed (pip install 'lct-torch[peers]'): {error}"
        return None

    def version(self) -> str:
        return str(getattr(importlib.import_module(self.module), "__version__", "unknown"))


class NvcompAns:
    """nvCOMP's ANS on bytes: outputs and configurations made beforehand, so that it need not wait.

    Source: https://docs.nvidia.com/cuda/nvcomp/py_api.html
    """

    def __init__(
        self,
        planes: Sequence[torch.Tensor],
        outputs: Sequence[torch.Tensor],
        options: Mapping[str, Any],
    ) -> None:
        from nvidia import nvcomp

        device = planes[0].device
        self._stream = torch.cuda.current_stream(device)
        handle = self._stream.cuda_stream
        self._codec = nvcomp.Codec(
            algorithm="ANS", data_type="|u1", device_id=device.index, cuda_stream=handle, **options
        )
        self._planes = [nvcomp.as_array(plane, cuda_stream=handle) for plane in planes]
        self._outputs = [nvcomp.as_array(output, cuda_stream=handle) for output in outputs]
        self._encode_config = self._codec.compression_config(planes[0].nbytes)
        self._decode_config = self._codec.decompression_config(self._encode_config)
        room = self._codec.get_max_comp_buffer_size(self._planes[0])
        self._rooms = [
            nvcomp.as_array(torch.empty(room, dtype=torch.uint8, device=device), cuda_stream=handle)
            for _ in planes
        ]
        self._payloads = [self.encode(i) for i in range(len(planes))]

    def encode(self, i: int) -> Any:
        return self._codec.encode(
            self._planes[i], out=self._rooms[i], compression_config=self._encode_config
        )

    def decode(self, i: int) -> Any:
        return self._codec.decode(
            self._payloads[i], out=self._outputs[i], decompression_config=self._decode_config
        )

    def size_bytes(self, i: int) -> int:
        self._stream.synchronize()
        return int(self._payloads[i].buffer_size)


PEERS = {
    peer.name: peer
    for peer in (
        Peer(
            name="nvcomp-ans",
            package="nvidia-nvcomp-cu13",
            module="nvidia.nvcomp",
            device_type="cuda",
            open=NvcompAns,
            note=(
                "on the exponent plane, split and merge not timed; CUDA events on the stream that "
                "the codec was given, around calls with outputs and configurations made before"
            ),
        ),
    )
}


def split(dense: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Exponents and sign-fraction bytes of flat BF16 values, uint8 each."""
    exponents = torch.empty(dense.shape, dtype=torch.uint8, device=dense.device)
    sign_fractions = torch.empty_like(exponents)
    for start in range(0, len(dense), PIECE_VALUES):
        piece = slice(start, start + PIECE_VALUES)
        bits = dense[piece].view(torch.int16)
        exponents[piece] = (bits >> 7).to(torch.uint8)  # the sign goes with the upper byte
        sign_fractions[piece] = ((bits >> 8) & 0x80 | bits & 0x7F).to(torch.uint8)
    return exponents, sign_fractions


def merge(exponents: torch.Tensor, sign_fractions: torch.Tensor) -> torch.Tensor:
    """The BF16 values of both planes."""
    dense = torch.empty(exponents.shape, dtype=DTYPE, device=exponents.device)
    for start in range(0, len(dense), PIECE_VALUES):
        piece = slice(start, start + PIECE_VALUES)
        rest = sign_fractions[piece].to(torch.int16)
        bits = (rest & 0x80) << 8 | exponents[piece].to(torch.int16) << 7 | rest & 0x7F
        dense[piece] = bits.view(DTYPE)
    return dense


def takes(given: Input) -> bool:
    """Whether peers are measured on ``given``: they code the exponents of BF16 values."""
    return given.dense.dtype == DTYPE


def measure_peer(given: Input, peer: Peer, *, repetitions: int = REPETITIONS) -> dict[str, Any]:
    """A row like LCT's, with ``peer``'s name as its layout; its bits are checked as LCT's are.

    The ratio counts the compressed bytes, without slack, and the raw sign-fraction plane.
    ValueError for another dtype than BF16; LctError for wrong bits.
    """
    if not takes(given):
        raise ValueError(f"peers take {DTYPE} tensors, got {given.dense.dtype}")
    device = given.dense.device
    # A stream of its own: peers may take the default stream's handle, 0, for none given.
    side = torch.cuda.Stream(device) if device.type == "cuda" else None
    if side is None:
        return _measure(given, peer, repetitions)
    side.wait_stream(torch.cuda.current_stream(device))
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.cuda.device(device))
        stack.enter_context(torch.cuda.stream(side))
        row = _measure(given, peer, repetitions)
        torch.cuda.synchronize(device)
    return row


def _measure(given: Input, peer: Peer, repetitions: int) -> dict[str, Any]:
    dense = given.dense.reshape(-1)
    exponents, sign_fractions = split(dense)
    check_bits(dense, merge(exponents, sign_fractions), "split and merge")

    # A set of buffers: input and output of the copy; plane, payload and decoded plane.
    set_bytes = 2 * dense.nbytes + 3 * exponents.nbytes
    rotations = rotations_for(exponents.nbytes, dense.device, set_bytes)
    inputs = [dense, *(dense.clone() for _ in range(rotations - 1))]
    copies = [torch.empty_like(dense) for _ in range(rotations)]
    planes = [exponents, *(exponents.clone() for _ in range(rotations - 1))]
    outputs = [poisoned(exponents) for _ in range(rotations)]
    codec: PlaneCodec = peer.open(planes, outputs, peer.options)

    def check(what: str) -> None:
        for i in range(rotations):
            outputs[i].fill_(POISON)
            codec.decode(i)
            check_bits(planes[i], outputs[i], f"{peer.name} {what}")

    check("before it is timed")
    check_bits(dense, merge(outputs[0], sign_fractions), peer.name)
    compressed_bytes = codec.size_bytes(0)
    measurement = measure(
        {
            "copy": lambda i: copies[i].copy_(inputs[i]),
            "encode": codec.encode,
            "decode": codec.decode,
        },
        dense.device,
        rotations=rotations,
        repetitions=repetitions,
        no_graph="a peer's calls are not captured",
    )
    for i in range(rotations):
        check_bits(planes[i], outputs[i], f"{peer.name} as timed")
    check("after it was timed")
    return make_row(
        given,
        peer.name,
        measurement,
        compressed_bytes + sign_fractions.nbytes,
        notes=[peer.note],
        rotations=rotations,
        version=peer.version(),
        options=dict(peer.options),
        compressed_bytes=compressed_bytes,
    )
