"""Computes a unit again when its backward needs the first tensor that its forward has saved.

[Note: recomputation]
While a unit's body runs, nodes of its graph save nothing: hooks of saved tensors count what they
would save, and throw it away. A visit holds its inputs only. The first node that needs a tensor
lets the body run again, from the state that the first run has found, until the last tensor is saved
again. The graph is that of the first run, so whatever leaves the unit has its gradient: outputs,
losses that layers store, tensors that hooks take out.

Source: torch's own ``checkpoint(use_reentrant=False)``. The inputs here can move to the host.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lightning_cephalo.accelerator import Accelerator
from lightning_cephalo.common.errors import UnitUseError
from lightning_cephalo.execution.call_tree import CallStructure, Structure
from lightning_cephalo.execution.graph import (
    gradient_through_units,
    pop_saved_tensor_hooks,
    push_saved_tensor_hooks,
)
from lightning_cephalo.execution.offload import HostArena, OffloadedTensor
from lightning_cephalo.execution.overlay import Overlay, View
from lightning_cephalo.execution.replay import ThreadState

_CHANGED_INPUT = (
    "An input of a unit is changed in place, by the unit or by the code after it, so that the unit"
    " cannot be computed again for the backward. Write `x = x + y` instead of `x += y` there, or"
    " use CephaloStrategy(recompute=False)."
)


class _Enough(BaseException):
    """All tensors are saved again. No ``except Exception`` of a unit catches it."""


class SavedAgain:
    """Collects what nodes save while a unit is computed again, up to the last tensor.

    One object serves all visits: torch never lets go of a hook that has raised.
    """

    def __init__(self) -> None:
        self._values: list[Any] = []
        self._count = 0

    def begin(self, count: int) -> None:
        """Expect this number of tensors."""
        self._values, self._count = [], count

    def pack(self, tensor: Tensor) -> None:
        """Keep a tensor; its node holds nothing. Raises :class:`_Enough` at the last one."""
        self._values.append(tensor)
        if len(self._values) == self._count:
            raise _Enough

    def take(self) -> list[Any]:
        """Return what was saved."""
        values, self._values = self._values, []
        return values


@dataclass(frozen=True)
class Found:
    """What the first run of a body has found, for the second one."""

    random: tuple[Tensor, ...]
    modes: ThreadState
    view: View | None


@dataclass
class Recomputing:
    """The visit that is computed again; None: none is."""

    visit: RecomputedVisit | None = None


@dataclass(frozen=True)
class Places:
    """Where a body finds its state, equal for all visits of a step."""

    accelerator: Accelerator
    overlay: Overlay
    arena: HostArena | None
    saved_again: SavedAgain = field(default_factory=SavedAgain)
    recomputing: Recomputing = field(default_factory=Recomputing)


class RecomputedVisit:
    """A visit of a unit whose backward computes the unit again."""

    def __init__(
        self,
        places: Places,
        inputs: Sequence[Any],
        structure: Structure | CallStructure,
        found: Found,
    ) -> None:
        self._places, self._structure, self._found = places, structure, found
        self._inputs = _leaves(inputs)
        self._tensors = [value for value in self._inputs if isinstance(value, Tensor)]
        self._versions = [tensor._version for tensor in self._tensors]
        self._away: list[OffloadedTensor] = []
        self._saved_count = 0
        self._counts = False
        self._values: list[Any] | None = None
        self._body: Callable[..., Any] = _never
        self._parts = 0  # of its backward that have begun
        self._met: list[tuple[Any, tuple[Tensor, ...]]] = []
        self._met_again: Iterator[tuple[Any, tuple[Tensor, ...]]] = iter(())

    # -- forward ------------------------------------------------------------------------------

    def first(self, body: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the body for the first time."""
        self._body = body
        self.resume()
        try:
            result = body(*args, **kwargs)
        finally:
            self.pause()
        self._refuse_changed_inputs()
        return result

    def resume(self) -> None:
        """Go on with the body, in this thread."""
        push_saved_tensor_hooks(self._count, self._value)
        self._counts = True

    def pause(self) -> None:
        """Stop before the body's end: other code is to save what it saves."""
        if self._counts:  # a microbatch that is stopped at a meeting has paused already
            pop_saved_tensor_hooks()
        self._counts = False

    def _count(self, tensor: Tensor) -> int:
        self._saved_count += 1
        return self._saved_count - 1

    def _refuse_changed_inputs(self) -> None:
        if [tensor._version for tensor in self._tensors] != self._versions:
            raise UnitUseError(_CHANGED_INPUT)

    # -- meetings in the middle of the unit ---------------------------------------------------

    def met(self, meeting: Any) -> None:
        """Note a meeting; other microbatches have drawn random numbers meanwhile."""
        self._met.append((meeting, self._places.accelerator.random_states()))

    def meet_again(self) -> Any:
        """Return the next meeting while the unit is computed again; None: there was no other."""
        meeting, random = next(self._met_again, (None, ()))
        if meeting is not None:
            self._places.accelerator.restore_random_states(random)
        return meeting

    # -- the inputs on the host ---------------------------------------------------------------

    def offload(self) -> None:
        """Move inputs that nobody else holds to host memory."""
        arena = self._places.arena
        for tensor in self._tensors:
            if arena is not None and is_held_alone(tensor):
                away = arena.offload(tensor)
                if away is not None:
                    self._away.append(away)

    def fetch(self) -> None:
        """Begin to copy them back."""
        for away in self._away:
            away.fetch()

    # -- backward -----------------------------------------------------------------------------

    def arrive(self) -> None:
        """The unit is gathered for the backward of this visit, or of its part before a meeting."""
        self._parts += 1

    @property
    def is_last_part(self) -> bool:
        """Whether the backward has come to the unit's code before all meetings."""
        return self._parts > len(self._met)

    def leave(self, *, keeps: bool = False) -> None:
        """Drop what is left: the backward of this visit is over, or will not come.

        Args:
            keeps: Whether another backward will come (``retain_graph=True``).
        """
        self._parts, self._values = 0, None
        if keeps:
            return
        for away in self._away:  # without gradients its values were never restored
            away.discard()
        self._away, self._inputs, self._tensors, self._met = [], [], [], []
        self._body = _never

    def _value(self, index: int) -> Tensor:
        if not self._parts:
            raise gradient_through_units()
        # a Function that reads its saved tensors twice lets the unit run once more
        if self._values is None or self._values[index] is None:
            self._values = self._compute_again()
        value: Tensor = self._values[index]
        self._values[index] = None  # its memory goes with its use
        return value

    def _compute_again(self) -> list[Any]:
        places, found, body = self._places, self._found, self._body
        for away in self._away:
            away.restore()
        self._away = []
        self._refuse_changed_inputs()
        saved, count = places.saved_again, self._saved_count
        saved.begin(count)
        args, kwargs = self._structure.unflatten(self._inputs)
        accelerator, modes = places.accelerator, found.modes
        drawn, before = accelerator.random_states(), modes.now()
        self._met_again = iter(self._met)
        places.recomputing.visit = self
        try:
            if before is not modes:
                modes.restore()
            torch.set_autocast_cache_enabled(False)
            torch._C._set_grad_enabled(True)
            accelerator.restore_random_states(found.random)
            push_saved_tensor_hooks(saved.pack, _never)
            try:
                with places.overlay.replayed(found.view):
                    body(*args, **kwargs)
            except _Enough:
                pass
            finally:
                pop_saved_tensor_hooks()
                values = saved.take()
        finally:
            places.recomputing.visit = None
            accelerator.restore_random_states(drawn)
            before.restore()
        if len(values) != count:
            raise UnitUseError(
                f"A unit has saved {count} tensors for its backward, and {len(values)} when it was"
                " computed again. Let it compute the same each time, or use"
                " CephaloStrategy(recompute=False)."
            )
        return values


def _leaves(values: Sequence[Any]) -> list[Any]:
    """Return inputs as the second run gets them: with a gradient, and without a past."""
    found: list[Any] = []
    for place, value in enumerate(values):
        if isinstance(value, Tensor) and value.requires_grad:
            # one object stays one: `attention(x, x, x)` computes otherwise
            same = [at for at in range(place) if values[at] is value]
            value = found[same[0]] if same else value.detach().requires_grad_()
        found.append(value)
    return found


def _never(*args: Any, **kwargs: Any) -> Tensor:
    raise gradient_through_units()


def is_held_alone(tensor: Tensor) -> bool:
    """Whether a tensor needs a gradient, and is the only one in its memory.

    Private API: a storage is held by its tensors, and here by its Python object.
    """
    if not tensor.requires_grad:
        return False
    storage = tensor.untyped_storage()
    return torch._C._storage_Use_Count(storage._cdata) <= 2
