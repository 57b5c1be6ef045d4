"""What optimizers with compressed state share: which state is compressed, and plain checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import Any, Literal

import torch
from torch.utils._foreach_utils import _get_foreach_kernels_supported_devices
from torch.utils.weak import WeakIdKeyDictionary

from ..dtypes import DTYPES
from ..nn.compressed_weight import CompressedWeight
from ..nn.saves import captures
from ..nn.strides import memory_order
from ..nn.untraced import untraced
from ..ops import SUPPORTED_DEVICES
from ..tensor import CompressedTensor, encode, ensure_room, relieve_arena

Rounding = Literal["single", "foreach", "fused"]
_DTYPES = {getattr(torch, name) for name in DTYPES}
_STEPPED_TYPES = (torch.Tensor, torch.nn.Parameter, CompressedWeight)

Closure = Callable[[], Any]


def has_compressible_state(param: torch.Tensor) -> bool:
    """True for weights as ``lct.compress_`` takes them, compressed or dense."""
    return (
        param.dim() >= 2
        and param.dtype in _DTYPES
        and param.device.type in SUPPORTED_DEVICES
        and type(param) in _STEPPED_TYPES
    )


# Steps that a plain tensor of state has been through since it was found that compressing it does
# not pay.
_steps_dense: Any = WeakIdKeyDictionary()


def compress_state(
    param: torch.Tensor, value: torch.Tensor, held: torch.Tensor | CompressedTensor | None = None
) -> torch.Tensor | CompressedTensor:
    """``value`` (state of ``param``'s shape) compressed, in the place of ``held``, which was the
    state before the step.

    As it is where its memory is not laid out like the parameter's, or compressing does not pay.
    Whether it does waits for the device: of state that is dense it is asked after 1, 2, 4, 8, …
    steps again, and not while a CUDA graph is captured.
    """
    if value.dtype not in _DTYPES or value.layout != torch.strided:
        return value
    flat = value if value.is_contiguous() else memory_order(value)
    if flat is None or value.stride() != param.stride():
        return value
    if isinstance(held, CompressedTensor):
        if held.shape == flat.shape and not held.layout.is_raw:
            return held.encode_(flat)
    elif held is not None:
        steps = _steps_dense.get(held, 0) + 1
        _steps_dense[value] = steps
        if captures() or steps & (steps - 1):
            return value
    # Measured once, with the one synchronisation of a parameter's first step.
    stored = encode(flat, capacity="exact")
    return value if stored.layout.is_raw else stored


def ensure_room_for_step(param: torch.Tensor, states: Iterable[Any]) -> None:
    """ArenaExhaustedError where ``param`` or one of ``states``, which a step that is not fused
    encodes one after another, might find no room: before any of them is changed.
    """
    own = (param.compressed,) if isinstance(param, CompressedWeight) else ()
    ensure_room([*own, *states])


def decode_state(param: torch.Tensor, value: Any) -> Any:
    """The plain tensor of a compressed state of ``param``; anything else as it is."""
    if not isinstance(value, CompressedTensor):
        return value
    dense = value.decode()
    return dense if dense.shape == param.shape else dense.as_strided(param.shape, param.stride())


def grad_of_payload(param: CompressedWeight) -> torch.Tensor | None:
    """The gradient with its values in the order of the payload; None where it is not laid out so,
    or not BF16.
    """
    grad = param.grad
    assert grad is not None
    if grad.dtype != torch.bfloat16 or param.numel() != param.compressed.numel():
        return None
    if param.is_contiguous():
        return grad
    return memory_order(grad) if grad.stride() == param.stride() else None


def drop_grads_of(params: Iterable[torch.Tensor]) -> None:
    """Set the gradients of ``params`` to None."""
    for param in params:
        param.grad = None


def choose_rounding(
    params: list[torch.Tensor], foreach: bool | None, fused: bool | None
) -> Rounding:
    """The implementation that torch would take if ``params`` were dense."""
    if foreach is None and fused is None:
        devices = _get_foreach_kernels_supported_devices()
        foreach = all(type(p) in _STEPPED_TYPES and p.device.type in devices for p in params)
    if foreach:
        return "foreach"
    return "fused" if fused else "single"


class CompressedState(torch.optim.Optimizer):
    """Mix-in before a torch optimizer: state of weights is held as ``CompressedTensor``.

    ``state_dict`` gives plain tensors under torch's keys and ``load_state_dict`` takes them, so
    that checkpoints go both ways between this optimizer and torch's.
    """

    @torch.no_grad()
    @untraced
    def step(self, closure: Closure | None = None) -> Any:
        """One step; ``closure`` computes the loss anew where given. Returns its result.

        Everything that can be refused is refused before a parameter is changed.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        # Every attribute of a compressed weight would go through its __torch_function__.
        with torch._C.DisableTorchFunctionSubclass():
            plans = []
            for group in self.param_groups:
                params = [p for p in group["params"] if p.grad is not None]
                plans.append((group, params, self._check(group, params)))
            for group, params, rounding in plans:
                self._step_group(group, params, rounding)
                for device in {param.device for param in params}:
                    relieve_arena(device, self._payloads)
        return loss

    def step_params(self, group: dict[str, Any], params: Iterable[torch.Tensor]) -> None:
        """Step ``params`` of ``group``, which have gradients, and set each gradient to None once
        its parameter is stepped: after an error those that still have one are as they were.

        The bits are those of a ``step()`` for each, in which no other has a gradient. The hooks
        that torch puts around ``step`` are left out.
        """
        with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            alike: dict[Hashable, list[torch.Tensor]] = {}
            for param in params:
                alike.setdefault(self._kind(group, param), []).append(param)
            plans = [(some, self._check(group, some)) for some in alike.values()]
            for some, rounding in plans:
                self._step_group(group, some, rounding, drop_grads=True)
            for device in {param.device for some, _ in plans for param in some}:
                relieve_arena(device, self._payloads)

    def _kind(self, group: dict[str, Any], param: torch.Tensor) -> Hashable:
        """Equal for parameters that torch steps in a list with the bits of each alone.

        By the devices and types of a list torch chooses between foreach and a loop, and foreach
        itself between its kernels and a loop by the strides of all that it gets.
        """
        grad = param.grad
        assert grad is not None
        if type(param) is CompressedWeight:
            return param.device  # never in a list of torch's
        strides = param.stride()
        regular = (
            type(param) in _STEPPED_TYPES
            and param.is_contiguous()
            and all(
                tensor.layout == torch.strided and tensor.stride() == strides
                for tensor in (grad, *self.state.get(param, {}).values())
                if isinstance(tensor, torch.Tensor) and tensor.shape == param.shape
            )
        )
        return param.device if regular else param

    def _payloads(self) -> Iterator[CompressedTensor]:
        """The compressed weights and state that this optimizer steps."""
        for group in self.param_groups:
            for param in group["params"]:
                held = self.state.get(param, {}).values()
                own = (param.compressed,) if isinstance(param, CompressedWeight) else ()
                yield from (v for v in (*own, *held) if isinstance(v, CompressedTensor))

    def _check(self, group: dict[str, Any], params: list[torch.Tensor]) -> Rounding:
        """The rounding to equal when ``params``, which have gradients, are stepped; raises
        refusals.
        """
        raise NotImplementedError

    def _step_group(
        self,
        group: dict[str, Any],
        params: list[torch.Tensor],
        rounding: Rounding,
        drop_grads: bool = False,
    ) -> None:
        """Step ``params``, which ``_check`` has admitted; ``drop_grads``: each one's gradient is
        set to None as soon as it is stepped.
        """
        raise NotImplementedError

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Torch's, with an error where a group has a parameter twice: it would be stepped twice."""
        params = param_group.get("params") if isinstance(param_group, dict) else None
        if isinstance(params, (list, tuple)):
            self._check_unique(params)
        elif params is not None and not isinstance(params, (torch.Tensor, set)):
            param_group["params"] = params = list(params)
            self._check_unique(params)
        super().add_param_group(param_group)

    def _check_unique(self, params: Any) -> None:
        tensors = [p[1] if isinstance(p, tuple) else p for p in params]
        repeated = len(tensors) - len({id(p) for p in tensors})
        if repeated:
            raise ValueError(
                f"a parameter group must have each parameter once, got {len(tensors)} parameters "
                f"of which {repeated} repeat another"
            )

    @torch._disable_dynamo  # type: ignore[attr-defined]
    def state_dict(self) -> dict[str, Any]:
        """Torch's ``state_dict``: plain tensors, decoded, under torch's keys."""
        handle = self.register_state_dict_post_hook(_decode_states, prepend=True)
        try:
            return super().state_dict()
        finally:
            handle.remove()

    @torch._disable_dynamo  # type: ignore[attr-defined]
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a ``state_dict`` of this optimizer or of torch's, and compress it."""
        handle = self.register_load_state_dict_post_hook(_compress_states, prepend=True)
        try:
            super().load_state_dict(state_dict)
        finally:
            handle.remove()


def _decode_states(optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> None:
    params: dict[int, torch.Tensor] = {}
    for group, packed in zip(optimizer.param_groups, state_dict["param_groups"], strict=True):
        params.update(zip(packed["params"], group["params"], strict=True))
    state = state_dict["state"]
    for key, values in state.items():
        if key in params:
            # New dictionaries: these are the optimizer's own.
            state[key] = {name: decode_state(params[key], v) for name, v in values.items()}


def _compress_states(optimizer: torch.optim.Optimizer) -> None:
    for param, values in optimizer.state.items():
        if isinstance(param, torch.Tensor) and has_compressible_state(param):
            for name, value in values.items():
                if isinstance(value, torch.Tensor) and value.shape == param.shape:
                    values[name] = compress_state(param, value)
