"""Gives each microbatch its own contents of the containers that modules hold, in steps in turns.

Code of a step fills a config, appends to a history, or raises a counter in an object. Each
microbatch starts from the contents of before the step. What all leave alike has effect once.
Numbers in them (a history of losses) become the mean over the samples, as those of attributes do.

Iterators cannot be put back: a step that advances one is refused. Generators of random numbers stay
where each microbatch leaves them, with a warning.
"""

from __future__ import annotations

import gc
import operator
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import compress, count, cycle, islice, repeat
from types import BuiltinFunctionType, FunctionType, GeneratorType, MethodType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_cephalo.data.randomness import GENERATOR_TYPES, mark_of

MISSING = object()

# longer ones are compared by a part, and those beyond cannot be put back
_LONGEST, _MOST_ITEMS = 1000, 1_000_000
_DEEPEST = 4  # iterators that take from iterators
_LOOKS = 3  # steps in which generators are looked at
_LARGEST_ARRAY = 100_000
_FUNCTIONS = (FunctionType, BuiltinFunctionType, MethodType, type)
# loggers, and configs that models fill in their first forward: each microbatch may
_WITH_CACHES = frozenset(["logging", "transformers"])
_NOT_USERS = _WITH_CACHES | frozenset(["torch", "torchmetrics", "functools", "builtins", "enum"])
_NOT_USERS |= {"lightning", "pytorch_lightning", "lightning_cephalo"}


def is_container(value: Any) -> bool:
    """Whether a value may change in place: a container, an array, or an object of the user's."""
    if isinstance(value, list | dict | set | deque | np.ndarray):
        return True
    owner, *parents = [kind.__module__.split(".")[0] for kind in type(value).__mro__]
    if owner in _NOT_USERS or not _WITH_CACHES.isdisjoint(parents):
        return False
    return hasattr(value, "__dict__") and not isinstance(value, _FUNCTIONS)


