"""Finds out what an optimizer's update of one element depends on.

Torch's own optimizers are known. A copy of another one updates a few small random parameters: all
together, and in two parts. If the results differ, an update depends on other parameters, too. A
trial never finds by itself that an update is element-wise, as many optimizers factor or quantise
only tensors above some size. Users say so with ``Planner(elementwise=[...])``; a trial contradicts
what is plainly wrong.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

from lightning_cephalo.adapters.stepping import copy_of, step_without_hooks

# Steps of a trial: more than the periods of common slow updates (5, 6 and 10).
_STEPS = 12
# Parameters of a trial, and of one kind in one group.
_MOST, _OF_A_KIND = 16, 2
# Moments of Adam.
MOMENTS = 2
# A difference, relative to the largest change, below which results count as equal: batched kernels
# sum in another order.
_ALIKE = 1e-3
_SHAPES = ((6, 4, 3, 2, 2), (5, 7, 2, 3, 1))


class Scope(Enum):
    """What the update of one element of a parameter depends on."""

    ELEMENT = "element"
    PARAMETER = "parameter"


_KNOWN: dict[type[Optimizer], Scope] = {
    **dict.fromkeys(
        (
            torch.optim.SGD,
            torch.optim.Adam,
            torch.optim.AdamW,
            torch.optim.Adamax,
            torch.optim.NAdam,
            torch.optim.RAdam,
            torch.optim.RMSprop,
            torch.optim.Adagrad,
            torch.optim.Adadelta,
            torch.optim.ASGD,
            torch.optim.Rprop,
        ),
        Scope.ELEMENT,
    ),
    torch.optim.Adafactor: Scope.PARAMETER,
}
if hasattr(torch.optim, "Muon"):  # from torch 2.9 on
    _KNOWN[torch.optim.Muon] = Scope.PARAMETER

# Element-wise in the versions of docs/optimizers.md; a trial checks that they still are.
_ELEMENT_WISE_PACKAGES = {
    ("adabelief_pytorch", "AdaBelief"),
    ("lion_pytorch", "Lion"),
    ("schedulefree", "AdamWScheduleFree"),
    ("schedulefree", "RAdamScheduleFree"),
    ("schedulefree", "SGDScheduleFree"),
}


def known_scope(optimizer: Optimizer) -> Scope | None:
    """Return the scope of torch's own optimizers; None for others, and for subclasses."""
    return _KNOWN.get(type(optimizer))


def not_element_wise(optimizer: Optimizer) -> str:
    """Return why an optimizer is none of torch's element-wise ones; empty: it is."""
    if known_scope(optimizer) is Scope.ELEMENT:
        return ""
    return f"{type(optimizer).__name__} is none of torch's element-wise optimizers"


def parameters_of(optimizer: Optimizer) -> list[Any]:
    """Return the parameters of all groups of an optimizer."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def is_listed(optimizer: Optimizer) -> bool:
    """Return whether the optimizer is one of a package whose updates were found element-wise."""
    kind = type(optimizer)
    return (kind.__module__.partition(".")[0], kind.__name__) in _ELEMENT_WISE_PACKAGES


def is_named(optimizer: Optimizer, elementwise: Sequence[type[Optimizer] | str]) -> bool:
    """Return whether the user names the optimizer's class, or one that it is made from."""
    return any(
        kind in elementwise or kind.__name__ in elementwise for kind in type(optimizer).__mro__
    )


def parameters_elsewhere(optimizer: Optimizer) -> list[str]:
    """Return the attributes that hold parameters, modules or other optimizers."""
    own = set(map(id, parameters_of(optimizer)))
    lists = {id(group["params"]) for group in optimizer.param_groups}

    def holds(value: Any) -> bool:
        if id(value) in lists:  # the same list is exchanged together with the group's
            return False
        leaves: Iterable[Any] = pytree.tree_leaves(value)
        if isinstance(value, Mapping):
            leaves = [*leaves, *value]
        return any(id(leaf) in own or isinstance(leaf, Optimizer | nn.Module) for leaf in leaves)

    attributes = vars(optimizer).items()
    return [
        name for name, value in attributes
        if name not in ("state", "param_groups", "defaults") and holds(value)
    ]  # fmt: skip


