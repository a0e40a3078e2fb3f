"""Updates on the host before the norm that clips gradients is known; nothing changes until it is.

[Note: speculated updates]
Clipping by norm multiplies gradients by a factor that is known last. It is exactly 1 where nothing
is clipped, so that an update with the gradients as they are is the clipped update, bit by bit. The
host makes that update while the backward still runs. It leaves all that it may need again as it is:

- Old parameters are on the device. The host's own copy of them takes the new ones.
- Old state stays where it is. It is copied to a second set of memory, which takes the new state.
- Gradients are only read: torch's fused optimizers do not write to them.

When the optimizer's step comes, all that the update has assumed is compared: the factor, the
options of the parameter groups, the parameters, their state, and which of them have gradients. If
it holds, parameters go to the device, and both sets change places. If not, or if the update has
failed, it is forgotten, and the host updates as if it had never begun. So no error is made here
that late updates do not make, and a step that is repeated finds all as before.

An update that was in vain keeps the processors busy while the right one waits. So a step assumes
something only behind steps that were not clipped: one, and twice as many behind each error,
whatever has changed.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from lightning_cephalo.adapters.optimizer import has_rows
from lightning_cephalo.adapters.unchanged import (
    changed_option,
    entries_unchanged,
    kept,
    kept_options,
)
from lightning_cephalo.sharding.placement import local_part
from lightning_cephalo.sharding.spent_gradients import sent_gradient

# Steps that are not clipped, behind which one assumes something after many errors.
_MOST_PATIENCE = 64

State = defaultdict[Tensor, dict[str, Any]]


@dataclass
class SecondState:
    """State of parameters as an update before the norm leaves it, beside that of before.

    ::

        second = SecondState(memory_for)
        state[rows] = second.of(parameter, optimizer.state[parameter])
        second.fill()                    # in the thread that updates
        ...
        second.change_places()           # once it is known that the update holds

    Args:
        memory_for: Returns memory on the host for rows of a parameter's state, by the parameter,
            the entry's name and the rows; the same one for the same parameter and name.
    """

    memory_for: Callable[[Tensor, str, Tensor], Tensor]
    _rows: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    _numbers: list[tuple[Tensor, Tensor]] = field(default_factory=list)

    def of(self, parameter: Tensor, entries: dict[str, Any]) -> dict[str, Any]:
        """Return the entries of a parameter's state for the update, whose memory is its own."""
        found: dict[str, Any] = {}
        for name, value in entries.items():
            if not isinstance(value, Tensor):
                found[name] = value
                continue
            own = local_part(value)
            if has_rows(name, parameter, own):
                found[name] = self.memory_for(parameter, name, own)
                self._rows.append((own, found[name]))
            else:
                found[name] = own.cpu().clone()
                self._numbers.append((own, found[name]))
        return found

    @property
    def nbytes(self) -> int:
        """Bytes of the rows of state."""
        return sum(rows.nbytes for rows, _ in self._rows)

    def fill(self) -> None:
        """Copy old state to the memory of the new."""
        for rows, second in self._rows:
            second.copy_(rows)

    def change_places(self) -> dict[int, Tensor]:
        """Let the tensors of before hold the new state; return them by the ids of the others."""
        for rows, second in self._rows:
            rows.data, second.data = second.data, rows.data
        found = {id(second): rows for rows, second in self._rows}
        for number, second in self._numbers:
            if number.device == second.device:
                number.copy_(second)
                found[id(second)] = number
        return found


@dataclass(frozen=True)
class Assumed:
    """What an update before the norm has assumed, to be compared when the norm is known.

    Attributes:
        optimizer: What updates.
        members: By parameter group, the parameters.
        options: By parameter group, its options; of a group without members, none.
        state: By parameter, its state.
        versions: By parameter, the version of its rows.
    """

    optimizer: Optimizer
    members: tuple[tuple[Tensor, ...], ...]
    options: tuple[dict[str, Any], ...]
    state: tuple[dict[str, Any], ...]
    versions: tuple[int, ...]

    @classmethod
    def of(cls, optimizer: Optimizer, chosen: Sequence[Sequence[Tensor]]) -> Assumed:
        """Return what is true now of parameters, by parameter group."""
        parameters = [parameter for group in chosen for parameter in group]
        pairs = zip(optimizer.param_groups, chosen, strict=True)
        return cls(
            optimizer,
            tuple(tuple(group) for group in chosen),
            tuple(kept_options(group) if own else {} for group, own in pairs),
            tuple(
                {name: kept(value) for name, value in optimizer.state.get(parameter, {}).items()}
                for parameter in parameters
            ),
            _versions_of(parameters),
        )

    @property
    def parameters(self) -> list[Tensor]:
        """All parameters."""
        return [parameter for group in self.members for parameter in group]

    def holds(self, optimizer: Optimizer, chosen: Sequence[Sequence[Tensor]]) -> bool:
        """Return whether the optimizer's step makes the same update of these parameters.

        Args:
            optimizer: The optimizer whose step it is.
            chosen: By parameter group, parameters with gradients, of which it may be a part.
        """
        groups, parameters = optimizer.param_groups, self.parameters
        if optimizer is not self.optimizer or not len(chosen) == len(self.members) == len(groups):
            return False
        for group, own, given, options in zip(
            groups, self.members, chosen, self.options, strict=True
        ):
            if not {*map(id, own)} <= {*map(id, given)}:
                return False
            if own and changed_option(group, options):
                return False
        for parameter in parameters:
            sent = sent_gradient(parameter.grad)
            if sent is None or sent.factor != 1.0:
                return False
        if _versions_of(parameters) != self.versions:
            return False
        now = (optimizer.state.get(parameter, {}) for parameter in parameters)
        return all(map(entries_unchanged, now, self.state))


