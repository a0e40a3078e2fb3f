"""Hybrid sharding: each group of ranks holds the whole state, and trains as one device."""

from __future__ import annotations

import copy
import os
from datetime import timedelta
from functools import partial

import pytest
import torch
from cases import Cases, on_one_device
from common import Net, assert_same_tensors, in_ranks, loader, trainer, values_of
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import WeightAveraging
from plans import GLOBAL_BATCH, PLANS, QUIET
from torch.distributed.tensor import DTensor

from lightning_cephalo import CephaloStrategy, Planner
from lightning_cephalo.common.errors import RemoteRankError, UnsupportedError
from lightning_cephalo.plan import Plan, PlanError, RankPlan
from lightning_cephalo.ranks import groups
from lightning_cephalo.recovery.pieces import Assembly, RankState, taken_apart
from lightning_cephalo.recovery.store import places

GROUPED = ("hybrid 2 + 1", "hybrid 2 x 2", "hybrid in turns")


class _Looks(Callback):
    """Notes what hooks compute, and the bits of all weights and moments behind each update."""

    def __init__(self) -> None:
        self.numbers: list[list[float]] = []
        self.bits: list[list[bytes]] = []

    def on_before_optimizer_step(self, trainer, module, optimizer) -> None:
        weight, bias = module.head.weight, module.blocks[2].up.bias
        self.numbers.append(
            [
                float(weight.detach().mean()),
                float(bias.grad.abs().max()),
                float(torch.nn.utils.get_total_norm([p.grad for p in module.parameters()
                                                     if p.grad is not None])),
            ]
        )  # fmt: skip

    def on_train_batch_end(self, trainer, module, *_) -> None:
        # as `trainer.save_checkpoint` does, but on every rank
        held = [p.detach() for p in module.parameters()]
        for entries in trainer.optimizers[0].state.values():
            held += [value for value in entries.values() if isinstance(value, DTensor)]
        whole = [t.full_tensor() if isinstance(t, DTensor) else t for t in held]
        self.bits.append([t.contiguous().numpy().tobytes() for t in whole])


class _Written(Callback):
    """Writes a parameter with numbers that depend on all of it."""

    def on_train_batch_start(self, trainer, module, *_) -> None:
        with torch.no_grad():
            weight = module.inputs.weight
            weight.div_(1 + 0.1 * weight.norm())
            module.blocks[0].down.bias.copy_(torch.linspace(0, 1, 6))


def _fit(plan, optimizer="adamw", given=None, **options):
    looks, module = _Looks(), Net(optimizer)
    callbacks = [looks, *options.pop("callbacks", [])]
    options = {"limit_train_batches": 3, "callbacks": callbacks, **options}
    fitted = trainer(plan, None if plan is None else given, **options)
    fitted.fit(module, loader(28), loader(8))
    return values_of(module), module.losses, looks.numbers, looks.bits


class _Keeps(Callback):
    """Takes the weights apart, and puts them together from the pieces of all ranks."""

    def on_train_end(self, trainer, module) -> None:
        held = {name: p.detach() for name, p in module.named_parameters()}
        meta, tensors = taken_apart(held, trainer.global_rank)
        starts, nbytes = places(tensors)
        payload = torch.zeros(nbytes, dtype=torch.uint8)
        for start, tensor in zip(starts, tensors, strict=True):
            payload[start : start + tensor.nbytes] = tensor.reshape(-1).view(torch.uint8)
        pieces = trainer.strategy.session.control.gather((meta, payload))
        self.read_of: set[int] = set()

        def fetch(rank: int, where: slice) -> torch.Tensor:
            self.read_of.add(rank)
            return pieces[rank][1][where]

        assembly = Assembly([RankState.parse(meta) for meta, _ in pieces], fetch)
        found = assembly.resolved(assembly.states[0].tree)
        self.same = all(
            torch.equal(found[name], p.full_tensor() if isinstance(p, DTensor) else p)
            for name, p in held.items()
        )


def _kept(plan):
    keeps = _Keeps()
    trainer(plan, limit_train_batches=2, callbacks=[keeps]).fit(Net(), loader(28), loader(8))
    return keeps.same, keeps.read_of


FITS = {
    "clipped": (_fit, {"gradient_clip_val": 0.3}),
    "sgd, accumulated": (partial(_fit, optimizer="sgd"), {"accumulate_grad_batches": 2}),
    "written, averaged": (_fit, {"callbacks": [_Written(), WeightAveraging()]}),
}


def _run(plan, case):
    function, options = FITS[case]
    return function(plan, **copy.deepcopy(options))


found = Cases(
    {
        **{(plan, case): (plan, _run, case) for plan in GROUPED[:2] for case in FITS},
        ("hybrid in turns", "clipped"): ("hybrid in turns", _run, "clipped"),
        ("hybrid 2 + 1", "kept"): ("hybrid 2 + 1", _kept),
        ("hybrid 2 x 2", "rounded"): (
            "hybrid 2 x 2", partial(_fit, given={"reduce_dtype": "bfloat16"})
        ),
    }
)  # fmt: skip


@pytest.mark.parametrize("case", [*((p, c) for p in GROUPED[:2] for c in FITS),
                                  ("hybrid in turns", "clipped")], ids=str)  # fmt: skip
