"""Measures what meetings at a vocabulary that stays cut take: columns of logits, and messages.

A step was timed before, and its questions were counted. Here each rank answers such questions with
the rows that it holds, apart from the others, and then all ranks exchange messages of that kind
without computing. Both grow with the tokens of the global batch, and columns with a rank's share
of the state.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_cephalo.common.errors import ProfilingError
from lightning_cephalo.execution.memory_errors import is_out_of_memory
from lightning_cephalo.execution.sharded_model import ShardedModel
from lightning_cephalo.execution.vocabulary import columns as of_columns
from lightning_cephalo.execution.vocabulary.columns import STATISTICS, Gradients, wide
from lightning_cephalo.execution.vocabulary.layers import CutLayer
from lightning_cephalo.execution.vocabulary.questions import Kind
from lightning_cephalo.execution.vocabulary.rounds import Asked
from lightning_cephalo.plan import Problem, RankProfile
from lightning_cephalo.plan.program import ROOT
from lightning_cephalo.profiling.network import slowest
from lightning_cephalo.sharding.collectives import (
    all_gather_rows,
    all_to_all_rows,
    reduce_slices,
)

# Tokens whose columns are timed first, the most of them, and the seconds that are enough.
_FEW_TOKENS, _MANY_TOKENS, _ENOUGH_S = 32, 4096, 0.05
_REPEATS = 3
# Bytes of one message that is timed.
_MESSAGE_BYTES = 2**23
# Logits of a chunk and what is made of them.
_CHUNK_COPIES = 3
# Columns of ranks of one kind that differ by less are noise.
_ALIKE = 0.10


@dataclass(frozen=True)
class VocabularyTimes:
    """What meetings take in a step of the global batch.

    Attributes:
        columns_s: Seconds of all columns, of each rank.
        forward_s: Seconds of messages in the forward.
        backward_s: Seconds of messages in the backward.
        hidden_bytes: What every rank holds until the backward.
        tokens_bytes: What it holds of tokens that were looked up.
        meeting_bytes: What a meeting takes in addition.
    """

    columns_s: tuple[float, ...]
    forward_s: float
    backward_s: float
    hidden_bytes: float
    tokens_bytes: float
    meeting_bytes: float


def measure_vocabulary(
    model: ShardedModel,
    clock: Callable[[], float],
    asked: Mapping[Asked, int],
    samples: int,
    global_batch_size: int,
    largest_round: int,
    exchange_s: float,
) -> VocabularyTimes:
    """Measure meetings on the rows that ranks hold now; collective.

    Args:
        model: The sharded model; has run a step.
        clock: Returns seconds once all work issued to the device is done.
        asked: What a step asked, in tokens of all ranks; equal on all ranks.
        samples: Samples of all ranks in that step.
        global_batch_size: Samples of a step over all ranks.
        largest_round: Most samples of all ranks that meet at the same time.
        exchange_s: Seconds of one exchange of small messages.

    Raises:
        ProfilingError: If the step asked nothing.
    """
    if not asked or not samples:
        raise ProfilingError(
            "vocabulary_sharding=True, but no step that was measured used the layers that are cut,"
            " so that they have no price. Use vocabulary_sharding=False, or give plan=."
        )
    model.executor.reshard()
    root = model.units[ROOT]
    root.start_gather(is_cut=True)
    root.wait_gather()
    columns_s: float | None = 0.0
    forward_s = backward_s = hidden_bytes = tokens_bytes = meeting_bytes = 0.0
    for each, counted in asked.items():
        layer = model.executor.hooks.vocabulary.at(each.meeting)
        each_sample = counted / samples
        tokens = each_sample * global_batch_size
        found = _columns_s(layer, each, tokens, clock, model.device)
        columns_s = None if found is None or columns_s is None else columns_s + found
        there_s, back_s = _messages_s(model, layer, each, tokens, clock)
        forward_s += there_s + exchange_s
        backward_s += (back_s + exchange_s) * each.has_backward
        held = tokens * _held_bytes(layer, each) * each.has_backward
        if each.kind is Kind.LOOKUP:
            tokens_bytes += held
        else:
            hidden_bytes += held
        round_tokens = each_sample * min(largest_round, global_batch_size)
        taken = _taken_bytes(layer, each, round_tokens, len(model.fractions))
        meeting_bytes = max(meeting_bytes, taken)
    root.free()
    return VocabularyTimes(
        columns_s=_known_everywhere(model, columns_s),
        forward_s=forward_s,
        backward_s=backward_s,
        hidden_bytes=model.control.max(hidden_bytes),
        tokens_bytes=model.control.max(tokens_bytes),
        meeting_bytes=model.control.max(meeting_bytes),
    )


def _known_everywhere(model: ShardedModel, own_s: float | None) -> tuple[float, ...]:
    """Return every rank's seconds; a rank that does not know its own gets the largest known."""
    said = model.control.gather([-1.0 if own_s is None else own_s])
    seconds = [each for (each,) in said]
    most = max(seconds)
    if most < 0:
        raise ProfilingError(
            "vocabulary_sharding=True, but no rank has the memory to compute columns of logits"
            " while they are measured. Use larger devices, or vocabulary_sharding=False."
        )
    return tuple(most if each < 0 else each for each in seconds)


