"""Gives each microbatch its own values of what code stores on modules, in steps in turns.

``ModuleState`` does so for tensors. Steps whose code runs its backwards itself need it for all
attributes: ``self.count += 1`` and ``self.running = 0.9 * self.running + 0.1 * float(loss)`` have
effect once a step, and a loss that reads them finds the values of before the step in each
microbatch.

======================================  ===========================================================
value that a step stores                after the step
======================================  ===========================================================
a float, or a tensor without dimension  the mean over the samples of all ranks
tensors of the samples                  joined, as in every step (``module_state.py``)
anything else                           that of all microbatches; refused where they differ
what containers hold that are changed   the same rules (``shared_containers.py``)
iterators                               refused: each microbatch would advance them
======================================  ===========================================================
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lightning_cephalo.common.errors import UnitUseError
from lightning_cephalo.execution.module_state import ModuleState
from lightning_cephalo.execution.shared_containers import (
    MISSING as _MISSING,
)
from lightning_cephalo.execution.shared_containers import (
    SharedContainers,
    as_number,
)

WAY_OUT = "or use a plan with one microbatch per rank"

# what torch keeps there; parameters and buffers change their places in a step
_TORCHS = frozenset(vars(nn.Module())) | {"_flat_weights", "forward"}
_NAMED_ALIKE = (int, bool, str, type(None))

# how deep containers and objects are searched, and how many entries of one
_DEEPEST, _LONGEST = 4, 1000

Said = dict[str, tuple[str, float, float]]
"""Of each value that differs from before the step: its kind, mean over samples, and samples."""


class StepValues:
    """The attributes of a model's modules in a step.

    ::

        values.begin([3, 2])       # samples of this rank's microbatches
        values.resume(0)           # microbatch 0 finds its own values
        ...
        values.pause(0)            # the modules show the values of before the step again
        ...
        own = values.collect()     # what other ranks must know
        values.finish([own, ...])  # the same means on all ranks
        values.end()

    Args:
        module: The model.
        state: Its tensors.

    Attributes:
        read_once: Names of attributes that hooks read which run once for all microbatches.
    """

    def __init__(self, module: nn.Module, state: ModuleState) -> None:
        self._state = state
        self.read_once: frozenset[str] = frozenset()
        self._modules = list(module.modules())
        paths = {id(vars(inner)): path for path, inner in module.named_modules()}
        self._places = [(paths[id(names)], names) for names in state.places]
        self._paths = paths
        self._start: list[dict[str, Any]] = []
        self._ids: list[list[int]] = []
        self._containers = SharedContainers()
        self._shared: list[Tensor] = []
        self._modes: list[bool] = []
        self._values: list[dict[tuple[int, str], Any]] = []
        self._modes_of: list[list[bool]] = []
        self._samples: tuple[int, ...] = ()
        self._shown: int | None = None

    def begin(self, samples: Sequence[int]) -> None:
        """Begin a step with microbatches of these numbers of samples."""
        self._samples = tuple(samples)
        self._start = [dict(names) for _, names in self._places]
        self._ids = [[*map(id, start.values())] for start in self._start]
        self._shared = []
        self._containers.begin(len(samples))
        for (path, names), start in zip(self._places, self._start, strict=True):
            for name, value in start.items():
                if self._is_own(names, name):
                    self._look_into(_named(path, name), value)
        for names, name, values in self._state.stored():
            if all(value is values[0] for value in values):
                self._look_into(_named(self._paths.get(id(names), ""), name), values[0])
        self._modes = [module.training for module in self._modules]
        self._values = [{} for _ in samples]
        self._modes_of = [self._modes for _ in samples]
        self._shown = None

    def _look_into(self, name: str, value: Any, depth: int = 0) -> None:
        """Note the tensors and containers that all microbatches share."""
        if isinstance(value, Tensor):
            self._shared.append(value)
        elif isinstance(value, nn.Module):
            if depth:  # else it is a part of the model
                self._shared += [*value.parameters(), *value.buffers()]
        elif depth < _DEEPEST:
            held = self._containers.note(name, value)
            if isinstance(value, tuple):
                held = [(f"{name}[{at}]", each) for at, each in enumerate(value[:_LONGEST])]
            for inner, each in held:
                self._look_into(inner, each, depth + 1)

    @property
    def shared(self) -> Sequence[Tensor]:
        """The tensors that code may write in place, and that all microbatches share."""
        return self._shared

    # -- turns --------------------------------------------------------------------------------

    def resume(self, microbatch: int) -> None:
        """Show a microbatch's values."""
        self._shown = microbatch
        for (place, name), value in self._values[microbatch].items():
            _set(self._places[place][1], name, value)
        self._containers.resume(microbatch)
        self._show_modes(self._modes_of[microbatch])

    def pause(self, microbatch: int) -> None:
        """Keep a microbatch's values, and show those of before the step.

        Raises:
            UnitUseError: If the microbatch has changed what cannot be put back.
        """
        self._values[microbatch] = self._changed()
        self._hand_over()
        self._modes_of[microbatch] = [module.training for module in self._modules]
        self._show_start()
        changed = self._containers.pause(microbatch)
        if changed is not None:
            name, kind = changed
            raise UnitUseError(
                f"training_step changes {name!r} in place, a {kind}: with manual optimization and"
                " several microbatches per rank, each microbatch would do that once. Do it in"
                f" on_train_batch_start or on_train_batch_end, {WAY_OUT}."
            )

    def _hand_over(self) -> None:
        """Leave attributes to ``ModuleState`` that have come to hold tensors."""
        for microbatch, values in enumerate(self._values):
            for place, name in [*values]:
                names = self._places[place][1]
                if self._state.knows(names, name):
                    self._state.set_value(microbatch, names, name, values.pop((place, name)))

    def _changed(self) -> dict[tuple[int, str], Any]:
        found: dict[tuple[int, str], Any] = {}
        for place, (_, names) in enumerate(self._places):
            if [*map(id, names.values())] == self._ids[place]:
                continue
            start = self._start[place]
            for name in {**start, **names}:
                now = names.get(name, _MISSING)
                if now is not start.get(name, _MISSING) and self._is_own(names, name):
                    found[place, name] = now
        return found

    def _is_own(self, names: dict[str, Any], name: str) -> bool:
        return name not in _TORCHS and not self._state.knows(names, name)

    def _show_start(self) -> None:
        self._shown = None
        for place, (_, names) in enumerate(self._places):
            if [*map(id, names.values())] == self._ids[place]:
                continue
            start = self._start[place]
            for name in {**start, **names}:
                if self._is_own(names, name):
                    _set(names, name, start.get(name, _MISSING))
        self._show_modes(self._modes)

    def _show_modes(self, modes: Sequence[bool]) -> None:
        for module, mode in zip(self._modules, modes, strict=True):
            if module.training != mode:
                module.training = mode

    @contextmanager
    def unchanged(self) -> Iterator[None]:
        """Undo what units store in a ``with`` block in which a backward computes them again."""
        try:
            yield
        finally:
            self._show_start()
            self._containers.show_start()

    @contextmanager
    def for_all(self) -> Iterator[None]:
        """Give all microbatches what the running one stores in a ``with`` block."""
        before, modes = self._changed(), [module.training for module in self._modules]
        tensors, contents = self._state.now_known(), self._containers.shown()
        yield
        now = self._changed()
        for key in {**before, **now}:
            value = now.get(key, self._start[key[0]].get(key[1], _MISSING))
            if value is not before.get(key, self._start[key[0]].get(key[1], _MISSING)):
                for values in self._values:
                    values[key] = value
        after = [module.training for module in self._modules]
        for index, (old, new) in enumerate(zip(modes, after, strict=True)):
            if old != new:
                self._modes_of = [[*of[:index], new, *of[index + 1 :]] for of in self._modes_of]
        self._state.spread(tensors)
        name = self._containers.spread(contents, _is_same)
        if name is not None:
            raise UnitUseError(_different(name))

    # -- the end of a step --------------------------------------------------------------------

    def collect(self) -> Said:
        """Return what other ranks must know of this rank's values.

        Raises:
            UnitUseError: If microbatches leave different values.
        """
        said: Said = {}
        if any(modes != self._modes_of[0] for modes in self._modes_of):
            raise UnitUseError(_different("module.training"))
        keys = {key: None for values in self._values for key in values}
        for place, name in keys:
            full = _named(self._places[place][0], name)
            start = self._start[place].get(name, _MISSING)
            if self._state.knows(self._places[place][1], name):
                continue
            values = [own.get((place, name), start) for own in self._values]
            if any(isinstance(value, float) for value in values) and all(
                isinstance(value, int | float) and not isinstance(value, bool) for value in values
            ):
                said[full] = self._mean(values)
                self._check_hooks(full, values)
            elif any(not _is_same(value, values[0]) for value in values):
                raise UnitUseError(_different(full))
            else:
                kind = type(values[0])
                said[full] = (repr(values[0]) if kind in _NAMED_ALIKE else "", 0.0, 0.0)
        for full, numbers in self._tensors().items():
            said[full] = self._mean(numbers)
            self._check_hooks(full, numbers)
        for full, held in self._containers.leaves():
            if all(isinstance(value, float) or _is_number(value) for value in held):
                said[full] = self._mean([float(value) for value in held])
            elif any(not _is_same(value, held[0]) for value in held):
                raise UnitUseError(_different(full))
            else:
                said[full] = (repr(held[0]) if type(held[0]) in _NAMED_ALIKE else "", 0.0, 0.0)
        return said

    def _check_hooks(self, full: str, values: Sequence[Any]) -> None:
        """Raise if hooks have found another value than that of the whole batch.

        Raises:
            UnitUseError: The message names it and the way out.
        """
        if full.rpartition(".")[2] in self.read_once and any(v != values[0] for v in values):
            raise UnitUseError(
                f"A hook that runs once for all microbatches (on_after_backward,"
                f" on_before_optimizer_step, ...) reads {full!r}, which training_step sets to"
                " another value in each microbatch: it finds that of the first one. Take it in"
                f" on_train_batch_end, such as from trainer.callback_metrics, {WAY_OUT}."
            )

    def _mean(self, values: Sequence[Any]) -> tuple[str, float, float]:
        weights = [float(size or 1) for size in self._samples]
        if all(value == values[0] for value in values):
            return "mean", values[0], sum(weights)
        pairs = zip(values, weights, strict=True)
        mean = sum(float(value) * weight for value, weight in pairs) / sum(weights)
        kinds = {type(value) for value in values if isinstance(value, float)}
        return "mean", kinds.pop()(mean) if len(kinds) == 1 else mean, sum(weights)

    def _tensors(self) -> Mapping[str, Sequence[Any]]:
        """Return the numbers among stored tensors, which are the same on all microbatches."""
        found: dict[str, Sequence[Any]] = {}
        for names, name, values in self._state.stored():
            full = _named(self._paths.get(id(names), ""), name)
            if all(isinstance(v, float) or _is_number(v) for v in values):
                found[full] = [float(value) for value in values]
            elif not self._state.are_of_samples(values) and any(
                not _is_same(value, values[0]) for value in values
            ):
                raise UnitUseError(
                    _different(full)
                    + " A buffer (register_buffer) gets the mean over the samples instead."
                )
        return found

    def finish(self, said: Sequence[Said]) -> None:
        """Show the values of the whole step.

        Args:
            said: :meth:`collect` of every rank.

        Raises:
            UnitUseError: On all ranks, if ranks leave different values.
        """
        rows: dict[str, list[tuple[str, float, float]]] = {}
        for of_rank in said:
            for full, row in of_rank.items():
                rows.setdefault(full, []).append(row)
        for full, of_ranks in rows.items():
            if len({kind for kind, _, _ in of_ranks}) > 1:
                raise UnitUseError(_different(full))
            if of_ranks[0][0] == "mean":
                self._check_hooks(full, [mean for _, mean, _ in of_ranks])
        keys = {key: None for values in self._values for key in values}
        for place, name in keys:
            path, names = self._places[place]
            if self._state.knows(names, name):
                continue
            of_ranks = rows[_named(path, name)]
            value = self._values[0].get((place, name), self._start[place].get(name, _MISSING))
            _set(names, name, _mean_of(of_ranks) if of_ranks[0][0] == "mean" else value)
        if self._modes_of:
            self._show_modes(self._modes_of[0])
        for names, name, values in self._state.stored():
            of_ranks = rows.get(_named(self._paths.get(id(names), ""), name), [])
            if of_ranks and of_ranks[0][0] == "mean":
                like = next((value for value in values if isinstance(value, Tensor)), None)
                self._state.share(names, name, as_number(like, _mean_of(of_ranks)))
        self._containers.finish(
            {full: _mean_of(row) for full, row in rows.items() if row[0][0] == "mean"}
        )
        self._start = []

    def abandon(self) -> None:
        """Show the values of before the step, after a failure."""
        if self._start:
            self._show_start()
            self._containers.show_start()
            self._start = []
        self._containers.abandon()
        self._values, self._shared = [], []


