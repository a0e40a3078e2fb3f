"""Optimizers on shards: equal to one device, or refused by name before training."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from cases import Cases, on_one_device
from common import (
    Net,
    assert_same_optimizer_state,
    assert_same_tensors,
    by_plan,
    in_ranks,
    loader,
    trainer,
    values_of,
)
from plans import PLANS
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_flatten

# In double precision: several of these divide by differences of tiny moments, which in single
# precision would magnify that sums are taken in another order than on one device.
TOLERANCE = 1e-9


class Lion(torch.optim.Optimizer):
    """A user's own element-wise optimizer: the sign of a moving average."""

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["average"] = torch.zeros_like(parameter)
                average = state["average"]
                update = average * 0.9 + parameter.grad * 0.1
                parameter.add_(torch.tanh(1e3 * update), alpha=-group["lr"])
                average.lerp_(parameter.grad, 0.01)
        return loss


OPTIMIZERS = {
    "AdamW": lambda p: torch.optim.AdamW(p, lr=1e-2),
    "AdamW amsgrad": lambda p: torch.optim.AdamW(p, lr=1e-2, amsgrad=True),
    "AdamW fused": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
    "AdamW foreach": lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=True),
    "AdamW loop": lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=False),
    "SGD": lambda p: torch.optim.SGD(p, lr=1e-2, weight_decay=0.1),
    "SGD nesterov": lambda p: torch.optim.SGD(
        p, lr=1e-2, momentum=0.9, nesterov=True, weight_decay=0.1
    ),
    "SGD foreach": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, foreach=True),
    "SGD fused": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, fused=True),
    "Adam maximize": lambda p: torch.optim.Adam(p, lr=1e-4, weight_decay=0.1, maximize=True),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=1e-3, momentum=0.9, centered=True),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2),
    "Adadelta": lambda p: torch.optim.Adadelta(p, lr=1.0),
    "Adamax": lambda p: torch.optim.Adamax(p, lr=1e-2),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=1e-2),
    "RAdam": lambda p: torch.optim.RAdam(p, lr=1e-2),
    "ASGD": lambda p: torch.optim.ASGD(p, lr=1e-2),
    "Rprop": lambda p: torch.optim.Rprop(p, lr=1e-2),
}


class _Fitted(Net):
    def __init__(self, make):
        super().__init__()
        self.make = make

    def configure_optimizers(self):
        return self.make([p for p in self.parameters() if p.requires_grad])


def _fit(plan, make):
    model = _Fitted(make)
    runs = trainer(plan, limit_train_batches=3, limit_val_batches=0, precision="64-true")
    runs.fit(model, loader(), loader(8))
    return model.losses, values_of(model), runs.strategy.optimizer_state(runs.optimizers[0])


# one for each way to update over local rows: in a loop, together, in a kernel, through masks
WITH_EMPTY_RANKS = ("RMSprop", "AdamW loop", "AdamW foreach", "AdamW fused", "Rprop")


STEPPED = Cases(
    {
        # in "three" a rank holds none of the state
        name: ("three" if name in WITH_EMPTY_RANKS else "3:1", _fit, make)
        for name, make in OPTIMIZERS.items()
    }
)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_three_steps_equal_one_device(name):
    losses, values, state = STEPPED[name][0]
    wanted_losses, wanted, wanted_state = on_one_device(_fit, OPTIMIZERS[name])
    torch.testing.assert_close(losses, wanted_losses, rtol=TOLERANCE, atol=TOLERANCE)
    assert_same_tensors(values, wanted, TOLERANCE)
    assert_same_optimizer_state(state, wanted_state, TOLERANCE)


class Lamb(torch.optim.Optimizer):
    """A user's own: it scales each parameter's update by norms of the whole parameter."""

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr, "steps": 0})

    @torch.no_grad()
    def step(self, closure=None):
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            group["steps"] += 1
            for p in group["params"]:
                if p.grad is None:
                    continue
                average = self.state[p].setdefault("average", torch.zeros_like(p))
                average.lerp_(p.grad, 0.1)
                p.data = p.data - average * (group["lr"] * p.norm() / (average.norm() + 1e-8))
        return loss