def test_training_and_hooks_are_those_of_one_device_and_all_groups_hold_the_same_bits(case):
    _, name = case
    values, losses, numbers, _ = on_one_device(_run, name)
    ranks = found[case]
    for own_values, own_losses, own_numbers, own_bits in ranks:
        assert own_losses == pytest.approx(losses, rel=1e-5)
        for own, wanted in zip(own_numbers, numbers, strict=True):
            assert own == pytest.approx(wanted, rel=1e-4, abs=1e-6)
        assert_same_tensors(own_values, values, 2e-5)
        assert own_bits == ranks[0][3]


def test_gradients_that_travel_in_less_precision_are_the_same_in_all_groups():
    ranks = found["hybrid 2 x 2", "rounded"]
    assert all(own[3] == ranks[0][3] for own in ranks)
    assert ranks[0][0]["gain"] != on_one_device(_fit)[0]["gain"]


def test_pieces_of_a_kept_step_are_those_of_one_group():
    for same, read_of in found["hybrid 2 + 1", "kept"]:
        assert same and read_of == {0, 1}


def _refused(plan, error, optimizer, **options):
    module = Net()
    if optimizer is not None:
        module.configure_optimizers = lambda: optimizer(module.parameters())
    with pytest.raises(error) as refused:
        trainer(plan, options, limit_train_batches=1).fit(module, loader(14), loader(8))
    return str(refused.value)


def _all_refused(plan):
    found = {
        "whole": _refused(plan, UnsupportedError, torch.optim.Adafactor),
        "offload": _refused(plan, UnsupportedError, None, optimizer_offload="auto"),
        "no groups": _refused("whole three", PlanError, None, hybrid_sharding=True),
    }
    own = CephaloStrategy(
        planner=Planner(hybrid_sharding=True, verbose=False), global_batch_size=GLOBAL_BATCH
    )
    with pytest.raises(PlanError) as one_node:
        Trainer(strategy=own, devices=3, accelerator="cpu", **QUIET).fit(
            Net(), loader(14), loader(8)
        )
    found["one node"] = str(one_node.value)
    # the next start is not hurt
    return found, _fit(plan)[1]


def test_what_does_not_go_together_is_refused_by_name_on_every_rank():
    for found, losses in in_ranks(3, _all_refused, "hybrid 2 + 1"):
        assert "Adafactor updates whole parameters" in found["whole"]
        assert "optimizer_offload='auto' does not work with hybrid sharding" in found["offload"]
        assert "the plan has no groups" in found["no groups"]
        assert "all 3 ranks are on one node" in found["one node"]
        assert (
            "told apart by the launcher's node number, the host name, the kernel"
            in found["one node"]
        )
        assert len(losses) == 3


class _Changes(Callback):
    """Moves rows inside of the groups, and asks for a plan without groups."""

    def on_train_batch_end(self, trainer, module, outputs, batch, index) -> None:
        if index != 1:
            return
        ranks = [RankPlan((size,), share) for size, share in ((2, 0.8), (3, 0.2), (3, 1.0))]
        with pytest.raises((PlanError, RemoteRankError), match="cannot change them while training"):
            alone = [RankPlan((3,), 0.5), RankPlan((2,), 0.25), RankPlan((3,), 0.25)]
            trainer.strategy.change_plan(Plan(alone))
        trainer.strategy.change_plan(Plan(ranks, groups=(0, 0, 1)))


class _Manual(Net):
    """The same step as that of automatic optimization, by hand."""

    automatic_optimization = False

    def training_step(self, batch, index):
        loss = super().training_step(batch, index)
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        self.lr_schedulers().step()


def _fit_that_solves(kind=Net):
    module = kind()
    strategy = CephaloStrategy(
        planner=Planner(hybrid_sharding=True, budget_s=0.5, remeasure=True, verbose=False),
        global_batch_size=GLOBAL_BATCH,
        timeout=timedelta(seconds=400),
    )
    fitted = Trainer(
        strategy=strategy, devices=3, accelerator="cpu", limit_train_batches=3, **QUIET
    )
    fitted.fit(module, loader(28), loader(8))
    predicted = [rank.memory_bytes for rank in fitted.strategy.plan.ranks]
    measured = [rank.peak_bytes for rank in fitted.strategy.report.memory]
    assert all(most >= held for most, held in zip(predicted, measured, strict=True))
    return fitted.strategy.plan, module.losses, values_of(module)


def _solved():
    rank = int(os.environ["RANK"])
    groups._network = lambda: rank // 2  # this process's node
    found = [_fit_that_solves(), _fit_that_solves(_Manual)]
    return found, _fit("hybrid 2 + 1", callbacks=[_Changes()])


def test_a_plan_is_solved_for_nodes_that_hold_the_whole_state_and_changes_inside_of_them():
    values, losses, _, _ = on_one_device(_fit)
    ranks = in_ranks(3, _solved)
    for solved, changed in ranks:
        for plan, own_losses, own_values in solved:
            assert plan.groups == (0, 0, 1) and plan.step_s > 0
            totals = [sum(own) for own in plan.fractions_of_groups]
            assert totals == pytest.approx([1] * len(totals))
            assert own_losses == pytest.approx(losses, rel=1e-5)
            assert_same_tensors(own_values, values, 2e-5)
        assert changed[1] == pytest.approx(losses, rel=1e-5)
        assert changed[3] == ranks[0][1][3]


def test_plans_of_the_tests_have_groups():
    assert all(PLANS[name].groups for name in GROUPED)
