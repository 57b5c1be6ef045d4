"""What compiled graphs save for backward: an op of the forward graph encodes it, another decodes it
in the backward graph.

Hooks see the saved tensors of a graph one by one, when all of it has run, and backward asks them
for all before it begins. So where a graph is compiled within a block of
``compress_activations(in_graphs=True)``, what it saves for its own backward becomes an argument of
``lct::save_all``, and what autograd saves is a *ticket*, a CPU tensor of one number.
``lct::load_all`` takes it and gives the tensors. Inputs and outputs of the graph, which others hold
too, are left to the hooks, and so are tensors of unknown size.
"""

from __future__ import annotations

import itertools
import json
import operator
import re
import weakref
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor import config as inductor_config
from torch._inductor.custom_graph_pass import CustomPartitionerFn
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import Graph, GraphModule, Node

from ..config import save_batch_bytes
from ..ops import MOST_TOGETHER
from .activations import BATCH_BYTES, SAVE_RULES, active_block
from .compressed_weight import TRACE_VERSION
from .graph_ops import define, split_by_rank
from .saves import SavedTogether
from .sites import is_internal
from .strides import memory_order

_DTYPES = tuple(SAVE_RULES)  # numbered in graphs
_CASTS = (
    torch.ops.prims.convert_element_type.default,
    torch.ops.aten._to_copy.default,
)
_FRAME = re.compile(r'File "(.+?)", line (\d+)')


class Source(NamedTuple):
    """Where a model saves a tensor (file:line), by which op; whether it is BF16 cast to FP32."""

    place: str
    producer: str
    upcast: bool


@lru_cache(maxsize=4096)
def _sources(text: str) -> list[Source]:
    return [Source(*fields) for fields in json.loads(text)]


# ---- the ops ---------------------------------------------------------------------------------


_numbers = itertools.count(1)
_saved: dict[int, SavedTogether] = {}  # by the number of a ticket, as long as its memory is alive


def _save_all(tensors: list[torch.Tensor], sources: str) -> torch.Tensor:
    dense = [_without_holes(tensor) for tensor in tensors]
    block = active_block()
    if block is None or torch._C._current_graph_task_id() != -1:
        saved = SavedTogether([tensor.stride() for tensor in dense], (), profile=False)
        # Copies: the graph takes the memory of its arguments for other tensors.
        saved.others.update(enumerate(tensor.clone() for tensor in dense))
    else:
        saved = block.save_together(dense, _sources(sources))
    number = next(_numbers)
    ticket = torch.tensor([number])
    _saved[number] = saved
    # Hooks on saved tensors may give another tensor back, in the same memory.
    weakref.finalize(ticket.untyped_storage(), _saved.pop, number, None).atexit = False
    return ticket


def _without_holes(tensor: torch.Tensor) -> torch.Tensor:
    # A compiler may pad rows.
    if tensor.is_contiguous() or memory_order(tensor) is not None:
        return tensor
    return tensor.contiguous()


def _save_all_fake(tensors: list[torch.Tensor], sources: str) -> torch.Tensor:
    return torch.empty(1, dtype=torch.int64, device="cpu")


def _load_all(
    ticket: torch.Tensor,
    dims: Sequence[int],
    strides: Sequence[int],
    ranks: Sequence[int],
    dtypes: Sequence[int],
    device: torch.device,
) -> list[torch.Tensor]:
    number = int(ticket)
    saved = _saved.get(number)
    if saved is None:
        raise RuntimeError(
            f"what a compiled graph saved for backward is gone (ticket {number}): backward through "
            "a graph a second time needs retain_graph=True the first time, and other hooks on "
            "saved tensors must not copy what they get"
        )
    keep = torch._C._autograd._get_current_graph_task_keep_graph()
    flats = saved.decode(keep)
    if not keep:
        _saved.pop(number, None)
    shapes = zip(split_by_rank(dims, ranks), split_by_rank(strides, ranks), strict=True)
    return [
        _laid_out(flat, lay, size, stride)
        for flat, lay, (size, stride) in zip(flats, saved.strides, shapes, strict=True)
    ]


def _laid_out(
    flat: torch.Tensor, saved: tuple[int, ...], size: tuple[int, ...], stride: tuple[int, ...]
) -> torch.Tensor:
    """``flat``, which was saved with strides ``saved``, with those that the graph expects."""
    if flat.shape == size and flat.stride() == stride:
        return flat
    values = flat.as_strided(size, saved)
    if saved == stride:
        return values
    return torch.empty_strided(size, stride, dtype=flat.dtype, device=flat.device).copy_(values)