class Soap(torch.optim.Optimizer):
    """A user's own: its state has lists of square matrices of both dimensions, and a number."""

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure):
        with torch.enable_grad():
            loss = closure()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                grad, state = p.grad.reshape(len(p) if p.ndim else 1, -1), self.state[p]
                if not state:
                    state["sides"] = [grad.new_zeros(n, n) for n in grad.shape]
                    state["seen"], state["scale"] = 0, grad.new_zeros(())
                left, right = state["sides"]
                left += grad @ grad.T
                right += grad.T @ grad
                state["seen"] += 1
                state["scale"] += grad.norm()
                inverse = [torch.linalg.inv(m + torch.eye(len(m), dtype=m.dtype))
                           for m in (left, right)]  # fmt: skip
                update = (inverse[0] @ grad @ inverse[1]).reshape(p.shape)
                p.add_(update, alpha=-group["lr"] / state["seen"])
        return loss


class Prodigy(torch.optim.Optimizer):
    """A user's own: one learning rate, estimated from all parameters and the loss."""

    def __init__(self, params):
        super().__init__(params, {"estimate": 1e-2})

    @torch.no_grad()
    def step(self, closure):
        with torch.enable_grad():
            loss = closure()
        held = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        size = torch.stack([p.grad.norm() for p in held]).norm().item()
        for group in self.param_groups:
            group["estimate"] = max(group["estimate"], min(0.05, float(loss) / size**2))
        for p in held:
            p.sub_(p.grad, alpha=self.param_groups[0]["estimate"])
        return loss


class _FusedSGD(torch.optim.SGD):
    """A subclass: what it does is not known."""


MORE = {
    "Lion": lambda p: Lion(p, lr=1e-3),
    "_FusedSGD fused": lambda p: _FusedSGD(p, lr=1e-2, momentum=0.9, fused=True),
    "Muon": lambda p: torch.optim.Muon([q for q in p if q.ndim == 2], lr=1e-2),
    "Adafactor": lambda p: torch.optim.Adafactor(p, lr=1e-2),
    "Lamb": lambda p: Lamb([{"params": [q]} for q in p], lr=1e-2),
    "Soap": lambda p: Soap(p, lr=1e-2),
}


def _scope(runs):
    """Of the optimizer's updates, as they run."""
    session = getattr(runs.strategy, "_session", None)
    found = None if session is None else session.updates.of(runs.optimizers[0])
    return "rows" if found is None else "parameter"


def _fit_more(plan, names, folder):
    """Fit with optimizers one after another, saving in the middle; also the ways they took."""
    found = {}
    for name in names:
        make, ways = MORE[name], []

        class Fitted(_Fitted):
            def on_train_end(self, ways=ways):
                ways.append(_scope(self.trainer))

        torch.manual_seed(0)
        model = Fitted(make)
        options = {"limit_val_batches": 0, "precision": "64-true", "gradient_clip_val": 2.0}
        options["accumulate_grad_batches"] = 2  # two updates of each
        runs = trainer(plan, limit_train_batches=4, **options)
        runs.fit(model, loader(40), loader(8))
        path = folder / f"{name}.ckpt"
        runs.save_checkpoint(path)
        found[name] = model.losses, values_of(model), ways
    return found


@pytest.mark.parametrize(
    ("plan", "names"),
    [
        ("three", ("Muon", "Adafactor", "Lamb")),
        pytest.param("three", tuple(MORE), marks=pytest.mark.slow),
        pytest.param("3:1", tuple(MORE), marks=pytest.mark.slow),
    ],
)
def test_updates_of_whole_parameters_equal_one_device(plan, names, tmp_path):
    """Losses, weights, and checkpoints with the state of optimizers."""
    folder = tmp_path / "one"
    folder.mkdir()
    wanted = on_one_device(_fit_more, names, folder)
    found = in_ranks(len(PLANS[plan].ranks), _fit_more, plan, names, tmp_path)[0]
    ways = {name: ways for name, (*_, ways) in found.items()}
    assert ways == {name: ["parameter"] for name in names}
    for name, (losses, values, _) in wanted.items():
        # inverses magnify the order of sums
        tolerance = 1e-6 if name == "Soap" else TOLERANCE
        torch.testing.assert_close(
            found[name][0],
            losses,
            rtol=tolerance,
            atol=tolerance,
            msg=lambda m, n=name: f"{n}: {m}",
        )
        assert_same_tensors(found[name][1], values, tolerance)
        paths = tmp_path / f"{name}.ckpt", folder / f"{name}.ckpt"
        saved, wanted_saved = (torch.load(path) for path in paths)
        _assert_same_tree(saved["optimizer_states"], wanted_saved["optimizer_states"], tolerance)


