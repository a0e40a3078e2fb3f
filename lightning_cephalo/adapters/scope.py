"""Finds out what an optimizer's update of one element depends on.

A copy of an unknown optimizer updates a few small random parameters: all together, and each alone.
If the results differ, its update depends on the whole model. A trial never decides that an update
is element-wise, as many optimizers factor or quantise only tensors above some size. Users say so
with ``Planner(elementwise=[...])``; a trial contradicts what is plainly wrong.
"""

from __future__ import annotations

import copy
import inspect
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

from lightning_cephalo.accelerator.torch_versions import state_of_constructor

# Steps of a trial: more than the periods of common slow updates (5, 6 and 10).
_STEPS = 12
# Parameters of a trial, and of one kind in one group.
_MOST, _OF_A_KIND = 16, 2
# A difference, relative to the largest change, below which results count as equal: batched kernels
# sum in another order.
_ALIKE = 1e-3
_SHAPES = ((6, 4, 3, 2, 2), (5, 7, 2, 3, 1))


class Scope(Enum):
    """What the update of one element of a parameter depends on."""

    ELEMENT = "element"
    PARAMETER = "parameter"
    MODEL = "model"


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
    torch.optim.LBFGS: Scope.MODEL,
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


@dataclass(frozen=True)
class _Piece:
    """A parameter of a trial, or some of its rows: where it starts, and where gradients pull it."""

    start: Tensor
    target: Tensor

    def rows(self, rows: slice) -> _Piece:
        return _Piece(self.start[rows], self.target[rows])


@dataclass(frozen=True)
class Trial:
    """The result of a trial.

    Attributes:
        scope: What the optimizer's update was seen to depend on; MODEL if the trial did not run.
        is_element_wise: Whether whole tensors and cut ones were updated alike.
        moves_first: Whether the step changes parameters before it calls the closure.
        why: Why the scope is MODEL.
        ran: Whether copies could be tried to the end.
    """

    scope: Scope
    is_element_wise: bool = False
    moves_first: bool = False
    draws: bool = False
    why: str = ""
    ran: bool = True


def known_scope(optimizer: Optimizer) -> Scope | None:
    """Return the scope of torch's own optimizers; None for others, and for subclasses."""
    return _KNOWN.get(type(optimizer))


def not_element_wise(optimizer: Optimizer) -> str:
    """Return why an optimizer is none of torch's element-wise ones; empty: it is."""
    known, name = known_scope(optimizer), type(optimizer).__name__
    if known is None:
        return f"{name} is none of torch's optimizers"
    return "" if known is Scope.ELEMENT else f"{name} is not element-wise"


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


def try_out(optimizer: Optimizer) -> Trial:
    """Run a few steps of copies of the optimizer on small random parameters.

    The optimizer, its parameters and the CPU's random generator stay as they are. Nothing is
    communicated. It runs on the CPU, so that ranks with different devices find the same.
    """
    groups = _stand_ins(optimizer)
    with torch.random.fork_rng(devices=[]):
        try:
            return _trial(optimizer, groups)
        except Exception as failure:
            why = f"a trial raised {type(failure).__name__}: {failure}"
            return Trial(Scope.MODEL, why=why, ran=False)


def twin_of(optimizer: Optimizer, parameters: Sequence[nn.Parameter]) -> Callable[[], None]:
    """Return the step of a copy of an optimizer that holds other parameters, and has no hooks."""
    clone = _clone(optimizer, {(0, index): each for index, each in enumerate(parameters)})
    update = _plain_step(clone)
    return lambda: update(clone)


def state_bytes_per_element(optimizer: Optimizer) -> list[int]:
    """Return the bytes of state per element of a parameter, by parameter group.

    A copy of the optimizer updates one small parameter of each group. 8 for Adam in fp32.
    """
    groups: list[list[_Piece | None]] = []
    for group in optimizer.param_groups:
        dtype = group["params"][0].dtype if group["params"] else torch.float32
        tensors = [torch.full((2, 2), value, dtype=dtype) for value in (0.0, 1.0)]
        groups.append([_Piece(*tensors)] if group["params"] else [])
    # torch's own make all of their state in the first step
    steps = _STEPS if known_scope(optimizer) is None else 1
    run = _run(optimizer, groups, lambda p: p.detach(), steps)
    found = []
    for index, _ in enumerate(groups):
        entries = run.state.get((index, 0), {})
        rows = [v for v in entries.values() if isinstance(v, Tensor) and v.shape == (2, 2)]
        found.append(sum(row.element_size() for row in rows))
    return found


