"""Tells where the code of a rank is right now, from the stack of its thread."""

from __future__ import annotations

import sys
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import torch

_PACKAGE = str(Path(__file__).parents[1])
_TORCH = str(Path(torch.__file__).parent)
_COLLECTIVES = str(Path(_TORCH) / "distributed")
_INSTALLED = tuple({sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")})
# functions of this package that block in torch's C++ code, or in a meeting
_WAITS = ("wait", "_wait", "wait_for", "_ask")


@dataclass(frozen=True)
class Whereabouts:
    """Where a rank is."""

    hook: str | None
    line: str | None
    waits: bool

    def __str__(self) -> str:
        parts = [f"in {self.hook}()" if self.hook else "outside of hooks"]
        if self.line is not None:
            parts.append(f"({self.line})")
        return " ".join(parts)


def whereabouts(thread: int) -> Whereabouts:
    """Return where a thread of this process is."""
    frames = list(_outwards(sys._current_frames().get(thread)))
    hooks = (_hook_of(frame) for frame in frames)
    lines = (_line_of(frame) for frame in frames if _is_users(frame))
    return Whereabouts(
        hook=next((hook for hook in hooks if hook is not None), None),
        line=next(lines, None),
        waits=_waits(frames),
    )


def _outwards(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _waits(frames: list[FrameType]) -> bool:
    """Return whether the innermost code is a wait for other ranks."""
    for frame in frames:
        file, name = frame.f_code.co_filename, frame.f_code.co_name
        if file.startswith(_COLLECTIVES):
            return True
        if file.startswith(_PACKAGE):
            return name in _WAITS
        if file.startswith(_TORCH) or not file.startswith(_INSTALLED):
            return False
        # the standard library: locks and futures in which a wait may stand
    return False


def _is_users(frame: FrameType) -> bool:
    return not frame.f_code.co_filename.startswith((_PACKAGE, "<frozen", *_INSTALLED))


def _line_of(frame: FrameType) -> str:
    return f"{frame.f_code.co_name} in {Path(frame.f_code.co_filename).name}, line {frame.f_lineno}"


def _hook_of(frame: FrameType) -> str | None:
    """Return the hook that a frame of Lightning calls."""
    if not frame.f_code.co_name.startswith("_call_"):
        return None
    hook = frame.f_locals.get("hook_name")
    return hook if isinstance(hook, str) else None
