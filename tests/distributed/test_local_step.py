"""Updates and clipping over rows: bit by bit what they are over DTensors, and seen by nobody."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
import torch.distributed as dist
from harness import make_executor
from launch import run_ranks
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import SGD, Adam, AdamW

from lightning_cephalo.adapters.optimizer import _square_of_norm, clip_by_norm, local_update
from lightning_cephalo.sharding.placement import local_part

SHARES = {"3:1": (0.75, 0.25), "3:1:0": (0.75, 0.25, 0.0)}


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(5, 7), nn.Linear(7, 3, bias=False)


class _Net(nn.Module):
    """Matrices, vectors, a 0-d parameter, and one that never gets a gradient."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.blocks = nn.ModuleList(_Block() for _ in range(2))
        self.gain = nn.Parameter(torch.tensor(1.5))
        self.unused = nn.Parameter(torch.ones(4))


def _parameters(shares, dtype=torch.float32):
    model = _Net().to(dtype)
    make_executor(model, shares, recompute=False)
    return list(model.parameters())


def _set_gradients(parameters, step):
    for index, parameter in enumerate(parameters[:-1]):
        generator = torch.Generator().manual_seed(100 * step + index)
        whole = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
        parameter.grad = torch.zeros_like(parameter)
        own = local_part(parameter.grad)
        rows = getattr(parameter.placements[0], "rows", None)
        own.copy_(whole if rows is None else whole[slice(*rows[dist.get_rank()])])
    assert parameters[-1].ndim == 1 or parameters[-1].grad is None


def _unused_last(parameters):
    return sorted(parameters, key=lambda p: tuple(p.shape) == (4,))


def _groups(parameters):
    return [
        {"params": [p for p in parameters if p.ndim == 2]},
        {"params": [p for p in parameters if p.ndim != 2], "weight_decay": 0.0, "lr": 3e-3},
    ]


def _trained(make, parameters, initial, locally):
    for parameter, value in zip(parameters, initial, strict=True):
        local_part(parameter).copy_(value)
    optimizer = make(_groups(parameters))
    for step in range(2):  # the second finds the state of the first
        _set_gradients(parameters, step)
        if locally:
            with local_update(optimizer):
                optimizer.step()
        else:
            optimizer.step()
    return [local_part(parameter).clone() for parameter in parameters], optimizer


def _compare(rank, make, parameters, initial):
    expected, general = _trained(make, parameters, initial, False)
    found, local = _trained(make, parameters, initial, True)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    moved = any(not torch.equal(one, was) for one, was in zip(found, initial, strict=True))
    assert moved
    for found_group, group in zip(local.param_groups, general.param_groups, strict=True):
        assert list(found_group) == list(group)
        for name, value in group.items():
            assert found_group[name] is value or found_group[name] == value or name == "params"
        for one, other in zip(found_group["params"], group["params"], strict=True):
            assert one is other and isinstance(one, DTensor) and local_part(one).grad is None
            assert (one in local.state) == (one in general.state)
            if one in local.state:
                _assert_same_state(local.state[one], general.state[one], one)
    assert len(local.state) == len(general.state)


def _assert_same_state(found, expected, parameter):
    assert list(found) == list(expected)
    for name, value in expected.items():
        if not isinstance(value, torch.Tensor):
            assert found[name] == value
            continue
        assert isinstance(found[name], DTensor) == isinstance(value, DTensor), name
        assert found[name].shape == value.shape and found[name].dtype == value.dtype, name
        assert torch.equal(local_part(found[name]), local_part(value)), name
        if isinstance(value, DTensor):
            assert found[name].placements[0] == parameter.placements[0]
            assert found[name].stride() == value.stride()
            assert torch.equal(found[name].full_tensor(), value.full_tensor())


