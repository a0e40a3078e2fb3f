"""What one microbatch asks of all ranks, and its cut of the graph; docs/design/vocabulary.md.

A microbatch that looks up tokens, or needs a number of each token's logits, parks. When all have
come, the ranks answer them. The answer is a leaf of the graph, like the output of a unit.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from lightning_cephalo.common.errors import UnitUseError, UnsupportedError
from lightning_cephalo.execution.boundaries import Boundaries, refuse_saved_tensor_hooks
from lightning_cephalo.execution.visit_records import VisitRecords
from lightning_cephalo.execution.vocabulary.questions import WAY_OUT, Question
from lightning_cephalo.plan.program import ROOT, Visit


class VocabularyAttendance:
    """One microbatch's questions.

    Args:
        records: The microbatch's visits.
        boundaries: Its cuts.
        park: Parks until all microbatches have come to a visit.
        is_on: Whether its step meets all others: not with manual optimization.
        has_backward: Whether a backward follows: not in evaluation, also where gradients are on.

    Attributes:
        question: What it waits for; None: nothing.
        answer: The answer, when it is there.
    """

    def __init__(
        self,
        records: VisitRecords,
        boundaries: Boundaries,
        park: Callable[[Visit], object],
        *,
        is_on: bool,
        has_backward: bool,
    ) -> None:
        self._records = records
        self._boundaries = boundaries
        self._park = park
        self._is_on, self._has_backward = is_on, has_backward
        self.question: Question | None = None
        self.answer: Tensor | None = None

    def ask(self, question: Question, source: Tensor | None, *, differentiable: bool) -> Tensor:
        """Wait until all ranks have answered.

        Args:
            question: The question.
            source: What its values were computed from; None: they need no gradient.
            differentiable: Whether a backward passes.
        """
        if not self._is_on:
            raise UnsupportedError(
                "A layer that is cut along the vocabulary is used with manual optimization, where"
                f" ranks meet at backwards and updates only. {WAY_OUT}"
            )
        if self._records.entered is not None:
            raise UnitUseError(
                "A layer that is cut along the vocabulary is used inside of a unit, where ranks do"
                f" not meet. {WAY_OUT}"
            )
        if differentiable:
            refuse_saved_tensor_hooks("layer that is cut along the vocabulary")
        self._boundaries.drop_values()
        question.needs_gradient = bool(
            differentiable and source is not None and source.requires_grad
        )
        self.question = question
        self._park(Visit(ROOT, differentiable and self._has_backward, question.meeting))
        answer, self.answer, self.question = self.answer, None, None
        if answer is None:
            raise UnitUseError(
                "A layer that is cut along the vocabulary is called where other ranks do not"
                f" expect it, and got no answer. {WAY_OUT}"
            )
        answer = answer.view(question.shape)
        if not differentiable:
            self._records.add(None)
            return answer
        position = len(self._records)
        if source is not None:
            question.source = self._boundaries.leaf_of(source, position)
        question.leaf, shown = self._boundaries.show(answer, position)
        self._records.add(question)
        return shown

    def backward(self, position: int) -> None:
        """Run the backward of the code before a question, back to the last cut."""
        if isinstance(self._records[position], Question):
            self._records[position] = None
        self._boundaries.passed(position)
        self._boundaries.through_glue(position)
