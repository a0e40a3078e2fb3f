"""Warns of what differs from one device, and cannot be refused."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lightning_cephalo.adapters.averaged_weights import lightnings_classes
from lightning_cephalo.data.containers import known_length
from lightning_cephalo.data.reading import original_of
from lightning_cephalo.plan import Plan


def warn_of_throughput(callbacks: Sequence[Any], plan: Plan) -> None:
    """Warn if Lightning's callback would count rank 0's samples as those of every rank."""
    found = any("ThroughputMonitor" in lightnings_classes(callback) for callback in callbacks)
    own, ranks = plan.ranks[0].batch_size, plan.world_size
    if found and own * ranks != plan.global_batch_size:
        rank_zero_warn(
            "ThroughputMonitor multiplies what rank 0 counts by the number of ranks: it would"
            f" report {own * ranks} samples a step in place of {plan.global_batch_size}. Count the"
            " mean of the ranks in training: ThroughputMonitor(batch_size_fn=lambda batch:"
            f" {plan.global_batch_size} / {ranks} if trainer.training else len(batch)), and"
            " length_fn and flops_per_batch likewise.",
            category=UserWarning,
        )


def warn_of_combined_evaluation(loader: Any) -> None:
    """Warn if an evaluation leaves samples out, or repeats some, by the length of a rank's part."""
    mode = loader._mode
    if mode not in ("min_size", "max_size_cycle"):
        return
    lengths = [known_length(original_of(each)) for each in loader.flattened]
    if len(lengths) < 2 or (None not in lengths and len(set(lengths)) == 1):
        return
    ends = "ends with the shortest" if mode == "min_size" else "repeats the shorter ones"
    rank_zero_warn(
        "The dataloaders of this evaluation have different lengths, and"
        f" CombinedLoader(..., {mode!r}) {ends}. Each rank does so with its own part, so that other"
        " samples count than on one device. Use the mode 'sequential' or 'max_size', which take"
        " every sample once.",
        category=UserWarning,
    )


def warn_of_other_optimizers(saved: int, present: int) -> None:
    """Warn if a checkpoint has another number of optimizers; Lightning pairs those that it can."""
    if saved != present:
        paired = min(saved, present)
        rank_zero_warn(
            f"The checkpoint has the state of {saved} optimizers, and configure_optimizers returned"
            f" {present}. {paired} of them are restored, in this order, as on one device;"
            f" {present - paired} start anew."
        )
