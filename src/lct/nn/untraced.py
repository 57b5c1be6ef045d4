"""Functions that ``torch.compile`` must run as they are, at no cost to eager calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from torch._C._dynamo.eval_frame import (
    _FrameAction,
    _FrameExecStrategy,
    set_code_exec_strategy,
)

Function = TypeVar("Function", bound=Callable[..., Any])

# For the frame itself, and for all that it calls.
_RUN = _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP)


def untraced(function: Function) -> Function:
    """Mark ``function``: where traced code calls it the graph breaks, and where a frame runs as it
    is below a compiled function, Dynamo does not compile this one by itself.

    ``torch.compiler.disable`` does that too, but wraps the function and imports the compiler.
    """
    set_code_exec_strategy(function.__code__, _RUN)
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    function._torchdynamo_disable_msg = "LCT's"  # type: ignore[attr-defined]
    return function
