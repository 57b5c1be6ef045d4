"""``save_checkpoint`` and ``load_checkpoint``: a training run in one ``.lct`` file.

Payloads pass as they are in both directions: none is decoded and encoded again. How a run lies in
the file: docs/file-format.md, section 7.
"""

from __future__ import annotations

import io
import os
import pickle
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..errors import CorruptFileError
from ..nn import CompressedWeight
from ..optim.base import CompressedState, decode_state, has_compressible_state
from ..tensor import CompressedTensor
from .container import ContainerReader
from .files import held_tensor, read_tensor, save_file

VERSION_KEY = "lct_checkpoint"
VERSION = "1"
STRUCTURE = ".__structure__"

Held = torch.Tensor | CompressedTensor
Place = tuple[Any, ...]  # keys of nested dictionaries, outermost first


@dataclass(frozen=True)
class _Structure:
    """What a part is made of besides tensors.

    ``leaves``: a place in it with the name of a tensor, or with None and another value.
    ``payloads``: names of tensors that were held compressed. ``versions``: of a module's parts.
    """

    leaves: list[tuple[Place, str | None, Any]]
    payloads: list[str]
    versions: Any


def save_checkpoint(path: str | os.PathLike[str], /, **parts: Any) -> None:
    """Write ``parts`` of a training run into a ``.lct`` file, which appears whole or not at all.

    A part is a module, an optimizer, another object with ``state_dict`` and ``load_state_dict`` (a
    scheduler, a GradScaler), or a value: a tensor, number or text, or dictionaries, lists and
    tuples of them. Compressed weights and optimizer state are stored as they are held, dense
    tensors are compressed as ``save_file`` does it, tied weights stand once. Each compressed tensor
    is decoded for its checksum, one at a time.

    TypeError for values that ``torch.load(weights_only=True)`` would refuse and for tensors that
    ``save_file`` refuses, ValueError for a part whose name is no identifier, OSError where the file
    cannot be written.
    """
    tensors: dict[str, Held] = {}
    for part, value in parts.items():
        # Names of tensors begin with the part's and a dot: no two parts can meet.
        if not part.isidentifier():
            raise ValueError(f"names of parts must be identifiers, got {part!r}")
        tensors |= _to_tensors(part, value)
    save_file(tensors, path, {VERSION_KEY: VERSION})


def load_checkpoint(path: str | os.PathLike[str], /, **parts: Any) -> dict[str, Any]:
    """Load a file of ``save_checkpoint`` into ``parts``, by their names; returns the other parts.

    A part that is given gets its state by its own ``load_state_dict``. It need not be compressed as
    the saved one was: dense models and torch's optimizers take checkpoints of compressed ones, and
    the other way round. A part that is not given comes back as the value, or the ``state_dict``,
    that it was: tensors on the CPU, compressed ones as ``CompressedTensor``.

    The whole file is read before anything is loaded: CorruptFileError where it is damaged,
    ValueError where it is no checkpoint, KeyError for a part that it does not have, TypeError for a
    part without ``load_state_dict``. Then whatever a part's own ``load_state_dict`` raises.
    """
    saved = _read(path, parts)
    for part, target in parts.items():
        value, versions = saved.pop(part)
        if isinstance(target, nn.Module):
            target.load_state_dict(_module_state(value, versions))
        elif isinstance(target, torch.optim.Optimizer):
            target.load_state_dict(_optimizer_state(target, value))
        else:
            target.load_state_dict(value)
    return {part: value for part, (value, _) in saved.items()}


def _to_tensors(part: str, value: Any) -> dict[str, Held]:
    """The tensors of ``value`` by their names in the file, and its structure as one more."""
    versions = None
    if isinstance(value, nn.Module):
        # With the parameters themselves: without keep_vars all would be decoded.
        value = value.state_dict(keep_vars=True)
        versions = getattr(value, "_metadata", None)
    elif isinstance(value, CompressedState):
        value = _payload_state(value)
    elif hasattr(value, "state_dict") and hasattr(value, "load_state_dict"):
        value = value.state_dict()
    tensors: dict[str, Held] = {}
    names: dict[int, str] = {}  # by the id of what is held: tied weights are one
    structure = _Structure([], [], versions)
    for place, leaf in _leaves((), value):
        if not isinstance(leaf, Held):
            structure.leaves.append((place, None, leaf))
            continue
        held = held_tensor(leaf)
        key = id(held) if isinstance(held, CompressedTensor) else id(leaf)
        if key not in names:
            name = names[key] = ".".join(map(str, (part, *place)))
            if name in tensors or name.endswith(STRUCTURE):
                raise ValueError(f"every tensor must have a name of its own, got {name!r} again")
            tensors[name] = held
            if isinstance(held, CompressedTensor):
                structure.payloads.append(name)
        structure.leaves.append((place, names[key], None))
    return {**tensors, part + STRUCTURE: _pack(part, structure)}


def _leaves(place: Place, value: Any) -> Iterator[tuple[Place, Any]]:
    """What nested dictionaries hold, with its place. An empty one is a leaf."""
    if isinstance(value, dict) and value:
        for key, item in value.items():
            yield from _leaves((*place, key), item)
    else:
        yield place, value


