"""A function in a process of its own: what it allocates, compiles or breaks ends with it."""

from __future__ import annotations

import multiprocessing
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

# Imported once, in the process that the others are forked from; what is not installed is passed
# over. None of them may initialise CUDA: a forked process cannot use it then.
PRELOADED = (
    "torch",
    "lct.bench.train",
    *(f"transformers.models.{name}.modeling_{name}" for name in ("llama", "qwen2", "qwen3")),
)

GRACE_SECONDS = 30


class ChildError(RuntimeError):
    """The function raised, or its process ended before it returned. ``traceback``: the child's."""

    def __init__(self, message: str, traceback: str = "") -> None:
        super().__init__(message)
        self.traceback = traceback


def run_isolated(function: Callable[..., Any], *args: Any) -> Any:
    """``function(*args)`` in a new process; what it takes and returns is pickled.

    ChildError with what it raised, or with its exit code where it died.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(PRELOADED))
    receiver, sender = context.Pipe(duplex=False)
    child = context.Process(target=_child, args=(sender, function, args))
    child.start()
    sender.close()
    try:
        returned, value = receiver.recv()
    except EOFError:
        child.join()
        raise ChildError(f"the process ended with exit code {child.exitcode}") from None
    finally:
        receiver.close()
    # Threads that a library left behind may keep it; what it had to say is here.
    child.join(GRACE_SECONDS)
    child.kill()
    child.join()
    if not returned:
        raise ChildError(*value)
    return value


def describe_error(error: BaseException) -> str:
    """The type of an error and the first line of what it says."""
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"


def _child(sender: Connection, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    result: tuple[bool, Any]
    try:
        result = True, function(*args)
    except Exception as error:
        result = False, (describe_error(error), traceback.format_exc())
    sender.send(result)
