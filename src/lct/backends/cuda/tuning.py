"""Launch configurations, one table: warps a block, blocks that a multiprocessor's registers allow.

Chosen by measurement on sm_90 (H200) for BF16, where more resident warps hide the latency of
memory; elsewhere, and for FP32 and FP16, which need more registers, by reasoning: as tight or a
step looser, so that no architecture spills registers to local memory
(tests/backends/test_cuda_kernels.py holds that).
"""

from __future__ import annotations

from dataclasses import dataclass

from ...dtypes import DTYPES, DType

MEASURED_ARCH = "sm_90"
_MEASURED_DTYPE = DTYPES["bfloat16"]


@dataclass(frozen=True)
class LaunchConfig:
    """``min_blocks``: the second argument of ``__launch_bounds__``, measured and elsewhere.

    ``any_warps``: a launch may take fewer warps a block, so that few blocks spread evenly.
    ``even_waves``: a launch of a few waves holds fewer blocks a multiprocessor at once where that
    makes its waves equal.
    """

    warps: int
    measured_min_blocks: int = 1
    other_min_blocks: int = 1
    any_warps: bool = False
    even_waves: bool = False

    @property
    def groups_at_once(self) -> int:
        """Warps that a multiprocessor holds, on the measured architecture."""
        return self.warps * self.measured_min_blocks

    def min_blocks(self, arch: str, dtype: DType) -> int:
        """Blocks a multiprocessor for ``arch`` and ``dtype``."""
        measured = arch == MEASURED_ARCH and dtype is _MEASURED_DTYPE
        return self.measured_min_blocks if measured else self.other_min_blocks


LAUNCH: dict[str, LaunchConfig] = {
    # Measured with benchmarks/sweep.py; docs/performance.md, Notebook.
    "pooled_encode": LaunchConfig(8, 3, 2, any_warps=True, even_waves=True),
    "pooled_decode": LaunchConfig(8, 4, 4, any_warps=True, even_waves=True),
    "pooled_encode_list": LaunchConfig(8, 3, 2),
    "pooled_decode_list": LaunchConfig(8, 4, 4, even_waves=True),
    "pooled_needs": LaunchConfig(4),
    "fixed_encode": LaunchConfig(8, 4, 3),
    "fixed_decode": LaunchConfig(8, 6, 4),
    "sgd_step": LaunchConfig(10, 2, 1, any_warps=True),
    "adam_step": LaunchConfig(16, 1, 1, any_warps=True),
    "muon_step": LaunchConfig(12, 2, 1, any_warps=True),
    "select_book": LaunchConfig(32),
    "select_books": LaunchConfig(32),
    "sweep_chunks": LaunchConfig(8),
    "grow_arena": LaunchConfig(8),
    "close_segments": LaunchConfig(1),
    "report_counters": LaunchConfig(1),
}
