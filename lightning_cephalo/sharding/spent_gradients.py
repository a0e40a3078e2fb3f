"""Stand-ins for gradients whose memory is given back as soon as they have updated their parameters.

They keep ``parameter.grad is not None`` and ``zero_grad()`` as on one device. Any other use is
refused by name: the values are gone. Some gradients have left for the host, which has not used them
yet: of these clipping by norm knows what it needs.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_cephalo.sharding.placement import as_dtensor, local_part
from lightning_cephalo.sharding.write_guard import Locked


@dataclass
class SentGradient:
    """What is left on the device of a gradient that is in host memory.

    Attributes:
        norm: Norm of this rank's rows.
        factor: What the host multiplies it by before its update.
    """

    norm: Tensor
    factor: float = 1.0


class SpentGradient(Locked):
    """Stands in for this rank's rows of a gradient that has updated its parameter."""

    sent: SentGradient | None = None

    refusal = (
        "The gradient of {names} is used ({operator}) after its update, which runs inside the"
        " backward and gives the gradient back at once, or after it has left for the host. Use"
        " gradients in on_after_backward() or on_before_optimizer_step(): with these, updates"
        " follow the backward, and gradients stay. Or say"
        " CephaloStrategy(early_update=False)."
    )


def spent(gradient: DTensor, name: str) -> DTensor:
    """Return a stand-in without memory for a gradient."""
    return as_dtensor(SpentGradient(local_part(gradient), name), gradient._spec)


def is_spent(gradient: Tensor | None) -> bool:
    """Return whether a gradient is such a stand-in."""
    return gradient is not None and isinstance(local_part(gradient), SpentGradient)


def mark_sent(parameter: Tensor, sent: SentGradient) -> None:
    """Say that the gradient of a parameter, which has a stand-in, is in host memory."""
    assert parameter.grad is not None
    stand_in = local_part(parameter.grad)
    assert isinstance(stand_in, SpentGradient)
    stand_in.sent = sent


def take_sent(gradient: Tensor | None) -> SentGradient | None:
    """Return what is known of a gradient that the host will use, which counts as used then."""
    found = sent_gradient(gradient)
    if found is not None and gradient is not None:
        local_part(gradient).sent = None  # type: ignore[attr-defined]
    return found


def sent_gradient(gradient: Tensor | None) -> SentGradient | None:
    """Return what is known of a gradient that the host will use; None: it is none of these."""
    stand_in = None if gradient is None else local_part(gradient)
    return stand_in.sent if isinstance(stand_in, SpentGradient) else None


def refuse_spent(gradient: Tensor) -> None:
    """Raise if a gradient is such a stand-in.

    Raises:
        UnitUseError: The message names the parameter and the way out.
    """
    if is_spent(gradient):
        local_part(gradient).abs()