def _load_all_fake(
    ticket: torch.Tensor,
    dims: Sequence[int],
    strides: Sequence[int],
    ranks: Sequence[int],
    dtypes: Sequence[int],
    device: torch.device,
) -> list[torch.Tensor]:
    shapes = zip(split_by_rank(dims, ranks), split_by_rank(strides, ranks), dtypes, strict=True)
    return [
        torch.empty_strided(size, stride, dtype=_DTYPES[number], device=device)
        for size, stride, number in shapes
    ]


define(
    "save_all(Tensor[] tensors, str sources) -> Tensor",
    _save_all,
    _save_all_fake,
    torch.Tag.needs_exact_strides,
)
define(
    "load_all(Tensor ticket, int[] dims, int[] strides, int[] ranks, int[] dtypes, Device device)"
    " -> Tensor[]",
    _load_all,
    _load_all_fake,
    torch.Tag.needs_exact_strides,
)


# ---- the graphs ------------------------------------------------------------------------------


class SavesEncoded(CustomPartitionerFn):
    """Inductor's partitioner or a user's, ``first``; then the ops are put into the graphs."""

    def __init__(self, first: CustomPartitionerFn | None) -> None:
        self.first = first

    def __call__(
        self, gm: GraphModule, joint_inputs: Sequence[object], **kwargs: Any
    ) -> tuple[GraphModule, GraphModule]:
        split: Any = self.first or min_cut_rematerialization_partition
        forward, backward = split(gm, joint_inputs, **kwargs)
        block = active_block()
        if block is not None and block.in_graphs:
            encode_saved(forward, backward, kwargs["num_fwd_outputs"], block.min_bytes)
        return forward, backward

    def uuid(self) -> Any:
        """What graphs that are kept on disk depend on; None where ``first`` forbids to keep any."""
        other = self.first.uuid() if self.first is not None else ""
        if other is None:
            return None
        block = active_block()
        saves = None
        if block is not None and block.in_graphs:
            saves = block.min_bytes, _group_bytes()
        return "lct::save_all", TRACE_VERSION, saves, other


def install() -> None:
    """Have Inductor ask the partitioner from now on."""
    present: Any = inductor_config.custom_partitioner_fn
    if not isinstance(present, SavesEncoded):
        inductor_config.custom_partitioner_fn = SavesEncoded(present)


def encode_saved(
    forward: GraphModule, backward: GraphModule, num_outputs: int, min_bytes: int
) -> None:
    """Put ``save_all`` and ``load_all`` between the two graphs of a partition.

    ``num_outputs``: the outputs of ``forward`` before those that are saved for ``backward`` alone.
    """
    if forward.graph.find_nodes(op="call_function", target=torch.ops.aten.convolution.default):
        return  # Inductor may lay its tensors out anew, and backward is compiled for that
    output = forward.graph.output_node()
    outputs: list[Any] = list(output.args[0])  # type: ignore[arg-type]
    inputs = {node.name: node for node in backward.graph.find_nodes(op="placeholder")}
    if any(node.name not in inputs for node in outputs[num_outputs:]):
        return  # another partitioner than torch's, which calls them otherwise
    aliases = _chosen(forward.graph, outputs, num_outputs, min_bytes)
    for group in _groups(forward.graph, aliases):
        # The first of what is saved in both graphs: autograd expects some tensors at the end.
        place = inputs[outputs[num_outputs].name]
        ticket = _insert_save(forward.graph, group)
        with backward.graph.inserting_before(place):
            received = backward.graph.placeholder(ticket.name)
        received.meta = dict(place.meta) | {"val": ticket.meta["val"]}
        received.meta.pop("tensor_meta", None)
        inputs[ticket.name] = received
        given = [[inputs[node.name] for node in aliases[member]] for member in group]
        _insert_load(backward.graph, received, given)
        gone = {node for member in group for node in aliases[member]}
        outputs.insert(num_outputs, ticket)
        outputs = [node for node in outputs if node not in gone]
    output.args = (tuple(outputs),)
    output.meta.pop("desc", None)  # names of the outputs, of which there are others now
    for module in (forward, backward):
        module.graph.lint()
        module.recompile()


def _value(node: Any) -> Any:
    return node.meta.get("val") if isinstance(node, Node) else None


def _storage(node: Any) -> int | None:
    value = _value(node)
    return value.untyped_storage()._cdata if isinstance(value, torch.Tensor) else None


