"""Answers what microbatches of all ranks ask of layers that are cut along the vocabulary.

The k-th microbatches that wait on each rank make a round. A rank without one takes part with no
tokens: its rows are needed. So only the tokens of a round are together at one time.

A rank that lacks the memory for its part of a round drops its microbatches and tries again, so that
the other ranks do not wait. See [Note: failures] in failure.py.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_cephalo.execution.failure import Failure
from lightning_cephalo.execution.microbatch import Microbatch
from lightning_cephalo.execution.vocabulary.columns import Gradients, joined, wide
from lightning_cephalo.execution.vocabulary.layers import CutLayer, VocabularyLayers
from lightning_cephalo.execution.vocabulary.questions import Kind, Question
from lightning_cephalo.plan.program import Visit
from lightning_cephalo.ranks.control import ControlGroup
from lightning_cephalo.sharding.collectives import (
    all_gather_rows,
    all_to_all_rows,
    reduce_slices,
)
from lightning_cephalo.sharding.transfers import Pending

_Result = TypeVar("_Result")
_Context = Callable[[], AbstractContextManager[None]]
_Header = tuple[int, int, torch.dtype, bool]


@dataclass(frozen=True)
class Asked:
    """What was asked of a layer.

    Attributes:
        meeting: Index of the layer among the places where microbatches meet.
        kind: What was asked.
        dtype: Dtype of the values.
        has_backward: Whether a backward passes.
    """

    meeting: int
    kind: Kind
    dtype: torch.dtype
    has_backward: bool


@dataclass
class Round:
    """Questions of one kind, one for each rank at most, and what their backward needs.

    Attributes:
        kind: What they ask.
        sizes: Tokens of each rank.
        own: This rank's question; None: it has none.
        dtype: Dtype of the values.
        needs_gradient: Whether values of any rank need a gradient.
        values: Those of all ranks.
        targets: Those of all ranks, for STATISTICS.
        log_sum: That of each token, for STATISTICS.
    """

    kind: Kind
    sizes: list[int]
    own: Question | None
    dtype: torch.dtype
    needs_gradient: bool
    values: Tensor | None = None
    targets: Tensor | None = None
    log_sum: Tensor | None = None

    @property
    def tokens(self) -> int:
        """Tokens of all ranks."""
        return sum(self.sizes)

    @property
    def held_bytes(self) -> int:
        """Bytes that are held of all ranks' tokens."""
        held = (self.values, self.targets, self.log_sum)
        return sum(each.numel() * each.element_size() for each in held if each is not None)

    @property
    def has_gradient(self) -> bool:
        """Whether a gradient of this rank's answer has come."""
        return self.own is not None and self.own.gradient is not None

    def parts(self) -> list[slice]:
        """Return where each rank's tokens are among those of all."""
        edges = [0, *itertools.accumulate(self.sizes)]
        return [slice(start, end) for start, end in itertools.pairwise(edges)]


