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
    """What is left on the device of a gradient that is in host memory."""

    norm: Tensor  # of this rank's rows
    factor: float = 1.0  # by which the host multiplies it before its update


class SpentGradient(Locked):
    """Stands in for this rank's rows of a gradient that has updated its parameter."""

    sent: SentGradient | None = None

    refusal = (
        "The gradient of {names} is used ({operator}) after its update, which runs inside the"
        " backward and gives the gradient back at once, or after it has left for the host. Use"
        " gradients in on_after_backward() or on_before_optimizer_step(): with these, updates"
        " follow the backward, and gradients stay. Or say"
        " CephaloStrategy(planner=Planner(early_update=False))."
    )


def spent(gradient: DTensor, name: str) -> DTensor:
    """Return a stand-in without memory for a gradient."""
    return as_dtensor(SpentGradient(local_part(gradient), name), gradient._spec)


def is_spent(gradient: Tensor | None) -> bool:
    """Return whether a gradient is such a stand-in."""
    return _stand_in(gradient) is not None


def mark_sent(gradient: Tensor | None, sent: SentGradient | None) -> None:
    """Note what is known of a gradient that the host will use; None: it is none of these."""
    stand_in = _stand_in(gradient)
    if stand_in is not None:
        stand_in.sent = sent


def sent_gradient(gradient: Tensor | None) -> SentGradient | None:
    """Return what is known of a gradient that the host will use; None: it is none of these."""
    stand_in = _stand_in(gradient)
    return None if stand_in is None else stand_in.sent


def _stand_in(gradient: Tensor | None) -> SpentGradient | None:
    rows = None if gradient is None else local_part(gradient)
    return rows if isinstance(rows, SpentGradient) else None
