"""``CompressedTensor``: a payload and its description; ``encode`` and ``decode``."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Literal

import numpy as np
import torch

from . import ops
from .codebook import candidates as book_candidates
from .dtypes import DTYPES, UPCAST, DType, get_dtype
from .errors import CorruptPayloadError
from .layout import FIRST_WORDS, HEADER_BYTES, PayloadLayout, best_capacity, parse_header
from .presets import Preset, get_preset

_TORCH_DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in DTYPES}
_CODED_DTYPES: dict[torch.dtype, DType] = {_TORCH_DTYPES[name]: DTYPES[name] for name in DTYPES}
# Where this share of a tensor's groups spills, the tensor is stored anew with more room.
_REPACK_SHARE = 1 / 32
# Exact capacities leave 8 words (1 %) a group: a weight's need moves by a few words in training.
# That of state moves more, by up to 40 words as its scale drifts; it is stored anew where many
# groups come to spill (relieve_arena).
HEADROOM_WORDS = 8

_live: weakref.WeakSet[CompressedTensor] = weakref.WeakSet()
_live_batches: weakref.WeakSet[CompressedBatch] = weakref.WeakSet()

Capacity = int | Literal["exact"] | None
_PLAIN = (torch.Tensor, torch.nn.Parameter)


class CompressedTensor:
    """A tensor stored losslessly: ``shape`` and ``dtype`` of the dense tensor, bytes of the format.

    Made by ``encode``. ``payload`` is one uint8 allocation on ``device``; what spilled lies beside
    it on the CPU and in the device's arena on CUDA. Aliases share the object: ``encode_`` writes in
    place. ``version`` counts what was written so.
    """

    __slots__ = (
        *("__weakref__", "_candidates", "_preset", "_stored"),
        *("dtype", "layout", "place", "shape", "version"),
    )

    def __init__(
        self,
        stored: ops.Stored,
        layout: PayloadLayout,
        shape: torch.Size,
        candidates: tuple[int, ...],
        preset: Preset,
    ) -> None:
        self._stored = stored
        self.layout = layout
        self.shape = shape
        self.dtype = _TORCH_DTYPES[layout.dtype.name]
        self._candidates = candidates
        self._preset = preset  # as asked for; the layout may be RAW, and may come back from it
        self.version = 0
        self.place: Any = None  # among the weights that are decoded together (nn.ahead)
        _live.add(self)

    @property
    def payload(self) -> torch.Tensor:
        """The payload's bytes, uint8 (layout.size_bytes,)."""
        return self._stored.payload

    @property
    def device(self) -> torch.device:
        """Device of the payload."""
        return self._stored.payload.device

    @property
    def preset(self) -> str:
        """Name of the preset, ``raw`` where storing dense was smaller."""
        return self.layout.preset.name

    @property
    def ndim(self) -> int:
        """Number of dimensions of the dense tensor."""
        return len(self.shape)

    def numel(self) -> int:
        """Number of values."""
        return self.layout.num_values

    @property
    def dense_nbytes(self) -> int:
        """Bytes of the dense tensor."""
        return self.layout.num_values * self.layout.dtype.itemsize

    @property
    def nbytes(self) -> int:
        """Every byte held for this tensor: payload (header, streams, planes) and spilled chunks.

        Synchronises on CUDA, because only the device knows what spilled.
        """
        return self.payload.nbytes + ops.count_groups(self._stored, self.layout).spill_bytes

    @property
    def ratio(self) -> float:
        """Dense bytes over ``nbytes``; 1.0 for an empty tensor."""
        return self.dense_nbytes / self.nbytes if self.dense_nbytes else 1.0

    @property
    def book(self) -> str:
        """Name of the codebook. Synchronises on CUDA."""
        return "none" if self.layout.is_raw else ops.book_name(self._stored)

    def group_counts(self) -> ops.GroupCounts:
        """How many groups are coded, constant, spilled, raw. Synchronises on CUDA."""
        return ops.count_groups(self._stored, self.layout)

    @property
    def is_written_by_graphs(self) -> bool:
        """Whether a CUDA graph was captured that writes to it: replays change it uncounted."""
        return ops.is_written_by_graphs(self._stored)

    def tensors(self) -> list[torch.Tensor]:
        """The tensors that hold the bytes: the payload and, on the CPU, what spilled."""
        spill = self._stored.spill
        return [self.payload, spill] if isinstance(spill, torch.Tensor) else [self.payload]

    def decode(self, out: torch.Tensor | None = None) -> torch.Tensor:
        """The dense tensor, contiguous; in ``out`` (same shape, dtype, device) where given."""
        stored = self._stored
        device = stored.payload.device
        if out is None:
            out = torch.empty(self.shape, dtype=self.dtype, device=device)
        elif (
            out.shape != self.shape
            or out.dtype != self.dtype
            or out.device != device
            or not out.is_contiguous()
        ):
            raise ValueError(
                f"out must be a contiguous {self.dtype} tensor of shape {tuple(self.shape)} on "
                f"{device}, got {_describe(out)}"
            )
        return ops.decode(stored, self.layout, out)

    def encode_(self, dense: torch.Tensor) -> CompressedTensor:
        """Store ``dense`` (same shape, dtype, device) in place of the present values; returns self.

        The payload's memory is reused. Where many groups spill it is replaced by a larger one; on
        an error the old values stay.
        """
        _check_dense(dense, "encode_")
        if dense.shape != self.shape or dense.dtype != self.dtype or dense.device != self.device:
            raise ValueError(
                f"encode_ takes a {self.dtype} tensor of shape {tuple(self.shape)} on "
                f"{self.device}, got {_describe(dense)}"
            )
        dense = _plain(dense)
        self.version += 1
        # On CUDA looking would wait for the device: relieve_arena and repack do it there.
        looks = self._preset.pooled and not self.payload.is_cuda
        if looks and self.layout.is_raw and self._store_exactly(dense):
            return self
        self._stored = ops.encode(dense, self.layout, self._candidates, self._stored)
        if looks and not self.layout.is_raw:
            counts = ops.count_groups(self._stored, self.layout)
            if counts.spilled > counts.groups * _REPACK_SHARE:
                self._store_exactly(dense)
        return self

    def copy_(self, other: CompressedTensor) -> CompressedTensor:
        """Take the values of ``other`` (same shape and dtype, any device); returns self.

        Its payload is copied where both are stored by one preset, so that nothing is encoded. On
        one CUDA device values are decoded and encoded instead, which does not wait for it.
        """
        if other.shape != self.shape or other.dtype != self.dtype:
            raise ValueError(
                f"copy_ takes a {self.dtype} tensor of shape {tuple(self.shape)}, got a "
                f"{other.dtype} tensor of shape {tuple(other.shape)}"
            )
        if other is self:
            return self
        same_kind = (other.layout.preset, other.layout.dtype) == (self._preset, self.layout.dtype)
        if not same_kind or (self.payload.is_cuda and other.device == self.device):
            return self.encode_(other.decode().to(self.device))
        self._stored = ops.to_device(other._stored, other.layout, self.device)
        self.layout = other.layout
        self.version += 1
        return self

    def can_step_fused(self, *states: CompressedTensor) -> bool:
        """Whether ``sgd_`` (``adam_``) takes this parameter with ``states`` as its momentum
        (moments), and ``muon_`` this momentum.
        """
        return all(ops.can_step_fused(tensor._stored, tensor.layout) for tensor in (self, *states))

    def sgd_(self, state: CompressedTensor, grad: torch.Tensor, **update: Any) -> None:
        """One fused step of SGD with momentum on this parameter and ``state``, in place.

        ``update``: lr, momentum, dampening, weight_decay (floats), nesterov, maximize (bools),
        rounding ("single", "foreach" or "fused"), grad_scale, found_inf (float32 tensors or None).
        """
        sgd_all_([(self, state)], [grad], **update)

    def adam_(
        self,
        exp_avg: CompressedTensor,
        exp_avg_sq: CompressedTensor,
        grad: torch.Tensor,
        **update: Any,
    ) -> None:
        """One fused step of Adam or AdamW on this parameter and its moments, in place.

        ``update``: step (a float32 tensor on the device for "fused", else a number; this step
        counts), lr, beta1, beta2, eps, weight_decay (floats), decoupled_weight_decay, maximize
        (bools), rounding, grad_scale, found_inf (as ``sgd_``).
        """
        if isinstance(update["step"], torch.Tensor):
            update["step"] = [update["step"]]
        adam_all_([(self, exp_avg, exp_avg_sq)], [grad], **update)

    def muon_(self, grad: torch.Tensor, *, momentum: float) -> torch.Tensor:
        """One fused step of Muon's Nesterov momentum on this momentum buffer, in place.

        ``grad``: dense BF16 of this shape, contiguous. Returns the update before torch
        orthogonalises it, a new tensor like ``grad``.
        """
        self.version += 1
        return ops.fused_muon((self._stored, self.layout), grad, momentum=momentum)

    def repack(self) -> CompressedTensor:
        """Store the present values anew with the capacity that they need. Synchronises on CUDA."""
        if self._preset.pooled:
            self._store_exactly(self.decode())
        return self

    def _store_exactly(self, dense: torch.Tensor) -> bool:
        """Store ``dense`` in the layout that it needs; False where that is the present one."""
        if not dense.numel():
            return False
        layout = _exact_layout(dense, self._preset, self.layout.dtype, self._candidates)
        if layout == self.layout:
            return False
        self._stored = ops.encode(dense, layout, self._candidates)
        self.layout = layout
        return True

    def clone(self) -> CompressedTensor:
        """A copy with a payload of its own. Synchronises on CUDA."""
        return self._on(self.device)

    def to(self, device: torch.device | str | int) -> CompressedTensor:
        """This tensor on ``device``: itself where it is there already, else a copy.

        ValueError for a device that has no backend or is not there.
        """
        target = _resolve_device(device)
        return self if target == self.device else self._on(target)

    def cpu(self) -> CompressedTensor:
        """``to("cpu")``."""
        return self.to("cpu")

    def cuda(self, device: int | None = None) -> CompressedTensor:
        """``to`` a CUDA device, the current one by default."""
        return self.to("cuda" if device is None else torch.device("cuda", device))

    def _on(self, device: torch.device) -> CompressedTensor:
        stored = ops.to_device(self._stored, self.layout, device)
        return CompressedTensor(stored, self.layout, self.shape, self._candidates, self._preset)

    def canonical_bytes(self) -> bytes:
        """Payload and spilled data as the format's canonical bytes, equal on all backends."""
        payload, spill = ops.to_canonical(self._stored, self.layout)
        return payload.tobytes() + spill.tobytes()

    @classmethod
    def from_canonical(
        cls, data: bytes | np.ndarray, shape: tuple[int, ...], device: torch.device | str = "cpu"
    ) -> CompressedTensor:
        """The tensor with these ``canonical_bytes`` (bytes, or uint8 of one dimension).

        CorruptPayloadError where they are damaged, ValueError for a device that has no backend or
        is not there.
        """
        target = _resolve_device(device)
        array = np.frombuffer(data, np.uint8) if isinstance(data, bytes) else data
        layout, _, _ = parse_header(array[:HEADER_BYTES].tobytes())
        size = torch.Size(shape)
        if size.numel() != layout.num_values:
            raise CorruptPayloadError(f"shape {tuple(shape)} must have {layout.num_values} values")
        if array.size < layout.size_bytes:
            raise CorruptPayloadError(
                f"payload must have {layout.size_bytes} bytes, got {array.size}"
            )
        payload, spill = array[: layout.size_bytes], array[layout.size_bytes :]
        stored = ops.from_canonical(payload, spill, layout, target)
        # A payload that is stored dense does not say which preset had been asked for.
        preset = get_preset(None) if layout.is_raw else layout.preset
        return cls(stored, layout, size, book_candidates(None), preset)

    def __reduce__(self) -> tuple[Any, ...]:
        data = np.frombuffer(self.canonical_bytes(), np.uint8)
        return CompressedTensor.from_canonical, (data, tuple(self.shape), str(self.device))

    def __repr__(self) -> str:
        return (
            f"CompressedTensor(shape={tuple(self.shape)}, dtype={self.dtype}, "
            f"device={self.device}, preset={self.preset!r}, "
            f"payload={self.payload.nbytes} of {self.dense_nbytes} bytes)"
        )


