"""Finds out what an optimizer's update of one element depends on.

Torch's own optimizers are known. A copy of another one updates a few small random parameters: all
together, and in two parts. If the results differ, an update depends on other parameters, too. No
trial proves that an update is element-wise, as many optimizers factor or quantise only large
tensors. Users say so with ``Planner(elementwise=[...])``; a trial contradicts plain errors.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

from lightning_cephalo.adapters.stepping import (
    copy_of,
    is_torchs,
    parameters_of,
    step_is_replaced,
    step_without_hooks,
)
from lightning_cephalo.common.errors import UnsupportedError
from lightning_cephalo.sharding.placement import like_parameter

# Steps of a trial: more than the periods of common slow updates (5, 6 and 10).
_STEPS = 12
# Parameters of a trial, and the shapes of those of one kind.
_MOST, _SHAPES = 16, ((6, 4, 3, 2, 2), (5, 7, 2, 3, 1))
# A difference, relative to the largest change, below which results count as equal: batched kernels
# sum in another order.
_ALIKE = 1e-3
# Moments of Adam.
MOMENTS = 2


_ELEMENT_WISE = "SGD Adam AdamW Adamax NAdam RAdam RMSprop Adagrad Adadelta ASGD Rprop"
_KNOWN = dict.fromkeys(_ELEMENT_WISE.split(), True) | {"Adafactor": False, "Muon": False}


def is_elementwise(optimizer: Optimizer) -> bool | None:
    """Whether an optimizer of torch's updates elements apart; None: another, or a subclass."""
    return _KNOWN.get(type(optimizer).__name__) if is_torchs(optimizer) else None


def not_by_units(optimizer: Optimizer) -> str:
    """Return why units cannot be updated apart, in a few words; empty: they can."""
    name = type(optimizer).__name__
    if not is_elementwise(optimizer):
        return f"{name} is none of torch's element-wise optimizers"
    if step_is_replaced(optimizer):
        return f"{name}.step is replaced"
    options = ("differentiable", "capturable")
    found = (o for o in options for group in optimizer.param_groups if group.get(o))
    return next((f"{name}({option}=True)" for option in found), "")


def state_bytes_per_element(optimizer: Optimizer) -> dict[int, int]:
    """Return the bytes of state per element of each parameter, by the parameter's id.

    A copy of the optimizer updates one small parameter of each group. 8 for Adam in fp32, and as
    with Adam if no copy can tell: updates are not element-wise, or options are for devices only.
    """
    groups = [group["params"] for group in optimizer.param_groups]
    likes = [[nn.Parameter(torch.ones(2, 2, dtype=p.dtype)) for p in own[:1]] for own in groups]
    found = [sum(MOMENTS * p.element_size() for p in like) for like in likes]
    with suppress(Exception):
        if is_elementwise(optimizer):
            own = copy_of(optimizer, likes, on_host=True)
            for parameter in parameters_of(own):
                parameter.grad = torch.ones_like(parameter)
            step_without_hooks(own)
            made = [[v for p in like for v in own.state[p].values()] for like in likes]
            found = [
                sum(v.element_size() for v in each if isinstance(v, Tensor) and v.ndim)
                for each in made
            ]
    pairs = zip(groups, found, strict=True)
    return {id(parameter): nbytes for group, nbytes in pairs for parameter in group}


_Place = tuple[int, int]
"""A parameter's group, and its index there."""
_Pieces = Mapping[_Place, tuple[Tensor, Tensor]]
"""By parameter of a trial, or rows of it, where it starts and where gradients pull it."""
_Run = Mapping[_Place, tuple[list[Tensor], Any]]
"""By parameter, its values before and after every step, and its state at the end."""


def try_out(optimizer: Optimizer, *, by_rows: bool) -> str:
    """Return why updates do not run on rows, or on single parameters; empty: they may.

    Copies of the optimizer run a few steps on small random parameters, whole and in parts.
    ``by_rows``: the parts are rows of all parameters, and a trial that cannot run refutes nothing.
    It runs on the CPU, so that ranks with different devices find the same.
    """
    own, others = set(map(id, parameters_of(optimizer))), (Optimizer, nn.Module)
    held = [
        name
        for name, value in vars(optimizer).items()
        if name not in ("state", "param_groups", "defaults")
        and any(id(x) in own or isinstance(x, others) for x in pytree.tree_leaves(value))
    ]
    if held:
        return (
            "it holds parameters, a module or another optimizer in its attributes"
            f" {held}, where they stay in shards during its update"
        )
    if optimizer.state:
        return "" if by_rows else "it has state already, so that no copy of it can be tried"
    if not by_rows and all(callable(getattr(optimizer, name, None)) for name in ("train", "eval")):
        return "it has train() and eval(), which change parameters outside of step()"
    with torch.random.fork_rng(devices=[]):
        try:
            return _difference(optimizer, _pieces(optimizer), by_rows)
        except UnsupportedError as found_so:
            return str(found_so)
        except Exception as failure:
            return "" if by_rows else f"a trial raised {type(failure).__name__}: {failure}"


