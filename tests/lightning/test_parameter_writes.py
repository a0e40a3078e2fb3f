"""Writes to parameters: as on one device in hooks, refused inside of a step."""

from __future__ import annotations

import pytest
import torch
from common import assert_same_tensors, in_ranks, loader, look_soon, trainer, values_of
from lightning.pytorch import LightningModule
from shared_start import SharedStart
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from lightning_cephalo import writable_parameters
from lightning_cephalo.common.errors import UnsupportedError

TOLERANCE = 1e-5
MOMENTUM = 0.6

IN_ONE, IN_TWO, IN_THREE = (SharedStart(in_ranks, ranks) for ranks in (1, 2, 3))


class _Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.map, self.norm = nn.Linear(5, 5), nn.LayerNorm(5)

    def forward(self, x):
        return x + torch.tanh(self.map(self.norm(x)))


class _Encoder(nn.Module):
    """Two units, and a projector that belongs to the root unit."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([_Layer(), _Layer()])
        self.projector = nn.Linear(5, 3)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.projector(x)


class _Student(LightningModule):
    """A student and a frozen teacher with units of its own; tests write to the teacher."""

    def __init__(self, write=lambda module: None, place=None) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.student, self.teacher = _Encoder(), _Encoder()
        self.teacher.requires_grad_(False)
        self.write, self.place = write, place
        self.losses = []

    def at(self, place):
        if place == self.place:
            self.write(self)

    def training_step(self, batch, batch_idx):
        self.at("start")
        found = self.student(batch[0])
        self.at("between")
        with torch.no_grad():
            wanted = self.teacher(batch[0] + 0.1)
        loss = nn.functional.mse_loss(found, wanted)
        self.at("end")
        return loss

    def on_train_batch_start(self, batch, batch_idx):
        self.at("on_train_batch_start")

    def on_before_zero_grad(self, optimizer):
        self.at("on_before_zero_grad")

    def on_after_backward(self):
        self.at("on_after_backward")

    def on_before_optimizer_step(self, optimizer):
        self.at("on_before_optimizer_step")

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.losses.append(float(outputs["loss"]))
        self.at("on_train_batch_end")

    def configure_optimizers(self):
        return torch.optim.SGD(self.student.parameters(), lr=0.1)


def _pairs(module):
    return zip(module.teacher.parameters(), module.student.parameters(), strict=True)


def _by_data(module):
    for t, s in _pairs(module):
        t.data.mul_(MOMENTUM).add_(s.data, alpha=1 - MOMENTUM)


@torch.no_grad()
def _by_assignment(module):
    for t, s in _pairs(module):
        t.data = t.data * MOMENTUM + s.data * (1 - MOMENTUM)


@torch.no_grad()
def _by_foreach(module):
    torch._foreach_lerp_(
        list(module.teacher.parameters()), list(module.student.parameters()), 1 - MOMENTUM
    )


def _by_state_dict(module):
    module.teacher.load_state_dict(module.student.state_dict())


WRITES = [_by_data, _by_assignment, _by_foreach, _by_state_dict]


# -- in hooks ---------------------------------------------------------------------------------


def _in_full(write):
    def written(module):
        with writable_parameters(module.teacher, module.student):
            write(module)

    return written


def _fit(plan, write, place):
    module = _Student(write, place)
    trainer(plan, max_epochs=1).fit(module, loader(14))
    return values_of(module), module.losses


PAIRS = [(_by_data, "on_train_batch_start"), (_by_foreach, "on_before_optimizer_step")]
THREES = [(_by_assignment, "on_after_backward"), (_by_state_dict, "on_train_batch_end")]


@IN_ONE.each(*((None, *case) for case in PAIRS + THREES))
@IN_TWO.each(("3:1", *PAIRS[0]), ("no data", *PAIRS[1]))
@IN_THREE.each(*(("three", *case) for case in THREES))
def _fit_in_full(plan, write, place):
    return _fit(plan, _in_full(write), place)


@pytest.mark.parametrize(
    ("write", "plan", "hook"),
    [
        (_by_data, "3:1", "on_train_batch_start"),
        (_by_assignment, "three", "on_after_backward"),
        (_by_foreach, "no data", "on_before_optimizer_step"),
        (_by_state_dict, "three", "on_train_batch_end"),
    ],
)
def test_a_teacher_that_is_written_in_a_hook_is_that_of_one_device(write, plan, hook):
    ranks = IN_THREE if plan == "three" else IN_TWO
    found, _ = ranks.of(_fit_in_full, plan, write, hook)[0]
    wanted, _ = IN_ONE.of(_fit_in_full, None, write, hook)[0]
    moved = {"teacher.projector.weight": _Student().teacher.projector.weight.detach()}
    assert not torch.allclose(wanted["teacher.projector.weight"], *moved.values())
    assert_same_tensors(found, wanted, TOLERANCE)


@IN_ONE.each((None,))
@IN_THREE.each(("three",))
def _fit_averaged(plan):
    """torch's own average of weights, whose copy is made before the model is sharded."""
    module = _Student()
    average = get_ema_multi_avg_fn(MOMENTUM)
    module.average = AveragedModel(module.student, multi_avg_fn=average).requires_grad_(False)

    def write(module):
        with writable_parameters(module.average, module.student):
            module.average.update_parameters(module.student)

    module.write, module.place = write, "on_train_batch_end"
    trainer(plan, max_epochs=1).fit(module, loader(14))
    return values_of(module)


