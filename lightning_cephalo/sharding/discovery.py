"""Finds the units of a module: the blocks whose parameters are gathered together.

By default each block in a run of same-typed blocks is a unit (``nn.ModuleList`` or
``nn.Sequential``: encoder and decoder layers). The root unit holds everything else.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torch import nn
from torch.nn.utils.parametrize import type_before_parametrizations

# A run that is tiny next to the largest one (two heads next to forty blocks) is not worth a gather
# of its own. Such modules are also the ones that some microbatches skip.
SMALLEST_RUN_SHARE = 0.1


@dataclass(frozen=True)
class Owner:
    """A place where a module holds a parameter.

    Attributes:
        module: The module that owns the parameter.
        attribute: The parameter's name in that module.
        name: The parameter's full name from the top module.
    """

    module: nn.Module
    attribute: str
    name: str


@dataclass(frozen=True)
class UnitMembers:
    """The module and the parameters of one unit.

    Attributes:
        name: Full name of the module; "" for the root unit.
        module: The module; the top module for the root unit.
        parameters: Each distinct parameter with all the places that hold it.
    """

    name: str
    module: nn.Module
    parameters: tuple[tuple[nn.Parameter, tuple[Owner, ...]], ...]


def find_units(
    module: nn.Module,
    unit_types: Sequence[type[nn.Module] | str] | None = None,
    unit_names: Sequence[str] | None = None,
) -> list[UnitMembers]:
    """Divide the parameters of ``module`` into units, the root unit first.

    Args:
        module: The whole model.
        unit_types: Classes, or names of classes, whose instances are units.
        unit_names: Full names of modules that are units. If both are given, their union counts.

    Returns:
        The root unit, then the units in order of definition. The root unit holds parameters
        outside of all units, and those that several units share (tied weights).

    Raises:
        ValueError: If a name or type matches nothing, or a unit lies inside another unit.
    """
    if unit_types is None and unit_names is None:
        chosen = _repeated_blocks(module)
        if not chosen:
            warnings.warn(
                f"No repeated block (nn.ModuleList or nn.Sequential of modules of one type) was"
                f" found in {type(module).__name__}: the whole module is one unit, gathered at the"
                " start of a step and kept to its end, so that nothing is saved in memory by"
                " sharding parameters and no gather is hidden. Name the blocks with"
                " CephaloStrategy(unit_types=[...]) or unit_names=[...].",
                stacklevel=2,
            )
    else:
        chosen = _requested(module, unit_types or (), unit_names or ())
    _refuse_nesting(chosen)
    return _divide_parameters(module, chosen)


def _repeated_blocks(module: nn.Module) -> dict[str, nn.Module]:
    runs = list(_runs("", module))
    sizes = [sum(_parameter_numel(block) for _, block in run) for run in runs]
    largest = max(sizes, default=0)
    chosen: dict[str, nn.Module] = {}
    for run, size in zip(runs, sizes, strict=True):
        if size > 0 and size >= SMALLEST_RUN_SHARE * largest:
            chosen.update(run)
    return chosen


def _runs(prefix: str, module: nn.Module) -> Iterable[list[tuple[str, nn.Module]]]:
    """Yield the outermost runs of two or more neighbouring modules of one type."""
    inside: set[int] = set()
    if isinstance(module, (nn.ModuleList, nn.Sequential)):
        run: list[tuple[str, nn.Module]] = []
        for name, child in [*module.named_children(), ("", None)]:
            if run and (child is None or _type_of(child) is not _type_of(run[0][1])):
                if len(run) > 1:
                    inside.update(id(block) for _, block in run)
                    yield run
                run = []
            if child is not None and _can_be_unit(child):
                run.append((f"{prefix}{name}", child))
    for name, child in module.named_children():
        if id(child) not in inside:
            yield from _runs(f"{prefix}{name}.", child)


def _can_be_unit(module: nn.Module) -> bool:
    containers = (nn.ModuleList, nn.ModuleDict, nn.Sequential, nn.ParameterList, nn.ParameterDict)
    return not isinstance(module, containers) and _parameter_numel(module) > 0


def _type_of(module: nn.Module) -> type[nn.Module]:
    # weight_norm and the like give each instance a class of its own
    return type_before_parametrizations(module)


def _parameter_numel(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _requested(
    module: nn.Module, types: Sequence[type[nn.Module] | str], names: Sequence[str]
) -> dict[str, nn.Module]:
    modules = dict(module.named_modules())
    chosen: dict[str, nn.Module] = {}
    for name in names:
        if name not in modules or name == "":
            raise ValueError(
                f"unit_names has {name!r}, which is not the name of a submodule of"
                f" {type(module).__name__}; expected one of model.named_modules()."
            )
        chosen[name] = modules[name]
    for wanted in types:
        found = {
            name: candidate
            for name, candidate in modules.items()
            if name and (_type_of(candidate).__name__ == wanted or _type_of(candidate) is wanted)
        }
        if not found:
            raise ValueError(
                f"unit_types has {wanted!r}, but {type(module).__name__} has no such submodule;"
                f" it has: {', '.join(sorted({type(m).__name__ for m in modules.values()}))}."
            )
        chosen.update(found)
    return {name: candidate for name, candidate in modules.items() if name in chosen}


def _refuse_nesting(chosen: dict[str, nn.Module]) -> None:
    for name in chosen:
        for other in chosen:
            if name.startswith(f"{other}."):
                raise ValueError(
                    f"Units cannot lie inside one another: {name!r} is inside {other!r}."
                    " Choose the inner or the outer ones with unit_types= or unit_names=."
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

    members: dict[str, list[tuple[nn.Parameter, tuple[Owner, ...]]]] = {"": []}
    members.update({name: [] for name in chosen})
    for key, parameter in parameters.items():
        units = units_of[key]
        unit = next(iter(units)) if len(units) == 1 else ""
        members[unit].append((parameter, tuple(owners[key])))
    return [UnitMembers(name, chosen.get(name, module), tuple(members[name])) for name in members]
