"""A pass over Inductor's graphs: decodes of weights that follow one another become one op.

What ``ahead`` does between ops, done once where a graph is compiled: one call of an op and one
launch instead of several. It runs last of the passes of users; one that is set after LCT's first
compiled weight takes its place, and weights are then decoded ahead as in eager mode.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch._inductor import config as inductor_config
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch.fx import Graph, Node

from .. import ops
from .ahead import limit_bytes
from .compressed_weight import TRACE_VERSION

GraphPass = Callable[[Graph], None]


class DecodeTogether(CustomGraphPass):
    """The pass; ``first``: one that was set before, which it calls."""

    def __init__(self, first: GraphPass | None) -> None:
        self.first = first

    def __call__(self, graph: Graph) -> None:
        if self.first is not None:
            self.first(graph)
        for nodes in _groups(graph, _limit_bytes()):
            _merge(graph, nodes)

    def uuid(self) -> Any:
        """What graphs that are kept on disk depend on; None where ``first`` forbids to keep any."""
        other: Any = None
        if self.first is not None:
            other = self.first.uuid() if isinstance(self.first, CustomGraphPass) else None
            if other is None:
                return None
        return "lct::decode_all", TRACE_VERSION, _limit_bytes(), other


def install() -> None:
    """Have Inductor run the pass on every graph that it compiles from now on."""
    present: Any = inductor_config.post_grad_custom_post_pass
    if not isinstance(present, DecodeTogether):
        inductor_config.post_grad_custom_post_pass = DecodeTogether(present)


def _limit_bytes() -> int:
    """As for decoding ahead, but a power of two: graphs that differ in nothing else are shared."""
    limit = limit_bytes()
    return 1 << (limit.bit_length() - 1) if limit else 0


def _groups(graph: Graph, limit: int) -> Iterator[list[Node]]:
    """Decodes in the order of the graph, of one dtype, cut where they exceed ``limit`` bytes."""
    group: list[Node] = []
    size_bytes = 0
    for node in graph.find_nodes(op="call_function", target=torch.ops.lct.decode.default):
        value = node.meta["val"]
        if not ops.launches_kernels(value.device):
            continue
        same = not group or group[0].meta["val"].dtype == value.dtype
        if group and (not same or size_bytes + value.nbytes > limit):
            yield group
            group, size_bytes = [], 0
        group.append(node)
        size_bytes += value.nbytes
    if group:
        yield group


def _merge(graph: Graph, nodes: list[Node]) -> None:
    if len(nodes) < 2:
        return
    handles, sizes, dtypes, after = zip(*(node.args for node in nodes), strict=True)
    # Handles are inputs, so that all may be decoded where the first is.
    with graph.inserting_before(nodes[0]):
        dims = [dim for size in sizes for dim in size]
        ranks = [len(size) for size in sizes]
        args = [*handles], dims, ranks, dtypes[0], after[0]
        merged = graph.call_function(torch.ops.lct.decode_all.default, args)
        merged.meta["val"] = [node.meta["val"] for node in nodes]
        for number, node in enumerate(nodes):
            item = graph.call_function(operator.getitem, (merged, number))
            item.meta.update(node.meta)
            node.replace_all_uses_with(item)
    for node in nodes:
        graph.erase_node(node)