def _pieces(optimizer: Optimizer) -> _Pieces:
    """Return a small random tensor for some of the parameters of every group."""
    generator, counts = torch.Generator().manual_seed(7), Counter[tuple[str, int]]()
    found: dict[_Place, tuple[Tensor, Tensor]] = {}
    for g, group in enumerate(optimizer.param_groups):
        options = repr({k: v for k, v in group.items() if k not in ("params", "lr", "initial_lr")})
        for i, parameter in enumerate(group["params"]):
            kind = (options, parameter.ndim)
            if counts[kind] < len(_SHAPES) and len(found) < _MOST and parameter.ndim <= 5:
                shape = _SHAPES[counts[kind]][: parameter.ndim]
                counts[kind] += 1
                start, target = (torch.randn(shape, generator=generator) for _ in range(2))
                found[g, i] = start.to(parameter.dtype), target.to(parameter.dtype)
    return found


def _difference(optimizer: Optimizer, pieces: _Pieces, by_rows: bool) -> str:
    """Return what differs between parts and the whole, in a few words; empty: nothing."""
    places = list(pieces)
    if by_rows:
        # every rank has all of a 0-d parameter
        parts: list[_Pieces] = [
            {at: (s[rows], t[rows]) if s.ndim else (s, t) for at, (s, t) in pieces.items()}
            for rows in (slice(2), slice(2, None))
        ]
    else:
        parts = [{at: pieces[at] for at in places[first::2]} for first in (0, 1)]
    whole = _run(optimizer, pieces)
    # of another loss: ranks compute other ones
    runs = [_run(optimizer, part, loss=3.0) for part in parts if part]
    for place, (values, state) in whole.items():
        steps = zip(*(run[place][0] for run in runs if place in run), strict=True)
        for found, wanted in zip(steps, values, strict=True):
            one = torch.cat(found) if wanted.ndim else found[0]
            limit = _ALIKE * float((wanted - values[0]).abs().max())
            if not (one - wanted).abs().max() <= limit and wanted.isfinite().all():
                where = "is cut into rows" if by_rows else "stands alone"
                return f"a parameter that {where}, or another loss, changes an update"
        tensors = [v for v in pytree.tree_leaves(state) if isinstance(v, Tensor) and v.ndim]
        if by_rows and any(each.shape != values[0].shape for each in tensors):
            return "its state has other rows than the parameters"
    return ""


def _run(optimizer: Optimizer, pieces: _Pieces, loss: float = 1.0) -> _Run:
    """Let a copy of the optimizer update parameters by gradients that pull them to targets."""
    groups = optimizer.param_groups
    held = {
        (g, i): like_parameter(start.clone(), groups[g]["params"][i])
        for (g, i), (start, _) in pieces.items()
    }
    values = {place: [start] for place, (start, _) in pieces.items()}
    members = [[p for (g, _), p in held.items() if g == n] for n in range(len(groups))]
    own: Any = copy_of(optimizer, members, on_host=True)
    if callable(getattr(own, "train", None)):
        own.train()
    for step in range(1, _STEPS + 1):

        def closure(step: int = step) -> Tensor:
            for place, tensor in held.items():
                if tensor.grad is not None:
                    raise UnsupportedError("it evaluates its closure several times a step")
                if not torch.equal(tensor.nan_to_num(), values[place][-1].nan_to_num()):
                    raise UnsupportedError("it changes parameters before it calls its closure")
                # gradients of many sizes, so that clipping by a norm of all becomes visible
                pull = tensor.detach() - pieces[place][1]
                tensor.grad = pull * 10.0 ** (sum(place) % 3 - 1)
            return torch.tensor(loss / step)

        step_without_hooks(own, closure)
        for place, tensor in held.items():
            tensor.grad = None
            values[place].append(tensor.detach().clone())
    return {place: (values[place], own.state.get(p, {})) for place, p in held.items()}