def _assert_same_tree(found, wanted, tolerance):
    (leaves, tree), (wanted_leaves, wanted_tree) = map(tree_flatten, (found, wanted))
    assert tree == wanted_tree
    for one, other in zip(leaves, wanted_leaves, strict=True):
        if isinstance(other, (torch.Tensor, float)):
            torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)
        else:
            assert one == other


RESUMED = ("Soap", "Adafactor")


def _fit_a_step_more(plan, folder, steps):
    found = []
    for name in RESUMED:
        model = _Fitted(MORE[name])
        runs = trainer(plan, max_epochs=steps, limit_val_batches=0, precision="64-true")
        saved = folder / f"{name}{steps - 1}.ckpt" if steps > 1 else None
        runs.fit(model, loader(8), loader(8), ckpt_path=saved)
        runs.save_checkpoint(folder / f"{name}{steps}.ckpt")
        found += model.losses
    return found


def test_resuming_under_other_plans_continues_the_state_of_owners(tmp_path_factory):
    losses = []
    for plans in (["3:1", "three", None], [None] * 3):
        folder = tmp_path_factory.mktemp("saved")
        runs = [on_one_device if plan is None else partial(by_plan, plan) for plan in plans]
        losses.append([run(_fit_a_step_more, folder, n + 1) for n, run in enumerate(runs)])
    found, wanted = losses
    assert all(len(step) == len(RESUMED) for step in found)
    for step, wanted_step in zip(found, wanted, strict=True):
        assert step == pytest.approx(wanted_step, rel=1e-6)


def _fit_alone(plan):
    found = []
    for make in (
        Prodigy,
        lambda p: torch.optim.LBFGS(p, max_iter=5, line_search_fn="strong_wolfe"),
    ):
        losses, values, _ = _fit(plan, make)
        found.append((losses, values))
    return found


def test_one_rank_trains_with_optimizers_whose_updates_need_the_whole_model():
    wanted = on_one_device(_fit_alone)
    for (losses, values), (wanted_losses, wanted_values) in zip(
        by_plan("one", _fit_alone), wanted, strict=True
    ):
        assert losses == pytest.approx(wanted_losses, rel=1e-6)
        assert_same_tensors(values, wanted_values, 1e-6)


class _Nested(torch.optim.Optimizer):
    """It holds another optimizer, whose state an exchange would not reach."""

    def __init__(self, params):
        super().__init__(params, {})
        self.inner = torch.optim.SGD(self.param_groups[0]["params"], lr=0.1)


class _MovesFirst(torch.optim.SGD):
    """It steps to where gradients are to be computed before it calls the closure."""

    @torch.no_grad()
    def step(self, closure):
        for p in self.param_groups[0]["params"]:
            p.mul_(0.9)
        with torch.enable_grad():
            return closure()


class _Switched(Lamb):
    def train(self):
        """Change parameters outside of a step."""

    def eval(self):
        """Change them back."""


REFUSED = {
    "_Nested does not update each parameter by itself: it holds parameters, a module or another"
    " optimizer in its attributes ['inner']": _Nested,
    "_MovesFirst does not update each parameter by itself: it changes": lambda p: _MovesFirst(
        p, lr=0.1
    ),
    "_Switched does not update each parameter by itself: it has train() and eval()": lambda p: (
        _Switched(p, lr=0.1)
    ),
    "Prodigy does not update each parameter by itself": Prodigy,
    "SparseAdam does not update each parameter by itself: a trial raised": torch.optim.SparseAdam,
    "LBFGS does not update each parameter by itself: it holds parameters": torch.optim.LBFGS,
}


def _fit_all_refused(plan):
    found = []
    for make in REFUSED.values():
        try:
            _fit(plan, make)
        except Exception as error:
            found.append((type(error).__name__, str(error)))
        else:
            found.append(("", "it trained"))
    return found


