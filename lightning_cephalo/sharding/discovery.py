"""Finds the units of a module: the blocks whose parameters are gathered together.

By default ``sharding/blocks.py`` chooses them: repeated blocks, large embeddings and heads, and by
size where few are repeated. The root unit holds everything else.
"""

from __future__ import annotations

import enum
import warnings
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from lightning_cephalo.sharding.blocks import blocks_of, ends_of, is_plain_embedding, type_of


class UnitKind(enum.Enum):
    """What a unit is, which decides how a step moves it; see ``plan/program.py``."""

    ROOT = "root"
    BLOCK = "block"
    EMBEDDING = "embedding"  # its backward needs no parameters
    HEAD = "head"  # behind several units of one type; it may run with the loss


@dataclass(frozen=True)
class Owner:
    """A place where a module holds a parameter."""

    module: nn.Module
    attribute: str
    name: str


Member = tuple[nn.Parameter, tuple[Owner, ...]]
"""A parameter with all the places that hold it."""


@dataclass(frozen=True)
class UnitMembers:
    """The module and the parameters of one unit.

    Attributes:
        name: Full name of the module; "" for the root unit.
        parameters: Each distinct parameter.
    """

    name: str
    module: nn.Module
    parameters: tuple[Member, ...]
    kind: UnitKind = UnitKind.BLOCK


def find_units(
    module: nn.Module,
    wanted: Sequence[type[nn.Module] | str] | None = None,
    *,
    with_ends: bool = True,
) -> list[UnitMembers]:
    """Divide the parameters of ``module`` into units, the root unit first.

    Args:
        module: The whole model.
        wanted: Full names of modules, and classes or names of classes whose instances are units.
            A string that names a module means that module. Empty: the root unit holds everything.
            None: units are searched.
        with_ends: Whether a search may find embeddings and heads.

    Returns:
        The root unit, then the units in order of definition. The root unit holds parameters
        outside of all units, and those that several units share (tied weights).

    Raises:
        ValueError: If an item matches nothing, or a unit lies inside another unit.
    """
    if wanted is None:
        chosen = blocks_of(module)
        if not chosen:
            warnings.warn(
                f"No repeated block (nn.ModuleList or nn.Sequential of modules of one type) was"
                f" found in {type(module).__name__}, nor two layers that are large enough. So the"
                " whole module is one unit, which a step gathers at its start and keeps to its end."
                " Sharded parameters then save no memory, and no gather overlaps with compute. Name"
                " the blocks with CephaloStrategy(units=[...]).",
                stacklevel=2,
            )
        elif with_ends:
            ends = ends_of(module, chosen)
            both = {**chosen, **ends}
            chosen = {name: inner for name, inner in module.named_modules() if name in both}
    else:
        chosen = _requested(module, wanted)
    _refuse_nesting(chosen)
    return _divide_parameters(module, chosen)


def _requested(module: nn.Module, wanted: Sequence[type[nn.Module] | str]) -> dict[str, nn.Module]:
    modules = {name: inner for name, inner in module.named_modules() if name}
    chosen: set[str] = set()
    for item in wanted:
        found = {
            name
            for name, inner in modules.items()
            if item in (type_of(inner), type_of(inner).__name__)
        }
        found = {item} if isinstance(item, str) and item in modules else found
        if not found:
            classes = ", ".join(sorted({type_of(inner).__name__ for inner in modules.values()}))
            raise ValueError(
                f"units has {item!r}, which is neither the name of a submodule of"
                f" {type(module).__name__} nor the class of one. Expected a name of"
                f" model.named_modules(), or one of the classes: {classes}."
            )
        chosen |= found
    return {name: inner for name, inner in modules.items() if name in chosen}


def _refuse_nesting(chosen: dict[str, nn.Module]) -> None:
    for name in chosen:
        for other in chosen:
            if name.startswith(f"{other}."):
                raise ValueError(
                    f"Units cannot lie inside one another: {name!r} is inside {other!r}."
                    " Choose the inner or the outer ones with units=."
                )


def _divide_parameters(module: nn.Module, chosen: dict[str, nn.Module]) -> list[UnitMembers]:
    owners: dict[int, list[Owner]] = {}
    parameters: dict[int, nn.Parameter] = {}
    units_of: dict[int, set[str]] = {}

    # follow every path to every module: a module inside and outside of a unit is shared
    seen: set[int] = set()
    for module_name, inner in module.named_modules(remove_duplicate=False):
        enclosing = next(
            (name for name in chosen if module_name == name or module_name.startswith(f"{name}.")),
            "",
        )
        for attribute, parameter in inner._parameters.items():
            if parameter is None:
                continue
            key = id(parameter)
            parameters[key] = parameter
            units_of.setdefault(key, set()).add(enclosing)
            if id(inner) not in seen:
                full_name = f"{module_name}.{attribute}" if module_name else attribute
                owners.setdefault(key, []).append(Owner(inner, attribute, full_name))
        seen.add(id(inner))

    members: dict[str, list[Member]] = {"": []}
    members.update({name: [] for name in chosen})
    for key, parameter in parameters.items():
        units = units_of[key]
        unit = next(iter(units)) if len(units) == 1 else ""
        members[unit].append((parameter, tuple(owners[key])))
    kinds = _kinds(chosen)
    return [
        UnitMembers(name, chosen.get(name, module), tuple(own), kinds.get(name, UnitKind.ROOT))
        for name, own in members.items()
    ]


def _kinds(chosen: dict[str, nn.Module]) -> dict[str, UnitKind]:
    """Return the kinds of units, given in order of definition."""
    kinds = {
        name: UnitKind.EMBEDDING if is_plain_embedding(inner) else UnitKind.BLOCK
        for name, inner in chosen.items()
    }
    blocks = [name for name, kind in kinds.items() if kind is UnitKind.BLOCK]
    count = Counter(type_of(chosen[name]) for name in blocks)
    repeated = [n for n, name in enumerate(blocks) if count[type_of(chosen[name])] > 1]
    kinds.update(dict.fromkeys(blocks[max(repeated) + 1 :] if repeated else (), UnitKind.HEAD))
    return kinds