def some_of(value: Any) -> list[Any]:
    """Return what a container holds; of long ones their length and some of it."""
    if isinstance(value, np.ndarray):
        step = max(1, value.size // _LARGEST_ARRAY)
        return [value.shape, value.dtype, *([value.flat[::step].tobytes()] if value.size else [])]
    if not isinstance(value, list | dict | set | deque):
        value = vars(value)
    if isinstance(value, dict):
        return [*_some(value), *_some(value.values())]
    return _some(value)


@dataclass
class _Container:
    """A container that all microbatches share.

    Attributes:
        name: Where it is.
        value: The container.
        part: Some of what it holds when a microbatch begins.
        start: All of it; None: it is too large to be put back.
        of: By microbatch, what those have left that changed it.
    """

    name: str
    value: Any
    part: list[Any]
    start: Any
    of: dict[int, Any] = field(default_factory=dict)

    @property
    def has_changed(self) -> bool:
        now = some_of(self.value)
        if isinstance(self.value, np.ndarray):
            return now != self.part
        if isinstance(self.value, set):
            held = [one for one in self.part if not isinstance(one, _Length)]
            return len(now) != len(self.part) or any(one not in self.value for one in held)
        return len(now) != len(self.part) or not all(
            one is other or (isinstance(one, _Length) and one == other)
            for one, other in zip(now, self.part, strict=True)
        )


class SharedContainers:
    """The containers that modules hold, in a step.

    ::

        containers.begin(2)                 # microbatches
        containers.note("history", module.history)
        containers.resume(0)                # microbatch 0 finds what it has left
        ...
        changed = containers.pause(0)       # all show the contents of before the step again
        ...
        leaves = containers.leaves()        # what differs from before the step
        containers.finish(means)
    """

    def __init__(self) -> None:
        self._held: list[_Container] = []
        self._iterators: list[tuple[str, Any, Any]] = []
        self._generators: list[tuple[str, Any, Any]] = []
        self._looks = _LOOKS
        self._count = 0
        self._seen: set[int] = set()

    def begin(self, count: int) -> None:
        """Begin a step with so many microbatches."""
        self._held, self._iterators, self._count, self._seen = [], [], count, set()
        self._generators = []
        self._looks -= 1

    def note(self, name: str, value: Any) -> Iterable[tuple[str, Any]]:
        """Note a container or an iterator; return some of what it holds, with names."""
        if id(value) in self._seen:
            return ()
        if isinstance(value, Iterator):
            self._seen.add(id(value))
            self._iterators.append((name, value, position_of(value)))
        if isinstance(value, GENERATOR_TYPES) and self._looks >= 0:
            self._seen.add(id(value))
            self._generators.append((name, value, mark_of(value)))
        if not is_container(value):
            return ()
        self._seen.add(id(value))
        held = _Container(name, value, some_of(value), _all_of(value))
        self._held.append(held)
        if isinstance(value, np.ndarray):
            return ()
        inside = value if isinstance(value, list | dict | set | deque) else vars(value)
        pairs = inside.items() if isinstance(inside, dict) else enumerate(inside)
        return [(_named(held, key), each) for key, each in islice(pairs, _LONGEST)]

    def resume(self, microbatch: int) -> None:
        """Show what a microbatch has left."""
        for each in self._held:
            if microbatch in each.of:
                _refill(each.value, each.of[microbatch])

    def pause(self, microbatch: int) -> tuple[str, str] | None:
        """Keep what a microbatch leaves, and show the contents of before the step.

        Returns:
            Name and type of a value that cannot be put back; None: all can be.
        """
        for each in self._held:
            if each.has_changed:
                if each.start is None:
                    return each.name, type(each.value).__name__
                each.of[microbatch] = _all_of(each.value)
                _refill(each.value, each.start)
            else:
                each.of.pop(microbatch, None)
        for name, iterator, position in self._iterators:
            if position_of(iterator) != position:
                return name, type(iterator).__name__
        drawn = [n for n, each, s in self._generators if mark_of(each) != s]
        if drawn:
            self._generators, self._looks = [], 0
            _warn_of_generators(drawn)
        return None

    def shown(self) -> list[Any]:
        """Return all contents that show right now; for :meth:`spread`."""
        return [_all_of(each.value) if each.start is not None else None for each in self._held]

    def spread(self, before: Sequence[Any], same: Callable[[Any, Any], bool]) -> str | None:
        """Give all microbatches what the running one has changed since :meth:`shown`.

        Args:
            before: What was shown then.
            same: Whether two contents are the same.

        Returns:
            The name of a container whose microbatches had left different contents; None: all of
            them have the change.
        """
        for each, earlier in zip(self._held, before, strict=True):
            now = _all_of(each.value) if each.start is not None else None
            if each.start is None:
                each.part = some_of(each.value)
            elif not _is_unchanged(earlier, now):
                others = [each.of.get(index, each.start) for index in range(1, self._count)]
                if any(not same(left, earlier) for left in others):
                    return each.name
                each.of = dict.fromkeys(range(self._count), now)
        self._iterators = [(name, it, position_of(it)) for name, it, _ in self._iterators]
        return None

    def leaves(self) -> Iterator[tuple[str, Sequence[Any]]]:
        """Yield what differs from before the step: its name, and the value of each microbatch.

        Where containers have other keys or lengths, these are yielded.
        """
        for each in self._held:
            if not each.of:
                continue
            contents = [each.of.get(index, each.start) for index in range(self._count)]
            if not isinstance(each.start, list | dict):
                yield each.name, contents
                continue
            yield f"len({each.name})", [len(content) for content in contents]
            if not _have_same_keys(contents):
                yield each.name, contents
                continue
            for key in _changed_keys(each.start, contents):
                yield _named(each, key), [content[key] for content in contents]

    def finish(self, means: Mapping[str, float]) -> None:
        """Show the contents of the whole step.

        Args:
            means: Of numbers among them, the mean over all samples.
        """
        for each in self._held:
            if not each.of:
                continue
            content = each.of.get(0, each.start)
            if isinstance(content, list | dict):
                others = [each.of.get(index, each.start) for index in range(self._count)]
                for key in _changed_keys(each.start, others):
                    name = _named(each, key)
                    if name in means:
                        content[key] = as_number(content[key], means[name])
            _refill(each.value, content)
        self.abandon()

    def show_start(self) -> None:
        """Show the contents of before the step, after a failure."""
        for each in self._held:
            if each.start is not None and each.has_changed:
                _refill(each.value, each.start)

    def abandon(self) -> None:
        """Let go of everything."""
        self._held, self._iterators = [], []


def as_number(like: Any, mean: float) -> Any:
    """Return a mean as a number of the same kind as another."""
    if isinstance(like, Tensor):
        return torch.full_like(like, mean, requires_grad=False)
    return type(like)(mean) if isinstance(like, float) else mean


def _named(each: _Container, key: Any) -> str:
    is_object = not isinstance(each.value, list | dict | deque)
    return f"{each.name}.{key}" if is_object else f"{each.name}[{key!r}]"


def _items(content: Any) -> dict[Any, Any]:
    return content if isinstance(content, dict) else dict(enumerate(content))


def _have_same_keys(contents: Sequence[Any]) -> bool:
    first = contents[0]
    if isinstance(first, dict):
        return all(list(other) == list(first) for other in contents)
    return all(len(other) == len(first) for other in contents)


def _changed_keys(start: Any, contents: Sequence[Any]) -> list[Any]:
    """Return the keys or places where any of the contents is not as in the beginning."""
    if isinstance(start, dict):
        first = contents[0]
        return [k for k in first if any(own[k] is not start.get(k, MISSING) for own in contents)]
    found = set(range(len(start), len(contents[0])))
    for content in contents:
        found.update(compress(count(), map(operator.is_not, content, start)))
    return sorted(found)


def _all_of(value: Any) -> Any:
    """Return a copy of what a container holds; None if it is too large."""
    if isinstance(value, np.ndarray):
        return value.copy() if value.size < 2 * _LARGEST_ARRAY and value.dtype != object else None
    if not isinstance(value, list | dict | set | deque):
        value = vars(value)
    if len(value) > _MOST_ITEMS:
        return None
    if isinstance(value, dict):
        return dict(value)
    return set(value) if isinstance(value, set) else list(value)


def _refill(value: Any, content: Any) -> None:
    if isinstance(value, np.ndarray):
        value[...] = content
        return
    if isinstance(value, list):
        value[:] = content
        return
    held = value if isinstance(value, dict | set | deque) else vars(value)
    held.clear()
    if isinstance(held, deque):
        held.extend(content)
    else:
        held.update(content)


def _is_unchanged(one: Any, other: Any) -> bool:
    if isinstance(one, np.ndarray):
        return one.tobytes() == other.tobytes()
    if isinstance(one, set):
        return bool(one == other)
    mine, its = _items(one), _items(other)
    return list(mine) == list(its) and all(value is its[key] for key, value in mine.items())


def _warn_of_generators(names: Sequence[str]) -> None:
    warnings.warn(
        f"training_step draws from {', '.join(map(repr, names))}, random generators that the module"
        " holds. Each microbatch does, on each rank, so that training will differ from one device:"
        " ranks draw the same values for other samples. Draw for the whole batch in"
        " on_train_batch_start, let the dataset draw for each sample, or use global generators.",
        stacklevel=2,
    )


def position_of(iterator: Any, depth: int = 0) -> Any:
    """Return how far an iterator is, as far as Python says."""
    if isinstance(iterator, GeneratorType):
        frame = iterator.gi_frame
        return None if frame is None else (frame.f_lasti, [*map(id, frame.f_locals.values())])
    if isinstance(iterator, count | repeat):
        return repr(iterator)
    yielded = getattr(iterator, "_num_yielded", None)  # torch's iterators of DataLoaders
    hint = operator.length_hint(iterator, -1) if yielded is None else yielded
    if hint >= 0 or depth == _DEEPEST:
        return hint
    held = list(getattr(iterator, "__dict__", {}).values())
    return [*map(id, held), *_positions_inside(iterator, depth)]


def _positions_inside(iterator: Any, depth: int) -> list[Any]:
    """Return how far the iterators are from which others take (``zip``, ``map``, ``cycle``)."""
    found: list[Any] = []
    inside = gc.get_referents(iterator)
    if isinstance(iterator, cycle):
        # Python up to 3.13 tells the place in later rounds; the first one shows in the length
        with suppress(TypeError), warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            inside = [*inside, *iterator.__reduce__()[1]]
        found = [len(each) for each in inside if type(each) is list]
    for each in inside:
        inner = each if isinstance(each, tuple) else (each,)
        found += [position_of(one, depth + 1) for one in inner if isinstance(one, Iterator)]
    return found


def _some(values: Any) -> list[Any]:
    if len(values) <= _LONGEST:
        return list(values)
    if isinstance(values, list):
        part = values[:: len(values) // _LONGEST]
    elif isinstance(values, set):
        part = list(islice(values, _LONGEST))
    else:
        part = list(islice(values, _LONGEST // 2))
    last = [] if isinstance(values, set) else [*islice(reversed(values), _LONGEST // 2)]
    return [_Length(len(values)), *part, *last]


class _Length(int):
    """A length, which is compared by value."""

    __slots__ = ()