def _pack(part: str, structure: _Structure) -> torch.Tensor:
    buffer = io.BytesIO()
    try:
        torch.save(vars(structure), buffer)
        _unpack(buffer.getvalue())
    except (pickle.PickleError, AttributeError, TypeError) as error:
        raise TypeError(
            "save_checkpoint takes tensors, numbers, texts, and dictionaries, lists and tuples of "
            f"them, got for {part!r} what torch.load(weights_only=True) refuses: {error}"
        ) from None
    return torch.frombuffer(bytearray(buffer.getbuffer()), dtype=torch.uint8)


def _unpack(data: bytes) -> _Structure:
    fields = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    return _Structure(**fields)


def _read(path: str | os.PathLike[str], parts: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Value and versions of each part that the file has; it must have ``parts``."""
    with ContainerReader(path) as reader:
        if (reader.header.metadata or {}).get(VERSION_KEY) != VERSION:
            raise ValueError(
                f"load_checkpoint takes a file of save_checkpoint, version {VERSION}, got "
                f"{os.fspath(path)!r} (lct.load_file reads other .lct files)"
            )
        entries = {entry.name: (entry, record) for entry, record in reader}
        saved = [name.removesuffix(STRUCTURE) for name in entries if name.endswith(STRUCTURE)]
        for part, target in parts.items():
            if part not in saved:
                raise KeyError(f"checkpoint has the parts {', '.join(saved)}, got {part!r}")
            if not hasattr(target, "load_state_dict"):
                raise TypeError(
                    "load_checkpoint takes objects with load_state_dict (values are returned), got "
                    f"{type(target).__name__} for {part!r}"
                )
        values = {}
        for part in saved:
            data = reader.read(*entries[part + STRUCTURE]).tobytes()
            try:
                structure = _unpack(data)
                payloads = set(structure.payloads)
                names = {name for _, name, _ in structure.leaves if name is not None}
                tensors = {
                    name: read_tensor(reader, *entries[name], dense=name not in payloads)
                    for name in names
                }
                values[part] = _assemble(structure, tensors), structure.versions
            except CorruptFileError:
                raise
            except _BAD_STRUCTURE as error:
                raise reader.error(
                    f"is damaged: the structure of part {part!r} cannot be read: {error}"
                ) from None
        return values


# A structure that the file's digests hold for sound was written so; anything may be wrong in it.
_BAD_STRUCTURE = (
    *(pickle.UnpicklingError, RuntimeError, LookupError, EOFError),
    *(AttributeError, TypeError, ValueError),
)


def _assemble(structure: _Structure, tensors: dict[str, Held]) -> Any:
    root: dict[Any, Any] = {}
    for place, name, value in structure.leaves:
        *keys, last = (None, *place)
        node = root
        for key in keys:
            node = node.setdefault(key, {})
        node[last] = value if name is None else tensors[name]
    return root[None]


def _module_state(value: dict[str, Any], versions: Any) -> dict[str, Any]:
    """As ``Module.load_state_dict`` takes it: payloads as weights, which are copied undecoded."""
    state = _StateDict(
        (name, CompressedWeight(item) if isinstance(item, CompressedTensor) else item)
        for name, item in value.items()
    )
    if versions is not None:
        state._metadata = versions
    return state


class _StateDict(dict[str, Any]):
    """A dictionary that can carry the versions of modules, as torch's does."""

    _metadata: Any


def _payload_state(optimizer: CompressedState) -> dict[str, Any]:
    """``optimizer.state_dict()`` with payloads; those in another order of values are decoded."""
    state_dict = torch.optim.Optimizer.state_dict(optimizer)
    params = _params(optimizer, state_dict)

    def pick(index: Any, item: Any) -> Any:
        fits = isinstance(item, CompressedTensor) and item.shape == params[index].shape
        return item if fits else decode_state(params[index], item)

    return _with_state(state_dict, pick)


def _optimizer_state(
    optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]
) -> dict[str, Any]:
    """``state_dict`` with payloads where ``optimizer`` holds some, on the parameters' devices."""
    params = _params(optimizer, state_dict)

    def pick(index: Any, item: Any) -> Any:
        if not isinstance(item, CompressedTensor):
            return item
        param = params.get(index)
        if (
            param is not None
            and isinstance(optimizer, CompressedState)
            and has_compressible_state(param)
            and param.is_contiguous()
            and (param.shape, param.dtype) == (item.shape, item.dtype)
        ):
            return item.to(param.device)
        return item.decode()

    return _with_state(state_dict, pick)


def _params(
    optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]
) -> dict[int, torch.Tensor]:
    """The optimizer's parameters by the indices that ``state_dict`` gives them.

    Where the groups do not match, torch's own load_state_dict says so.
    """
    params: dict[int, torch.Tensor] = {}
    for group, saved in zip(optimizer.param_groups, state_dict["param_groups"], strict=False):
        params.update(zip(saved["params"], group["params"], strict=False))
    return params


def _with_state(state_dict: dict[str, Any], pick: Any) -> dict[str, Any]:
    """``state_dict`` with ``pick(index, item)`` for each item of the state of parameters."""
    state = {
        index: {name: pick(index, item) for name, item in values.items()}
        if isinstance(index, int)
        else values
        for index, values in state_dict["state"].items()
    }
    return {**state_dict, "state": state}