def _trial(optimizer: Optimizer, groups: list[list[_Piece | None]]) -> Trial:
    if optimizer.state:
        why = "it has state already, so that no copy of it can be tried"
        return Trial(Scope.MODEL, why=why, ran=False)
    before = torch.get_rng_state()
    together = _run(optimizer, groups, lambda p: p)
    draws = not torch.equal(before, torch.get_rng_state())
    if together.moves_first:
        return Trial(Scope.MODEL, moves_first=True, draws=draws)
    if together.evaluations > 1:
        return Trial(Scope.MODEL, draws=draws, why="it evaluates its closure several times a step")
    element_wise = _cut_alike(optimizer, groups, together)
    for g, group in enumerate(groups):
        for i, parameter in enumerate(group):
            if parameter is None:
                continue
            alone = [[None] * len(other) for other in groups]
            alone[g][i] = parameter  # type: ignore[call-overload]
            one = _run(optimizer, alone, lambda p: p)
            found = _difference(one, together, g, i, parameter.start)
            if found:
                return Trial(Scope.MODEL, draws=draws, why=found)
    return Trial(Scope.PARAMETER, element_wise, draws=draws)


def _stand_ins(optimizer: Optimizer) -> list[list[_Piece | None]]:
    """Return a small random tensor for some of the parameters of every group, None for others."""
    generator = torch.Generator().manual_seed(7)
    counts: dict[tuple[str, int], int] = {}
    found: list[list[_Piece | None]] = []
    for group in optimizer.param_groups:
        options = repr({k: v for k, v in group.items() if k not in ("params", "lr", "initial_lr")})
        found.append([])
        for parameter in group["params"]:
            kind = (options, parameter.ndim)
            count = counts.get(kind, 0)
            if count == _OF_A_KIND or sum(counts.values()) >= _MOST or parameter.ndim > 5:
                found[-1].append(None)
                continue
            counts[kind] = count + 1
            shape = _SHAPES[count][: parameter.ndim]
            start, target = (torch.randn(shape, generator=generator) for _ in range(2))
            dtype = parameter.dtype
            found[-1].append(_Piece(start.to(dtype), target.to(dtype)))
    return found


@dataclass
class _Run:
    """What a copy has made of its parameters: by group and index, values after every step."""

    values: dict[tuple[int, int], list[Tensor]]
    state: dict[tuple[int, int], Any]
    options: list[dict[str, Any]]
    common: dict[Any, Any]
    moves_first: bool
    evaluations: int


def _run(
    optimizer: Optimizer,
    groups: Sequence[Sequence[_Piece | None]],
    shown: Callable[[Tensor], Tensor],
    steps: int = _STEPS,
) -> _Run:
    """Let a copy of the optimizer update parameters by gradients that pull them to targets."""
    held: dict[tuple[int, int], Tensor] = {}
    targets: dict[tuple[int, int], Tensor] = {}
    for g, group in enumerate(groups):
        for i, piece in enumerate(group):
            if piece is not None:
                original = optimizer.param_groups[g]["params"][i]
                targets[g, i] = piece.target
                held[g, i] = shown(nn.Parameter(piece.start.clone()))
                held[g, i].__dict__.update(original.__dict__)
    clone = _clone(optimizer, held)
    update = _plain_step(clone)
    run = _Run({}, {}, [], {}, False, 0)
    last: dict[tuple[int, int], Tensor] = {}
    for step in range(steps):
        last = {place: tensor.detach().clone() for place, tensor in held.items()}
        evaluations = 0

        def closure(step: int = step, last: Mapping[Any, Tensor] = last) -> Tensor:
            nonlocal evaluations
            if evaluations == 0:
                run.moves_first |= not all(
                    torch.equal(held[place].nan_to_num(), last[place].nan_to_num())
                    for place in held
                )
            evaluations += 1
            for place, tensor in held.items():
                # gradients of many sizes, so that clipping by a norm of all becomes visible
                pull = tensor.detach() - targets[place]
                tensor.grad = pull * 10.0 ** (sum(place) % 3 - 1)
            return torch.tensor(1.0 / (step + 1))

        update(clone, closure)
        run.evaluations = max(run.evaluations, evaluations)
        for place, tensor in held.items():
            run.values.setdefault(place, []).append(tensor.detach().clone())
    places = {id(tensor): place for place, tensor in held.items()}
    for key, entries in clone.state.items():
        if id(key) in places:
            run.state[places[id(key)]] = entries
        else:
            run.common[key] = entries
    run.options = [
        {name: value for name, value in group.items() if name != "params"}
        for group in clone.param_groups
    ]
    return run


def _plain_step(clone: Optimizer) -> Any:
    update: Any = type(clone).step
    if getattr(update, "hooked", False):  # torch's wrapper, which calls hooks of all optimizers
        update = inspect.unwrap(update, stop=lambda own: not vars(own).get("hooked", False))
    return update