def test_torchs_averaged_model_is_that_of_one_device():
    found, wanted = IN_THREE.of(_fit_averaged, "three")[0], IN_ONE.of(_fit_averaged, None)[0]
    assert_same_tensors(found, wanted, TOLERANCE)


@IN_TWO.each(("3:1",))
def _misuse(plan):
    """What writable_parameters says where it cannot work, and that it then writes nothing."""
    messages, unchanged = [], []

    def expect_refused(function):
        def written(module):
            before = [p.full_tensor().clone() for p in module.teacher.parameters()]
            with pytest.raises(RuntimeError) as refused, writable_parameters(module.teacher):
                module.teacher.projector.bias.data.fill_(9.0)
                function(module)
            messages.append(str(refused.value))
            after = [p.full_tensor() for p in module.teacher.parameters()]
            unchanged.append(all(map(torch.equal, before, after)))

        return written

    def replaces(module):
        module.teacher.projector.weight = nn.Parameter(torch.ones(3, 5))

    def reshapes(module):
        module.teacher.projector.weight.data = torch.ones(2, 5)

    def fails(module):
        raise RuntimeError("of the user")

    for function in (replaces, reshapes, fails):
        module = _Student(expect_refused(function), "on_after_backward")
        trainer(plan, max_steps=1).fit(module, loader(8))
    return messages, unchanged


def test_writable_parameters_writes_all_or_nothing():
    for messages, unchanged in IN_TWO.of(_misuse, "3:1"):
        replaced, reshaped, failed = messages
        assert "'weight' of Linear is replaced" in replaced and "copy_(values)" in replaced
        assert "shape (2, 5)" in reshaped and "expected (3, 5)" in reshaped
        assert failed == "of the user"
        assert unchanged == [True, True, True]


def _row(module):
    module.teacher.projector.weight.data[0] = 0.0


def _part_of_gradient(module):
    module.student.projector.weight.grad.view(-1)[:4].zero_()


def _at_random(module):
    nn.init.normal_(module.teacher.projector.weight)


@IN_TWO.each(("3:1",))
def _parts(plan):
    messages = []
    for write in (_row, _part_of_gradient, _at_random):
        with pytest.raises(UnsupportedError) as refused:
            trainer(plan, max_steps=1).fit(_Student(write, "on_after_backward"), loader(8))
        messages.append(str(refused.value))
    return messages


def test_a_write_to_a_part_of_a_sharded_tensor_in_a_hook_is_refused_with_a_remedy():
    for messages in IN_TWO.of(_parts, "3:1"):
        for message in messages:
            assert "with lightning_cephalo.writable_parameters(module)" in message
            assert "`parameter.grad = gradient`" in message


# -- inside of a step -------------------------------------------------------------------------


def _root_by_data(module):
    module.teacher.projector.weight.data.mul_(0.5)


@torch.no_grad()
def _root_in_place(module):
    module.teacher.projector.weight.mul_(0.5)


@torch.no_grad()
def _root_by_foreach(module):
    torch._foreach_mul_([p.data for p in module.teacher.projector.parameters()], 0.5)


def _root_by_assignment(module):
    module.teacher.projector.weight.data = torch.ones(3, 5)


def _root_by_state_dict(module):
    module.teacher.projector.load_state_dict(module.student.projector.state_dict())


def _root_replaced(module):
    module.teacher.projector.weight = nn.Parameter(torch.ones(3, 5), requires_grad=False)


def _trained(module):
    for parameter in module.student.projector.parameters():
        parameter.data.clamp_(-0.1, 0.1)


def _unit_by_data(module):
    module.teacher.layers[0].map.weight.data.mul_(0.5)


