"""Losses over the whole global batch, such as contrastive ones, which are no mean over samples.

[Note: losses over the batch]
Ranks exchange rows and compute the loss of all rows; see docs/design/step.md. A step divides each
microbatch's gradients by the total weight and multiplies them by its own. So a microbatch carries
its rows' gradients times ``total / own``. Gradients of parameters that the function uses are equal
on all ranks: the first microbatch of each rank carries its part of them.

Source: the gradient cache of Gao et al. 2021 (arXiv 2101.06983).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lightning_cephalo.common.errors import UnitUseError, UnsupportedError
from lightning_cephalo.execution.graph import leaves_behind
from lightning_cephalo.execution.step import MicrobatchCall
from lightning_cephalo.execution.waiting import running_microbatch
from lightning_cephalo.features.normalisation import at_least_float32
from lightning_cephalo.plan.program import ROOT, Instruction, Operation, Visit, loss_unit
from lightning_cephalo.ranks.control import ControlGroup
from lightning_cephalo.sharding.collectives import all_gather_rows, everyone

if TYPE_CHECKING:
    from lightning_cephalo.execution.executor import Executor

AT_BATCH = Visit(-6)
"""The place of a microbatch that waits for the rows of the whole batch."""

# each step of a microbatch has a context of its own
_was_called = ContextVar("was_called", default=False)


def loss_over_batch(function: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
    """Return ``function(*tensors)``, with the rows of the whole global batch in a training step.

    ::

        def training_step(self, batch, batch_idx):
            first, second = (self.encoder(view) for view in batch)
            return loss_over_batch(self.contrastive, first, second)

        def contrastive(self, first, second):     # of shape (global batch, width)
            logits = self.log_scale.exp() * first @ second.T
            return torch.nn.functional.cross_entropy(logits, torch.arange(len(first)))

    Every rank computes the function, on the same values. It must not depend on chance, and on no
    tensor with a gradient other than its arguments and parameters outside of units. Memory for its
    intermediate results is not part of the plan.

    Outside of a training step, and with other strategies, the function is simply called.

    Args:
        function: Computes a scalar.
        tensors: Rows of this call's samples; of shape ``(rows, ...)``, equal but for the rows.

    Raises:
        UnitUseError: If the function calls a unit, or uses another tensor with a gradient.
        UnsupportedError: With manual optimization.
    """
    microbatch = running_microbatch()
    if microbatch is None:
        return function(*tensors)
    _was_called.set(True)
    if not microbatch.has_one_backward:
        raise UnsupportedError(
            "loss_over_batch with manual optimization: ranks meet at backwards and updates only."
            ' Use automatic optimization, or strategy="ddp".'
        )
    if not microbatch.meets:
        return function(*tensors)
    asking = Asking(tensors)
    microbatch.wait_for_all(AT_BATCH, asking)
    (answer,) = asking.answers
    return answer.loss_of(tensors, answer.share.compute(function))


def was_called() -> bool:
    """Return whether the step that calls this has computed a loss over the batch."""
    return _was_called.get()


Tensors = tuple[Any, ...]
"""The rows of one microbatch."""


@dataclass
class Asking:
    """The rows of one microbatch that waits, and what it gets."""

    tensors: Tensors
    answers: list[Answer] = field(default_factory=list)  # one, as soon as all have asked

    @property
    def is_answered(self) -> bool:
        return bool(self.answers)


@dataclass
class WholeBatch:
    rows: list[Tensor]
    ranks: int
    scale: Callable[[Tensor], Tensor] | None
    parameters: frozenset[int]
    loss: Tensor | None = None
    gradients: list[Tensor | None] = field(default_factory=list)
    of_parameters: list[tuple[Tensor, Tensor]] = field(default_factory=list)

    def compute(self, function: Callable[..., Tensor]) -> Tensor:
        """Return the loss; the first microbatch that asks computes it and its gradients."""
        if self.loss is not None:
            return self.loss
        loss = function(*self.rows)
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            raise UnitUseError(
                f"The function of loss_over_batch returned {_spelled(loss)}; expected a loss, a"
                " tensor of one element."
            )
        used = leaves_behind([loss])
        own = {id(row): place for place, row in enumerate(self.rows)}
        others = [leaf for leaf in used if id(leaf) not in own]
        if any(id(leaf) not in self.parameters for leaf in others):
            raise UnitUseError(
                "The function of loss_over_batch uses a unit, or a tensor with a gradient that is"
                " none of its arguments. Other samples' rows of it would be missing. Compute it"
                " before, and give it to loss_over_batch as an argument."
            )
        self.gradients = [None] * len(self.rows)
        if used:
            factor = torch.ones((), device=loss.device)
            factor = factor if self.scale is None else self.scale(factor)
            found = torch.autograd.grad(loss, used, factor.to(loss.dtype).expand_as(loss))
            for leaf, gradient in zip(used, found, strict=True):
                exact = gradient.to(at_least_float32(gradient.dtype)) / factor
                if id(leaf) in own:
                    self.gradients[own[id(leaf)]] = exact
                else:
                    self.of_parameters.append((leaf, exact))
        self.loss = loss.detach()
        return self.loss


@dataclass(frozen=True)
class Answer:
    """A microbatch's part of the loss of all rows."""

    share: WholeBatch
    starts: tuple[int, ...]
    factor: float
    is_first: bool

    def loss_of(self, tensors: Sequence[Tensor], loss: Tensor) -> Tensor:
        """Return the loss, with a graph to this microbatch's rows and its part of parameters."""
        share = self.share
        carried = torch.zeros((), device=loss.device)
        pairs = zip(tensors, share.gradients, self.starts, strict=True)
        for tensor, gradient, start in pairs:
            if gradient is not None and tensor.requires_grad:
                own = gradient[start : start + len(tensor)]
                carried = carried + (tensor.to(own.dtype) * own).sum() * self.factor
        if self.is_first:
            for parameter, gradient in share.of_parameters:
                part = (parameter.to(gradient.dtype) * gradient).sum()
                carried = carried + part * (self.factor / share.ranks)
        # the value of the loss, with the gradient of `carried`
        return loss + (carried - carried.detach()).to(loss.dtype)