def test_an_optimizer_that_cannot_train_as_on_one_device_is_refused_by_name_on_every_rank():
    for rank in in_ranks(2, _fit_all_refused, "3:1"):
        for (kind, message), wanted in zip(rank, REFUSED, strict=True):
            assert kind == "UnsupportedError", message
            assert message.startswith(wanted)
            assert "use " in message.lower() or "Leave " in message


class _FailsOnOneRank(Lamb):
    """On the rank that owns most, in its second step."""

    def step(self, closure):
        loss = super().step(closure)
        held = sum(p.numel() for g in self.param_groups for p in g["params"])
        if self.param_groups[0]["steps"] == 2 and held > 200:
            raise ValueError("no more")
        return loss


def _fit_failing(plan):
    try:
        _fit(plan, lambda p: _FailsOnOneRank(p, lr=0.1))
    except Exception as error:
        return type(error).__name__, str(error)


def test_a_step_that_fails_on_an_owner_is_raised_on_every_rank():
    (kind, message), (other, told) = in_ranks(2, _fit_failing, "3:1")
    assert (kind, message) == ("ValueError", "no more")
    assert other == "RemoteRankError" and "updating by _FailsOnOneRank" in told
    assert "no more" in told


class ScheduleFree(torch.optim.Optimizer):
    """Its parameters are averages in evaluation, and other points in training."""

    def __init__(self, params):
        super().__init__(params, {"steps": 0, "training": False})

    @torch.no_grad()
    def _switch(self, training):
        for group in self.param_groups:
            for p in group["params"]:
                if "z" in self.state[p] and group["training"] != training:
                    p.lerp_(end=self.state[p]["z"], weight=0.1 if training else 1 - 1 / 0.9)
            group["training"] = training

    def train(self):
        self._switch(True)

    def eval(self):
        self._switch(False)

    @torch.no_grad()
    def step(self, closure):
        with torch.enable_grad():
            loss = closure()
        for group in self.param_groups:
            assert group["training"]
            group["steps"] += 1
            for p in group["params"]:
                if p.grad is not None:
                    z = self.state[p].setdefault("z", p.clone())
                    p.lerp_(end=z, weight=1 / group["steps"])
                    p.sub_(p.grad, alpha=1e-2 * 0.9 * (1 - 1 / group["steps"]))
                    z.sub_(p.grad, alpha=1e-2)
        return loss


class _Averaged(_Fitted):
    def on_fit_start(self):
        self.seen = []

    def on_train_epoch_start(self):
        self.optimizers().train()

    def on_validation_epoch_start(self):
        self.optimizers().eval()

    def on_train_batch_end(self, *_):
        state = self.optimizers().state
        held = [entries["z"] for entries in state.values()]
        whole = [z.full_tensor() if isinstance(z, DTensor) else z for z in held]
        self.seen.append(sum(float(z.norm()) for z in whole))

    def on_train_end(self):
        self.optimizers().eval()


def _fit_averaged(plan):
    model = _Averaged(ScheduleFree)
    options = {"strategy_options": {"elementwise": ["ScheduleFree"]}} if plan else {}
    trainer(plan, max_epochs=2, precision="64-true", **options).fit(model, loader(24), loader(8))
    return model.seen, values_of(model)


def test_an_optimizer_that_is_said_to_be_element_wise_switches_parameters_in_hooks():
    seen, values = by_plan("three", _fit_averaged)
    wanted_seen, wanted = on_one_device(_fit_averaged)
    assert len(seen) == 6 and seen == pytest.approx(wanted_seen, rel=TOLERANCE)
    assert_same_tensors(values, wanted, TOLERANCE)


def _fit_claimed(plan):
    try:
        model = _Fitted(lambda p: Lamb(p, lr=1e-2))
        options = {"elementwise": [Lamb]}
        trainer(plan, options, max_steps=1).fit(model, loader(), loader(8))
    except Exception as error:
        return str(error)


def test_a_wrong_claim_is_refused_on_every_rank():
    for message in in_ranks(2, _fit_claimed, "3:1"):
        assert message.startswith(
            "Planner(elementwise=['Lamb']) names an optimizer whose updates of rows, in a trial,"
        )