def _describe(tensor: torch.Tensor) -> str:
    contiguous = "" if tensor.is_contiguous() else "non-contiguous "
    return f"a {contiguous}{tensor.dtype} tensor of shape {tuple(tensor.shape)} on {tensor.device}"


def _check_dense(tensor: Any, function: str) -> None:
    """TypeError unless ``tensor`` is a dense tensor, naming the ``function`` that takes it."""
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{function} takes a torch.Tensor, got {type(tensor).__name__}")
    if tensor.layout != torch.strided:
        raise TypeError(f"{function} takes a dense (strided) tensor, got layout {tensor.layout}")
    if tensor.is_nested:
        raise TypeError(f"{function} takes a dense (strided) tensor, got a nested one")
    if tensor.is_quantized:
        raise TypeError(f"{function} takes no quantized tensor, got {tensor.dtype}")


def _check_supported(device: torch.device) -> None:
    if device.type not in ops.SUPPORTED_DEVICES:
        raise ValueError(f"device must be one of {', '.join(ops.SUPPORTED_DEVICES)}, got {device}")


def _resolve_device(device: torch.device | str | int) -> torch.device:
    """``device`` with its index. ValueError for one that has no backend or is not there."""
    named = torch.device(device)
    _check_supported(named)
    if named.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device {named} needs a CUDA GPU and a CUDA build of torch, found none")
    return torch.empty(0, device=named).device