def with_vocabulary(problem: Problem, times: VocabularyTimes | None) -> Problem:
    """Return a problem with what meetings take; None: nothing is cut.

    Equal devices get the same seconds: these differ by noise.
    """
    columns_s = (0.0,) * len(problem.ranks) if times is None else times.columns_s
    alike: dict[RankProfile, list[float]] = {}
    for rank, seconds in zip(problem.ranks, columns_s, strict=True):
        alike.setdefault(replace(rank, columns_s=0.0), []).append(seconds)
    ranks = []
    for rank, seconds in zip(problem.ranks, columns_s, strict=True):
        middle = statistics.median(alike[replace(rank, columns_s=0.0)])
        is_alike = abs(seconds - middle) <= _ALIKE * middle
        ranks.append(replace(rank, columns_s=middle if is_alike else seconds))
    if times is None:
        return replace(
            problem,
            ranks=tuple(ranks),
            vocabulary_sharding=False,
            meeting_forward_s=0.0,
            meeting_backward_s=0.0,
            hidden_bytes=0.0,
            meeting_bytes=0.0,
        )
    return replace(
        problem,
        ranks=tuple(ranks),
        vocabulary_sharding=True,
        gathered_bytes=problem.gathered_bytes + times.tokens_bytes,
        meeting_forward_s=times.forward_s,
        meeting_backward_s=times.backward_s,
        hidden_bytes=times.hidden_bytes,
        meeting_bytes=times.meeting_bytes,
    )


# -- what one rank computes ---------------------------------------------------------------------


