"""Guards look for what training cannot mean, and change nothing.

A guard sees four moments of a step, and returns what it finds: errors or warnings, by name. Those
that take long look at the first steps only.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor
from torch.utils import _pytree as pytree

from lightning_cephalo.common.errors import UnitUseError
from lightning_cephalo.execution.user_writes import UserWrites, used_outside
from lightning_cephalo.sharding.unit import Unit

if TYPE_CHECKING:
    from lightning_cephalo.execution.step import Step

FIRST_STEPS = 3

# code of the user that runs while parameters are gathered for the backward, for messages
BEFORE_BACKWARD = "a hook between the forward and the backward"


@dataclass(frozen=True)
class Finding:
    """What a guard has found."""

    told: str
    is_error: bool = True


Found = Iterable[Finding]


class Guard:
    """Looks at the moments that it overrides.

    Attributes:
        takes_long: Whether it looks at the first steps only.
    """

    takes_long = False

    def step_begins(self, step: Step) -> Found:
        """No code has run yet."""
        return ()

    def microbatch_pauses(self, step: Step, index: int) -> Found:
        """A microbatch's code waits, or has returned."""
        return ()

    def backward_begins(self, step: Step) -> Found:
        """The code of the forward has run."""
        return ()

    def step_ends(self, step: Step) -> Found:
        """The backward has run."""
        return ()


class Guards:
    """All guards of a model.

    Attributes:
        all_look: Whether those that take long look at this step, too.
    """

    def __init__(self, guards: Sequence[Guard]) -> None:
        self._guards, self._steps, self.all_look = tuple(guards), 0, False
        self._due = self._guards
        self._at_pauses: tuple[Guard, ...] = ()

    def begin_step(self, *, is_timed: bool = False) -> None:
        """Choose who looks at the training step that begins.

        Args:
            is_timed: Whether the step is measured: guards that take long leave it out.
        """
        self._steps += not is_timed
        self.all_look = self._steps <= FIRST_STEPS and not is_timed
        self._due = tuple(each for each in self._guards if self.all_look or not each.takes_long)
        # asked at each visit: most guards have nothing to look at
        own = Guard.microbatch_pauses
        self._at_pauses = tuple(e for e in self._due if type(e).microbatch_pauses is not own)

    def step_begins(self, step: Step) -> None:
        """Let guards look; each moment raises UnitUseError for an error."""
        _report(lambda guard: guard.step_begins(step), self._due)

    def microbatch_pauses(self, step: Step, index: int) -> None:
        if self._at_pauses:
            _report(lambda guard: guard.microbatch_pauses(step, index), self._at_pauses)

    def backward_begins(self, step: Step) -> None:
        _report(lambda guard: guard.backward_begins(step), self._due)

    def step_ends(self, step: Step) -> None:
        _report(lambda guard: guard.step_ends(step), self._due)


def _report(look: Callable[[Guard], Found], guards: Iterable[Guard]) -> None:
    for guard in guards:
        for finding in look(guard):
            if finding.is_error:
                raise UnitUseError(finding.told)
            warnings.warn(finding.told, stacklevel=3)


class OwnWrites(Guard):
    """Finds writes to parameters inside of a step."""

    def __init__(self, writes: UserWrites) -> None:
        self._writes = writes

    def backward_begins(self, step: Step) -> Found:
        return map(Finding, self._writes.found("training_step"))

    def step_ends(self, step: Step) -> Found:
        return map(Finding, self._writes.found(BEFORE_BACKWARD))


class LateGradients(Guard):
    """Finds gradients that have come to a unit behind its reduce."""

    def __init__(self, units: Sequence[Unit]) -> None:
        self._units = units[1:]

    def step_ends(self, step: Step) -> Found:
        late = [unit.name for unit in self._units if unit.has_landed]
        return [Finding(used_outside(late))] if late else []


class ForeignTensors(Guard):
    """Finds results that depend on a tensor of another microbatch."""

    takes_long = True

    def microbatch_pauses(self, step: Step, index: int) -> Found:
        code = step.microbatches[index].code
        leaves = pytree.tree_leaves(code.result) if code.finished else ()
        roots = [each for each in leaves if isinstance(each, Tensor) and each.requires_grad]
        if not step.windows.are_of_others(roots, index):
            return
        yield Finding(
            "The loss depends on a tensor of another microbatch, which a hook has put into a list,"
            " dict or object that microbatches share. They take turns at units. Let the hook assign"
            " a new container to an attribute of a module: `self.features = {**self.features, name:"
            " output}`. Or let training_step make the list, and hand it to hooks by a"
            " contextvars.ContextVar, of which each microbatch has its own."
        )


def guards_of(units: Sequence[Unit], writes: UserWrites) -> Guards:
    """Return the guards of a model."""
    return Guards([OwnWrites(writes), LateGradients(units), ForeignTensors()])