ADAM = [
    {"lr": 1e-2, **kernel, **options}
    for kernel in ({}, {"foreach": True}, {"foreach": False}, {"fused": True})
    for options in (
        {},
        {"amsgrad": True, "weight_decay": 0.1},
        {"maximize": True, "betas": (0.5, 0.7)},
    )
]
SGDS = [
    {"lr": 1e-2, **kernel, **options}
    for kernel in ({}, {"foreach": True}, {"foreach": False})
    for options in (
        {},
        {"momentum": 0.9, "dampening": 0.1, "weight_decay": 0.1},
        {"momentum": 0.9, "nesterov": True, "maximize": True},
    )
]
# every option of every kernel, on a rank without rows too; then each value of each once
UPDATES = {
    ("3:1:0", torch.float32): [
        *((AdamW, options) for options in ADAM),
        *((SGD, options) for options in SGDS),
    ],
    ("3:1:0", torch.float64): [*((Adam, options) for options in ADAM[::4]), (SGD, SGDS[1])],
    ("3:1", torch.float32): [*((Adam, options) for options in ADAM[1::4]), (SGD, SGDS[5])],
    ("3:1", torch.float64): [*((AdamW, options) for options in ADAM[3::4]), (SGD, SGDS[6])],
}


@pytest.mark.parametrize(("shares", "dtype"), UPDATES, ids=str)
def test_updates_over_rows_are_bit_by_bit_those_over_dtensors(shares, dtype):
    def compare_all(rank):
        parameters = _unused_last(_parameters(SHARES[shares], dtype))
        initial = [local_part(parameter).clone() for parameter in parameters]
        for kind, options in UPDATES[shares, dtype]:
            _compare(rank, lambda p, k=kind, o=options: k(p, **o), parameters, initial)

    run_ranks(len(SHARES[shares]), compare_all)


def _seen_by_hooks(rank):
    parameters = _unused_last(_parameters(SHARES["3:1"]))
    optimizer = AdamW(parameters, lr=1e-2)
    identities = [id(p) for p in parameters]
    state, groups = optimizer.state, optimizer.param_groups
    seen = []

    def note(what):
        assert optimizer.state is state and optimizer.param_groups is groups
        assert [id(p) for p in optimizer.param_groups[0]["params"]] == identities
        entries = [v for p in optimizer.state for v in optimizer.state[p].values() if v.ndim]
        assert all(isinstance(entry, DTensor) for entry in entries)
        assert all(entry.placements == p.placements for p in state for entry in state[p].values()
                   if isinstance(entry, DTensor))  # fmt: skip
        seen.append((what, len(state)))

    optimizer.register_step_pre_hook(lambda *_: note("pre"))
    optimizer.register_step_post_hook(lambda *_: note("post"))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)

    def closure():
        _set_gradients(parameters, 0)
        note("closure")
        return 5.0

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            with local_update(optimizer):
                assert optimizer.step(closure=closure) == 5.0
            scheduler.step()
        with local_update(optimizer):
            assert optimizer.step(closure) == 5.0  # by position
    assert len(optimizer._optimizer_step_pre_hooks) == 1
    assert len(optimizer._optimizer_step_post_hooks) == 1
    trained = len(parameters) - 1
    return seen == [
        (what, 0 if index == 0 and what != "post" else trained)
        for index in range(3)
        for what in ("pre", "closure", "post")
    ]


def test_hooks_closures_and_schedulers_see_dtensors_and_nothing_remains():
    assert all(run_ranks(2, _seen_by_hooks))


class _Failure(Exception):
    pass


