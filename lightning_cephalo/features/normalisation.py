"""Normalises by the statistics of the global batch, in the middle of a unit.

[Note: meetings]
At a layer of synchronised batch normalisation all microbatches of all ranks stop, and add up::

    forward    each: count, mean, squared deviations of its samples  ->  mean, variance of all
    backward   each: sum of g, sum of g x normalised values          ->  sums of all

The layer then is an affine function of its input. The input's gradient has a part that goes
straight through, and one that goes through the statistics to all samples, even without weight.
Statistics travel in double precision, as the mean of unequal parts is a difference of sums.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional


@dataclass(frozen=True)
class Statistics:
    count: Tensor
    mean: Tensor
    variance: Tensor

    @classmethod
    def of_moments(cls, moments: Tensor) -> Statistics:
        count = moments[0].clamp(min=1.0)
        mean, deviations = moments[1:].chunk(2)
        return cls(count, mean, deviations / count)


def no_moments(norm: nn.SyncBatchNorm, device: torch.device) -> Tensor:
    return torch.zeros(1 + 2 * norm.num_features, dtype=torch.float64, device=device)


def moments_of(norm: nn.SyncBatchNorm, value: Tensor) -> Tensor:
    """Return count, mean and sum of squared deviations per channel, in one row."""
    norm._check_input_dim(value)
    norm._check_non_zero_input_channels(value)
    value = value.detach()
    count = value.numel() // value.shape[1]
    row = no_moments(norm, value.device)
    if count:
        over = [dim for dim in range(value.ndim) if dim != 1]
        variance, mean = torch.var_mean(value.to(at_least_float32(value.dtype)), over, correction=0)
        row[0] = count
        row[1:] = torch.cat([mean, variance * count])
    return row


def joined(rows: Tensor) -> Tensor:
    """Return the moments of all samples, given those of disjoint parts.

    Source: Chan, Golub and LeVeque 1979, "Updating formulae and a pairwise algorithm for computing
    sample variances".
    """
    counts = rows[:, :1]
    means, deviations = rows[:, 1:].chunk(2, dim=1)
    count = counts.sum()
    mean = (counts * means).sum(0) / count.clamp(min=1.0)
    between = (counts * (means - mean) ** 2).sum(0)
    return torch.cat([count[None], mean, deviations.sum(0) + between])


_RUNNING = ("num_batches_tracked", "running_mean", "running_var")


def _update_running(norm: nn.SyncBatchNorm, statistics: Statistics) -> None:
    """Move the running statistics of a layer, as torch's batch normalisation does."""
    if not norm.track_running_stats:
        return
    with torch.no_grad():
        steps, mean, variance = (norm.get_buffer(name) for name in _RUNNING)
        steps.add_(1)
        momentum = norm.momentum
        if momentum is None:  # the mean over all steps
            momentum = 1.0 / float(steps)
        count = statistics.count
        unbiased = statistics.variance * (count / (count - 1.0))
        mean.mul_(1.0 - momentum).add_(statistics.mean * momentum)
        variance.mul_(1.0 - momentum).add_(unbiased * momentum)


class Meeting:
    """One microbatch at one layer: what it brings, and what it takes away.

    ::

        value -> moments -> joint (all microbatches, all ranks) -> tap of weight and bias -> output
          |                                                                                    ^
          +------------------------------------------------------------------------------------+

    Attributes:
        row: Its moments, with a graph to its values.
        statistics: Those of all samples, as soon as they have met.
        joint: Mean and variance of all samples, with a graph; None: no gradient passes.
    """

    def __init__(self, norm: nn.SyncBatchNorm, arrive: Callable[[], None] | None) -> None:
        self.norm, self.arrive = norm, arrive
        self.row: Tensor | None = None
        self.values_per_channel = 0
        self.statistics: Statistics | None = None
        self.joint: Tensor | None = None

    @property
    def is_answered(self) -> bool:
        return self.statistics is not None

    def bring(self, value: Tensor) -> None:
        """Compute the moments of a microbatch's values."""
        self.values_per_channel = value.numel() // value.shape[1]
        self.row = _Moments.apply(value, self)

    def normalised(self, value: Tensor) -> Tensor:
        """Return the normalised values; gradients of the statistics go to :attr:`joint`.

        Moves the running statistics of the layer.
        """
        norm, statistics = self.norm, self.statistics
        if statistics is None:
            raise RuntimeError("A layer normalises before all ranks have met.")
        _update_running(norm, statistics)
        wide = at_least_float32(value.dtype)
        if norm.affine:
            weight, bias = norm.weight.to(wide), norm.bias.to(wide)
        else:
            weight = torch.ones(norm.num_features, dtype=wide, device=value.device)
            bias = torch.zeros_like(weight)
        if self.joint is not None:
            weight, bias = _Tap.apply(weight, bias, self.joint, statistics.variance, norm.eps)
        mean, variance = statistics.mean.to(wide), statistics.variance.to(wide)
        return functional.batch_norm(
            value, mean, variance, weight, bias, training=False, eps=norm.eps
        )


