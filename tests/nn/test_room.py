"""Capacities of saved activations: what was needed before, without waiting for the device."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

import lct
from lct.layout import CHUNK_BYTES
from lct.nn import activations, room
from lct.nn.room import (
    CAPACITY_WORDS,
    CLASS_WORDS,
    FIRST_LOOKS,
    LOOK_EVERY,
    MOST_PAUSE,
    Room,
    heard_of_spills,
    room_of,
)
from training import BF16, assert_same_bits, random_bits

DATA = Path(__file__).resolve().parents[1] / "data"
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
TENSOR = torch.zeros(4 * 8192, dtype=BF16)


@pytest.fixture(autouse=True)
def _no_rooms(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "_rooms", {})
    monkeypatch.setattr(room, "_spills", {})


class Device:
    """Measurements that are there when ``done`` is set."""

    def __init__(self) -> None:
        self.words = 0
        self.done = False
        self.asked = 0

    def group_needs_later(
        self, dense: torch.Tensor, upcast: bool
    ) -> Callable[[], np.ndarray | None]:
        self.asked += 1
        needs = np.full(4, self.words, np.int32)
        return lambda: needs if self.done else None


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    found = Device()
    monkeypatch.setattr(room, "group_needs_later", found.group_needs_later)
    return found


def test_a_measurement_counts_when_it_is_there(device: Device) -> None:
    site = Room()
    device.words = 900
    for _ in range(5):
        site.look(TENSOR, False)
        assert site.words == CAPACITY_WORDS and device.asked == 1, "one at a time, and no waiting"
    device.done = True
    site.look(TENSOR, False)
    assert 900 + 8 <= site.words < 900 + 8 + CLASS_WORDS
    assert site.words % CLASS_WORDS == 0


def test_few_saves_are_measured(device: Device) -> None:
    site = Room()
    device.done, device.words = True, 700
    for _ in range(FIRST_LOOKS):
        site.look(TENSOR, False)
    assert device.asked == FIRST_LOOKS
    for _ in range(LOOK_EVERY * 10 - FIRST_LOOKS):
        site.look(TENSOR, False)
    assert device.asked == FIRST_LOOKS + 10


def test_measurements_count_not_saves(device: Device) -> None:
    """A device that is late has no fewer looks."""
    site = Room()
    device.words = 700
    for number in range(LOOK_EVERY - 1):
        device.done = number % 5 == 4
        site.look(TENSOR, False)
    assert device.asked == FIRST_LOOKS


class Spills:
    """What the host hears of chunks taken; which blocks make a room look again."""

    def __init__(self, device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
        self.device, self.taken = device, 2**32 - 5
        device.done, device.words = True, 700
        monkeypatch.setattr(room, "arena_taken_chunks", lambda _: self.taken % 2**32)
        self.place = room_of("model.py:1", "", TENSOR)
        for _ in range(FIRST_LOOKS):
            self.place.look(TENSOR, False)
        for _ in range(5):  # what was taken before, and a calm after it
            self.block(0)

    def block(self, chunks: int, stored_chunks: int = 1000) -> int:
        """Measurements after a block that stored so many chunks' bytes and took ``chunks``."""
        self.taken += chunks
        heard_of_spills(TENSOR.device, stored_chunks * CHUNK_BYTES)
        before = self.device.asked
        for _ in range(2 * FIRST_LOOKS):
            self.place._saves = 1  # none is due for its number
            self.place.look(TENSOR, False)
        return self.device.asked - before


def test_rooms_look_again_where_much_spilled(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    spills = Spills(device, monkeypatch)
    assert spills.block(10) == 0, "a hundredth"
    assert spills.block(11) == FIRST_LOOKS
    elsewhere = torch.device("cuda", 1)
    heard_of_spills(elsewhere, 1)
    assert spills.block(0) == 0, "another device"


def test_values_that_simply_spill_are_measured_ever_less(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    spills = Spills(device, monkeypatch)
    looks = [number for number in range(1000) if spills.block(500)]
    assert looks[:5] == [0, 2, 6, 14, 30]
    gaps = np.diff(looks)
    assert max(gaps) == gaps[-1] == MOST_PAUSE + 1
    for _ in range(10):
        spills.block(0)
    assert spills.block(500) == FIRST_LOOKS, "after a calm it looks at once"


def test_the_outermost_block_trims_when_all_is_encoded(monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[object] = []
    cuda = torch.device("cuda", 0)
    monkeypatch.setattr(activations, "trim_arenas", lambda: log.append("trim"))
    monkeypatch.setattr(activations, "arena_devices", lambda: [cuda])
    monkeypatch.setattr(activations, "heard_of_spills", lambda *heard: log.append(heard))
    x = torch.randn(64, 512, dtype=BF16).requires_grad_() * 1
    with lct.compress_activations() as saved:
        with lct.compress_activations():
            x.abs()
        assert log == []
    assert saved.stored_bytes > 0
    assert log == ["trim", (cuda, saved.stored_bytes)]


def test_capacities_do_not_go_back_and_forth(device: Device) -> None:
    site = Room()
    device.done = True
    seen = []
    for words in (700, 690, 710, 700, 690, 700, 710, 700):
        device.words = words
        site.look(TENSOR, False)
        seen.append(site.words)
    assert len(set(seen)) <= 2 and seen == sorted(seen)


def test_what_does_not_pay_stays_dense_until_it_does(device: Device) -> None:
    site = Room()
    device.done, device.words = True, 2000
    site.look(TENSOR, False)
    assert not site.pays
    device.words = 700
    for _ in range(FIRST_LOOKS * LOOK_EVERY + 1):
        site.look(TENSOR, False)
    assert site.pays and site.words < 720 + CLASS_WORDS


def save(values: torch.Tensor, times: int) -> lct.nn.SavedActivations:
    """Save ``values`` at one place, and check the bits that come back."""
    with lct.compress_activations() as saved:
        for _ in range(times):
            x = values.clone().requires_grad_() * 1
            out = x.abs()
            assert_same_bits(x, out.grad_fn._saved_self)
            if values.is_cuda:
                torch.cuda.synchronize()
    return saved


# Dense bytes over stored ones of a payload with the room that it needs.
RATIOS = {"act_relu_out": 1.57, "act_relu2_out": 1.52, "act_silu_times_up": 1.38, "act_q": 1.42}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", RATIOS)
def test_real_activations(name: str, device: str) -> None:
    """Zero-rich ones take less room than Gaussian values, those of gated products more."""
    values = torch.from_numpy(np.load(DATA / f"{name}.npy")).view(BF16).to(device)
    save(values, 4)
    saved = save(values, 1)
    (site,) = saved.sites
    assert site.encoded == 1
    assert site.dense_bytes / site.stored_bytes > RATIOS[name]
    stored = lct.encode(values, capacity=site.room.words)
    assert stored.group_counts().spilled == 0


@pytest.mark.parametrize("device", DEVICES)
def test_hostile_values_stay_as_they_are(device: str) -> None:
    save(random_bits(64, 512).to(device), 4)
    saved = save(random_bits(64, 512).to(device), 4)
    assert saved.encoded == 0
    assert saved.kept["its values need as much room compressed"] == 4
