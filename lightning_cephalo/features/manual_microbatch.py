"""A microbatch whose code calls its backwards itself; see [Note: phases] in manual_step.py."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from lightning_cephalo.execution.graph import Root, nodes_between, nodes_of, now
from lightning_cephalo.execution.microbatch import Microbatch, refuse_without_gradient
from lightning_cephalo.plan.program import ROOT, Visit

AT_BACKWARD = Visit(-4)
"""The place of a microbatch whose code has called a backward itself."""

AT_UPDATE = Visit(-5)
"""The place of a microbatch whose code is about to clip gradients or to run an optimizer."""


class ManualMicrobatch(Microbatch):
    """The one microbatch of a rank.

    Attributes:
        outside: Returns a context for code of this package that runs within the step.
        retains: Whether another backward through the same graph will come.
    """

    has_one_backward = False

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.outside: Callable[[], AbstractContextManager[Any]] = nullcontext
        self.retains = False
        self._spans: dict[int, tuple[int, int]] = {}  # per visit, the numbers of its nodes

    def need_root(self) -> None:
        """Park until the root unit is gathered."""
        with self.outside():
            self.code.park(Visit(ROOT))

    def need_backward(self, loss: Tensor, retain: bool) -> None:
        """Park until every rank is about to run a backward."""
        self.code.result, self.retains = loss, retain
        with self.outside():
            self.code.park(AT_BACKWARD)
        self.code.result = None

    def need_update(self) -> None:
        """Park until every rank is about to clip gradients or to run an optimizer."""
        with self.outside():
            self.code.park(AT_UPDATE)

    def visit(self, unit: int, trainable: bool, forward: Any, args: Any, kwargs: Any) -> Any:
        first = now()
        with self.outside():
            result = super().visit(unit, trainable, forward, args, kwargs)
        self._spans[self.made[-1]] = (first, now())
        return result

    @property
    def has_loss(self) -> bool:
        return self.code.finished or self.code.parked is AT_BACKWARD

    def backward_of_loss(self, loss: Tensor, without_weight: Tensor | None) -> list[Root]:
        refuse_without_gradient(loss)
        return [(loss, torch.ones_like(loss))]

    def visits_behind(self, roots: Sequence[Tensor]) -> set[int]:
        """Return the positions of the visits that a backward from these tensors passes."""
        return self._visits_of(nodes_of(roots))

    def visits_between(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> set[int]:
        """Return the positions of the visits through which outputs depend on inputs."""
        wanted = {get_gradient_edge(each).node for each in inputs}
        return self._visits_of(nodes_between(nodes_of(outputs), wanted))

    def _visits_of(self, nodes: Iterable[Any]) -> set[int]:
        numbers = sorted(node._sequence_nr() for node in nodes if not hasattr(node, "variable"))
        return {
            position
            for position, (first, end) in self._spans.items()
            if bisect_left(numbers, first) < bisect_left(numbers, end)
        }