def _clone(optimizer: Optimizer, held: Mapping[tuple[int, int], Tensor]) -> Optimizer:
    """Return a copy of an optimizer that holds other parameters, and has no hooks."""
    clone: Any = object.__new__(type(optimizer))
    skipped = ("state", "param_groups", "step", "_params")
    # the steps of torch's own change no object that is an attribute, which may be the user's
    is_torchs = known_scope(optimizer) is not None
    for name, value in vars(optimizer).items():
        if name in skipped:
            continue
        own = value if is_torchs else copy.deepcopy(value)
        clone.__dict__[name] = OrderedDict() if name.endswith("_hooks") else own
    clone.state = defaultdict(dict)
    for tensor in held.values():
        if made := state_of_constructor(optimizer, tensor):
            clone.state[tensor] = made
    clone.param_groups = []
    for g, group in enumerate(optimizer.param_groups):
        options = {k: copy.deepcopy(v) for k, v in group.items() if k != "params"}
        if "capturable" in options:  # of graphs, which a CPU has none of
            options["capturable"] = False
            if options.get("foreach"):  # a rate that is a tensor needs graphs then
                options["foreach"] = False
        members = [held[place] for place in sorted(held) if place[0] == g]
        clone.param_groups.append({"params": members, **options})
    if callable(getattr(clone, "train", None)):
        clone.train()
    return clone


def _cut_alike(
    optimizer: Optimizer, groups: Sequence[Sequence[_Piece | None]], together: _Run
) -> bool:
    """Return whether rows are updated as in whole tensors, and all state has their rows."""

    def cut(piece: _Piece | None, rows: slice) -> _Piece | None:
        if piece is None or not piece.start.ndim:  # every rank has all of a 0-d parameter
            return piece
        return piece.rows(rows)

    upper, lower = (
        [[cut(piece, rows) for piece in group] for group in groups]
        for rows in (slice(2), slice(2, None))
    )
    try:
        runs = [_run(optimizer, part, lambda p: p.detach()) for part in (upper, lower)]
    except Exception:
        return False
    for place, values in together.values.items():
        piece, value = groups[place[0]][place[1]], values[-1]
        assert piece is not None
        steps = zip(*(run.values[place] for run in runs), strict=True)
        joined = [torch.cat(parts) if value.ndim else parts[0] for parts in steps]
        if not _equal(joined, values, piece.start):
            return False
        leaves = [leaf for leaf in pytree.tree_leaves(together.state.get(place, {}))
                  if isinstance(leaf, Tensor)]  # fmt: skip
        if any(leaf.ndim and leaf.shape != value.shape for leaf in leaves):
            return False
    return not _unlike(runs[0].options, together.options)


def _equal(found: Sequence[Tensor], wanted: Sequence[Tensor], start: Tensor) -> bool:
    """Return whether values after every step are alike, until they are not finite any more."""
    for one, other in zip(found, wanted, strict=True):
        if not other.isfinite().all():
            break
        most = (other - start).abs().max() if other.numel() else 0.0
        if not bool(((one - other).abs() <= _ALIKE * most).all()):
            return False
    return True


def _difference(one: _Run, together: _Run, g: int, i: int, start: Tensor) -> str:
    """Say what differs for a parameter that is updated alone; empty: nothing."""
    place = (g, i)
    if not _equal(one.values[place], together.values[place], start):
        return "its update of a parameter changes with the other parameters"
    unlike = _unlike(one.state.get(place, {}), together.state.get(place, {}))
    if unlike:
        return f"its state of a parameter changes with the other parameters ({unlike})"
    unlike = _unlike(one.options[g], together.options[g]) or _unlike(one.common, together.common)
    return f"it keeps numbers of all parameters ({unlike})" if unlike else ""


def _unlike(found: Any, wanted: Any) -> str:
    """Return the path of the first entry that differs; empty: none does."""
    pairs = [pytree.tree_flatten_with_path(tree)[0] for tree in (found, wanted)]
    if [path for path, _ in pairs[0]] != [path for path, _ in pairs[1]]:
        return "different entries"
    for (path, one), (_, other) in zip(*pairs, strict=True):
        if isinstance(one, (int, float)) and isinstance(other, (int, float)):
            same = not abs(one - other) > _ALIKE * abs(other)
        elif isinstance(one, Tensor) and isinstance(other, Tensor):
            zero = torch.zeros_like(other, dtype=torch.float32)
            same = one.shape == other.shape and _equal([one.float()], [other.float()], zero)
        else:
            same = type(one) is type(other)
        if not same:
            return pytree.keystr(path)
    return ""


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
