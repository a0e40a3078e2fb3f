"""Numbers of parameters and gradients that hooks compute are one device's, on every rank."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from common import Net, in_ranks, loader, look_soon, trainer
from lightning.pytorch import Callback
from plans import PLANS

from lightning_cephalo.common.errors import UnsupportedError

HOOKS = (
    *("on_train_start", "on_train_batch_start", "on_after_backward"),
    *("on_before_optimizer_step", "on_train_batch_end", "on_train_epoch_end"),
    *("on_validation_start", "on_validation_batch_end", "on_validation_epoch_end", "on_train_end"),
)


class _Numbers(Callback):
    """Computes what users log, in every hook."""

    def __init__(self) -> None:
        self.found: list[list[float]] = []
        for name in HOOKS:
            setattr(self, name, self._note)

    def _note(self, trainer, module, *args, **kwargs) -> None:
        numbers = []
        for parameter in module.parameters():
            chosen = parameter is module.head.weight or parameter is module.blocks[2].up.bias
            for tensor in (parameter.detach(), parameter.grad) if chosen else ():
                if tensor is not None:
                    numbers += self._of(tensor)
        norms = torch.stack([parameter.detach().norm() for parameter in module.parameters()])
        self.found.append([*numbers, norms.sum().item()])

    def _of(self, tensor) -> list[float]:
        counts, _ = np.histogram(tensor.cpu().numpy(), bins=3)
        return [
            float(tensor.mean()),
            tensor.abs().max().item(),
            float((tensor**2).mean().sqrt()),
            tensor.std(correction=0).item(),
            tensor.var(correction=0).item(),
            tensor.sum().item(),
            tensor.min().item(),
            (tensor - tensor.roll(1, 0)).abs().mean().item(),
            float(tensor.isnan().any()),
            *map(float, counts),
        ]


def _fit(plan):
    numbers = _Numbers()
    trainer(plan, max_epochs=1, limit_train_batches=1, callbacks=[numbers]).fit(
        Net(), loader(28), loader(8)
    )
    return numbers.found


# "three" has uneven ranks too, and one without state
@pytest.mark.parametrize("plan", ["three", pytest.param("3:1", marks=pytest.mark.slow)])
def test_numbers_in_every_hook_are_those_of_one_device_on_every_rank(plan):
    wanted = _fit(None)
    assert len(wanted) == len(HOOKS)
    for found in in_ranks(len(PLANS[plan].ranks), _fit, plan):
        assert len(found) == len(wanted)
        for numbers, expected in zip(found, wanted, strict=True):
            assert numbers == pytest.approx(expected, rel=1e-4, abs=1e-5)


class _Alone(Callback):
    def on_train_batch_end(self, trainer, module, *_) -> None:
        if trainer.is_global_zero:
            module.head.weight.abs().mean()


class _SavesAlone(Callback):
    def on_train_batch_end(self, trainer, module, *_) -> None:
        trainer.save_checkpoint("never_written.ckpt")

    def on_save_checkpoint(self, trainer, module, checkpoint) -> None:
        if trainer.is_global_zero:
            checkpoint["weight"] = module.head.weight.detach()


def _refused(plan, callback):
    look_soon()
    with pytest.raises((UnsupportedError, RuntimeError)) as refused:
        run = trainer(plan, limit_train_batches=1, callbacks=[callback])
        run.fit(Net(), loader(14), loader(8))
    return str(refused.value)


def test_a_number_that_one_rank_computes_alone_is_refused_by_name_and_all_ranks_end():
    for message in in_ranks(2, _refused, "3:1", _Alone()):
        assert "0 is computing mean of a sharded tensor, in on_train_batch_end()" in message
        assert "every rank must compute it" in message


def test_a_sharded_tensor_that_one_rank_saves_alone_is_refused_by_name_on_every_rank():
    for message in in_ranks(2, _refused, "3:1", _SavesAlone()):
        assert "[1, 0] of them on rank 0 and up" in message and "on_save_checkpoint()" in message
