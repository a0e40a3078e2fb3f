"""Trees of a checkpoint are walked as torch's pytree walks them."""

from __future__ import annotations

from collections import OrderedDict, defaultdict, namedtuple
from enum import Enum
from typing import Any, NamedTuple

import torch
from torch.utils import _pytree as pytree

from lightning_cephalo.recovery.trees import tensors_of, with_tensors


class Kind(Enum):
    ONE = 1


class Facts(NamedTuple):
    kind: Kind
    rest: Any


class Own:
    """No container: what it holds stays."""

    def __init__(self) -> None:
        self.held = torch.zeros(1)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Own)

    __hash__ = None


def test_all_containers_are_walked_and_keep_their_kind() -> None:
    def tensor() -> torch.Tensor:
        return torch.zeros(2)

    pair = namedtuple("pair", "first second")
    tree = {
        "b": [1, 2.5, None, "text", b"bytes", True, tensor()],
        "a": ((3, 4, 5), (6, tensor()), ()),
        3: OrderedDict(x=tensor(), y={"z": [tensor()]}),
        "default": defaultdict(list, of=[tensor()]),
        "named": Facts(Kind.ONE, pair(tensor(), {"deep": tensor()})),
        "own": Own(),
        "parameter": torch.nn.Parameter(tensor()),
        "sizes": tensor().shape,
    }
    numbers = {id(leaf): number for number, leaf in enumerate(tensors_of(tree))}
    assert len(numbers) == 8

    def number_of(leaf: torch.Tensor) -> str:
        return f"tensor {numbers[id(leaf)]}"

    found = with_tensors(tree, number_of)
    wanted = pytree.tree_map_only(torch.Tensor, number_of, tree)
    assert found == wanted and list(found) == list(wanted)
    kinds = [[type(each) for each in walked.values()] for walked in (found, wanted)]
    assert kinds[0] == kinds[1]
    assert type(found["named"].rest) is pair and type(found["default"]) is defaultdict