def _columns_s(
    layer: CutLayer,
    asked: Asked,
    tokens: float,
    clock: Callable[[], float],
    device: torch.device,
) -> float | None:
    """Return the seconds of all columns for all tokens; None: this rank cannot tell."""
    if asked.kind is Kind.LOOKUP:
        return 0.0
    share = len(layer.rows) / layer.vocabulary
    if not share:
        return None
    count, took_s = max(1, min(_FEW_TOKENS, round(tokens))), 0.0
    found: float | None = None
    most = max(1, min(_MANY_TOKENS, round(tokens)))
    if asked.kind is Kind.LOGITS:  # no chunks: all of them are there at once
        row = len(layer.rows) * wide(asked.dtype).itemsize
        most = max(1, min(most, of_columns.CHUNK_BYTES // row))
        count = min(count, most)
    try:
        while True:
            took_s = min(_timed(layer, asked, count, clock, device) for _ in range(_REPEATS))
            found = took_s / count * tokens / share
            if took_s > _ENOUGH_S or count >= most:
                break
            count = min(2 * count, most)
    except Exception as failure:  # the host's errors have other types
        if not is_out_of_memory(failure):
            raise
    return found


def _timed(
    layer: CutLayer, asked: Asked, count: int, clock: Callable[[], float], device: torch.device
) -> float:
    columns, vocabulary = layer.columns, layer.vocabulary
    with torch.no_grad():
        hidden = torch.zeros((count, layer.width), dtype=asked.dtype, device=device)
        targets = torch.zeros(count, dtype=torch.int64, device=device)
        log_sum = torch.zeros(count, dtype=wide(asked.dtype), device=device)
        gradients = torch.zeros((count, 3), dtype=wide(asked.dtype), device=device)
        of_logits = None
        rows = torch.zeros_like(columns.rows) if layer.is_trained and asked.has_backward else None
        into = Gradients(rows, None, torch.empty_like(hidden))
        if asked.kind is Kind.LOGITS and asked.has_backward:
            of_logits = torch.zeros((count, len(columns.rows)), dtype=asked.dtype, device=device)
        start_s = clock()
        if asked.kind is Kind.STATISTICS:
            columns.statistics(hidden, targets)
            if asked.has_backward:
                columns.backward_of_statistics(
                    hidden, targets, log_sum, gradients, vocabulary, into
                )
        elif asked.kind is Kind.BEST:
            columns.best(hidden)
        else:
            columns.logits(hidden)
            if of_logits is not None:
                columns.backward_of_logits(hidden, of_logits, 0, into)
        return clock() - start_s


# -- what ranks send ----------------------------------------------------------------------------


def _messages_s(
    model: ShardedModel, layer: CutLayer, asked: Asked, tokens: float, clock: Callable[[], float]
) -> tuple[float, float]:
    """Return the seconds of all messages in the forward and in the backward."""
    ranks, device = len(model.fractions), model.device
    wanted = max(1, round(tokens / ranks))
    row = layer.vocabulary if asked.kind is Kind.LOGITS else layer.width
    count = max(1, min(wanted, _MESSAGE_BYTES // (row * asked.dtype.itemsize * ranks)))
    there, back = _messages(layer, asked, count, ranks, device)
    scale = tokens / (count * ranks)
    forward_s = sum(_median_s(model, clock, each) for each in there)
    backward_s = sum(_median_s(model, clock, each) for each in back) if asked.has_backward else 0.0
    return forward_s * scale, backward_s * scale


def _median_s(
    model: ShardedModel, clock: Callable[[], float], message: Callable[[], object]
) -> float:
    def send() -> None:
        message()

    slowest(model, clock, send)  # the first one may make connections
    return statistics.median(slowest(model, clock, send) for _ in range(_REPEATS))


_Messages = Sequence[Callable[[], object]]


def _messages(
    layer: CutLayer, asked: Asked, count: int, ranks: int, device: torch.device
) -> tuple[_Messages, _Messages]:
    """Return the messages of a round of so many tokens on each rank, there and back."""
    group, width, sizes = dist.group.WORLD, layer.width, [count] * ranks
    assert group is not None

    def tensor(*shape: int, dtype: torch.dtype = asked.dtype) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=device)

    def gather(rows: Tensor, counts: Sequence[int]) -> Callable[[], object]:
        return lambda: all_gather_rows(rows, counts, group)

    def exchange(row: int, dtype: torch.dtype = asked.dtype) -> Callable[[], object]:
        # each rank has an even share of the vocabulary here
        part, rest = divmod(count, ranks)
        parts = [part + (index < rest) for index in range(ranks)]
        own = parts[dist.get_rank()]
        sends, receives = [own] * ranks, parts
        return lambda: all_to_all_rows(tensor(sum(sends), row, dtype=dtype), sends, receives, group)

    def reduce() -> None:
        numel = [count * width] * ranks
        sums = tensor(count * width, dtype=wide(asked.dtype))
        reduce_slices(tensor(sum(numel)), numel, group, sums).wait()

    dtype = wide(asked.dtype)
    if asked.kind is Kind.LOOKUP:
        ids = tensor(count, dtype=torch.int64)
        rows = layer.rows.dtype
        return [gather(ids, sizes), exchange(width, rows)], [exchange(width, rows)]
    hidden = gather(tensor(count, width), sizes)
    everywhere = [count * ranks] * ranks
    if asked.kind is Kind.STATISTICS:
        numbers = gather(tensor(count * ranks, STATISTICS, dtype=dtype), everywhere)
        targets = gather(tensor(count, dtype=torch.int64), sizes)
        return [hidden, targets, numbers], [gather(tensor(count, 3, dtype=dtype), sizes), reduce]
    if asked.kind is Kind.BEST:
        best = tensor(count * ranks, 2, dtype=torch.float64)
        return [hidden, gather(best, everywhere)], []
    logits = exchange(layer.vocabulary)
    return [hidden, logits], [logits, reduce]


# -- what they hold -----------------------------------------------------------------------------


def _held_bytes(layer: CutLayer, asked: Asked) -> int:
    """Return the bytes that each rank holds of a token until the backward."""
    if asked.kind is Kind.LOOKUP:
        return torch.int64.itemsize
    more = 0
    if asked.kind is Kind.STATISTICS:  # targets and log-sums
        more = torch.int64.itemsize + wide(asked.dtype).itemsize
    return layer.width * asked.dtype.itemsize + more


def _taken_bytes(layer: CutLayer, asked: Asked, tokens: float, ranks: int) -> float:
    """Return the most that a round of so many tokens takes on any rank, in addition to those."""
    itemsize = wide(asked.dtype).itemsize
    row = layer.width * itemsize
    if asked.kind is Kind.LOOKUP:  # rows that are sent, that come, and their order
        return 3 * tokens * row
    if asked.kind is Kind.LOGITS:
        return 3 * tokens * layer.vocabulary * itemsize + 3 * tokens * row
    numbers = tokens * STATISTICS * itemsize * (ranks + 2)
    chunk = min(float(of_columns.CHUNK_BYTES), tokens * layer.vocabulary * itemsize)
    # gradients of hidden states, what their reduce receives, and its sum
    return _CHUNK_COPIES * chunk + numbers + 3 * tokens * row * asked.has_backward
