"""What ops do with compressed weights: the tables that ``CompressedWeight`` dispatches by.

An op that no table names is a view (lazy), or runs on decoded tensors, as its schema says.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch._subclasses.fake_tensor import UnsupportedOperatorException
from torch.utils._python_dispatch import _disable_current_modes

from ..dtypes import DTYPES
from ..tensor import CompressedTensor
from .ahead import decode_for_op
from .compressed_weight import CompressedWeight, Handler, alias_of, view_of
from .handles import count_write
from .linear import linear
from .strides import memory_order

aten = torch.ops.aten
_DTYPES = {getattr(torch, name) for name in DTYPES}


def _stand_in(weight: CompressedWeight) -> torch.Tensor:
    """A meta tensor with the geometry of ``weight``: metadata without values.

    Its storage has no bytes, so that it counts for nothing where tensors are on ``meta`` too.
    """
    base = torch.empty(0, dtype=weight.dtype, device="meta")
    return base.as_strided(weight.shape, weight.stride(), weight.storage_offset())


def _is_traced(weight: CompressedWeight) -> bool:
    """True where ``torch.compile`` traces with ``weight``: it has no payload, only a handle."""
    return type(weight.compressed) is not CompressedTensor


class _Decoded:
    """Plain tensors in the place of compressed weights, for one op: each root is decoded once."""

    def __init__(self, args: Any, kwargs: dict[str, Any], mirror_requires_grad: bool) -> None:
        self.args, self.kwargs = args, kwargs
        self.values: dict[int, torch.Tensor] = {}
        self.weights: dict[int, CompressedWeight] = {}
        self.plain: dict[int, torch.Tensor] = {}
        self.mirror_requires_grad = mirror_requires_grad

    def __call__(self, value: Any) -> Any:
        if isinstance(value, CompressedWeight):
            return self.of(value)
        if isinstance(value, (list, tuple)):
            return type(value)(self(item) for item in value)
        return value

    def of(self, weight: CompressedWeight) -> torch.Tensor:
        found = self.plain.get(id(weight))
        if found is not None:
            return found
        if _is_traced(weight):
            return self._of_traced(weight)
        root = weight.compressed
        values = self.values.get(id(root))
        if values is None:
            values = self.values[id(root)] = decode_for_op(root)
        # A whole weight gets an alias too: an op may see a weight and a view of it.
        plain = values.detach() if weight._whole else view_of(values, weight)
        if self.mirror_requires_grad and weight.requires_grad:
            # Autograd is done above us, but some ops choose a kernel by this flag.
            plain.requires_grad_(True)
        self.plain[id(weight)] = plain
        self.weights[id(plain)] = weight
        return plain

    def _of_traced(self, weight: CompressedWeight) -> torch.Tensor:
        from .compiled import plain_tensors

        if weight.traced_view is not None:
            func, (base, *args), kwargs, index = weight.traced_view
            result = func(self._of_traced(base), *args, **kwargs)
            return result if index is None else result[index]
        root: Any = weight.compressed
        values = self.values.get(id(root))
        if values is None:
            others = plain_tensors([*self.args, *self.kwargs.values()])
            values = self.values[id(root)] = root.decode(after=others)
        return values if weight._whole else view_of(values, weight)

    def result(self, value: Any) -> Any:
        """The weight itself where an op returns what it changed in place."""
        if isinstance(value, torch.Tensor):
            return self.weights.get(id(value), value)
        if isinstance(value, (list, tuple)):
            return type(value)(self.result(item) for item in value)
        return value


def _written(args: Any, kwargs: dict[str, Any], writes: tuple[tuple[int, str], ...]) -> list[Any]:
    found: list[Any] = []
    for index, name in writes:
        value = args[index] if index < len(args) else kwargs.get(name)
        found += value if isinstance(value, (list, tuple)) else [value]
    return [value for value in found if isinstance(value, CompressedWeight)]


def _run_dense(
    func: Any, args: Any, kwargs: dict[str, Any], writes: tuple[tuple[int, str], ...] = ()
) -> Any:
    written = _written(args, kwargs, writes)
    for weight in written:
        _check_writable(func, weight)
    changed = {id(weight.compressed): weight.compressed for weight in written}
    mirror_requires_grad = not writes and torch.is_grad_enabled()
    decoded = _Decoded(args, kwargs, mirror_requires_grad)
    result = func(*decoded(tuple(args)), **{k: decoded(v) for k, v in kwargs.items()})
    for key, root in changed.items():
        _write(root, decoded.values[key])
    if any(isinstance(args[index], (list, tuple)) for index, _ in writes if index < len(args)):
        # Autograd leaves the versions of lists to the ops on their tensors, which saw plain ones.
        torch.autograd.graph.increment_version(written)
    return decoded.result(result) if writes else result


def _check_writable(func: Any, weight: CompressedWeight) -> None:
    if _is_traced(weight):
        # For Dynamo this is a reason to break the graph: the write then runs eagerly.
        error = UnsupportedOperatorException(func)
        error.add_note(f"{func} writes to a compressed weight, which a compiled graph cannot do")
        raise error


def _write(root: CompressedTensor, dense: torch.Tensor) -> None:
    """New values for ``root``, of which the compiled graphs that saved its handle must know."""
    root.encode_(dense)
    count_write(root)


def _lazy_view(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    weight = args[0]
    if _is_traced(weight):
        return _traced_view(func, args, kwargs)
    return _as_views(weight, func(_stand_in(weight), *args[1:], **kwargs))


def _as_views(weight: CompressedWeight, meta: Any) -> Any:
    """Views of ``weight`` with the geometry of ``meta``, of one tensor or of many."""
    if isinstance(meta, (list, tuple)):
        return type(meta)(_as_views(weight, item) for item in meta)
    return CompressedWeight(
        weight.compressed, meta.shape, meta.stride(), meta.storage_offset(), meta.dtype
    )


def _traced_view(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """A view that the graph takes of the decoded weight by the same op as of a dense one."""
    weight = args[0]
    with _disable_current_modes():  # they would trace what is done to the stand-in
        meta = func(_stand_in(weight), *args[1:], **kwargs)
    views = _as_views(weight, meta)
    for index, view in enumerate(views) if isinstance(views, (list, tuple)) else [(None, views)]:
        view.traced_view = func, args, kwargs, index
    return views


def _refuse(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    raise RuntimeError(
        f"{func} changes shape or storage of a tensor in place, which a compressed weight does not "
        "support; call lct.decompress_(model) first"
    )


def _handler_for(func: Any) -> Handler:
    """View, op that writes, or op that reads, as its schema says."""
    if torch.Tag.inplace_view in func.tags:
        return _refuse
    schema = func._schema
    writes = tuple(
        (index, argument.name)
        for index, argument in enumerate(schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    )
    if not writes and schema.returns and all(r.alias_info is not None for r in schema.returns):
        return _lazy_view
    return partial(_run_dense, writes=writes)


def _detach(func: Any, args: Any, kwargs: dict[str, Any]) -> CompressedWeight:
    alias = alias_of(args[0])
    if _is_traced(alias):
        alias.traced_view = args[0].traced_view
    return alias


def _transpose(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    weight = args[0]
    if weight.dim() != 2 or func is not aten.t.default or _is_traced(weight):
        return _lazy_view(func, args, kwargs)
    (rows, columns), (row, column) = weight.shape, weight.stride()
    return CompressedWeight(
        weight.compressed, (columns, rows), (column, row), weight.storage_offset(), weight.dtype
    )


def _clone(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    weight = args[0]
    memory_format = kwargs.get("memory_format") or torch.preserve_format
    if (
        not weight._whole
        or _is_traced(weight)
        or memory_format not in (torch.preserve_format, torch.contiguous_format)
    ):
        return _run_dense(func, args, kwargs)
    return CompressedWeight(weight.compressed.clone())


def _to_copy(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Moves stay compressed. Casts do where a model is cast (no_grad), not within a forward."""
    weight = args[0]
    dtype = kwargs.get("dtype") or weight.dtype
    device = kwargs.get("device") or weight.device
    memory_format = kwargs.get("memory_format") or torch.preserve_format
    if memory_format == torch.preserve_format and weight._whole and not _is_traced(weight):
        if dtype == weight.dtype:
            moved = torch.empty(0, device=device).device != weight.device
            root = weight.compressed
            return CompressedWeight(root.to(device) if moved else root.clone())
        if dtype in _DTYPES and not torch.is_grad_enabled():
            return CompressedWeight.from_dense(_run_dense(func, args, kwargs))
    return _run_dense(func, args, kwargs)


