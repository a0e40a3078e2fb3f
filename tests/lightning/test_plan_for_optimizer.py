"""A plan that is made anew for what the optimizer holds is treated as the first one is."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from lightning.pytorch import LightningModule
from profiled import fit, in_ranks
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_cephalo.plan import InfeasibleError
from lightning_cephalo.recovery.recovering import Recovering

BATCH = 256
# With late updates, two moments and the whole batch fit into the larger one. Three fit into the
# smaller one in no way.
ENOUGH, TOO_LITTLE = 1_000_000, 800_000


class Normalised(LightningModule):
    """Six layers of batch normalisation, and an optimizer with three moments or two."""

    def __init__(self, amsgrad: bool) -> None:
        super().__init__()
        torch.manual_seed(1)
        blocks = [nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.ReLU()) for _ in range(6)]
        self.net, self.amsgrad = nn.Sequential(*blocks, nn.Linear(64, 1)), amsgrad

    def training_step(self, batch: Any, index: int) -> Any:
        return self.net(batch[0]).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), amsgrad=self.amsgrad)


def _trained(amsgrad: bool, capacity_bytes: int) -> tuple[tuple[int, ...], int]:
    """Return the sizes of microbatches, and how many warnings name batch normalisation."""
    data = TensorDataset(torch.zeros(4 * BATCH, 64))
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        trainer = fit(
            Normalised(amsgrad),
            DataLoader(data, batch_size=BATCH),
            world_size=1,
            capacity_bytes=(capacity_bytes,),
            max_steps=1,
            strategy={"budget_s": 0.3, "replan": False, "early_update": False},
        )
    warned = sum("batch normalisation" in str(one.message) for one in said)
    return trainer.strategy.plan.ranks[0].microbatch_sizes, warned


def _ran() -> Any:
    found = [_trained(amsgrad, ENOUGH) for amsgrad in (False, True)]
    waited = []
    wait = Recovering.wait_for_hosts
    Recovering.wait_for_hosts = lambda self, error: waited.append(error)  # type: ignore[method-assign]
    try:
        _trained(True, TOO_LITTLE)
    except InfeasibleError as error:
        found.append(waited == [error])
    finally:
        Recovering.wait_for_hosts = wait  # type: ignore[method-assign]
    return found


def test_warnings_are_those_of_the_last_plan_and_a_restart_waits_if_that_does_not_fit():
    ((two, three, waits),) = in_ranks(1, _ran)
    assert two == ((BATCH,), 0)
    sizes, warned = three
    assert len(sizes) > 1 and sum(sizes) == BATCH and warned == 1
    assert waits