class VocabularyRounds:
    """Answers questions; every method is collective.

    A rank that has failed, or has no samples, asks nothing, and answers the others.

    Args:
        layers: The layers.
        failure: Holds this rank's failure.
        control: The ranks.
        device: This rank's device.

    Attributes:
        asked: Tokens of all ranks that were asked about since :meth:`count_anew`.
    """

    def __init__(
        self,
        layers: VocabularyLayers,
        failure: Failure,
        control: ControlGroup,
        device: torch.device,
    ) -> None:
        self._layers = layers
        self._failure = failure
        self._control = control
        self._device = device
        self._kept: dict[int, list[Round]] = {}
        self.asked: dict[Asked, int] = {}

    @property
    def held_bytes(self) -> int:
        """Bytes that are held for the backward."""
        return sum(each.held_bytes for rounds in self._kept.values() for each in rounds)

    def count_anew(self) -> None:
        """Forget what was asked so far."""
        self.asked = {}

    def forget(self) -> None:
        """Drop what is held for a backward that will not come."""
        self._kept.clear()

    def forward(
        self,
        visit: Visit,
        position: int,
        microbatches: Sequence[Microbatch],
        waiting_for_ranks: _Context,
        answered: Callable[[], None],
    ) -> None:
        """Answer the microbatches that wait at this visit.

        Args:
            visit: The visit.
            position: Its position in the order of visits.
            microbatches: This rank's microbatches.
            waiting_for_ranks: Returns a context for the wait for other ranks.
            answered: Called when the ranks are done with each other.
        """
        layer = self._layers.at(visit.meeting)
        waiting = [each.vocabulary for each in microbatches if each.parked == visit]
        asked = [each.question for each in waiting if each.question is not None]
        headers = [_header(question) for question in asked]
        with waiting_for_ranks():
            said: list[list[_Header]] = [each for (each,) in self._control.gather((headers,))]
        rounds = list(_rounds(said, asked))
        answers: dict[int, Tensor] = {}
        for each in rounds:
            meeting = _Meeting(layer, each, self._failure, self._device, waiting_for_ranks)
            answer = meeting.answer()
            if each.own is not None:
                answers[id(each.own)] = answer
            key = Asked(visit.meeting, each.kind, each.dtype, visit.differentiable)
            self.asked[key] = self.asked.get(key, 0) + each.tokens
        for attendance in waiting:
            if attendance.question is not None:
                attendance.answer = answers[id(attendance.question)]
        if visit.differentiable:
            self._kept[position] = rounds
        answered()

    def backward(
        self,
        visit: Visit,
        position: int,
        microbatches: Sequence[Microbatch],
        waiting_for_ranks: _Context,
        answered: Callable[[], None],
    ) -> None:
        """Pass gradients on to tables and hidden states.

        Args:
            visit: The visit.
            position: As for :meth:`forward`.
            microbatches: As for :meth:`forward`.
            waiting_for_ranks: As for :meth:`forward`.
            answered: As for :meth:`forward`.
        """
        layer = self._layers.at(visit.meeting)
        rounds = self._kept.pop(position, [])
        with waiting_for_ranks():
            # a table without a gradient on any rank keeps None, which optimizers skip
            has_gradient = self._control.any([each.has_gradient for each in rounds])
        self._pass_back(layer, rounds, has_gradient, waiting_for_ranks)
        rounds.clear()  # what was held for them
        answered()

        def finish() -> None:
            for microbatch in microbatches:
                microbatch.vocabulary.backward(position)

        self._failure.guarded(finish)

    def _pass_back(
        self,
        layer: CutLayer,
        rounds: Sequence[Round],
        has_gradient: Sequence[bool],
        waiting_for_ranks: _Context,
    ) -> None:
        for each, has in zip(rounds, has_gradient, strict=True):
            if has:
                _Meeting(layer, each, self._failure, self._device, waiting_for_ranks).backward()


def _header(question: Question) -> _Header:
    values = question.values
    return int(question.kind), len(values), values.dtype, question.needs_gradient


def _rounds(said: Sequence[Sequence[_Header]], asked: Sequence[Question]) -> list[Round]:
    """Return the rounds in an order that is equal on all ranks."""
    found = []
    for number in range(max(map(len, said))):
        row = [each[number] if number < len(each) else None for each in said]
        kinds = {(header[0], str(header[2])): header for header in row if header is not None}
        for _, (kind, _, dtype, _) in sorted(kinds.items()):
            same = [h if h is not None and (h[0], h[2]) == (kind, dtype) else None for h in row]
            own = asked[number] if number < len(asked) else None
            if own is not None and (own.kind, own.values.dtype) != (kind, dtype):
                own = None
            found.append(
                Round(
                    Kind(kind),
                    [0 if header is None else header[1] for header in same],
                    own,
                    dtype,
                    any(header is not None and header[3] for header in same),
                )
            )
    return found


