"""Gives a rank without samples the outputs of a training step that another rank has.

Callbacks get the outputs of ``training_step``. A rank without samples has none of its own, nor has
one whose ``training_step`` has returned None for all of them. A callback that reads
``outputs["accuracy"]`` would fail on that rank alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree

from lightning_cephalo.adapters.logging import ValuesOfRanks


def outputs_everywhere(
    result: Any, samples: int, losses: Sequence[int], ranks: ValuesOfRanks
) -> Any:
    """Return a step's outputs; without a loss those of the first rank that has one.

    Of a tensor with one row for each sample it is the first row, as hooks see one sample there. A
    ``"weight"`` is 0. Collective if a rank has no loss; the host waits for no device.

    Args:
        result: The joined result of this rank's microbatches; unused without a loss.
        samples: Samples of this rank's microbatches with a loss.
        losses: Microbatches with a loss of every rank.
        ranks: Exchanges values between ranks.
    """
    if all(losses):
        return result
    own, first = ranks.control.rank, next(rank for rank, count in enumerate(losses) if count)
    sent = ranks.broadcast(_of_one_sample(result, samples) if own == first else None, first)
    return result if losses[own] else sent


def _of_one_sample(result: Any, samples: int) -> Any:
    def cut(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        has_rows = value.ndim > 0 and len(value) == samples
        return (value[:1] if has_rows else value).detach()

    sent = pytree.tree_map(cut, result)
    if isinstance(sent, dict) and "weight" in sent:
        sent["weight"] = sent["weight"] * 0
    return sent