def exchange_rows(
    asked: Sequence[Tensors],
    samples: Sequence[int],
    control: ControlGroup,
    scale: Callable[[Tensor], Tensor] | None,
    parameters: Iterable[Tensor],
    device: torch.device,
) -> list[Answer]:
    """Return the answer for each microbatch of this rank; collective."""
    kinds = control.together(
        "reading the arguments of loss_over_batch", lambda: [_kinds(tensors) for tensors in asked]
    )
    rows = control.gather((kinds, list(samples)))
    every = [kind for kinds_of_rank, _ in rows for kind in kinds_of_rank]
    like = {tuple(kind[1:3] for kind in kinds) for kinds in every}
    if len(like) > 1:
        said = " and ".join(sorted(_spelled_kinds(kinds) for kinds in like))
        raise UnitUseError(
            f"Microbatches call loss_over_batch with different tensors: rows of {said}. Only the"
            " number of rows may differ, so that they can be joined."
        )
    total = float(sum(sum(own) for _, own in rows))
    found, starts = [], []
    for place, (shape, dtype) in enumerate(next(iter(like))):
        own_rows = [tensors[place].detach() for tensors in asked]
        sent = torch.uint8 if dtype is torch.bool else dtype
        empty = torch.zeros((0, *shape), dtype=sent, device=device)
        local = torch.cat([empty, *(each.to(sent) for each in own_rows)])
        counts = [sum(kinds[place][0] for kinds in of_rank) for of_rank, _ in rows]
        joined = local
        if control.world_size > 1:
            joined = all_gather_rows(local, counts, everyone())
        needs_gradient = any(kinds[place][3] for kinds in every)
        found.append(joined.to(dtype).detach().requires_grad_(needs_gradient))
        before = sum(counts[: control.rank])
        lengths = [len(each) for each in own_rows]
        starts.append([before + sum(lengths[:index]) for index in range(len(lengths))])
    ranks = sum(bool(of_rank) for of_rank, _ in rows)
    share = WholeBatch(found, ranks, scale, frozenset(map(id, parameters)))
    return [
        Answer(share, tuple(own), total / size, is_first=index == 0)
        for index, (own, size) in enumerate(zip(zip(*starts, strict=True), samples, strict=True))
    ]


def _weight_of(call: MicrobatchCall, result: Any) -> tuple[Tensor, float | Tensor]:
    """Return the loss, and a weight that is the number of samples; else raise UnitUseError."""
    found, samples = call.weight_of(result), call.samples
    if float(found[1]) != samples:
        raise UnitUseError(
            f"training_step calls loss_over_batch and returns the weight {float(found[1]):g} for"
            f" {samples} samples. That"
            " loss has one value for the whole batch: return it without a weight, and multiply"
            " terms that have weights by them in the function of loss_over_batch."
        )
    return found


def _kinds(tensors: Tensors) -> list[tuple[int, tuple[int, ...], torch.dtype, bool]]:
    """Return rows, shape of a row, dtype, and whether it needs a gradient, of each tensor."""
    for value in tensors:
        if not isinstance(value, Tensor) or not value.ndim:
            raise UnitUseError(
                f"loss_over_batch got {type(value).__name__}; expected tensors whose first"
                " dimension is that of the samples. Give other values to the function itself,"
                " by functools.partial."
            )
    return [(len(t), tuple(t.shape[1:]), t.dtype, t.requires_grad) for t in tensors]


def _spelled(value: Any) -> str:
    return f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)


def _spelled_kinds(kinds: Sequence[tuple[tuple[int, ...], torch.dtype]]) -> str:
    return ", ".join(f"shape {shape} in {dtype}" for shape, dtype in kinds) or "none"


def go_on(executor: Executor, others_returned: bool) -> None:
    """Give all microbatches the rows of the whole batch, and go on with them; collective."""
    step, failure, doing = executor.step, executor.failure, "computing a loss over the batch"
    waiting = [each.meeting for each in step.microbatches if each.code.parked == AT_BATCH]
    asked = [each for each in waiting if isinstance(each, Asking)]
    if others_returned or len(asked) < len(step.microbatches):
        failure.note(
            UnitUseError(
                "Some microbatches call loss_over_batch, and others return without it. Its rows"
                " are those of all samples of the step: call it in every training_step."
            )
        )
    said = executor.link.exchange([float(failure.error is not None)])
    if any(row[0] for row in said):
        executor.give_up(doing)
    try:
        answers = exchange_rows(
            [each.tensors for each in asked],
            [call.samples for call in step.calls],
            executor.link.control,
            step.weights.scale_loss,
            [gathered for _, gathered in executor.units[ROOT].parameter_pairs()],
            executor.accelerator.device,
        )
    except UnitUseError as error:  # on all ranks
        failure.note(error)
        executor.give_up(doing)
        raise
    for asking, answer in zip(asked, answers, strict=True):
        asking.answers = [answer]
    step.calls = [replace(each, weight_of=partial(_weight_of, each)) for each in step.calls]
    last, unit = len(step.visits) - 1, loss_unit(step.visits, executor.ends)
    if unit != ROOT and step.trainable[unit]:
        executor.execute(Instruction(Operation.ARM, unit, last))
    for index in range(len(step.calls)):
        executor.execute(Instruction(Operation.LOSS, unit, last, index))
    executor.execute(Instruction(Operation.AGREE))