class _Meeting:
    """One round at one layer, on this rank."""

    def __init__(
        self,
        layer: CutLayer,
        round_: Round,
        failure: Failure,
        device: torch.device,
        waiting: _Context,
    ) -> None:
        self._layer = layer
        self._round = round_
        self._failure = failure
        self._device = device
        self._waiting = waiting
        self._group: Any = dist.group.WORLD  # its own: gathers and reduces may be under way
        self._rank = dist.get_rank()

    def answer(self) -> Tensor:
        """Return the answer to this rank's question; of no tokens if it has none."""
        own, width = self._round.own, self._layer.width
        shape = () if self._round.kind is Kind.LOOKUP else (width,)
        values = self._owed(self._new, 0, *shape) if own is None else own.values
        self._round.values = self._gathered(values)
        if self._round.kind is Kind.LOOKUP:
            return self._looked_up(values)
        if self._round.kind is Kind.STATISTICS:
            return self._statistics()
        if self._round.kind is Kind.BEST:
            return self._best()
        return self._logits()

    def backward(self) -> None:
        """Add this rank's gradients of its rows, and give its question those of its values."""
        if self._round.kind is Kind.LOOKUP:
            self._backward_of_lookup()
            return
        hidden = None
        if self._round.needs_gradient:
            hidden = self._owed(self._zeros, self._round.tokens, self._layer.width)
        into = Gradients(self._layer.grad_rows, self._layer.grad_bias, hidden)
        if self._round.kind is Kind.STATISTICS:
            self._backward_of_statistics(into)
        else:
            self._backward_of_logits(into)
        if hidden is None:
            return
        own = self._round.sizes[self._rank]
        dtype = wide(hidden.dtype)
        sizes = [size * self._layer.width for size in self._round.sizes]

        def start() -> tuple[Tensor, Pending]:
            sums = torch.empty((own, self._layer.width), dtype=dtype, device=self._device)
            return sums, reduce_slices(hidden.view(-1), sizes, self._group, sums.view(-1))

        with self._waiting():
            output, pending = self._owed(start)
            pending.wait()
        question = self._round.own
        if question is not None and question.gradient is not None:
            self._failure.guarded(question.finish, output)

    # -- tables -------------------------------------------------------------------------------

    def _owned(self, ids: Tensor, rank: int) -> Tensor:
        """Return the places of the tokens whose rows a rank holds."""
        first, end = self._layer.interval(rank)
        return ((ids >= first) & (ids < end)).nonzero()[:, 0]

    def _places(self) -> tuple[list[Tensor], list[Tensor]]:
        """Return the tokens of each rank whose rows are here, and where this rank's rows are."""
        assert self._round.values is not None
        ranks = range(len(self._round.sizes))
        of_ranks = [self._round.values[part] for part in self._round.parts()]
        first, _ = self._layer.interval(self._rank)
        wanted = [ids[self._owned(ids, self._rank)] - first for ids in of_ranks]
        return wanted, [self._owned(of_ranks[self._rank], rank) for rank in ranks]

    def _looked_up(self, ids: Tensor) -> Tensor:
        wanted, places = self._owed(self._places)
        sends, receives = [len(each) for each in wanted], [len(each) for each in places]
        rows = self._layer.rows
        sent = self._owed(rows.new_zeros, (sum(sends), self._layer.width))

        def pick() -> None:
            torch.index_select(rows, 0, torch.cat(wanted), out=sent)

        self._failure.guarded(pick)
        received = self._exchanged(sent, sends, receives)

        def in_order() -> Tensor:
            answer = rows.new_empty((len(ids), self._layer.width))
            answer[torch.cat(places)] = received
            return answer

        return self._owed(in_order)

    def _backward_of_lookup(self) -> None:
        wanted, places = self._owed(self._places)
        sends, receives = [len(each) for each in places], [len(each) for each in wanted]
        own = self._round.own
        found = None if own is None else own.gradient

        def pick() -> Tensor:
            if found is None:
                return self._layer.rows.new_zeros((sum(sends), self._layer.width))
            return found.reshape(-1, self._layer.width)[torch.cat(places)]

        received = self._exchanged(self._owed(pick), sends, receives)

        def add() -> None:
            into, rows = self._layer.grad_rows, torch.cat(wanted)
            if into is None:
                return
            padding = self._layer.padding
            if padding is not None:
                received[rows == padding] = 0.0
            into.index_add_(0, rows, received.to(into.dtype))

        self._failure.guarded(add)

    # -- heads --------------------------------------------------------------------------------

    def _statistics(self) -> Tensor:
        own, hidden = self._round.own, self._round.values
        assert hidden is not None
        targets = None if own is None else own.targets
        if targets is None:
            new = partial(torch.empty, 0, dtype=torch.int64, device=self._device)
            targets = self._owed(new)
        self._round.targets = whole = self._gathered(targets)
        dtype = wide(hidden.dtype)
        found = [self._owed(partial(hidden.new_zeros, (len(hidden), 4), dtype=dtype))]

        def compute() -> None:
            found[0] = self._layer.columns.statistics(hidden, whole)

        self._failure.guarded(compute)
        together = self._of_ranks(found[0])
        answers, self._round.log_sum = self._owed(joined, together, self._layer.vocabulary)
        # a view would hold the answers to all ranks
        return self._owed(answers[self._round.parts()[self._rank]].clone)

    def _backward_of_statistics(self, into: Gradients) -> None:
        own, hidden, targets = self._round.own, self._round.values, self._round.targets
        log_sum = self._round.log_sum
        assert hidden is not None and targets is not None and log_sum is not None
        found = None if own is None else own.gradient
        if found is None:
            found = self._owed(log_sum.new_zeros, (self._round.sizes[self._rank], 3))
        gradients = self._gathered(found)
        self._failure.guarded(
            self._layer.columns.backward_of_statistics,
            hidden,
            targets,
            log_sum,
            gradients,
            self._layer.vocabulary,
            into,
        )

    def _best(self) -> Tensor:
        hidden = self._round.values
        assert hidden is not None
        found = self._owed(partial(hidden.new_zeros, (len(hidden), 2), dtype=torch.float64))
        found[:, 0] = -torch.inf

        def compute() -> None:
            value, place = self._layer.columns.best(hidden)
            found[:, 0], found[:, 1] = value, place

        self._failure.guarded(compute)
        value, place = self._of_ranks(found).unbind(2)
        last = float(self._layer.vocabulary - 1)

        def first() -> Tensor:
            top = value.amax(0)  # of tokens with a logit that is not a number, that
            best = torch.where((value == top) | value.isnan(), place, last).amin(0)
            return best[self._round.parts()[self._rank]].to(torch.int64)

        return self._owed(first)

    def _logits(self) -> Tensor:
        hidden, parts = self._round.values, self._round.parts()
        assert hidden is not None
        columns = self._layer.columns
        own = self._round.sizes[self._rank]
        sends = [size * len(columns.rows) for size in self._round.sizes]
        widths = [end - first for first, end in self._layer.intervals]
        sent = self._owed(hidden.new_zeros, sum(sends))

        def compute() -> None:
            torch.cat([columns.logits(hidden[part]).view(-1) for part in parts], out=sent)

        self._failure.guarded(compute)
        receives = [own * width for width in widths]
        received = self._exchanged(sent, sends, receives).split(receives)

        def in_order() -> Tensor:
            pairs = zip(received, widths, strict=True)
            return torch.cat([each.view(own, width) for each, width in pairs], 1)

        return self._owed(in_order)

    def _backward_of_logits(self, into: Gradients) -> None:
        question, hidden, parts = self._round.own, self._round.values, self._round.parts()
        assert hidden is not None
        columns, own = self._layer.columns, self._round.sizes[self._rank]
        found = None if question is None else question.gradient
        widths = [end - first for first, end in self._layer.intervals]
        sends = [own * width for width in widths]
        receives = [size * len(columns.rows) for size in self._round.sizes]

        def in_columns() -> Tensor:
            if found is None:
                return hidden.new_zeros(own * self._layer.vocabulary)
            whole = found.reshape(own, self._layer.vocabulary)
            return torch.cat([each.reshape(-1) for each in whole.split(widths, 1)])

        received = self._exchanged(self._owed(in_columns), sends, receives).split(receives)

        def add() -> None:
            for part, each in zip(parts, received, strict=True):
                gradients = each.view(-1, len(columns.rows)) if each.numel() else each.view(0, 0)
                if len(gradients):
                    columns.backward_of_logits(hidden[part], gradients, part.start, into)

        self._failure.guarded(add)

    # -- ranks --------------------------------------------------------------------------------

    def _owed(self, function: Callable[..., _Result], *args: Any) -> _Result:
        """Return what a part of the round gives that this rank owes to the others.

        Without the memory for it, the rank drops its microbatches and tries again.
        """
        found: list[_Result] = []
        self._failure.with_memory(lambda: found.append(function(*args)))
        return found[0]

    def _new(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=self._round.dtype, device=self._device)

    def _zeros(self, *shape: int) -> Tensor:
        return self._new(*shape).zero_()

    def _gathered(self, own: Tensor) -> Tensor:
        """Return the rows of all ranks' tokens."""
        with self._waiting():
            return self._owed(
                lambda: all_gather_rows(own.contiguous(), self._round.sizes, self._group)
            )

    def _exchanged(self, rows: Tensor, sends: list[int], receives: list[int]) -> Tensor:
        """Return what every rank has sent here."""
        with self._waiting():
            return self._owed(all_to_all_rows, rows, sends, receives, self._group)

    def _of_ranks(self, own: Tensor) -> Tensor:
        """Return what every rank knows of all tokens, stacked."""
        ranks, tokens = len(self._round.sizes), len(own)
        with self._waiting():
            joined_rows = self._owed(all_gather_rows, own, [tokens] * ranks, self._group)
        return joined_rows.view(ranks, tokens, *own.shape[1:])
