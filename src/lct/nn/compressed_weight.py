"""``CompressedWeight``: a tensor that holds its values compressed and decodes them for each op.

A wrapper subclass: shape, strides and dtype of the dense tensor, no dense storage. Weights and
views of weights are one class: a *root* (``CompressedTensor``) that aliases share, and a geometry
within its decoded values. Any op that has no handler here decodes each root once, runs on plain
tensors, and encodes again what its schema says it changes. Results are plain tensors; views are
lazy.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor

from ..tensor import CompressedTensor, encode
from .ahead import decode_for_product
from .handles import handle_of, root_of
from .strides import memory_order
from .untraced import untraced

Handler = Callable[..., Any]
# What the class itself keeps on a weight.
OWN_ATTRIBUTES = ("compressed", "_whole", "_handle", "_flat")
# Compiled graphs live on disk too: count this up when a graph of before would do something else.
TRACE_VERSION = 1


class CompressedWeight(torch.Tensor):
    """View of ``compressed`` with a size, strides and an offset (in values of ``dtype``).

    ``CompressedWeight(root)`` is the whole of it. ``dense()`` gives the values as a plain tensor
    with the strides that the uncompressed weight has.
    """

    compressed: CompressedTensor
    _whole: bool
    _handle: torch.Tensor
    _flat: tuple[CompressedTensor, tuple[Any, ...]]
    # Within torch.compile, of a view: the op that made it, its arguments, and which result it is.
    traced_view: tuple[Any, tuple[Any, ...], dict[str, Any], int | None] | None = None
    # Filled by weight_ops: handlers of functions (absent: torch's own) and of dispatched ops (all).
    functions: ClassVar[dict[Any, Handler]] = {}
    ops: ClassVar[dict[Any, Handler]] = {}

    @staticmethod
    def __new__(
        cls: type[CompressedWeight],
        root: CompressedTensor,
        size: torch.Size | tuple[int, ...] | None = None,
        stride: tuple[int, ...] | None = None,
        offset: int = 0,
        dtype: torch.dtype | None = None,
    ) -> CompressedWeight:
        weight: CompressedWeight = torch.Tensor._make_wrapper_subclass(
            cls,
            root.shape if size is None else size,
            strides=stride,
            storage_offset=offset or None,
            dtype=root.dtype if dtype is None else dtype,
            device=root.device,
        )
        weight.compressed = root
        weight._whole = size is None
        return weight

    def __init__(self, *args: Any) -> None:
        pass  # __new__ has the arguments; Tensor.__init__ takes none

    @classmethod
    def from_dense(cls, dense: torch.Tensor, capacity: Any = "exact") -> CompressedWeight:
        """Encode ``dense`` (no holes between its values in memory), keeping its strides."""
        dense = dense.detach()
        if dense.is_contiguous():
            return cls(encode(dense, capacity=capacity))
        flat = memory_order(dense)
        if flat is None:
            return cls(encode(dense, capacity=capacity))
        return cls(encode(flat, capacity=capacity), dense.shape, dense.stride())

    def dense(self) -> torch.Tensor:
        """The values, decoded into a new plain tensor with this tensor's strides."""
        values = self.compressed.decode()
        return values if self._whole else view_of(values, self)

    def operand(self) -> torch.Tensor:
        """``dense()`` for a product of a model, which only reads: maybe decoded together with other
        weights, or kept from the product before.
        """
        values = decode_for_product(self.compressed)
        return values if self._whole else view_of(values, self)

    @property
    def payload(self) -> torch.Tensor:
        """The root's payload: aliases of a weight share it (libraries compare its address)."""
        return self.compressed.payload

    @classmethod
    @untraced
    def __torch_function__(
        cls, func: Handler, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        handler = cls.functions.get(func)
        with torch._C.DisableTorchFunctionSubclass():
            if handler is not None:
                result = handler(*args, **kwargs)
                if result is not NotImplemented:
                    return result
            return func(*args, **kwargs)

    @classmethod
    @untraced
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(not issubclass(kind, cls) and kind not in _PLAIN for kind in types):
            return NotImplemented
        with torch._C.DisableTorchFunctionSubclass():
            return cls.ops[func](func, args, kwargs or {})

    # Traceable wrapper subclasses are moved and cast by `Module.to` with `swap_tensors`; others by
    # `.data =`, which would not carry the root along. Compiled graphs see the flat form.
    def __tensor_flatten__(self) -> tuple[list[str], tuple[Any, ...]]:
        root = self.compressed
        # Compiled code asks at every call, of every weight.
        known = self.__dict__.get("_flat")
        if known is None or known[0] is not root:
            geometry = None
            if not self._whole:
                geometry = (self.shape, self.stride(), self.storage_offset(), self.dtype)
            known = self._flat = root, (TRACE_VERSION, root.shape, root.dtype, geometry)
        return ["handle"], known[1]

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, torch.Tensor], context: tuple[Any, ...], size: Any, stride: Any
    ) -> CompressedWeight:
        from .compiled import TracedRoot

        handle = inner["handle"]
        _, shape, dtype, geometry = context
        real = type(handle) is torch.Tensor
        root: Any = root_of(handle) if real else TracedRoot(handle, shape, dtype)
        return CompressedWeight(root) if geometry is None else CompressedWeight(root, *geometry)

    def __coerce_tangent_metadata__(self) -> CompressedWeight:
        # Asked of results of a graph; their gradients would have to be compressed weights too.
        raise RuntimeError(
            "a compiled graph cannot return a view of a compressed weight that requires gradients, "
            f"got one of shape {tuple(self.shape)}: let it return the result of an op with the view"
        )

    def _stable_hash_for_caching(self) -> str:
        """Torch's on-disk cache of compiled graphs knows a weight by this."""
        outer = self.shape, self.stride(), self.dtype, self.device, self.requires_grad
        return repr((outer, self.__tensor_flatten__(), self.handle.shape, self.handle.dtype))

    @property
    def handle(self) -> torch.Tensor:
        """What stands for the root in compiled graphs (``handles``)."""
        root: Any = self.compressed
        if type(root) is not CompressedTensor:
            return root.handle
        # Held here, so that graphs see one handle through all steps.
        handle = self.__dict__.get("_handle")
        if handle is None or handle.root is not root:
            from . import compiled  # noqa: F401 - registers the op

            handle = self._handle = handle_of(root)
        return handle

    def __deepcopy__(self, memo: dict[int, Any]) -> CompressedWeight:
        if id(self) in memo:
            return memo[id(self)]
        if not self.is_leaf:
            raise RuntimeError(
                "only compressed weights that are leaves of the graph can be deep-copied"
            )
        root = memo.get(id(self.compressed))
        if root is None:
            root = memo[id(self.compressed)] = self.compressed.clone()
        with torch.no_grad():
            new = alias_of(self, root)
        memo[id(self)] = new
        new.requires_grad_(self.requires_grad)
        if self.grad is not None:
            new.grad = copy.deepcopy(self.grad, memo)
        _restore_attributes(new, copy.deepcopy(_attributes(self), memo))
        return new

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        geometry = None
        if not self._whole:
            geometry = (tuple(self.shape), self.stride(), self.storage_offset(), self.dtype)
        return _rebuild, (self.compressed, geometry, self.requires_grad, _attributes(self))

    def __repr__(  # type: ignore[override]
        self, *, tensor_contents: Any = None
    ) -> str:
        kind = "Parameter, " if getattr(self, "_is_param", False) else ""
        view = "" if self._whole else f", view of {tuple(self.compressed.shape)}"
        root: Any = self.compressed
        stored = "traced"
        if type(root) is CompressedTensor:
            stored = f"payload={root.payload.nbytes} of {root.dense_nbytes} bytes"
        return (
            f"CompressedWeight({kind}shape={tuple(self.shape)}, dtype={self.dtype}, "
            f"device={self.device}, {stored}{view})"
        )


