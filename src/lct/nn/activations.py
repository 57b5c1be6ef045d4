"""``compress_activations``: what autograd saves for backward, kept compressed until backward asks.

A pair of saved-tensor hooks. What is stored is the *storage* that a saved tensor lies in, as a flat
tensor: a view of it comes back with the strides, offset and alignment that it had, and the views
that several ops save (q, k and v of one projection; a tensor and its transpose) share one encode.
The graph owns what is stored; this module keeps weak references only.
"""

from __future__ import annotations

import contextlib
import threading
import warnings
import weakref
from collections import Counter, OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks

from ..ops import SUPPORTED_DEVICES
from ..tensor import CompressedTensor, encode
from .bits import PackedBits, pack_bits
from .untraced import untraced


@dataclass(frozen=True)
class SaveRule:
    """From which size of its storage on a saved tensor of ``dtype`` is compressed.

    Below, the payload's fixed part (a header, and the planes of a group of 8,192 values) and the
    host time of an encode and a decode weigh more than the bytes.
    """

    dtype: torch.dtype
    min_bytes: int


# One group of values; a mask is worth its eight-fold ratio from an eighth of that on.
SAVE_RULES: dict[torch.dtype, SaveRule] = {
    rule.dtype: rule
    for rule in (
        SaveRule(torch.bfloat16, 16384),
        SaveRule(torch.float16, 16384),
        SaveRule(torch.float32, 32768),
        SaveRule(torch.bool, 2048),
    )
}
# A view of less than this share of its storage is kept as it is, unless the storage is stored
# anyway: encoding all of a large buffer for a few rows would not pay.
MIN_COVERAGE = 1 / 4
# Room of a group: activations are wider than weights, and many groups that would spill in
# the default 748 words fit (docs/format.md, "Capacity classes").
CAPACITY_WORDS = 784
# Decoded storages that wait for their other consumers (k and q, after v) may take this much.
SHARED_DECODED_BYTES = 256 << 20

_VIEWS = {
    f"{name}Backward0"
    for name in (
        *("View", "UnsafeView", "ReshapeAlias", "Transpose", "Permute", "T", "Alias", "Slice"),
        *("Select", "Expand", "Unsqueeze", "Squeeze", "Split", "SplitWithSizes", "AsStrided"),
    )
}


@dataclass
class SavedActivations:
    """What one ``compress_activations`` block has seen: counts and bytes, each storage once.

    ``dense_bytes`` and ``stored_bytes`` are of the compressed storages (payloads without spilled
    chunks, which only the device knows), ``reused`` counts saves that found their storage stored,
    ``kept`` the saves that were left as they are, by reason.
    """

    encoded: int = 0
    reused: int = 0
    dense_bytes: int = 0
    stored_bytes: int = 0
    kept: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self._stored: weakref.WeakValueDictionary[Any, _Stored] = weakref.WeakValueDictionary()

    @untraced
    def pack(self, tensor: torch.Tensor) -> Any:
        """Pack hook: a ``_Saved`` or a ``_Kept``."""
        reason = _reason_to_keep(tensor)
        if not reason:
            stored = self._find_or_store(tensor)
            if stored is not None:
                return _Saved(stored, tensor)
            reason = "it is a small part of its storage"
        self.kept[reason] += 1
        return _Kept(tensor)

    def _find_or_store(self, tensor: torch.Tensor) -> _Stored | None:
        source = tensor.untyped_storage()
        version = tensor._version
        # On CUDA another stream would have to wait for the encode: let it make its own.
        stream = torch.cuda.current_stream(tensor.device).cuda_stream if tensor.is_cuda else 0
        key = source._cdata, version, tensor.dtype, stream
        stored = self._stored.get(key)
        # An address is used again after its storage was freed, and what was stored may live on.
        if stored is not None and stored.source() is source:
            self.reused += 1
            return stored
        if tensor.numel() * tensor.element_size() < MIN_COVERAGE * source.nbytes():
            return None
        stored = _Stored(tensor, source, stream)
        self._stored[key] = stored
        self.encoded += 1
        self.dense_bytes += source.nbytes()
        self.stored_bytes += stored.content.payload.nbytes
        return stored


