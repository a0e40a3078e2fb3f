"""The order of Lightning's hooks is that of Lightning's own strategies."""

from __future__ import annotations

from typing import Any

import pytest
from common import Net, dataset, in_ranks, trainer
from lightning.pytorch import Callback, Trainer
from plans import QUIET
from torch.utils.data import DataLoader

# asked for at other times, or more often, without any meaning
NOT_COMPARED = {"on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer"}
DATA_HOOKS = ("prepare_data", "setup", "teardown", "train_dataloader", "val_dataloader")
STEP_HOOKS = ("training_step", "validation_step", "optimizer_step")  # backward() is refused
OTHERS = (
    *("configure_optimizers", "configure_model", "configure_callbacks", "optimizer_zero_grad"),
    *("configure_gradient_clipping", "lr_scheduler_step", "state_dict", "load_state_dict"),
)


def recorded(kind: type, who: str, calls: list[str]) -> dict[str, Any]:
    """Overrides of all hooks of a class, which note that they are called."""
    names = [name for name in dir(kind) if name.startswith("on_")]
    names += [name for name in (*DATA_HOOKS, *STEP_HOOKS, *OTHERS) if hasattr(kind, name)]

    def override(name: str) -> Any:
        def hook(self: Any, *args: Any, **kwargs: Any) -> Any:
            said = f"{who}.{name}"
            # a step is called once for each microbatch
            if not (name == "training_step" and calls[-1:] == [said]):
                calls.append(said)
            return getattr(super(made, self), name)(*args, **kwargs)

        return hook

    made = type(
        f"Recorded{kind.__name__}",
        (kind,),
        {name: override(name) for name in names if name not in NOT_COMPARED},
    )
    return made


class WithLoaders(Net):
    """Its loaders have the global batch on one device, and half of it on each of two ranks."""

    def train_dataloader(self) -> DataLoader:
        ranks = 1 if self.trainer.world_size == 1 else 2
        return DataLoader(dataset(14), batch_size=8 // ranks)

    def val_dataloader(self) -> DataLoader:
        ranks = 1 if self.trainer.world_size == 1 else 2
        return DataLoader(dataset(8), batch_size=8 // ranks)


def fit(strategy: str | None) -> list[str]:
    calls: list[str] = []
    model = recorded(WithLoaders, "module", calls)()
    callback = recorded(Callback, "callback", calls)()
    options = {"max_epochs": 3, "num_sanity_val_steps": 1, "callbacks": [callback]}
    options["reload_dataloaders_every_n_epochs"] = 2
    if strategy == "ddp":
        made = Trainer(strategy="ddp", accelerator="cpu", devices=2, **{**QUIET, **options})
    else:
        made = trainer(strategy, **options)
    made.fit(model)
    return calls


def in_lightnings_order(calls: list[str]) -> list[str]:
    """Move the one call that comes earlier: planning needs the loader before the model is cut."""
    early, wanted = "module.train_dataloader", "module.configure_optimizers"
    assert calls.index(early) == calls.index(wanted) - 1
    moved = list(calls)
    moved.remove(early)
    # Lightning requests it after the sanity check
    moved.insert(moved.index("callback.on_sanity_check_end") + 1, early)
    return moved


@pytest.mark.filterwarnings("ignore:Total length of `.*` across ranks is zero")
@pytest.mark.parametrize(("plan", "lightnings"), [("one", None), ("3:1", "ddp")])
def test_hooks_come_as_often_and_in_the_order_of_lightnings_own_strategies(plan, lightnings):
    ranks = 1 if lightnings is None else 2
    wanted = in_ranks(ranks, fit, lightnings)
    found = in_ranks(ranks, fit, plan)
    for calls, expected in zip(found, wanted, strict=True):
        assert in_lightnings_order(calls) == expected
        assert calls.count("module.train_dataloader") == 2  # of epochs 0 and 2


class FailsToMeasure(WithLoaders):
    fails = True
    made = 0

    def train_dataloader(self) -> DataLoader:
        type(self).made += 1
        return super().train_dataloader()

    def configure_optimizers(self) -> Any:
        if self.fails:
            raise ValueError("no optimizer")
        return super().configure_optimizers()


def test_a_trainer_that_has_failed_asks_the_next_model_for_its_loader():
    def fit():
        run = trainer("one", max_epochs=1)
        model = FailsToMeasure()
        with pytest.raises(ValueError, match="no optimizer"):
            run.fit(model)
        model.fails = False
        run.fit(model)
        return model.made

    assert in_ranks(1, fit) == [2]
