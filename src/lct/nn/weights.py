"""``compress_`` and ``decompress_``: the weights of a model, kept compressed while it trains."""

from __future__ import annotations

import contextlib
import logging
import weakref
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import nn

from ..dtypes import DTYPES
from ..ops import SUPPORTED_DEVICES
from ..tensor import CompressedTensor
from .compressed_weight import OWN_ATTRIBUTES, CompressedWeight, as_compressed
from .strides import memory_order

log = logging.getLogger(__name__)
_DTYPES = {getattr(torch, name) for name in DTYPES}

Model = TypeVar("Model", bound=nn.Module)
FilterFn = Callable[[str, nn.Parameter], bool]


@dataclass(frozen=True)
class WeightReport:
    """What ``compress_`` did with one parameter. ``reason`` is empty where it was compressed."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    reason: str
    dense_bytes: int
    stored_bytes: int


@dataclass
class CompressionReport:
    """One row per parameter (tied ones once), in the order of ``named_parameters``."""

    rows: list[WeightReport] = field(default_factory=list)

    @property
    def dense_bytes(self) -> int:
        """Bytes of all parameters before."""
        return sum(row.dense_bytes for row in self.rows)

    @property
    def stored_bytes(self) -> int:
        """Bytes of all parameters after."""
        return sum(row.stored_bytes for row in self.rows)

    def __str__(self) -> str:
        reasons = Counter(row.reason for row in self.rows if row.reason)
        done = len(self.rows) - reasons.total()
        dense = "".join(f"; {count} dense: {reason}" for reason, count in reasons.items())
        return (
            f"{done} of {len(self.rows)} parameters compressed, "
            f"{self.dense_bytes} to {self.stored_bytes} bytes{dense}"
        )


_reports: weakref.WeakKeyDictionary[nn.Module, CompressionReport] = weakref.WeakKeyDictionary()


def compression_report(model: nn.Module) -> CompressionReport:
    """What the last ``compress_(model)`` compressed and left dense, and why; KeyError if none."""
    if model not in _reports:
        raise KeyError("compression_report takes a model that lct.compress_ was called on")
    return _reports[model]


def compress_(model: Model, *, filter_fn: FilterFn | None = None) -> Model:
    """Compress the weights of ``model`` in place, losslessly; returns ``model``.

    Every parameter with two or more dimensions (BF16, FP16 or FP32), of any module, becomes a
    ``CompressedWeight``, which is decoded where an op needs it. The parameter objects stay the
    same, so ties and optimizers made before survive. Parameters with fewer dimensions, those for
    which ``filter_fn(name, parameter)`` is false, and those that would not get smaller stay dense
    (``compression_report(model)`` lists them with the reason); buffers are not touched. Call it
    where no forward awaits its backward.

    TypeError where ``model`` is no module, ValueError where it has no floating-point parameters or
    some that have no shape yet.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"compress_ takes a torch.nn.Module, got {type(model).__name__}")
    parameters = dict(model.named_parameters())
    lazy = [name for name, parameter in parameters.items() if nn.parameter.is_lazy(parameter)]
    if lazy:
        raise ValueError(
            "compress_ takes a model whose parameters have a shape (call lazy modules once "
            f"before), got {', '.join(lazy)} without"
        )
    if not any(parameter.is_floating_point() for parameter in parameters.values()):
        raise ValueError(
            "compress_ takes a model with floating-point parameters, got "
            f"{type(model).__name__} with {len(parameters)} parameters, none of them floating-point"
        )
    report = CompressionReport()
    memory = _Memory(parameters)
    with _weak_references_released(model):
        for name, parameter in parameters.items():
            reason = _reason_for_dense(name, parameter, filter_fn)
            reason = reason or memory.reason_for_dense(parameter)
            if not reason and not isinstance(parameter, CompressedWeight):
                weight = memory.weight_for(parameter)
                if weight.compressed.layout.is_raw:
                    reason = "it would not get smaller"
                else:
                    memory.leave(parameter)
                    _replace(name, parameter, weight)
            report.rows.append(_row(name, parameter, reason))
        memory.detach_dense_parameters()
    for module in model.modules():
        _set_state_dict_hook(module)
    _reports[model] = report
    log.info("lct.compress_(%s): %s", type(model).__name__, report)
    for row in report.rows:
        if row.reason:
            log.debug("left dense: %s %s: %s", row.name, row.shape, row.reason)
    return model


