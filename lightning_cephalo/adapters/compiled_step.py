"""Runs a step that ``torch.compile`` has wrapped as it was before.

A compiled step also traces its closure, which is the whole training step, and the hooks around the
update, which exchange shards. Neither can be traced. The update itself is the same without it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch.optim import Optimizer


def step_before_compiling(optimizer: Optimizer) -> Callable[..., Any] | None:
    """Return the step of an optimizer whose instance has a compiled one; None: it has none.

    ::

        optimizer.step = torch.compile(optimizer.step)
        step_before_compiling(optimizer)        # what torch.compile was given
    """
    marks: dict[str, Any] = getattr(vars(optimizer).get("step"), "__dict__", {})
    # Private: torch has no public way to find what it has compiled. What wraps a compiled function
    # carries copies of these marks.
    original: Callable[..., Any] | None = marks.get("_torchdynamo_orig_callable")
    is_own = marks.get("__wrapped__") is original and "_torchdynamo_disable" not in marks
    return original if is_own else None


def is_compiled(step: Any) -> bool:
    """Return whether a step, or one that it wraps, is compiled."""
    while step is not None:
        marks = getattr(step, "__dict__", ())
        # torch also marks the steps that it never compiles, as LBFGS's
        if "_torchdynamo_orig_callable" in marks:
            return "_torchdynamo_disable" not in marks
        step = getattr(step, "__wrapped__", None)
    return False


@contextmanager
def without_compiling(optimizer: Optimizer) -> Iterator[None]:
    """Show in a ``with`` block the step that an optimizer has had before it was compiled."""
    original = step_before_compiling(optimizer)
    if original is None:
        yield
        return
    compiled = optimizer.step
    optimizer.step = original  # type: ignore[method-assign]
    try:
        yield
    finally:
        optimizer.step = compiled  # type: ignore[method-assign]
