"""Chooses the modules that are units where the user names none.

1. *Runs*: neighbours of one type in an ``nn.ModuleList`` or ``nn.Sequential``, such as the layers
   of an encoder. Other members of a ``ModuleList`` with several blocks are units, too.
2. *Stages* are members that hold runs of their own and differ from one another, such as those of a
   ResNet, a Swin Transformer or a U-Net. The blocks inside of them are the units.
3. *By size*: where more than half of the parameters lie outside of blocks, the modules that hold
   them are units. Larger ones are divided into their children.
4. *Ends*: large embeddings, and large modules behind all blocks, such as the head of a language
   model.

The root unit keeps what is small, what is tied, and what other code reads without a call.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import nn
from torch.nn.utils.parametrize import type_before_parametrizations

# Blocks that are tiny next to others (two heads next to forty blocks) are not worth a gather of
# their own.
SMALLEST_SHARE = 0.1
# Beyond this share of the parameters outside of blocks, units by size are found, too.
LARGEST_REST = 0.5
# A unit by size is divided if it is larger than this share, and left to the root if it is smaller.
LARGEST_UNIT, SMALLEST_UNIT = 1 / 8, 1 / 64
# Embeddings and heads that are smaller than this share of a mean block stay in the root unit.
SMALLEST_END = 1 / 4

# Of such parameters the rows have another dtype, which code may read while they are away.
_HALF = (torch.float16, torch.bfloat16)
_LISTS = (nn.ModuleList, nn.Sequential)
_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)


@dataclass(frozen=True)
class _Block:
    """A module that may be a unit."""

    name: str
    module: nn.Module
    family: type[nn.Module]


def blocks_of(module: nn.Module) -> dict[str, nn.Module]:
    """Return the modules that are sensible units, by their full names, in order of definition.

    ::

        blocks_of(GPT())    # {"blocks.0": Block(...), "blocks.1": Block(...), ...}

    The result is empty if a division would gain nothing.
    """
    repeated = [block for block in _blocks("", module) if _has_layers(block.module)]
    blocks = list(_blocks("", module, frozenset(type_of(block.module) for block in repeated)))
    sizes: dict[type[nn.Module], int] = {}
    for block in blocks:
        sizes[block.family] = sizes.get(block.family, 0) + _numel(block.module)
    largest = max(sizes.values(), default=0)
    chosen = {
        block.name: block.module
        for block in blocks
        if sizes[block.family] >= SMALLEST_SHARE * largest
    }
    held = {id(parameter) for block in chosen.values() for parameter in block.parameters()}
    embedded = {
        id(p) for each in module.modules() if _is_embedding(each) for p in each.parameters()
    }
    others = {id(p): p.numel() for p in module.parameters() if id(p) not in embedded}
    total = sum(others.values())
    if sum(size for key, size in others.items() if key not in held) > LARGEST_REST * total:
        chosen.update(_by_size("", module, total, frozenset(map(id, chosen.values()))))
        if len(chosen) < 2 and not any(map(is_compiled, chosen.values())):
            return {}
    return {name: inner for name, inner in module.named_modules() if name in chosen}


def ends_of(module: nn.Module, blocks: dict[str, nn.Module]) -> dict[str, nn.Module]:
    """Return the large embeddings outside of blocks, and the large modules behind all blocks.

    ::

        ends_of(llama, blocks_of(llama))    # {"model.embed_tokens": ..., "lm_head": ...}
    """
    if not blocks:
        return {}
    inside = {id(inner) for block in blocks.values() for inner in block.modules()}
    order = {id(inner): place for place, inner in enumerate(module.modules())}
    last = max(order[key] for key in inside)
    least = SMALLEST_END * sum(map(_numel, blocks.values())) / len(blocks)
    tied = _tied(module)

    def found_in(prefix: str, parent: nn.Module) -> Iterator[tuple[str, nn.Module]]:
        for name, child in parent.named_children():
            own = [p for p in child.parameters() if id(p) not in tied]
            if id(child) in inside or sum(p.numel() for p in own) < max(least, 1):
                continue
            is_end = is_plain_embedding(child) or (order[id(child)] > last and _can_be_unit(child))
            if not is_end or _is_read_by_others(parent, name, child):
                yield from found_in(f"{prefix}{name}.", child)
            elif not any(p.dtype in _HALF for p in own):
                yield f"{prefix}{name}", child

    return dict(found_in("", module))


def _tied(module: nn.Module) -> set[int]:
    """Return the ids of the parameters that several modules hold."""
    seen: set[int] = set()
    tied: set[int] = set()
    for inner in module.modules():
        for parameter in inner._parameters.values():
            if parameter is not None:
                (tied if id(parameter) in seen else seen).add(id(parameter))
    return tied


def is_plain_embedding(module: nn.Module) -> bool:
    """Whether a module is an embedding whose backward needs no parameters."""
    if not isinstance(module, nn.Embedding) or type(module).forward is not nn.Embedding.forward:
        return False
    is_own = set(module._parameters) == {"weight"} and "forward" not in vars(module)
    plain = module.max_norm is None and not module.sparse and not module.scale_grad_by_freq
    return is_own and plain and not module._modules


def type_of(module: nn.Module) -> type[nn.Module]:
    """Return the class that the user has written."""
    # weight_norm and the like give each instance a class of its own
    return type_before_parametrizations(module)


# -- repeated blocks --------------------------------------------------------------------------


def _blocks(
    prefix: str, module: nn.Module, kinds: frozenset[type[nn.Module]] = frozenset()
) -> Iterator[_Block]:
    """Yield the outermost blocks: those of runs, and those that stand next to them."""
    found: dict[str, _Block] = {}
    if isinstance(module, _LISTS):
        runs = list(_runs(module))
        for run in runs:
            if len(run) > 1 and not _are_stages([inner for _, inner in run]):
                found.update({name: _Block(prefix + name, m, type_of(m)) for name, m in run})
        if isinstance(module, nn.ModuleList) and sum(len(run) for run in runs) > 1:
            found.update(_singles(prefix, [run[0] for run in runs if len(run) == 1], runs))
    for name, child in module.named_children():
        if name in found:
            yield found[name]
        elif type_of(child) in kinds and _can_be_unit(child):
            yield _Block(prefix + name, child, type_of(child))
        elif not is_compiled(child):
            yield from _blocks(f"{prefix}{name}.", child, kinds)


def _runs(module: nn.Module) -> Iterator[list[tuple[str, nn.Module]]]:
    """Yield the neighbours of one type that may be units; also those without neighbours."""
    run: list[tuple[str, nn.Module]] = []
    for name, child in module.named_children():
        if run and type_of(child) is not type_of(run[0][1]):
            yield run
            run = []
        if _can_be_unit(child):
            run.append((name, child))
    if run:
        yield run


def _singles(
    prefix: str,
    singles: list[tuple[str, nn.Module]],
    runs: list[list[tuple[str, nn.Module]]],
) -> Iterator[tuple[str, _Block]]:
    """Yield the blocks of a list that have other neighbours, unless they are small or stages."""
    members = [inner for run in runs for _, inner in run]
    largest = max(members, key=_numel)
    large = [inner for inner in members if _numel(inner) >= SMALLEST_SHARE * _numel(largest)]
    if len(large) < 2:
        return
    for name, inner in singles:
        if inner in large and not _repeated_inside(inner):
            yield name, _Block(prefix + name, inner, type_of(largest))


def _can_be_unit(module: nn.Module) -> bool:
    if is_compiled(module):
        return bool(_numel(module))
    has_forward = getattr(type_of(module), "forward", None) is not nn.Module.forward
    if isinstance(module, _CONTAINERS) or not has_forward or not _numel(module):
        return False
    return not isinstance(module, nn.Sequential) or not _repeated_inside(module)


def is_compiled(module: nn.Module) -> bool:
    """Whether ``torch.compile`` traces the module as a whole: no unit can be inside of it."""
    return "_orig_mod" in module._modules or module._compiled_call_impl is not None


def _are_stages(members: list[nn.Module]) -> bool:
    """Whether neighbours of one type are stages of blocks, which differ in width or depth.

    Blocks may repeat something, too: experts. But then most blocks are alike.
    """
    shapes = len({_signature(member) for member in members})
    if shapes < len(members) and (shapes < 3 or 2 * shapes <= len(members)):
        return False
    repeated = {kind for member in members for kind in _repeated_inside(member)}
    return bool(repeated) and all(
        any(type_of(inner) in repeated for inner in member.modules()) for member in members
    )


def _repeated_inside(module: nn.Module) -> set[type[nn.Module]]:
    """Return the types of the blocks of runs inside of a module."""
    found: set[type[nn.Module]] = set()
    for inner in module.modules():
        if isinstance(inner, _LISTS):
            for one, following in pairwise(inner.children()):
                if type_of(one) is type_of(following) and _has_layers(one):
                    found.add(type_of(one))
    return found


def _has_layers(module: nn.Module) -> bool:
    """Whether a module is more than a layer with its normalisation: it has two weights or more."""
    weights = (p for inner in module.modules() for p in inner._parameters.values() if p is not None)
    return type_of(module) not in _LISTS and sum(weight.ndim > 1 for weight in weights) > 1


def _signature(module: nn.Module) -> tuple[tuple[str, tuple[int, ...]], ...]:
    return tuple((name, tuple(p.shape)) for name, p in module.named_parameters())


# -- by size ----------------------------------------------------------------------------------


def _by_size(
    prefix: str, module: nn.Module, total: int, chosen: frozenset[int]
) -> Iterator[tuple[str, nn.Module]]:
    """Yield modules outside of blocks, none much larger than the others if it can be divided."""
    for name, child in module.named_children():
        size = _numel(child)
        if id(child) in chosen or _is_embedding(child) or size < SMALLEST_UNIT * total:
            continue
        holds_blocks = any(id(inner) in chosen for inner in child.modules())
        is_unit = _can_be_unit(child) or isinstance(child, nn.Sequential)
        if holds_blocks or not is_unit or (size > LARGEST_UNIT * total and _is_divisible(child)):
            yield from _by_size(f"{prefix}{name}.", child, total, chosen)
        elif not _is_read_by_others(module, name, child):
            yield f"{prefix}{name}", child


def _is_divisible(module: nn.Module) -> bool:
    # torch's own layers read the weights of their parts without calling these (attention)
    is_of_torch = type_of(module).__module__.startswith("torch.nn.")
    if is_compiled(module):
        return False
    parts = [child for child in module.children() if _numel(child)]
    return bool(parts) and (isinstance(module, _LISTS) or not is_of_torch)


def _is_read_by_others(parent: nn.Module, name: str, child: nn.Module) -> bool:
    """Whether the parent's code uses more of a child than a call of it: ``self.head.weight``."""
    if isinstance(parent, (*_LISTS, nn.ModuleDict)):
        return False
    pattern = rf"\bself\.{re.escape(name)}\.(?!forward\b)(\w+)"
    used = set(re.findall(pattern, _source(type_of(parent))))
    return any(
        attribute in child._parameters
        or (callable(getattr(child, attribute, None)) and not hasattr(nn.Module, attribute))
        for attribute in used
    )


def _source(kind: type[nn.Module]) -> str:
    """Return the code of a class that runs when the model is called, not when it is built."""
    functions = [
        function
        for each in kind.__mro__
        if issubclass(each, nn.Module) and not each.__module__.startswith("torch.")
        for name, function in vars(each).items()
        if inspect.isfunction(function) and "init" not in name
    ]
    try:
        return "".join(map(inspect.getsource, functions))
    except (OSError, TypeError):  # written in a shell, or built by a program
        return ""


def _is_embedding(module: nn.Module) -> bool:
    return isinstance(module, (nn.Embedding, nn.EmbeddingBag))


def _numel(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