# -- trials ---------------------------------------------------------------------------------------

_Place = tuple[int, int]  # a parameter's group, and its index there


@dataclass(frozen=True)
class _Piece:
    """A parameter of a trial, or some of its rows: where it starts, and where gradients pull it."""

    start: Tensor
    target: Tensor

    def rows(self, rows: slice) -> _Piece:
        # every rank has all of a 0-d parameter
        return _Piece(self.start[rows], self.target[rows]) if self.start.ndim else self


@dataclass(frozen=True)
class Trial:
    """The result of a trial.

    Attributes:
        why: Why updates do not run on rows, or on single parameters; empty: they do.
        moves_first: Whether the step changes parameters before it calls the closure.
        draws: Whether it draws random numbers.
        ran: Whether copies could be tried to the end.
    """

    why: str = ""
    moves_first: bool = False
    draws: bool = False
    ran: bool = True


def try_out(optimizer: Optimizer, *, by_rows: bool) -> Trial:
    """Run a few steps of copies of the optimizer on small random parameters, whole and in parts.

    ``by_rows``: the parts are rows of all parameters, not whole ones. Nothing is communicated, and
    nothing stays. It runs on the CPU, so that ranks with different devices find the same.
    """
    if optimizer.state:
        return Trial("it has state already, so that no copy of it can be tried", ran=False)
    with torch.random.fork_rng(devices=[]):
        try:
            return _trial(optimizer, _pieces(optimizer), by_rows)
        except Exception as failure:
            return Trial(f"a trial raised {type(failure).__name__}: {failure}", ran=False)


def state_bytes_per_element(optimizer: Optimizer) -> list[int]:
    """Return the bytes of state per element of a parameter, by parameter group.

    A copy of the optimizer updates one small parameter of each group. 8 for Adam in fp32, and as
    with Adam if no copy can tell: updates are not element-wise, or options are for devices only.
    """
    if known_scope(optimizer) is Scope.ELEMENT or is_listed(optimizer):
        with suppress(Exception), torch.random.fork_rng(devices=[]):
            return _tried_bytes(optimizer)
    first = [group["params"][:1] for group in optimizer.param_groups]
    return [sum(MOMENTS * p.element_size() for p in each) for each in first]


def _tried_bytes(optimizer: Optimizer) -> list[int]:
    pieces = {}
    for g, group in enumerate(optimizer.param_groups):
        if group["params"]:
            dtype = group["params"][0].dtype
            pieces[g, 0] = _Piece(*(torch.full((2, 2), value, dtype=dtype) for value in (0.0, 1.0)))
    # torch's own make all of their state in the first step
    run = _run(optimizer, pieces, _STEPS if known_scope(optimizer) is None else 1)
    found = [0] * len(optimizer.param_groups)
    for (g, _), entries in run.state.items():
        rows = [v for v in entries.values() if isinstance(v, Tensor) and v.shape == (2, 2)]
        found[g] = sum(row.element_size() for row in rows)
    return found


def _trial(optimizer: Optimizer, pieces: Mapping[_Place, _Piece], by_rows: bool) -> Trial:
    before = torch.get_rng_state()
    whole = _run(optimizer, pieces)
    draws = not torch.equal(before, torch.get_rng_state())
    found = partial(Trial, moves_first=whole.moves_first, draws=draws)
    if whole.evaluations > 1:
        return found("it evaluates its closure several times a step")
    if by_rows:
        cuts = (slice(2), slice(2, None))
        parts = [{place: each.rows(rows) for place, each in pieces.items()} for rows in cuts]
    else:
        order = list(pieces)
        parts = [{place: pieces[place] for place in order[first::2]} for first in (0, 1)]
    # of another loss: ranks compute other ones
    runs = [_run(optimizer, part, loss=3.0) for part in parts if part]
    return found(_difference(runs, whole, pieces, by_rows))


