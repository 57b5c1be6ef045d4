"""Presets: how values are dealt to streams, and a stream's room (docs/format.md, section 3).

A *group* is what one warp codes: 32 streams, one quad (four consecutive values) a stream and step.
"""

from __future__ import annotations

from dataclasses import dataclass

LANES = 32
QUAD = 4
STEP_VALUES = LANES * QUAD


@dataclass(frozen=True, eq=False)  # rows of a table: compared and hashed by identity
class Preset:
    """One row of the preset table.

    ``pooled``: the 32 streams of a group share one budget of ``capacity_words`` 32-bit words, and
    every span of 256 values has its own shift. Otherwise every stream owns ``capacity_words``
    words, and the tensor has one shift. ``steps``: quads a stream, so ``steps * 128`` values a
    group.
    """

    name: str
    code: int
    pooled: bool
    steps: int
    groups_per_block: int
    capacity_words: int

    @property
    def group_values(self) -> int:
        """Values that one group of 32 streams holds."""
        return self.steps * STEP_VALUES

    @property
    def block_values(self) -> int:
        """Values between which quads are dealt: a group (pooled) or 8 groups (256 streams)."""
        return self.group_values * self.groups_per_block


# CLEAN and HIGH are the paper's bounds (16 / (8 + 3.125) and 16 / (8 + 3)). MEDIUM has HIGH's short
# streams with one more word, 3.25 bits an exponent: words are the unit of a stream, so this is the
# next size up, and it holds tensors that are wider than a Gaussian without spilling.
# POOLED: 748 words for 8,192 values are 2.92 bits an exponent, all slack included, which bounds the
# allocated ratio at 1.4602. Gaussian data fits at every phase of the scale: `lct bench codec` shows
# no group that spills.
PRESETS: dict[str, Preset] = {
    row.name: row
    for row in (
        Preset("clean", 1, pooled=False, steps=64, groups_per_block=8, capacity_words=25),
        Preset("medium", 2, pooled=False, steps=32, groups_per_block=8, capacity_words=13),
        Preset("high", 3, pooled=False, steps=32, groups_per_block=8, capacity_words=12),
        Preset("pooled", 4, pooled=True, steps=64, groups_per_block=1, capacity_words=748),
    )
}
# RAW is no user's choice: what would not get smaller is stored dense.
RAW = Preset("raw", 0, pooled=False, steps=64, groups_per_block=1, capacity_words=0)
PRESETS_BY_CODE: dict[int, Preset] = {p.code: p for p in (RAW, *PRESETS.values())}
DEFAULT_PRESET = "pooled"


def get_preset(name: str | None) -> Preset:
    """The preset called ``name`` (``None``: the default). ValueError for any other name."""
    key = DEFAULT_PRESET if name is None else name
    if key not in PRESETS:
        raise ValueError(f"preset must be one of {', '.join(PRESETS)} or None, got {name!r}")
    return PRESETS[key]