class _Stored:
    """One storage, compressed; owned by the graph's nodes through their ``_Saved``."""

    __slots__ = ("__weakref__", "content", "decoded", "source", "stream", "version", "waiting")

    def __init__(self, tensor: torch.Tensor, source: torch.UntypedStorage, stream: int) -> None:
        flat = tensor.detach().as_strided((source.nbytes() // tensor.element_size(),), (1,), 0)
        self.content: CompressedTensor | PackedBits
        if tensor.dtype == torch.bool:
            self.content = pack_bits(flat)
        else:
            upcast = is_exact_upcast(tensor)
            self.content = encode(flat, capacity=CAPACITY_WORDS, upcast=upcast)
        self.source = weakref.ref(source)
        self.stream = stream
        self.waiting = 0  # saves that backward has not asked for yet
        self.decoded: torch.Tensor | None = None
        self.version = 0

    def values(self, shared: bool) -> torch.Tensor:
        """The storage's values, flat; kept for the other consumers where it is ``shared``."""
        with _decoded.lock:
            flat = self.decoded
            # A consumer that wrote into its copy has spoilt it for the others.
            if flat is not None and flat._version == self.version and self._same_stream(flat):
                if not shared:
                    _decoded.forget(self)
                return flat
        flat = self.content.decode()
        if shared:
            _decoded.keep(self, flat)
        return flat

    def _same_stream(self, flat: torch.Tensor) -> bool:
        # Memory of one stream must not be read on another without waiting.
        if not flat.is_cuda:
            return True
        return torch.cuda.current_stream(flat.device).cuda_stream == self.stream


class _Decoded:
    """Decoded storages with consumers left, oldest first, within a limit of bytes."""

    def __init__(self) -> None:
        self.lock = threading.RLock()  # each device has a backward thread of its own
        self.entries: OrderedDict[int, weakref.ref[_Stored]] = OrderedDict()
        self.size_bytes = 0

    def keep(self, stored: _Stored, flat: torch.Tensor) -> None:
        with self.lock:
            self.forget(stored)
            stored.decoded, stored.version = flat, flat._version
            self.entries[id(stored)] = weakref.ref(stored)
            self.size_bytes += flat.nbytes
            while self.size_bytes > SHARED_DECODED_BYTES and len(self.entries) > 1:
                oldest = next(iter(self.entries.values()))()
                assert oldest is not None, "what dies forgets itself before"
                self.forget(oldest)

    def forget(self, stored: _Stored) -> None:
        with self.lock:
            if stored.decoded is not None:
                self.size_bytes -= stored.decoded.nbytes
                del self.entries[id(stored)]
                stored.decoded = None


_decoded = _Decoded()


class _Saved:
    """What autograd holds for one saved tensor: its place in a ``_Stored``."""

    __slots__ = ("counter", "offset", "shape", "stored", "stride", "version", "waits")

    def __init__(self, stored: _Stored, tensor: torch.Tensor) -> None:
        self.stored = stored
        self.shape = tensor.shape
        self.stride = tensor.stride()
        self.offset = tensor.storage_offset()
        self.version = tensor._version
        # An alias shares the version counter; with another storage it does not keep the values
        # alive.
        self.counter = tensor.detach()
        self.counter.data = _nothing(tensor)
        self.waits = True
        stored.waiting += 1

    def unpack(self) -> torch.Tensor:
        if self.counter._version != self.version:
            raise _changed(self.counter.dtype, self.shape, self.version, self.counter._version)
        if self.waits:
            self.waits = False
            self.stored.waiting -= 1
        flat = self.stored.values(shared=self.stored.waiting > 0)
        return flat.as_strided(self.shape, self.stride, self.offset)

    @untraced
    def __del__(self) -> None:
        # The graph lets go of a save with no backward, or of the last one: nobody else will ask.
        if self.waits:
            self.stored.waiting -= 1
        if self.stored.waiting <= 0:
            _decoded.forget(self.stored)


class _Kept:
    """A saved tensor as it is. Not the tensor itself if it has a history: that would be a cycle."""

    __slots__ = ("tensor", "version")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor if tensor.grad_fn is None else tensor.detach()
        self.version = None if tensor.is_inference() else tensor._version

    def unpack(self) -> torch.Tensor:
        if self.version is not None and self.tensor._version != self.version:
            raise _changed(self.tensor.dtype, self.tensor.shape, self.version, self.tensor._version)
        return self.tensor


@untraced
def _unpack(packed: _Saved | _Kept) -> torch.Tensor:
    return packed.unpack()


def _nothing(tensor: torch.Tensor) -> torch.Tensor:
    key = tensor.dtype, tensor.device
    if key not in _empty:
        _empty[key] = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return _empty[key]


_empty: dict[tuple[torch.dtype, torch.device], torch.Tensor] = {}


def _changed(dtype: torch.dtype, shape: torch.Size, saved: int, current: int) -> RuntimeError:
    # Autograd checks this itself only where there are no hooks.
    return RuntimeError(
        "one of the variables needed for gradient computation has been modified by an inplace "
        f"operation: [{dtype} {list(shape)}] is at version {current}; expected version {saved} "
        "instead. Hint: enable anomaly detection to find the operation that failed to compute its "
        "gradient, with torch.autograd.set_detect_anomaly(True)."
    )


def _reason_to_keep(tensor: torch.Tensor) -> str:
    rule = SAVE_RULES.get(tensor.dtype)
    if rule is None:
        return f"{tensor.dtype} is not compressed"
    if type(tensor) is not torch.Tensor:
        return "it is a parameter or a subclass"
    if tensor.layout != torch.strided or tensor.device.type not in SUPPORTED_DEVICES:
        return "its layout or device has no codec"
    if tensor.is_leaf and tensor.requires_grad:
        return "it is a leaf, which its owner keeps alive"
    if tensor._base is not None and isinstance(tensor._base, torch.nn.Parameter):
        return "it is a view of a parameter"
    if tensor.is_nested or tensor.is_neg() or tensor.is_inference():
        return "it is a nested, negated or inference tensor"
    if tensor.untyped_storage().nbytes() < rule.min_bytes:
        return "it is small"
    if torch._C._current_graph_task_id() != -1:
        return "it is saved within a backward, which needs it at once"
    return ""


def is_exact_upcast(tensor: torch.Tensor) -> bool:
    """True where the history of FP32 ``tensor`` says that it was cast from BF16.

    A hint: a write through ``.data`` leaves no trace in the history.
    """
    if tensor.dtype != torch.float32:
        return False
    node: Any = tensor.grad_fn
    while node is not None and node.name() in _VIEWS:
        node = node.next_functions[0][0]
    if node is None or node.name() != "ToCopyBackward0":
        return False
    source, output = node.next_functions[0]
    if source is None:
        return False
    if hasattr(source, "variable"):
        return source.variable.dtype == torch.bfloat16
    return source._input_metadata[output].dtype == torch.bfloat16


@contextlib.contextmanager
def compress_activations() -> Iterator[SavedActivations]:
    """Compress, losslessly, what autograd saves within the block; backward may run after it.

    BF16, FP16 and FP32 tensors go through the codec (FP32 that was cast from BF16 as BF16), masks
    become bits. Left as they are: parameters and their views, other leaves that require gradients,
    tensor subclasses, integers, what is small (``SAVE_RULES``), and what is saved while a backward
    runs. Gives a ``SavedActivations`` with counts and bytes.

    A saved tensor that is changed in place before backward raises autograd's error, as without
    LCT. A change that torch does not see (through ``.data``, or by a kernel of one's own) is not
    seen here either: backward then gets the values from before.

    Torch applies only the innermost saved-tensor hooks: a warning says so where this block replaces
    hooks of others. Inside a checkpointed region they would undo the checkpoint: RuntimeError;
    around one they compress what the checkpoint saves. What a selective checkpoint caches passes no
    hooks and stays dense. ``torch.func`` transforms refuse the hooks with an error of their own.
    """
    outer = torch._C._autograd._top_saved_tensors_default_hooks(True)
    if outer is not None:
        _check_outer(outer[0])
    saved = getattr(outer[0], "__self__", None) if outer is not None else None
    if not isinstance(saved, SavedActivations):
        saved = SavedActivations()
    with saved_tensors_hooks(saved.pack, _unpack):
        yield saved


def _check_outer(pack: Any) -> None:
    if getattr(pack, "__module__", None) == "torch.utils.checkpoint":
        raise RuntimeError(
            "compress_activations must be entered outside of checkpointed regions, got a call "
            "inside one: its hooks would save what the checkpoint is there to compute again"
        )
    if not isinstance(getattr(pack, "__self__", None), SavedActivations):
        warnings.warn(
            f"compress_activations replaces the saved-tensor hooks {pack!r} within its block: "
            "torch applies only the innermost",
            stacklevel=4,
        )
