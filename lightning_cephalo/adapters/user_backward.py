"""Runs a LightningModule's own ``backward()`` around the layered backward.

The user's code gets a loss whose graph ends in one tensor. When a gradient arrives there, the
layered backward runs with this factor, on the thread of the caller.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lightning_cephalo.common.errors import UnsupportedError
from lightning_cephalo.ranks.control import ControlGroup

_DOING = "running backward() of the LightningModule"


class UserBackward:
    """One call of ``LightningModule.backward``; ``layered`` takes the factor of all gradients."""

    def __init__(self, control: ControlGroup, layered: Callable[[float], None]) -> None:
        self._control, self._layered = control, layered
        self._has_met = False

    def run(self, value: Tensor, user: Callable[[Tensor], Any]) -> None:
        """Call the user's ``backward()`` with a loss of this value; collective."""
        leaf = value.detach().requires_grad_()
        leaf.register_hook(self._reached)
        failure: Exception | None = None
        try:
            # a thread of the device would run collectives otherwise
            with torch.enable_grad(), torch.autograd.set_multithreading_enabled(False):
                user(leaf.clone())  # which code may change in place
        except Exception as error:
            if self._has_met:  # all ranks have come to their backward: this is another error
                raise
            failure = error
        if not self._has_met:
            self._control.raise_if_any_failed(failure or _never(), _DOING)

    def _reached(self, gradient: Tensor) -> None:
        """Run the layered backward, as this gradient has arrived at the loss; collective."""
        if self._has_met:
            raise UnsupportedError(
                "A second backward of the loss. Cephalo frees each unit's graph when its backward"
                " has run, so a loss has one backward. Call loss.backward() once."
            )
        self._has_met = True
        self._control.raise_if_any_failed(None, _DOING)
        factors = self._control.gather(float(gradient))
        if len({str(factor) for factor in factors}) > 1:  # a NaN equals a NaN here
            raise UnsupportedError(  # on every rank
                f"backward() multiplies the loss by another factor on each rank: {factors}. Each"
                " rank's loss is the mean of its own samples, so the factor must not depend on it."
                " Change the loss in training_step instead, where it is that of each microbatch."
            )
        with torch.enable_grad():
            self._layered(factors[0])


def _never() -> UnsupportedError:
    return UnsupportedError(
        "backward() of the LightningModule has returned without a backward of the loss. Call"
        " loss.backward() in it, on every rank."
    )