def _pieces(optimizer: Optimizer) -> dict[_Place, _Piece]:
    """Return a small random tensor for some of the parameters of every group."""
    generator = torch.Generator().manual_seed(7)
    counts: dict[tuple[str, int], int] = {}
    found: dict[_Place, _Piece] = {}
    for g, group in enumerate(optimizer.param_groups):
        options = repr({k: v for k, v in group.items() if k not in ("params", "lr", "initial_lr")})
        for i, parameter in enumerate(group["params"]):
            kind = (options, parameter.ndim)
            count = counts.get(kind, 0)
            if count < _OF_A_KIND and len(found) < _MOST and parameter.ndim <= 5:
                counts[kind] = count + 1
                shape = _SHAPES[count][: parameter.ndim]
                start, target = (torch.randn(shape, generator=generator) for _ in range(2))
                found[g, i] = _Piece(start.to(parameter.dtype), target.to(parameter.dtype))
    return found


@dataclass
class _Run:
    """What a copy has made of its parameters: values after every step, and state."""

    values: dict[_Place, list[Tensor]] = field(default_factory=dict)
    state: dict[_Place, Any] = field(default_factory=dict)
    moves_first: bool = False
    evaluations: int = 0


def _run(
    optimizer: Optimizer, pieces: Mapping[_Place, _Piece], steps: int = _STEPS, loss: float = 1.0
) -> _Run:
    """Let a copy of the optimizer update parameters by gradients that pull them to targets."""
    held: dict[_Place, nn.Parameter] = {}
    members: list[list[Tensor]] = [[] for _ in optimizer.param_groups]
    for (g, i), piece in pieces.items():
        held[g, i] = nn.Parameter(piece.start.clone())
        held[g, i].__dict__.update(optimizer.param_groups[g]["params"][i].__dict__)
        members[g].append(held[g, i])
    own: Any = copy_of(optimizer, members, on_host=True)
    if callable(getattr(own, "train", None)):
        own.train()
    run = _Run()
    for step in range(steps):
        last = {place: tensor.detach().clone() for place, tensor in held.items()}
        evaluations = 0

        def closure(step: int = step, last: Mapping[_Place, Tensor] = last) -> Tensor:
            nonlocal evaluations
            if not evaluations:
                run.moves_first |= not all(
                    torch.equal(tensor.nan_to_num(), last[place].nan_to_num())
                    for place, tensor in held.items()
                )
            evaluations += 1
            for place, tensor in held.items():
                # gradients of many sizes, so that clipping by a norm of all becomes visible
                pull = tensor.detach() - pieces[place].target
                tensor.grad = pull * 10.0 ** (sum(place) % 3 - 1)
            return torch.tensor(loss / (step + 1))

        step_without_hooks(own, closure)
        run.evaluations = max(run.evaluations, evaluations)
        for place, tensor in held.items():
            run.values.setdefault(place, []).append(tensor.detach().clone())
    run.state = {place: own.state[p] for place, p in held.items() if p in own.state}
    return run


def _difference(
    runs: Sequence[_Run], whole: _Run, pieces: Mapping[_Place, _Piece], by_rows: bool
) -> str:
    """Return what differs between parts and the whole, in a few words; empty: nothing."""
    where = "is cut into rows" if by_rows else "stands alone"
    for place, values in whole.values.items():
        own = [run for run in runs if place in run.values]
        steps = zip(*(run.values[place] for run in own), strict=True)
        joined = [torch.cat(parts) if values[-1].ndim else parts[0] for parts in steps]
        if not _equal(joined, values, pieces[place].start):
            return f"a parameter that {where}, or another loss, changes an update"
        if by_rows:
            leaves = pytree.tree_leaves(whole.state.get(place, {}))
            if any(
                isinstance(v, Tensor) and v.ndim and v.shape != values[-1].shape for v in leaves
            ):
                return "its state has other rows than the parameters"
    return ""


def _equal(found: Sequence[Tensor], wanted: Sequence[Tensor], start: Tensor) -> bool:
    """Return whether values after every step are alike, until they are not finite any more."""
    for one, other in zip(found, wanted, strict=True):
        if not other.isfinite().all():
            break
        most = (other - start).abs().max() if other.numel() else 0.0
        if not bool(((one - other).abs() <= _ALIKE * most).all()):
            return False
    return True
