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

from dataclasses import dataclass, field
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


def update_running(norm: nn.SyncBatchNorm, statistics: Statistics) -> None:
    """Move the running statistics of a layer, as torch's batch normalisation does."""
    if not norm.track_running_stats:
        return
    with torch.no_grad():
        assert norm.num_batches_tracked is not None
        assert norm.running_mean is not None and norm.running_var is not None
        norm.num_batches_tracked.add_(1)
        momentum = norm.momentum
        if momentum is None:  # the mean over all steps
            momentum = 1.0 / float(norm.num_batches_tracked)
        count = statistics.count
        unbiased = statistics.variance * (count / (count - 1.0))
        norm.running_mean.mul_(1.0 - momentum).add_(statistics.mean * momentum)
        norm.running_var.mul_(1.0 - momentum).add_(unbiased * momentum)


@dataclass(eq=False)
class Meeting:
    """One microbatch at one layer, in one step.

    Attributes:
        record: What its microbatch retains of the unit around the layer; None: there is none.
        source: The leaf of the input where the graph is cut; None: no backward passes.
        own: Leaves of this layer: its input, weight and bias.
        parameters: The trained parameters, each with its leaf.
    """

    norm: nn.SyncBatchNorm
    position: int
    statistics: Statistics
    record: Any = None
    random: tuple[Tensor, ...] | None = None
    source: Tensor | None = None
    own: tuple[Tensor, Tensor, Tensor] | None = None
    parameters: list[tuple[Tensor, Tensor]] = field(default_factory=list)

    def normalised(self, value: Tensor) -> Tensor:
        """Return the normalised values, with a plain graph; the statistics count as constants."""
        weight, bias = self._affine(value)
        return self._apply(value, weight, bias)

    def cut(self, value: Tensor, source: Tensor) -> Tensor:
        """Return the normalised values, with a graph that begins here."""
        affine = self._affine(value)
        weight, bias = (each.detach().clone().requires_grad_() for each in affine)
        own = value.detach().requires_grad_(source.requires_grad)
        self.source, self.own = source, (own, weight, bias)
        named = ((self.norm.weight, weight), (self.norm.bias, bias))
        self.parameters = [(p, leaf) for p, leaf in named if p is not None and p.requires_grad]
        if self.record is not None:  # what leaves the unit otherwise than as its output is refused
            for leaf in self.own:
                leaf._leaf_of_unit = None  # type: ignore[attr-defined]
        return self._apply(own, weight, bias)

    def _affine(self, value: Tensor) -> tuple[Tensor, Tensor]:
        wide, norm = at_least_float32(value.dtype), self.norm
        if norm.affine:
            return norm.weight.to(wide), norm.bias.to(wide)
        ones = torch.ones(norm.num_features, dtype=wide, device=value.device)
        return ones, torch.zeros_like(ones)

    def _apply(self, value: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        mean, variance = (
            each.to(weight.dtype) for each in (self.statistics.mean, self.statistics.variance)
        )
        return functional.batch_norm(
            value, mean, variance, weight, bias, training=False, eps=self.norm.eps
        )

    def sums(self) -> Tensor | None:
        """Return the sums of gradients and of their products with normalised values; None: none."""
        if self.own is None or self.own[1].grad is None or self.own[2].grad is None:
            return None
        return torch.cat([self.own[2].grad, self.own[1].grad]).to(torch.float64)

    def finish(self, sums: Tensor) -> None:
        if self.own is None or self.source is None:
            return
        own, weight, _ = self.own
        if own.requires_grad:
            gradient = self._through_statistics(own.detach(), weight.detach(), sums)
            if own.grad is not None:
                gradient += own.grad
            before = self.source.grad
            self.source.grad = gradient if before is None else before + gradient
        for parameter, leaf in self.parameters:
            if leaf.grad is not None:
                found = leaf.grad.to(parameter.dtype)
                torch.autograd.backward([parameter], [found], retain_graph=True)
        self.source, self.own, self.parameters = None, None, []

    def _through_statistics(self, value: Tensor, weight: Tensor, sums: Tensor) -> Tensor:
        """Return the part of the input's gradient that goes through mean and variance."""
        statistics, shape = self.statistics, [1, -1] + [1] * (value.ndim - 2)
        deviation = (statistics.variance + self.norm.eps).rsqrt()
        scale = weight * deviation / statistics.count
        of_gradients, of_products = sums.chunk(2)
        # scale * (sum of g + normalised value * sum of g x normalised), negated
        slope = -scale * of_products * deviation
        offset = -scale * of_gradients - slope * statistics.mean
        wide = weight.dtype
        found = value.to(wide) * slope.to(wide).view(shape) + offset.to(wide).view(shape)
        return found.to(value.dtype)


def refuse_single_value(moments: Tensor, own_count: float) -> None:
    """Raise ValueError for a global batch with one value per channel, which has no variance."""
    if own_count == 1 and float(moments[0]) == 1:
        raise ValueError(
            "SyncBatchNorm got one value per channel in the whole global batch; expected 2 or more."
        )


def at_least_float32(dtype: torch.dtype) -> torch.dtype:
    """Return float32, or a dtype that is wider."""
    return torch.promote_types(dtype, torch.float32)
