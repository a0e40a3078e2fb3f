"""Stand-ins for gradients whose memory is given back as soon as they have updated their parameters.

They keep ``parameter.grad is not None`` and ``zero_grad()`` as on one device. Any other use is
refused by name: the values are gone.
"""

from __future__ import annotations

from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_cephalo.sharding.placement import as_dtensor, local_part
from lightning_cephalo.sharding.write_guard import Locked


class SpentGradient(Locked):
    """Stands in for this rank's rows of a gradient that has updated its parameter."""

    refusal = (
        "The gradient of {names} is used ({operator}) after its update, which runs inside the"
        " backward and gives the gradient back at once. Use gradients in on_after_backward() or"
        " on_before_optimizer_step(): with these, updates follow the backward, and gradients stay."
        " Or say CephaloStrategy(planner=Planner(early_update=False))."
    )


def spent(gradient: DTensor, name: str) -> DTensor:
    """Return a stand-in without memory for a gradient."""
    return as_dtensor(SpentGradient(local_part(gradient), name), gradient._spec)


def is_spent(gradient: Tensor | None) -> bool:
    """Return whether a gradient is such a stand-in."""
    return gradient is not None and isinstance(local_part(gradient), SpentGradient)
