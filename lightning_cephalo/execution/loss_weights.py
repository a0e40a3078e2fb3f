"""Weighs the losses of a step's microbatches, so that their gradients add up to one device's.

[Note: weights]
A microbatch's share of the gradient is its weight, divided by the sum of the weights of all ranks,
which is known only behind the forward. Losses run their backward before. So each loss is divided by
the sum that is expected: of a whole batch. With whole batches, hooks of tensors then see the
gradients of one device. If samples weigh other than 1 (weights that are tokens), a power of two
brings the expected sum near to that of the step before: fp16 overflows no sooner, and a run that
resumes rounds alike. Reduces divide by the rest.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from torch import Tensor

from lightning_cephalo.accelerator.base import Readback


def loss_scale(weight_of_sample: float, whole_batch: float) -> float:
    """Return the factor of every loss of a step: near the inverse of the sum of its weights."""
    return float(0.5 ** round(math.log2(max(weight_of_sample, 1e-30))) / whole_batch)


def checked_weight(weight: float) -> float:
    """Return a weight of ``training_step``; TypeError if it is below 0, or not a number."""
    if not weight >= 0.0:
        raise TypeError(f"training_step returned the weight {weight}, expected 0 or more.")
    return weight


class LossWeights:
    def __init__(self, microbatches: int, scale: float, readback: Readback) -> None:
        self.values = [0.0] * microbatches
        self.scale = scale
        self.scale_loss: Callable[[Tensor], Tensor] | None = None
        self._readback = readback
        # microbatches whose weights are on their way to the host, in the order of the copies
        self._unread: list[int] = []

    def weigh(
        self, microbatch: int, loss: Tensor, weight: float | Tensor
    ) -> tuple[Tensor, Tensor | None] | None:
        """Return a loss times its weight and the factors; None if it has no weight."""
        without_weight = None
        if isinstance(weight, Tensor) and not loss.requires_grad:
            weight = float(weight)  # a constant is right only if it has no weight
        if isinstance(weight, Tensor):
            weight = weight.detach().reshape(())
            self._readback.add(weight)
            self._unread.append(microbatch)
            without_weight = weight == 0
        else:
            self.values[microbatch] = checked_weight(weight)
            if not weight:  # the loss may be 0/0: a mean over no tokens
                return None
        loss = loss * (weight * self.scale)
        return self.scale_loss(loss) if self.scale_loss else loss, without_weight

    def read(self) -> None:
        """Read the weights that are on the device, while it runs the last loss's backward."""
        for microbatch, weight in zip(self._unread, self._readback.finish(), strict=True):
            self.values[microbatch] = checked_weight(weight)


class Weighing:
    """What the weights of a step are expected to be; [Note: weights].

    Attributes:
        whole_batch: The sum of the weights of a whole batch, if each sample weighs 1; 0: not known.
        steps_per_update: Batches whose gradients add up.
        total: The sum of the weights of the last step.
    """

    def __init__(self) -> None:
        self.whole_batch, self.steps_per_update = 0.0, 1
        self.total = self._samples = 1.0

    def of_step(self, microbatches: int, readback: Readback) -> LossWeights:
        """Return the weights of the step that begins."""
        whole = self.whole_batch
        samples = (self._samples or whole) if whole else 1.0
        scale = loss_scale(self.total / samples, whole or 1.0) / self.steps_per_update
        return LossWeights(microbatches, scale, readback)

    def learn(self, total: float, samples: float) -> None:
        """Note the weight of a step, and of how many samples it is."""
        self.total, self._samples = total, samples