def decompress_(model: Model) -> Model:
    """Make the weights of ``model`` plain dense parameters again, in place; returns ``model``."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"decompress_ takes a torch.nn.Module, got {type(model).__name__}")
    # Aliases of one root become aliases of one dense tensor. The roots are kept for their ids.
    decoded: dict[int, tuple[CompressedTensor, torch.Tensor]] = {}
    with _weak_references_released(model):
        for name, parameter in model.named_parameters():
            if isinstance(parameter, CompressedWeight):
                root = parameter.compressed
                if id(root) not in decoded:
                    decoded[id(root)] = root, root.decode().view(-1)
                values = decoded[id(root)][1]
                geometry = parameter.shape, parameter.stride(), parameter.storage_offset()
                _replace(name, parameter, values.as_strided(*geometry))
    for module in model.modules():
        _set_state_dict_hook(module)
    _reports.pop(model, None)
    return model


def _reason_for_dense(name: str, parameter: Any, filter_fn: FilterFn | None) -> str:
    """Why ``parameter`` stays dense, by its own properties; empty if it should be compressed."""
    if isinstance(parameter, CompressedWeight):
        return ""
    if not parameter.is_floating_point():
        return "it is not floating-point"
    if type(parameter) is not nn.Parameter:
        return f"it is a {type(parameter).__name__}"
    if parameter.dim() < 2:
        return "it has fewer than 2 dimensions"
    if parameter.dtype not in _DTYPES:
        return f"{parameter.dtype} is not coded"
    if parameter.device.type not in SUPPORTED_DEVICES:
        return f"it is on device {parameter.device}"
    if parameter.layout != torch.strided:
        return f"its layout is {parameter.layout}"
    if memory_order(parameter) is None:
        return "it has holes or overlaps in memory"
    if filter_fn is not None and not filter_fn(name, parameter):
        return "filter_fn excludes it"
    return ""


class _Memory:
    """Which parameters share memory: the same values share a root, other overlaps stay dense."""

    def __init__(self, parameters: dict[str, nn.Parameter]) -> None:
        self.roots: dict[Any, CompressedWeight] = {}
        self.ranges: dict[int, list[tuple[int, int]]] = {}
        self.compressed: set[int] = set()
        self.parameters = [
            p
            for p in parameters.values()
            if type(p) is nn.Parameter
            and p.layout == torch.strided
            and p.device.type in SUPPORTED_DEVICES
        ]
        for parameter in self.parameters:
            self.ranges.setdefault(self._storage(parameter), []).append(self._range(parameter))

    @staticmethod
    def _storage(parameter: torch.Tensor) -> int:
        return parameter.untyped_storage()._cdata

    @staticmethod
    def _range(parameter: torch.Tensor) -> tuple[int, int]:
        spans = ((n - 1) * s for n, s in zip(parameter.shape, parameter.stride(), strict=True))
        start = int(parameter.storage_offset()) * parameter.element_size()
        return start, start + (int(sum(spans)) + 1) * parameter.element_size()

    def reason_for_dense(self, parameter: Any) -> str:
        if isinstance(parameter, CompressedWeight):
            return ""
        own = self._range(parameter)
        for other in self.ranges[self._storage(parameter)]:
            if other != own and other[0] < own[1] and own[0] < other[1]:
                return "it overlaps another parameter in memory"
        return ""

    def weight_for(self, parameter: nn.Parameter) -> CompressedWeight:
        """A new weight; parameters that are the same memory get the same root."""
        storage = self._storage(parameter)
        key = storage, self._range(parameter), parameter.dtype, parameter.shape, parameter.stride()
        if key not in self.roots:
            self.roots[key] = CompressedWeight.from_dense(parameter)
        return as_compressed(self.roots[key].detach())

    def leave(self, parameter: nn.Parameter) -> None:
        """Note that ``parameter`` is about to leave its memory."""
        self.compressed.add(self._storage(parameter))

    def detach_dense_parameters(self) -> None:
        """Move what stays dense out of buffers that it shared with compressed weights (RNNs on
        CUDA have one buffer for all), which would live on for it.
        """
        for parameter in self.parameters:
            if type(parameter) is nn.Parameter and self._storage(parameter) in self.compressed:
                parameter.data = parameter.detach().clone()


@contextlib.contextmanager
def _weak_references_released(model: nn.Module) -> Iterator[None]:
    """RNNs hold weak references to their weights, which forbid a swap: as in ``Module.to``."""
    recurrent = [module for module in model.modules() if isinstance(module, nn.RNNBase)]
    for rnn in recurrent:
        rnn._flat_weight_refs = []
    try:
        yield
    finally:
        for rnn in recurrent:
            rnn._init_flat_weights()


def _row(name: str, parameter: torch.Tensor, reason: str) -> WeightReport:
    dense_bytes = parameter.numel() * parameter.element_size()
    stored_bytes = dense_bytes
    if isinstance(parameter, CompressedWeight):
        stored_bytes = parameter.compressed.nbytes
    shape = tuple(parameter.shape)
    return WeightReport(name, shape, parameter.dtype, reason, dense_bytes, stored_bytes)


def _replace(name: str, parameter: nn.Parameter, value: torch.Tensor) -> None:
    """Make ``parameter`` hold ``value``: same object, gradient, hooks and attributes."""
    grad, requires_grad = parameter.grad, parameter.requires_grad
    new = nn.Parameter(value, requires_grad)
    new.__dict__.update({k: v for k, v in parameter.__dict__.items() if k not in OWN_ATTRIBUTES})
    new.grad = grad
    for hooks in ("_backward_hooks", "_post_accumulate_grad_hooks"):
        # They live in the C++ half, which is going to be swapped; their dictionary stays the same,
        # so that the handles that were given out still remove them.
        if getattr(parameter, hooks):
            setattr(new, hooks, getattr(parameter, hooks))
    del value
    try:
        torch.utils.swap_tensors(parameter, new)
    except RuntimeError as error:
        raise RuntimeError(
            f"parameter {name} is in use by an autograd graph or a weak reference: call compress_ "
            "and decompress_ where no forward awaits its backward"
        ) from error


# Plain tensors that one state_dict call has made so far, so that aliases of a root share one: by id
# of the dictionary that it fills, with a weak reference that ends the entry. Values are weak too:
# the dictionary owns the tensors.
_emitted: dict[int, tuple[Any, weakref.WeakValueDictionary[Any, torch.Tensor]]] = {}


def _emitted_into(state_dict: Any) -> weakref.WeakValueDictionary[Any, torch.Tensor]:
    key = id(state_dict)
    if key not in _emitted:
        tensors: weakref.WeakValueDictionary[Any, torch.Tensor] = weakref.WeakValueDictionary()
        if not isinstance(state_dict, OrderedDict):
            return tensors  # a dictionary of the caller's own; a plain one takes no weak reference
        _emitted[key] = weakref.ref(state_dict, lambda _: _emitted.pop(key, None)), tensors
    return _emitted[key][1]


def _emit_dense(module: nn.Module, state_dict: Any, prefix: str, local_metadata: Any) -> None:
    """State-dict post-hook: plain tensors under unchanged names."""
    for name in module._parameters:
        value = state_dict.get(prefix + name)
        # With keep_vars=True the caller asked for the parameters themselves.
        if not isinstance(value, CompressedWeight) or isinstance(value, nn.Parameter):
            continue
        tensors = _emitted_into(state_dict)
        root: CompressedTensor = value.compressed
        geometry = id(root), value.shape, value.stride(), value.storage_offset()
        dense = tensors.get(geometry)
        if dense is None:
            dense = tensors[geometry] = value.dense()
        state_dict[prefix + name] = dense


def _set_state_dict_hook(module: nn.Module) -> None:
    """Have the hook on exactly the modules that own a compressed weight."""
    wanted = any(isinstance(p, CompressedWeight) for p in module._parameters.values())
    present = [key for key, hook in module._state_dict_hooks.items() if hook is _emit_dense]
    if wanted and not present:
        module.register_state_dict_post_hook(_emit_dense)
    elif not wanted:
        for key in present:
            del module._state_dict_hooks[key]