def _check_encodable(tensor: torch.Tensor) -> torch.Tensor:
    _check_dense(tensor, "encode")
    _check_supported(tensor.device)
    return _plain(tensor)


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor`` with its values in memory as they read: contiguous, no pending negation."""
    if tensor.is_contiguous() and not tensor.is_neg():
        return tensor  # the common case: what follows costs host time
    return tensor.detach().resolve_neg().contiguous()


def _exact_layout(
    dense: torch.Tensor, preset: Preset, dtype: DType, candidates: tuple[int, ...]
) -> PayloadLayout:
    """The pooled layout with the capacity that ``dense`` needs, or RAW.

    Synchronises on CUDA, but for tensors so small that they would not shrink whatever their values.
    """
    least = PayloadLayout.choose(preset, dtype, dense.numel(), FIRST_WORDS)
    if least.is_raw:
        return least
    layout = PayloadLayout(preset, dtype, dense.numel(), preset.capacity_words)
    needs = _as_full_groups(ops.group_needs(dense, layout, candidates), layout)
    return PayloadLayout.choose(
        layout.preset, layout.dtype, layout.num_values, best_capacity(needs, HEADROOM_WORDS)
    )


def _as_full_groups(needs: np.ndarray, layout: PayloadLayout) -> np.ndarray:
    """``needs``, changed in place: what a full group must have for the last one to have room."""
    if layout.tail_steps:
        # The last group has room in proportion to its steps (PayloadLayout.tail_capacity_words).
        tail = np.maximum(needs[layout.full_groups :] - FIRST_WORDS, 0)
        needs[layout.full_groups :] += -(-tail * layout.preset.steps // layout.tail_steps) - tail
    return needs


def group_needs_later(dense: torch.Tensor, upcast: bool = False) -> Callable[[], np.ndarray | None]:
    """A call that gives the words, int32 (num_groups,), that the groups of ``dense`` need.

    ``dense``: contiguous. On CUDA nothing waits: the call gives None until the device is done.
    """
    preset = get_preset(None)
    dtype = UPCAST if upcast else _CODED_DTYPES[dense.dtype]
    layout = PayloadLayout(preset, dtype, dense.numel(), preset.capacity_words)
    later = ops.group_needs_later(dense.detach(), layout, book_candidates(None))

    def needs() -> np.ndarray | None:
        found = later()
        return found if found is None else _as_full_groups(found, layout)

    return needs


def payload_bytes(dtype: torch.dtype, upcast: bool, num_values: int, capacity: int) -> int:
    """Bytes of a pooled payload without spilled chunks, those of RAW where that is smaller."""
    row = UPCAST if upcast else _CODED_DTYPES[dtype]
    return PayloadLayout.choose(get_preset(None), row, num_values, capacity).size_bytes


def encode(
    tensor: torch.Tensor,
    *,
    preset: str | None = None,
    distribution: str | None = None,
    capacity: Capacity = None,
    upcast: bool = False,
) -> CompressedTensor:
    """Compress ``tensor`` losslessly (any shape; BF16, FP32 or FP16; CPU or CUDA).

    ``preset``: ``"clean"``, ``"medium"``, ``"high"``, ``"pooled"`` or None for the default.
    ``distribution``: pins the codebook's family (``"gaussian"``, ``"laplace"``, ``"power-law"``,
    ``"log-normal"``); None chooses among all of the bank. ``capacity``: 32-bit words a group
    (pooled) or a stream (fixed); None is the preset's own, ``"exact"`` measures the need first
    (pooled; one synchronisation on CUDA). ``upcast``: a hint that an FP32 tensor holds BF16 values,
    so that its lower halves get no room; a wrong hint costs storage, not bits.

    On CUDA the call does not wait for the device, ``"exact"`` excepted. Raises TypeError for a
    wrong dtype or layout, ValueError for a wrong device, preset, distribution or capacity.
    """
    dense = _check_encodable(tensor)
    row = get_preset(preset)
    dtype = _CODED_DTYPES.get(dense.dtype) or get_dtype(str(dense.dtype).removeprefix("torch."))
    if upcast:
        if dense.dtype != torch.float32:
            raise TypeError(f"upcast takes a torch.float32 tensor, got {dense.dtype}")
        dtype = UPCAST
    candidates = book_candidates(distribution)
    if capacity is None or isinstance(capacity, int):
        layout = PayloadLayout.choose(row, dtype, dense.numel(), capacity)
    elif capacity == "exact":
        layout = PayloadLayout.choose(row, dtype, dense.numel())
        if layout.preset.pooled:
            layout = _exact_layout(dense, row, dtype, candidates)
    else:
        raise ValueError(f'capacity must be a number of words, "exact" or None, got {capacity!r}')
    stored = ops.encode(dense, layout, candidates)
    return CompressedTensor(stored, layout, tensor.shape, candidates, row)


def _layouts(
    tensors: Sequence[torch.Tensor], capacities: Sequence[int], upcasts: Sequence[bool]
) -> list[PayloadLayout]:
    row = get_preset(None)
    return [
        PayloadLayout.choose(
            row, UPCAST if upcast else _CODED_DTYPES[dense.dtype], dense.numel(), capacity
        )
        for dense, capacity, upcast in zip(tensors, capacities, upcasts, strict=True)
    ]


def encode_all(
    tensors: Sequence[torch.Tensor], capacities: Sequence[int], upcasts: Sequence[bool]
) -> list[CompressedTensor]:
    """``encode`` of many contiguous tensors, on one device, with the default preset: in few
    launches on CUDA.

    Each has a ``capacity`` in words a group, and an ``upcast`` hint.
    """
    row, candidates = get_preset(None), book_candidates(None)
    layouts = _layouts(tensors, capacities, upcasts)
    return [
        CompressedTensor(stored, layout, dense.shape, candidates, row)
        for stored, layout, dense in zip(
            ops.encode_all(tensors, layouts, candidates), layouts, tensors, strict=True
        )
    ]


class CompressedBatch:
    """Contiguous tensors, on one device, that are encoded and decoded together.

    ``encode_all`` takes its arguments too. On CUDA the payloads of several share one buffer where
    one launch codes them all, which costs the host a fraction of as many ``CompressedTensor``s.
    ``device``: of all; ``nbytes``: of each payload.
    """

    __slots__ = (
        *("__weakref__", "_buffer", "_layouts", "_offsets", "_shapes", "_tensors"),
        *("device", "nbytes"),
    )

    def __init__(
        self,
        tensors: Sequence[torch.Tensor],
        capacities: Sequence[int],
        upcasts: Sequence[bool],
        layouts: Sequence[PayloadLayout] | None = None,
    ) -> None:
        self._layouts = layouts or _layouts(tensors, capacities, upcasts)
        self._shapes = [tensor.shape for tensor in tensors]
        self.device = tensors[0].device
        self._tensors: list[CompressedTensor] = []
        made = ops.encode_buffer(tensors, self._layouts, book_candidates(None))
        self._buffer: ops.Stored | None = None
        if made is None:
            self._tensors = encode_all(tensors, capacities, upcasts)
        else:
            self._buffer, self._offsets = made
            _live_batches.add(self)
        self.nbytes = [layout.size_bytes for layout in self._layouts]

    def decode(self) -> list[torch.Tensor]:
        """The dense tensors, in new memory each."""
        if self._buffer is None:
            if len(self._tensors) == 1:  # without lists of one, which cost the host more
                return [self._tensors[0].decode()]
            return decode_all(self._tensors)
        outs = [
            torch.empty(shape, dtype=_TORCH_DTYPES[layout.dtype.name], device=self.device)
            for shape, layout in zip(self._shapes, self._layouts, strict=True)
        ]
        ops.decode_buffer(self._buffer, self._offsets, self._layouts, outs)
        return outs

    def tensor(self, number: int) -> CompressedTensor:
        """One by itself; its payload may be a part of the buffer."""
        if self._buffer is None:
            return self._tensors[number]
        layout, start = self._layouts[number], self._offsets[number]
        payload = self._buffer.payload[start : start + layout.size_bytes]
        return CompressedTensor(
            ops.Stored(payload, self._buffer.spill),
            layout,
            self._shapes[number],
            book_candidates(None),
            get_preset(None),
        )

    def tensors(self) -> list[CompressedTensor]:
        """Each by itself."""
        return [self.tensor(number) for number in range(len(self._layouts))]


def encode_batches(
    tensors: Sequence[torch.Tensor], capacities: Sequence[int], upcasts: Sequence[bool]
) -> Iterator[tuple[slice, CompressedBatch]]:
    """``tensors``, of one dtype and device, in their order: batches of what one launch encodes, and
    which of them each has. One is encoded when it is asked for.
    """
    layouts = _layouts(tensors, capacities, upcasts)
    start = 0
    counts = ops.launch_counts(layouts, tensors[0].device)
    if len(counts) == 1:
        yield slice(None), CompressedBatch(tensors, capacities, upcasts, layouts)
        return
    for count in counts:
        part = slice(start, start + count)
        start += count
        yield part, CompressedBatch(tensors[part], capacities[part], upcasts[part], layouts[part])


def decode(compressed: CompressedTensor) -> torch.Tensor:
    """The dense tensor of ``compressed``, bit for bit. TypeError for anything else."""
    if not isinstance(compressed, CompressedTensor):
        raise TypeError(f"decode takes a CompressedTensor, got {type(compressed).__name__}")
    return compressed.decode()


def ensure_room(tensors: Iterable[Any]) -> None:
    """Call before several of ``tensors`` are written to, of which none may be where one fails.

    ArenaExhaustedError where one of the encodes might find no room. Others than compressed tensors
    are passed over. All are on one device.
    """
    ops.ensure_room([(t._stored, t.layout) for t in tensors if isinstance(t, CompressedTensor)])


def decode_all(tensors: Sequence[CompressedTensor]) -> list[torch.Tensor]:
    """``decode`` of many, on any devices: in few launches where they are on CUDA.

    Each dense tensor has memory of its own.
    """
    stored = [tensor._stored for tensor in tensors]
    layouts = [tensor.layout for tensor in tensors]
    outs = [
        torch.empty(tensor.shape, dtype=tensor.dtype, device=kept.payload.device)
        for tensor, kept in zip(tensors, stored, strict=True)
    ]
    ops.decode_all(stored, layouts, outs)
    return outs


def _written_parts(updates: Sequence[Sequence[CompressedTensor]]) -> list[list[ops.Part]]:
    """What a step, which writes to all of them, takes."""
    for update in updates:
        for tensor in update:
            tensor.version += 1
    return [[(tensor._stored, tensor.layout) for tensor in update] for update in updates]


Launched = Callable[[Sequence[int]], object]


def sgd_all_(
    updates: Sequence[tuple[CompressedTensor, CompressedTensor]],
    grads: Sequence[torch.Tensor],
    launched: Launched | None = None,
    **update: Any,
) -> None:
    """``CompressedTensor.sgd_`` of many: (parameter, momentum), in few launches.

    ``launched`` is called after each launch with the numbers of the updates that it makes: where
    the next one raises ArenaExhaustedError, these are made and no other.
    """
    _launch_all(ops.fused_sgd, _written_parts(updates), grads, launched, update)


def adam_all_(
    updates: Sequence[tuple[CompressedTensor, CompressedTensor, CompressedTensor]],
    grads: Sequence[torch.Tensor],
    launched: Launched | None = None,
    **update: Any,
) -> None:
    """``CompressedTensor.adam_`` of many: (parameter, exp_avg, exp_avg_sq), in few launches.

    ``step``: a number, the same for all, or for "fused" the tensor of each. ``launched`` as
    ``sgd_all_``.
    """
    _launch_all(ops.fused_adam, _written_parts(updates), grads, launched, update)


def _launch_all(
    step: Callable[..., None],
    parts: list[list[ops.Part]],
    grads: Sequence[torch.Tensor],
    launched: Launched | None,
    update: dict[str, Any],
) -> None:
    counts = update.get("step")
    for numbers in ops.fused_launches(parts):
        if isinstance(counts, Sequence):
            update = {**update, "step": [counts[n] for n in numbers]}
        step([parts[n] for n in numbers], [grads[n] for n in numbers], **update)
        if launched is not None:
            launched(numbers)


def live_tensors() -> list[CompressedTensor]:
    """All compressed tensors that exist, those of batches too."""
    alone = list(_live)
    return alone + [tensor for batch in list(_live_batches) for tensor in batch.tensors()]


def stats() -> dict[str, Any]:
    """``lct.stats()`` without the activations."""
    total = dict.fromkeys(
        (
            "dense_bytes",
            "payload_bytes",
            "spilled_bytes",
            "groups",
            "constant_groups",
            "spilled_groups",
            "raw_groups",
        ),
        0,
    )
    tensors = live_tensors()
    for tensor in tensors:
        counts = tensor.group_counts()
        total["dense_bytes"] += tensor.dense_nbytes
        total["payload_bytes"] += tensor.payload.nbytes
        total["spilled_bytes"] += counts.spill_bytes
        total["groups"] += counts.groups
        total["constant_groups"] += counts.constant
        total["spilled_groups"] += counts.spilled
        total["raw_groups"] += counts.raw
    return {"tensors": len(tensors), **total, "arenas": ops.arena_report()}


def reserve_arena(size_bytes: int, device: torch.device | str | int = "cuda") -> None:
    """Grow a CUDA device's overflow arena to ``size_bytes``: needed before capturing CUDA graphs.

    Outside graphs the arena grows by itself. ValueError for a size that is not positive and for a
    device that is no CUDA device or is not there.
    """
    if size_bytes <= 0:
        raise ValueError(f"size_bytes must be positive, got {size_bytes}")
    target = _resolve_device(device)
    if target.type != "cuda":
        raise ValueError(f"device must be a CUDA device, got {target}")
    ops.reserve_arena(size_bytes, target)


_relief_thresholds: dict[torch.device, int] = {}
_RELIEF_CHUNKS = 64


def relieve_arena(device: torch.device, tensors: Callable[[], Iterable[CompressedTensor]]) -> None:
    """Store those of ``tensors()`` of which many groups spill anew, with the room that they need.

    For optimizers, after a step. Free while few chunks of the arena of ``device`` are in use as far
    as the host has heard, and while a graph is captured; else synchronises, and looks again only
    when twice as many are in use.
    """
    if device.type != "cuda":
        return
    if ops.arena_used_chunks(device) <= _relief_thresholds.get(device, _RELIEF_CHUNKS):
        return
    if torch.cuda.is_current_stream_capturing():
        return
    # What dropped payloads held is given back: many chunks may be in use for that alone.
    used = ops.settle_arena(device)
    if used > _RELIEF_CHUNKS:
        for tensor in tensors():
            if tensor.device == device and tensor.layout.preset.pooled:
                counts = tensor.group_counts()
                if counts.spilled > counts.groups * _REPACK_SHARE:
                    tensor.repack()
        used = ops.settle_arena(device)
    _relief_thresholds[device] = max(_RELIEF_CHUNKS, 2 * used)