class _Moments(torch.autograd.Function):
    """Count, mean and squared deviations; the backward is that of mean and variance of all."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, meeting: Meeting) -> Tensor:
        ctx.save_for_backward(value)
        ctx.meeting = meeting
        return moments_of(meeting.norm, value)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        meeting, statistics = ctx.meeting, ctx.meeting.statistics
        if meeting.arrive is not None:
            meeting.arrive()
        (value,) = ctx.saved_tensors
        wide = at_least_float32(value.dtype)
        of_mean, of_variance = gradient[1:].chunk(2)
        shape = [1, -1] + [1] * (value.ndim - 2)
        # gradient of the mean / n + 2 x (value - mean) x gradient of the variance / n
        slope = 2.0 * of_variance / statistics.count
        offset = of_mean / statistics.count - slope * statistics.mean
        found = value.to(wide) * slope.to(wide).view(shape) + offset.to(wide).view(shape)
        return found.to(value.dtype), None


class _Tap(torch.autograd.Function):
    """Weight and bias, whose gradients also tell that of the statistics.

    The bias's gradient is the sum of all g, the weight's that of g x normalised values. The mean's
    is that of the bias, times -weight / deviation. The variance's is that of the weight, times
    -weight / (2 x (variance + eps)).
    """

    @staticmethod
    def forward(
        ctx: Any, weight: Tensor, bias: Tensor, joint: Tensor, variance: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(weight, variance)  # the weight may be away in between
        ctx.eps = eps
        return weight.detach(), bias.detach()

    @staticmethod
    def backward(ctx: Any, of_weight: Tensor, of_bias: Tensor) -> Any:
        weight, variance = (each.to(torch.float64) for each in ctx.saved_tensors)
        variance = variance + ctx.eps
        of_mean = -weight * variance.rsqrt() * of_bias.to(torch.float64)
        of_variance = -0.5 * weight / variance * of_weight.to(torch.float64)
        return of_weight, of_bias, torch.stack([of_mean, of_variance]), None, None


class Joint(torch.autograd.Function):
    """Mean and variance of all samples, from the moments of this rank's microbatches.

    The backward waits for all of them: it is one node.
    """

    @staticmethod
    def forward(
        ctx: Any, statistics: Statistics, meet: Callable[[Tensor], Tensor], *rows: Tensor
    ) -> Tensor:
        ctx.meet, ctx.count = meet, len(rows)
        return torch.stack([statistics.mean, statistics.variance])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        together = ctx.meet(gradient.reshape(-1))
        row = torch.cat([together.new_zeros(1), together])
        return None, None, *[row] * ctx.count


def refuse_single_value(moments: Tensor, own_count: float) -> None:
    """Raise ValueError for a global batch with one value per channel, which has no variance."""
    if own_count == 1 and float(moments[0]) == 1:
        raise ValueError(
            "SyncBatchNorm got one value per channel in the whole global batch; expected 2 or more."
        )


def at_least_float32(dtype: torch.dtype) -> torch.dtype:
    """Return float32, or a dtype that is wider."""
    return torch.promote_types(dtype, torch.float32)