def _mean_of(row: Sequence[tuple[str, float, float]]) -> float:
    means = [mean for _, mean, _ in row]
    if all(mean == means[0] for mean in means):
        return means[0]
    return sum(mean * weight for _, mean, weight in row) / sum(weight for _, _, weight in row)


def _set(names: dict[str, Any], name: str, value: Any) -> None:
    if value is _MISSING:
        names.pop(name, None)
    elif names.get(name, _MISSING) is not value:
        names[name] = value


def _named(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _is_number(value: Any) -> bool:
    return isinstance(value, Tensor) and not value.ndim and value.is_floating_point()


def _is_same(one: Any, other: Any) -> bool:
    """Whether two values are equal, to the last bit."""
    if one is other:
        return True
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        return (
            isinstance(one, Tensor)
            and isinstance(other, Tensor)
            and one.shape == other.shape
            and one.dtype == other.dtype
            and bool(torch.equal(one, other))
        )
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        pairs = zip(one, other, strict=False)
        return (
            len(one) == len(other)
            and all(key is its or (_is_name(key) and key == its) for key, its in pairs)
            and all(_is_same(value, other[key]) for key, value in one.items())
        )
    if isinstance(one, np.ndarray):
        return one.shape == other.shape and one.tobytes() == other.tobytes()
    if isinstance(one, list | tuple | deque):
        return len(one) == len(other) and all(map(_is_same, one, other))
    try:
        return bool(one == other)
    except Exception:  # an object of the user's that cannot be compared
        return False


def _is_name(key: Any) -> bool:
    return isinstance(key, str | int)


def _different(name: str) -> str:
    return (
        f"Microbatches leave different values in {name!r}. With manual optimization and several"
        " microbatches per rank, training_step may store floats, which become the mean over the"
        " samples, tensors with a row for each sample, and what is the same in all microbatches."
        f" Write other values in on_train_batch_end, {WAY_OUT}."
    )