@torch.no_grad()
def _unit_in_place(module):
    module.teacher.layers[0].map.weight.mul_(0.5)


def _unit_by_assignment(module):
    module.teacher.layers[0].map.weight.data = torch.ones(5, 5)


@torch.no_grad()
def _unit_mixed(module):
    module.teacher.layers[0].map.weight.copy_(torch.ones(5, 5))


def _unit_read(module):
    return module.teacher.layers[0].map.weight.norm()


def _gathers(module):
    with writable_parameters(module.teacher):
        pass


def _gathers_root(module):
    with writable_parameters(module.teacher.projector):
        pass


INSIDE = {
    **{write.__name__: (write, ("start", "between", "end")) for write in WRITES},
    "root by data": (_root_by_data, ("start", "end", "on_before_zero_grad")),
    "root in place": (_root_in_place, ("between", "on_before_zero_grad")),
    "root by foreach": (_root_by_foreach, ("end",)),
    "root by assignment": (_root_by_assignment, ("end",)),
    "root by state dict": (_root_by_state_dict, ("start",)),
    "root replaced": (_root_replaced, ("end",)),
    "trained": (_trained, ("end",)),
    "unit by data": (_unit_by_data, ("start", "end")),
    "unit in place": (_unit_in_place, ("between",)),
    "unit by assignment": (_unit_by_assignment, ("start",)),
    "unit mixed": (_unit_mixed, ("start",)),
    "unit read": (_unit_read, ("end",)),
    "gathers": (_gathers, ("start", "on_before_zero_grad")),
    "gathers root": (_gathers_root, ("end",)),
}


IN_THREE_RANKS = ("_by_data", "root by data", "unit by data")


@IN_TWO.each(*(("no data", name) for name in INSIDE if name not in IN_THREE_RANKS))
@IN_THREE.each(*(("three", name) for name in IN_THREE_RANKS))
def _refusals(plan, name):
    """Per place, how fit ended on this rank."""
    look_soon()
    write, places = INSIDE[name]
    ends = []
    for place in places:
        module = _Student(write, place)
        try:
            trainer(plan, max_epochs=1).fit(module, loader(8))
            ends.append(("", "it trained", module.losses))
        except Exception as error:
            ends.append((type(error).__name__, str(error), module.losses))
    return ends


@pytest.mark.parametrize("name", INSIDE)
def test_a_write_inside_of_a_step_is_refused_by_name_on_every_rank(name):
    if name in IN_THREE_RANKS:
        ranks = IN_THREE.of(_refusals, "three", name)
    else:
        ranks = IN_TWO.of(_refusals, "no data", name)
    for ends in zip(*ranks, strict=True):
        assert all(not losses for _, _, losses in ends)  # refused before the first update
        kinds = {kind for kind, _, _ in ends}
        refused = {"UnitUseError", "ShardedUseError"}
        assert kinds <= {*refused, "RemoteRankError"} and kinds & refused, ends
        for _, message, _ in ends:
            assert "writable_parameters" in message or "Call it in" in message, message
            if name not in ("unit mixed", "_by_foreach") and "gathers" not in name:
                assert "student." in message or "teacher." in message, message


def _late(module):
    if module.trainer.global_step == 1:
        _root_by_data(module)


def test_a_write_in_a_later_step_is_refused_too():
    for kind, message, losses in (end for ends in IN_TWO.of(_late_refusals, "3:1") for end in ends):
        assert kind == "UnitUseError" and "teacher.projector.weight" in message
        assert len(losses) == 1


@IN_TWO.each(("3:1",))
def _late_refusals(plan):
    module = _Student(_late, "end")
    try:
        trainer(plan, max_epochs=1).fit(module, loader(24))
    except Exception as error:
        return [(type(error).__name__, str(error), module.losses)]
    return [("", "it trained", module.losses)]


def _harmless(module):
    """What reads nothing but shapes, and full weights of the root unit."""
    for parameter in module.parameters():
        assert parameter.numel() and parameter.shape and parameter.device.type == "cpu"
    float(module.student.projector.weight.data.norm() + module.teacher.projector.bias.sum())
    module.teacher.layers[0].requires_grad_(False)


@IN_ONE.each((None,))
@IN_THREE.each(("three",))
def _fit_and_read(plan):
    return _fit(plan, _harmless, "end")


def test_reading_is_allowed_and_changes_nothing():
    found, losses = IN_THREE.of(_fit_and_read, "three")[0]
    wanted, _ = IN_ONE.of(_fit_and_read, None)[0]
    assert len(losses) == 2
    assert_same_tensors(found, wanted, TOLERANCE)