# Fake and functional tensors are what `torch.compile` traces with.
_PLAIN = (torch.Tensor, torch.nn.Parameter, FakeTensor, FunctionalTensor)


def _attributes(weight: CompressedWeight) -> dict[str, Any]:
    """What users and torch hung on a weight, without what the class itself keeps there."""
    return {k: v for k, v in weight.__dict__.items() if k not in OWN_ATTRIBUTES}


def _restore_attributes(weight: CompressedWeight, attributes: dict[str, Any]) -> None:
    weight.__dict__.update(attributes)


def _rebuild(
    root: CompressedTensor, geometry: Any, requires_grad: bool, attributes: dict[str, Any]
) -> CompressedWeight:
    weight = CompressedWeight(root) if geometry is None else CompressedWeight(root, *geometry)
    weight.requires_grad_(requires_grad)
    _restore_attributes(weight, attributes)
    return weight


def alias_of(weight: CompressedWeight, root: CompressedTensor | None = None) -> CompressedWeight:
    """A new weight with the geometry of ``weight``, of its root or of an equal one."""
    root = weight.compressed if root is None else root
    if weight._whole:
        return CompressedWeight(root)
    return CompressedWeight(
        root, weight.shape, weight.stride(), weight.storage_offset(), weight.dtype
    )


def view_of(values: torch.Tensor, weight: CompressedWeight) -> torch.Tensor:
    """``weight``'s view of the decoded values of its root."""
    flat = values.view(-1)
    if weight.dtype != flat.dtype:
        flat = flat.view(weight.dtype)
    return flat.as_strided(weight.shape, weight.stride(), weight.storage_offset())


def as_compressed(tensor: torch.Tensor) -> CompressedWeight:
    """``tensor``, which is known to be a compressed weight, as such to type checkers."""
    assert isinstance(tensor, CompressedWeight)
    return tensor
