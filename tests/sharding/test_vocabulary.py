"""Which layers stay cut along the vocabulary."""

from __future__ import annotations

from torch import nn

from lightning_cephalo.sharding.discovery import find_units
from lightning_cephalo.sharding.vocabulary import modules_of, vocabulary_of, with_heads_in_root


class _Net(nn.Module):
    """A head that no embedding shares, and a classifier, each larger than all blocks."""

    def __init__(self, tokens: int = 60, classes: int = 50) -> None:
        super().__init__()
        self.embed = nn.Embedding(tokens, 8)
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.head = nn.Linear(8, tokens)
        self.classes = nn.Linear(8, classes)


def _names(net: nn.Module) -> list[str]:
    return [unit.name for unit in find_units(net)]


def _cut(net: nn.Module) -> tuple[list[str], list[str]]:
    units = with_heads_in_root(find_units(net))
    held = [parameter for unit in units for parameter, _ in unit.parameters]
    assert {id(p) for p in held} == {id(p) for p in net.parameters()}
    tables = [name for name, _, _ in modules_of(vocabulary_of(units[0]))]
    return [unit.name for unit in units[1:]], tables


def test_a_head_that_is_larger_than_all_blocks_stays_cut_too():
    net = _Net()
    assert "head" in _names(net) and "classes" in _names(net)
    units, tables = _cut(net)
    assert tables == ["embed", "head"]
    assert "head" not in units and "classes" in units


def test_what_has_no_vocabulary_keeps_its_units():
    net = _Net()
    net.embed = nn.Embedding(60, 8, sparse=True)
    assert _cut(net) == (_names(net)[1:], [])


def test_a_head_with_a_forward_of_its_own_stays_a_unit():
    class Scaled(nn.Linear):
        def forward(self, x):
            return super().forward(x) / 8

    net = _Net()
    net.head = Scaled(8, 60)
    units, tables = _cut(net)
    assert "head" in units and tables == ["embed"]