def _chosen(
    graph: Graph, outputs: Sequence[Any], num_outputs: int, min_bytes: int
) -> dict[Node, list[Node]]:
    """What is saved and encoded: one tensor of each storage, and all that lie in the same."""
    others = [*graph.find_nodes(op="placeholder"), *outputs[:num_outputs]]
    held = {_storage(node) for node in others}
    found: dict[tuple[int | None, torch.dtype], list[Node]] = {}
    for node in outputs[num_outputs:]:
        storage = _storage(node)
        if storage not in held and _is_coded(_value(node), min_bytes):
            found.setdefault((storage, _value(node).dtype), []).append(node)
    return {nodes[0]: nodes for nodes in found.values()}


def _is_coded(value: Any, min_bytes: int) -> bool:
    """Whether a saved tensor like ``value`` is encoded: all of its storage, of a known size."""
    if type(value) is not FakeTensor or value.layout != torch.strided:
        return False
    rule = SAVE_RULES.get(value.dtype)
    if rule is None or not all(type(n) is int for n in (*value.shape, *value.stride())):
        return False
    size = value.numel() * value.element_size()
    return (
        size >= max(rule.min_bytes, min_bytes)
        and value.untyped_storage().nbytes() == size
        and memory_order(value) is not None
        and not (value.is_neg() or value.is_conj())
    )


def _group_bytes() -> int:
    """Dense bytes that a graph encodes, and later decodes, together at most."""
    return min(save_batch_bytes(), BATCH_BYTES)


def _groups(graph: Graph, chosen: Iterable[Node]) -> Iterator[list[Node]]:
    """``chosen`` in the order in which they are made, cut where a batch would be too large."""
    wanted = set(chosen)
    group: list[Node] = []
    size_bytes = 0
    limit = _group_bytes()
    for node in [node for node in graph.nodes if node in wanted]:
        size = _value(node).nbytes
        if group and (
            len(group) == MOST_TOGETHER
            or size_bytes + size > limit
            or _value(group[0]).device != _value(node).device
        ):
            yield group
            group, size_bytes = [], 0
        group.append(node)
        size_bytes += size
    if group:
        yield group


def _insert_save(graph: Graph, members: Sequence[Node]) -> Node:
    """Encode ``members`` where the graph has used the last of them; the ticket."""
    order = {node: number for number, node in enumerate(graph.nodes)}
    used = {user for member in members for user in member.users if user.op != "output"}
    last = max({*members, *used}, key=order.__getitem__)
    with graph.inserting_after(last):
        text = json.dumps([_source(member) for member in members])
        ticket = graph.call_function(torch.ops.lct.save_all.default, ([*members], text))
    with _value(members[0]).fake_mode:
        ticket.meta["val"] = _save_all_fake([], text)
    return ticket


def _insert_load(graph: Graph, ticket: Node, given: Sequence[Sequence[Node]]) -> None:
    """Decode what ``ticket`` stands for where the graph uses the first of it.

    ``given``: the inputs that stood for each tensor, several where views of it were saved too.
    """
    replaced = {node for nodes in given for node in nodes}
    first = next(node for node in graph.nodes if replaced & {*node.all_input_nodes})
    values = [_value(nodes[0]) for nodes in given]
    with graph.inserting_before(first):
        args = (
            ticket,
            [dim for value in values for dim in value.shape],
            [step for value in values for step in value.stride()],
            [value.dim() for value in values],
            [_DTYPES.index(value.dtype) for value in values],
            values[0].device,
        )
        loaded = graph.call_function(torch.ops.lct.load_all.default, args)
        loaded.meta["val"] = values
        for number, nodes in enumerate(given):
            item = graph.call_function(operator.getitem, (loaded, number))
            item.meta["val"] = values[number]
            nodes[0].replace_all_uses_with(item)
            for node in nodes[1:]:
                value = _value(node)
                shape = [*value.shape], [*value.stride()], 0
                view = graph.call_function(torch.ops.aten.as_strided.default, (item, *shape))
                view.meta["val"] = value
                node.replace_all_uses_with(view)
    for node in replaced:
        graph.erase_node(node)


def _source(node: Node) -> Source:
    """Where the model makes what ``node`` gives, as files lay when the graph was compiled."""
    frames = _FRAME.findall(node.meta.get("stack_trace") or "")
    own = [frame for frame in frames if not is_internal(frame[0])]
    place = ":".join((own or frames or [("compiled graph",)])[-1])
    made = node.args[0] if node.target is operator.getitem else node
    name = getattr(made.target, "_opname", None) if isinstance(made, Node) else None
    upcast = False
    if node.target in _CASTS and isinstance(node.args[0], Node):
        cast = _value(node.args[0]), _value(node)
        upcast = [value.dtype for value in cast] == [torch.bfloat16, torch.float32]
    return Source(place, name or node.name, upcast)
