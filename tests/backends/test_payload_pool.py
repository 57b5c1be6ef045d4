"""Payloads lie in a pool of their own while gradients go within backward, and lose no bit there."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn

import lct
from lct.backends.cuda import payload_pool
from lct.optim import step_in_backward

MIB = 1 << 20


class Dropper:
    """Stands for what frees gradients within backward."""


@pytest.fixture
def dropper(monkeypatch: pytest.MonkeyPatch) -> Iterator[Dropper]:
    monkeypatch.setenv("LCT_PAYLOAD_POOL", "1")
    found = Dropper()
    payload_pool.gradients_go(found)
    yield found
    payload_pool.gradients_stay(found)


def test_who_drops_gradients() -> None:
    before = set(payload_pool._droppers)
    layer = nn.Linear(8, 8)
    first = step_in_backward(lct.optim.SGD(layer.parameters(), lr=0.1))
    second = step_in_backward(torch.optim.SGD(nn.Linear(8, 8).parameters(), lr=0.1))
    assert set(payload_pool._droppers) == before | {first, second}
    first.remove()
    assert set(payload_pool._droppers) == before | {second}
    second.remove()
    first.remove()
    assert set(payload_pool._droppers) == before


def pool_of(tensor: torch.Tensor) -> tuple[int, int]:
    """The pool of torch's allocator in which ``tensor`` lies."""
    address = tensor.data_ptr()
    for segment in torch.cuda.memory_snapshot():
        if segment["address"] <= address < segment["address"] + segment["total_size"]:
            return tuple(segment["segment_pool_id"])
    raise AssertionError(f"no segment has {address:#x}")


def random(mib: int) -> torch.Tensor:
    return torch.randn(mib * MIB // 2, dtype=torch.bfloat16, device="cuda")


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.view(torch.int16), b.view(torch.int16))


def free_parts_taken() -> list[torch.Tensor]:
    """Takes each free part of what torch has reserved, down to 2 MiB; nothing is added."""
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(torch.cuda.memory_reserved() / total)
    taken = []
    mib = 1024
    while mib >= 2:
        try:
            taken.append(torch.empty(mib * MIB, dtype=torch.uint8, device="cuda"))
        except torch.cuda.OutOfMemoryError:
            mib //= 2
    return taken


@pytest.fixture
def limit() -> Iterator[Callable[[int], None]]:
    """limit(mib): nothing more than torch has reserved now, and so much. The pool starts empty.

    What is free beside a part of a segment that earlier tests have left is no room either.
    """
    gc.collect()
    payload_pool._pools.clear()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    taken: list[torch.Tensor] = []

    def limit_to(mib: int) -> None:
        taken.extend(free_parts_taken())
        most = torch.cuda.memory_reserved() + mib * MIB
        torch.cuda.set_per_process_memory_fraction(most / total)

    yield limit_to
    taken.clear()
    torch.cuda.set_per_process_memory_fraction(1.0)


def part_of_a_segment() -> torch.Tensor:
    """2 MiB of a segment of 256 MiB whose rest is free, as earlier work may leave."""
    whole = random(256)
    del whole
    return random(2)


@pytest.mark.gpu
def test_only_while_gradients_go(dropper: Dropper, monkeypatch: pytest.MonkeyPatch) -> None:
    values = random(4)
    coded = lct.encode(values)
    own = payload_pool._pools[0].id
    assert pool_of(coded.payload) == tuple(own)
    assert pool_of(coded.decode()) == pool_of(values) == (0, 0)
    monkeypatch.setenv("LCT_PAYLOAD_POOL", "0")
    payload_pool.gradients_go(dropper)  # asks again
    assert pool_of(lct.encode(values).payload) == (0, 0)
    monkeypatch.setenv("LCT_PAYLOAD_POOL", "1")
    payload_pool.gradients_go(dropper)
    payload_pool.gradients_stay(dropper)
    others = payload_pool._droppers
    assert bool(others) == (pool_of(lct.encode(values).payload) == tuple(own))
    assert same_bits(coded.decode(), values)


@pytest.mark.gpu
def test_saves_and_states_lie_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LCT_PAYLOAD_POOL", "1")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(1024, 4096), nn.GELU(), nn.Linear(4096, 1024))
    model = model.to("cuda", torch.bfloat16)
    lct.compress_(model)
    optimizer = lct.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    stepping = step_in_backward(optimizer)
    x = torch.randn(2048, 1024, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    with lct.compress_activations() as seen:
        loss = model(x).float().square().mean()
    own = tuple(payload_pool._pools[0].id)
    there = [
        segment["allocated_size"]
        for segment in torch.cuda.memory_snapshot()
        if tuple(segment["segment_pool_id"]) == own
    ]
    assert sum(there) >= seen.stored_bytes > 10 * MIB
    loss.backward()
    momentum = optimizer.state[model[0].weight]["momentum_buffer"]
    assert pool_of(momentum.payload) == own
    stepping.remove()


@pytest.mark.gpu
def test_what_others_have_cached_goes_to_payloads(
    dropper: Dropper, limit: Callable[[int], None]
) -> None:
    values = random(64)
    cached = random(256)
    limit(8)
    del cached  # in the common pool, and all that there is
    coded = [lct.encode(values) for _ in range(4)]
    assert all(pool_of(one.payload) == tuple(payload_pool._pools[0].id) for one in coded)
    torch.cuda.set_per_process_memory_fraction(1.0)
    assert all(same_bits(one.decode(), values) for one in coded)


@pytest.mark.gpu
@pytest.mark.parametrize("beside", [None, part_of_a_segment])
def test_what_payloads_have_left_goes_to_others(
    dropper: Dropper,
    limit: Callable[[int], None],
    beside: Callable[[], torch.Tensor] | None,
) -> None:
    left = beside() if beside else None
    values = random(64)
    coded = [lct.encode(values) for _ in range(4)]
    limit(8)
    del coded
    gc.collect()
    others = [random(32) for _ in range(4)]
    assert all(pool_of(one) == tuple(payload_pool._pools[0].id) for one in others)
    del left


@pytest.mark.gpu
@pytest.mark.parametrize("expandable", [False, True])
def test_default_by_the_allocators_setting(expandable: bool) -> None:
    """In a process of its own, whose allocator has no memory yet."""
    script = """
import torch, lct
from lct.backends.cuda import payload_pool
payload_pool.gradients_go(lct)
lct.encode(torch.randn(1 << 20, dtype=torch.bfloat16, device="cuda"))
print(len(payload_pool._pools))
"""
    settings = f"expandable_segments:{expandable}"
    environment = {**os.environ, "PYTORCH_CUDA_ALLOC_CONF": settings}
    environment.pop("LCT_PAYLOAD_POOL", None)
    done = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [str(int(expandable))]


@pytest.mark.gpu
def test_an_error_where_there_is_no_memory(dropper: Dropper, limit: Callable[[int], None]) -> None:
    values = random(256)
    limit(8)
    with pytest.raises(torch.cuda.OutOfMemoryError):
        lct.encode(values)
    torch.cuda.set_per_process_memory_fraction(1.0)
    assert same_bits(lct.encode(values).decode(), values)


@pytest.mark.gpu
def test_a_graph_owns_what_it_encodes(dropper: Dropper) -> None:
    values = random(4)
    lct.encode(values)  # compiles
    lct.reserve_arena(64 * MIB)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        coded = lct.encode(values)
    assert pool_of(coded.payload) == tuple(graph.pool())
    values.copy_(random(4))
    graph.replay()
    assert same_bits(coded.decode(), values)
