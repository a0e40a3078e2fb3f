"""Gradients of activations, and code that changes them, against one device."""

from __future__ import annotations

import warnings
from functools import partial
from typing import Any

import pytest
import torch
from common import Net, assert_same_tensors, loader, trainer, values_of
from torch import Tensor
from warm_ranks import in_ranks

_TOLERANCE = 1e-5
_LIMIT = 2e-3
"""Hooks clip gradients to it, which one device divides by the batches between updates."""

# what code in the backward sees; not on the module, whose containers microbatches share
_seen: list[tuple[int, str, Tensor]] = []


class _Activations(Net):
    """``behind`` handles the output of each block, and ``at_end`` all of them."""

    def __init__(self) -> None:
        super().__init__("sgd")

    def see(self, name: str, gradient: Tensor) -> Tensor:
        _seen.append((self.global_step, name, gradient.detach().clone()))
        return gradient.clamp(-_LIMIT, _LIMIT)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inputs(x)
        hidden = []
        for index, block in enumerate(self.blocks):
            x = self.behind(block(x), f"x{index}")
            hidden.append(x)
        self.at_end(hidden)
        return self.outputs(x).sum(1, keepdim=True)

    def behind(self, x: Tensor, name: str) -> Tensor:
        return x

    def at_end(self, hidden: list[Tensor]) -> None:
        pass


class _Hooks(_Activations):
    def behind(self, x: Tensor, name: str) -> Tensor:
        x.register_hook(partial(self.see, name))
        return x


_EQUAL = {
    "several batches per update": (_Hooks, {"accumulate_grad_batches": 3}),
}


def _fit(plan: str | None, kind: type[Net], options: dict[str, Any], recompute: bool = True) -> Any:
    _seen.clear()
    torch.manual_seed(2)
    module = kind()
    ready = trainer(plan, {"recompute": recompute} if plan else None, **options)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        ready.fit(module, loader(24))
    return values_of(module), [*_seen], [str(each.message) for each in said]


def _rows(seen: list[tuple[int, str, Tensor]]) -> dict[tuple[int, str], list[Tensor]]:
    found: dict[tuple[int, str], list[Tensor]] = {}
    for step, name, gradient in seen:
        found.setdefault((step, name), []).extend(gradient)
    return found


@pytest.mark.parametrize("recompute", [True, False])
@pytest.mark.parametrize("case", _EQUAL)
def test_gradients_of_activations_are_those_of_one_device(case, recompute):
    kind, options = _EQUAL[case]
    wanted, wanted_seen, _ = _fit(None, kind, options)
    ranks = in_ranks(2, _fit, "3:1", kind, options, recompute)
    for values, _, _ in ranks:
        assert_same_tensors(values, wanted, _TOLERANCE)
    found = _rows([each for _, seen, _ in ranks for each in seen])
    expected = _rows(wanted_seen)
    assert found.keys() == expected.keys() and expected
    for key, rows in expected.items():
        ours, theirs = torch.stack(found[key]).flatten(1), torch.stack(rows).flatten(1)
        assert ours.shape == theirs.shape, key
        # samples of a batch lie on the ranks in an order that a plan chooses
        nearest = torch.cdist(theirs, ours, compute_mode="donot_use_mm_for_euclid_dist").min(1)
        assert nearest.values.max() < 1e-6, key
    assert any(each.abs().max() > _LIMIT for rows in expected.values() for each in rows)