def _failing(rank):
    parameters = _unused_last(_parameters(SHARES["3:1"]))
    optimizer = SGD(parameters, lr=1e-2, momentum=0.9)
    _set_gradients(parameters, 0)
    held = optimizer.param_groups[0]["params"]
    before = [local_part(p).clone() for p in parameters]

    def closure():
        raise _Failure

    with pytest.raises(_Failure), local_update(optimizer):
        optimizer.step(closure)
    optimizer.param_groups[0]["lr"] = "fast"  # fails in the middle of the update
    with pytest.raises(Exception, match=r"fast|str") as failure, local_update(optimizer):
        optimizer.step()
    assert not isinstance(failure.value, _Failure)
    assert optimizer.param_groups[0]["params"] is held
    assert all(isinstance(parameter, DTensor) for parameter in held)
    assert all(torch.equal(local_part(p), b) for p, b in zip(parameters, before, strict=True))
    optimizer.param_groups[0]["lr"] = 1e-2
    with local_update(optimizer):
        optimizer.step()
    return not any(torch.equal(local_part(p), b)
                   for p, b in zip(parameters[:-1], before, strict=False) if b.numel())  # fmt: skip


def test_after_a_failure_dtensors_are_back_and_the_next_step_works():
    assert all(run_ranks(2, _failing))


def _clipped(rank, shares):
    return [
        _clipped_alike(shares, largest, dtype)
        for largest in (0.5, 1e6)
        for dtype in (torch.float32, torch.float64)
    ]


def _clipped_alike(shares, largest, dtype):
    gradients, norms = [], []
    for clip in (
        lambda p: nn.utils.clip_grad_norm_(p, largest),
        lambda p: clip_by_norm(iter(p), largest),
    ):
        parameters = _unused_last(_parameters(shares, dtype))
        _set_gradients(parameters, 0)
        norms.append(clip(parameters))
        assert all(local_part(p).grad is None for p in parameters)
        gradients.append([local_part(p.grad) for p in parameters[:-1]])
    tolerance = 1e-6 if dtype == torch.float32 else 1e-14
    assert norms[1].dtype == dtype and norms[1].shape == ()
    torch.testing.assert_close(norms[1], norms[0], rtol=tolerance, atol=0.0)
    for found, expected in zip(gradients[1], gradients[0], strict=True):
        torch.testing.assert_close(found, expected, rtol=tolerance, atol=0.0)
    return float(norms[1])


@pytest.mark.parametrize("shares", SHARES)
def test_clipping_by_norm_over_rows_is_clipping_over_dtensors(shares):
    """Both below and above the largest norm, in both precisions."""
    first, *others = run_ranks(len(SHARES[shares]), _clipped, SHARES[shares])
    assert all(norms == first for norms in others) and min(first) > 0.5


def _extremes(rank):
    parameters = _unused_last(_parameters(SHARES["3:1:0"]))
    norms = [float(clip_by_norm(parameters, 1.0))]  # no gradients at all
    for extreme in (float("inf"), float("nan"), 1e18):
        _set_gradients(parameters, 0)
        if rank == 1:
            for parameter in parameters[:-1]:
                if parameter.ndim:
                    local_part(parameter.grad).fill_(extreme)
        norms.append(float(clip_by_norm(parameters, 1.0)))
    return norms


def test_clipping_tells_every_rank_of_what_one_of_them_holds():
    for none, infinite, not_a_number, large in run_ranks(3, _extremes):
        assert none == 0.0 and infinite == float("inf")
        assert not_a_number != not_a_number
        assert 1e18 <= large < 1e19


def test_optimizers_of_plain_tensors_are_left_alone():
    parameter = nn.Parameter(torch.ones(3))
    parameter.grad = torch.ones(3)
    optimizer = SGD([parameter], lr=0.5, momentum=0.9)
    with local_update(optimizer):
        optimizer.step()
    assert parameter.tolist() == [0.5] * 3 and parameter.grad is not None
    assert torch.equal(optimizer.state[parameter]["momentum_buffer"], torch.ones(3))
    copied = copy.deepcopy(optimizer)
    assert not copied._optimizer_step_pre_hooks


def test_the_norm_of_no_gradients_is_on_the_device():
    """On the CPU, as torch has it, a GPU's host would wait to copy it."""
    assert _square_of_norm([], torch.device("meta")).device.type == "meta"