def _copy_(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """A copy to all of a weight needs no decode."""
    target, source = args[0], args[1]
    if isinstance(target, CompressedWeight):
        _check_writable(func, target)
    root = target.compressed if isinstance(target, CompressedWeight) else None
    if root is None or target.dtype != root.dtype or target.numel() != root.numel():
        return _run_dense(func, args, kwargs, writes=((0, "self"),))
    if (target._whole and isinstance(source, CompressedWeight) and source._whole) and (
        source.shape,
        source.dtype,
    ) == (target.shape, target.dtype):
        root.copy_(source.compressed)
        count_write(root)
        return target
    dense = source.dense() if isinstance(source, CompressedWeight) else source
    if target._whole:
        dense = dense.to(device=target.device, dtype=target.dtype).expand(target.shape)
        _write(root, dense)
        return target
    laid_out = torch.empty_strided(
        target.shape, target.stride(), dtype=target.dtype, device=target.device
    )
    flat = memory_order(laid_out)
    if flat is None:
        return _run_dense(func, args, kwargs, writes=((0, "self"),))
    laid_out.copy_(dense)
    _write(root, flat.view(root.shape))
    return target


def _factory(func: Any, args: Any, kwargs: dict[str, Any]) -> torch.Tensor:
    """``zeros_like`` and kin: a plain tensor, made from metadata alone."""
    weight = args[0]
    device = kwargs.get("device") or weight.device
    if _is_traced(weight):
        geometry = weight.shape, weight.stride()
        stand_in = torch.empty_strided(*geometry, dtype=weight.dtype, device=weight.device)
    else:
        stand_in = _stand_in(weight)
    return func(stand_in, *args[1:], **{**kwargs, "device": device})


def _empty_like(func: Any, args: Any, kwargs: dict[str, Any]) -> torch.Tensor:
    """A compressed weight, as ``Module.to_empty`` needs it; its values are zeros."""
    dense = _factory(aten.zeros_like.default, args, kwargs)
    root = args[0].compressed
    if dense.dtype != root.dtype or _is_traced(args[0]):
        return dense
    return CompressedWeight.from_dense(dense, root.layout.capacity_words or None)


def _is_pinned(func: Any, args: Any, kwargs: dict[str, Any]) -> bool:
    return False


class _Handlers(dict[Any, Handler]):
    """Handlers by op; one that is missing is chosen when the op is first seen."""

    def __missing__(self, func: Any) -> Handler:
        handler = self[func] = _handler_for(func)
        return handler


OPS = _Handlers(
    {
        aten.detach.default: _detach,
        aten.alias.default: _detach,
        aten.t.default: _transpose,
        aten.clone.default: _clone,
        aten._to_copy.default: _to_copy,
        aten.copy_.default: _copy_,
        aten.empty_like.default: _empty_like,
        aten.is_pinned.default: _is_pinned,
    }
)
for _name in (
    *("zeros_like", "ones_like", "full_like", "rand_like", "randn_like", "randint_like"),
    *("new_zeros", "new_ones", "new_empty", "new_full", "new_empty_strided"),
):
    for _overload in getattr(aten, _name).overloads():
        if _overload not in ("out", "low_dtype_out"):
            OPS[getattr(getattr(aten, _name), _overload)] = _factory


def _set_data(weight: Any, value: torch.Tensor) -> None:
    """``weight.data = value``: the weight lets go of its root and takes ``value``, compressed."""
    new = value if isinstance(value, CompressedWeight) else CompressedWeight.from_dense(value)
    torch.Tensor.data.__set__(weight, new)  # type: ignore[attr-defined]
    weight.compressed, weight._whole = new.compressed, new._whole


def _on_dense(function: Handler, weight: Any, *args: Any, **kwargs: Any) -> Any:
    if not isinstance(weight, CompressedWeight):
        return NotImplemented
    return function(weight.dense().requires_grad_(weight.requires_grad), *args, **kwargs)


def _no_shared_memory(weight: Any) -> Any:
    raise RuntimeError(
        "a compressed weight cannot be moved to shared memory; call lct.decompress_(model) first"
    )


# Calls that never reach the dispatcher, or reach it with less to go by. `.data.__set__` is a new
# object at every access, equal to and hashed as the others.
FUNCTIONS: dict[Any, Handler] = {
    torch.nn.functional.linear: linear,
    torch.Tensor.data.__set__: _set_data,  # type: ignore[attr-defined]
    torch.Tensor.share_memory_: _no_shared_memory,
    **{
        function: partial(_on_dense, function)
        for function in (
            torch.Tensor.numpy,
            torch.Tensor.tolist,
            torch.Tensor.__array__,
            torch.Tensor.__dlpack__,
        )
    },
}

CompressedWeight.ops = OPS
CompressedWeight.functions = FUNCTIONS