def _versions_of(parameters: Sequence[Tensor]) -> tuple[int, ...]:
    return tuple(local_part(parameter)._version for parameter in parameters)


class WhetherItPays:
    """Tells whether a step should assume that nothing is clipped, from the steps before.

    ::

        pays = WhetherItPays()
        pays.begin_step()
        pays.now               # False: no step was seen
        pays.learn(False)      # nothing is clipped
        pays.begin_step()
        pays.now               # True
    """

    def __init__(self) -> None:
        self._unclipped, self._patience = 0, 1
        self._has_begun = self._was_in_vain = False
        self._is_clipped: bool | None = None

    @property
    def now(self) -> bool:
        """Whether the step that has begun should."""
        return self._unclipped >= self._patience

    def begun(self) -> None:
        """Say that an update of this step has begun."""
        self._has_begun = True

    def learn(self, is_clipped: bool) -> None:
        """Say whether gradients of this step were clipped."""
        self._is_clipped = is_clipped

    def was_in_vain(self) -> None:
        """Say that an update of this step does not hold, whatever the factor."""
        self._was_in_vain = True

    def begin_step(self) -> None:
        """Begin the next step; one that was repeated has told nothing."""
        if self._is_clipped is not None and (self._is_clipped or self._was_in_vain):
            self._unclipped = 0
            if self._has_begun:
                self._patience = min(2 * self._patience, _MOST_PATIENCE)
        elif self._is_clipped is False:
            self._unclipped += 1
            if self._has_begun:
                self._patience = max(1, self._patience // 2)
        self._is_clipped, self._has_begun, self._was_in_vain = None, False, False


class Guess:
    """An update of a unit that has begun before the norm is known.

    Args:
        assumed: What it assumes.
        second: The state that it makes.
        optimizer: What updates rows on the host.
        to_device: Starts the copies of new rows to the device, behind what is given.
    """

    def __init__(
        self,
        assumed: Assumed,
        second: SecondState,
        optimizer: Optimizer,
        to_device: Callable[[Sequence[Any]], list[Any]],
    ) -> None:
        self.assumed, self.second, self.optimizer = assumed, second, optimizer
        self._to_device = to_device
        self._lock = threading.Lock()
        self._is_void = self._is_confirmed = False
        self._done: Sequence[Any] | None = None
        self.future: Future[list[Any]] | None = None

    def work(self, step: Callable[[], None]) -> None:
        """Update, in the host's thread."""
        if not self._is_void:
            self.second.fill()
            step()

    def then(self, done: Sequence[Any]) -> list[Any]:
        """Copy new rows to the device if it is known that the update holds; behind the work."""
        with self._lock:
            self._done = done
            return self._to_device(done) if self._is_confirmed and not self._is_void else []

    @property
    def has_failed(self) -> bool:
        """Whether the update is known to have raised an error."""
        assert self.future is not None
        return self.future.done() and self.future.exception() is not None

    def confirm(self) -> Future[list[Any]]:
        """Say that the update holds; return the copies of new rows, when they have begun."""
        assert self.future is not None
        with self._lock:
            self._is_confirmed = True
            if self._done is None:
                return self.future
            started: Future[list[Any]] = Future()
            started.set_result(self._to_device(self._done))
            return started

    def forget(self) -> None:
        """Say that the update does not hold: it does not begin, if it has not."""
        self._is_void = True

    def wait(self) -> None:
        """Wait until the host's thread is done with it."""
        assert self.future is not None
        self.future.exception()
