"""Training on simulated CUDA devices over NCCL: one device's results, and nothing out of order."""

from __future__ import annotations

import os

import pytest
from device_cases import assert_each_is_as_alone, assert_equal, case, outcomes_of_each, trained_each
from device_jobs import STEPS
from lightning.pytorch.callbacks import WeightAveraging

pytestmark = pytest.mark.simulated

ONE = [((3, 3, 2), 1.0)]
EVEN = [((2, 2), 0.5), ((2, 2), 0.5)]
EVEN_FOUR = [((2,), 0.25)] * 4
UNEVEN = [((3, 3), 0.75), ((2,), 0.25)]
IDLE_WITHOUT_STATE = [((), 0.0), ((4, 4), 1.0)]
IDLE_WITH_ALL_STATE = [((4, 4), 0.0), ((), 1.0)]
MIXED = {"resident_fraction": 0.3, "host_update_fraction": 0.3}
FOUR = [((2, 1), 0.5), ((3,), 0.3), ((2,), 0.2), ((), 0.0)]
GLOO = {"process_group_backend": "gloo"}


def few(names, cases):
    """The cases that no quicker test has."""
    assert set(names) <= set(cases)
    return list(names)


def others(names, cases):
    """The cases that hold the same for more plans and modes."""
    return [name for name in cases if name not in names]


FEW_AND_OTHERS = pytest.mark.parametrize(
    "names",
    [few, pytest.param(others, marks=pytest.mark.slow)],
    ids=["few", "others"],
)


@pytest.fixture(scope="module")
def alone(simulated):
    """Plain Lightning on one device."""
    (found,) = trained_each(simulated, {"alone": case(None)})["alone"]
    assert len(found["losses"]) == STEPS and found["device"] == "cuda:0"
    return found


PLANS = {
    "one": ONE,
    "uneven": UNEVEN,
    "idle without state": IDLE_WITHOUT_STATE,
    "idle with all state": IDLE_WITH_ALL_STATE,
    "four": FOUR,
}


@FEW_AND_OTHERS
def test_plans(simulated, alone, names):
    most_important = ("one", "idle with all state", "four")
    cases = {name: case(PLANS[name]) for name in names(most_important, PLANS)}
    for name, found in trained_each(simulated, cases).items():
        assert_equal(found, alone, name=name)
        assert [one["device"] for one in found] == [f"cuda:{rank}" for rank in range(len(found))]


@FEW_AND_OTHERS
def test_ranks_of_several_kinds_train_over_gloo(simulated, names):
    def of_kinds(ranks, kinds, **given):
        return case(
            ranks,
            accelerators=kinds.split(),
            world_size=len(kinds.split()),
            strategy=GLOO,
            model={"logs_host_values": True},
            **given,
        )

    cases = {
        "gpus": of_kinds(UNEVEN, "gpu gpu"),
        "uneven": of_kinds(UNEVEN, "gpu cpu"),
        "even": of_kinds(EVEN, "cpu gpu"),
        "idle cpu with all state": of_kinds(IDLE_WITH_ALL_STATE, "cpu gpu"),
        "solved": of_kinds("solve", "gpu cpu"),
        "four": of_kinds(FOUR, "gpu cpu gpu cpu"),
    }
    most_important = ("uneven", "idle cpu with all state", "four")
    cases = {name: cases[name] for name in names(most_important, cases)}
    used = {"gpu": "cuda", "cpu": "cpu"}
    for name, found in assert_each_is_as_alone(simulated, cases).items():
        kinds = [one["device"].split(":")[0] for one in found]
        assert kinds == [used[kind] for kind in cases[name].given["accelerators"]], name


@FEW_AND_OTHERS
def test_slices_of_even_shares_travel_in_single_tensors(simulated, alone, names):
    cases = {
        "plain": case(EVEN, padding=True),
        "four": case(EVEN_FOUR, padding=True),
        "keep": case(EVEN, padding=True, strategy={"recompute": False}),
        "stay": case(EVEN, padding=True, plan={"stay_gathered": True}),
        "lists": case(EVEN, padding=True, plan={"padded": False}),
    }
    most_important = ("plain", "stay", "lists")
    cases = {name: cases[name] for name in names(most_important, cases)}
    for name, outcomes in outcomes_of_each(simulated, cases).items():
        assert_equal([outcome.value for outcome in outcomes], alone, name=name)
        for outcome in outcomes:
            held, counted = outcome.value["padding"]
            if name == "lists":  # as its plan leaves padding out
                assert outcome.kernels["nccl:reduce_scatter"] == 4 * STEPS
                assert held == [0, 0]
                continue
            # the head has 17 elements, too few to pad: they go as a list in both passes
            assert outcome.kernels["nccl:reduce_scatter"] == STEPS, name
            assert outcome.kernels["nccl:reduce_scatter_single"] == 3 * STEPS, name
            assert 0 < held[0] <= counted[0] and 0 < held[1] <= counted[1], name


MODES = {
    "offload": {"plan": {"offload": True}},
    "stay": {"plan": {"stay_gathered": True}},
    "offload and stay": {"plan": {"offload": True, "stay_gathered": True}},
    "keep": {"strategy": {"recompute": False}},
    "early": {"strategy": {"early_update": "auto"}},
    "streamed": {"plan": {"resident_fraction": 0.3}},
    "early, mixed": {"strategy": {"early_update": "auto"}, "plan": MIXED},
}


@FEW_AND_OTHERS
def test_modes(simulated, alone, names):
    plans = {"1": ONE, "2": UNEVEN, "idle": IDLE_WITH_ALL_STATE}
    cases = {
        f"{mode}, {plan}": case(ranks, **given)
        for plan, ranks in plans.items()
        for mode, given in MODES.items()
    }
    # tests/gpu has one rank in some modes
    most_important = [
        *(f"{mode}, 2" for mode in MODES),
        "offload and stay, idle",
        "early, mixed, idle",
    ]
    cases = {name: cases[name] for name in names(most_important, cases)}
    for name, found in trained_each(simulated, cases).items():
        assert_equal(found, alone, name=name)


@FEW_AND_OTHERS
def test_a_trace_parameters_on_the_host_and_compiled_blocks(simulated, alone, tmp_path, names):
    given = {"strategy": {"record": tmp_path}, "folder": str(tmp_path)}
    cases = {
        "trace and arrays": case(UNEVEN, **given, arrays=True),
        "compiled by eager": case(UNEVEN, compile="eager"),
        "compiled by aot_eager": case(UNEVEN, compile="aot_eager"),
    }
    most_important = ("trace and arrays",)
    runs = trained_each(simulated, {name: cases[name] for name in names(most_important, cases)})
    for name, found in runs.items():
        assert_equal(found, alone, name=name)
    if "trace and arrays" in runs:
        assert "trace.json" in os.listdir(tmp_path)
        assert all(one["arrays"] for one in runs["trace and arrays"])


@pytest.mark.slow  # tests/gpu holds it for two ranks over NCCL, and the mixed ranks above over gloo
def test_a_plan_that_is_measured_and_solved(simulated, alone):
    cases = {"solved": case("solve", world_size=2)}
    assert_equal(trained_each(simulated, cases)["solved"], alone)


def test_another_plan_in_the_middle_of_training(simulated, alone):
    cases = {
        "idle without state": case(UNEVEN, change=IDLE_WITHOUT_STATE),
        "even": case(UNEVEN, change=EVEN),
    }
    for name, found in trained_each(simulated, cases).items():
        assert_equal(found, alone, name=name)


def test_nodes_with_different_numbers_of_devices(simulated, alone):
    places = tuple(
        {"GROUP_RANK": str(node), "LOCAL_RANK": str(local), "LOCAL_WORLD_SIZE": str(size)}
        for node, local, size in [(0, 0, 2), (0, 1, 2), (1, 0, 1)]
    )
    ranks = [((2, 1), 0.5), ((3,), 0.3), ((2,), 0.2)]
    found = trained_each(simulated, {"nodes": case(ranks, places=places)})["nodes"]
    assert_equal(found, alone)
    assert [one["device"] for one in found] == ["cuda:0", "cuda:1", "cuda:0"]


# -- what users do --------------------------------------------------------------------------------


def test_options_of_the_trainer(simulated):
    options = {
        "clip by norm": {"gradient_clip_val": 0.1},
        "clip by value": {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"},
        "accumulate": {"accumulate_grad_batches": 2},
        # the average, which is validated, is in host memory
        "validate the average": {
            "val_check_interval": 1,
            "callbacks": [WeightAveraging(device="cpu")],
        },
        "double": {"precision": "64-true"},
    }
    cases = {
        name: case(UNEVEN, trainer=given, plan={"offload": True}) for name, given in options.items()
    }
    assert_each_is_as_alone(simulated, cases)


def test_a_microbatch_without_weight_adds_nothing(simulated):
    """Its loss is 0/0, and the host does not know when the backward begins."""
    given = {"model": {"weighted": True}, "data": {"without_target": 3}}
    plans = {"uneven": UNEVEN, "idle": IDLE_WITH_ALL_STATE}
    cases = {f"full, {plan}": case(ranks, **given) for plan, ranks in plans.items()}
    for plan, ranks in plans.items():
        cases[f"16-mixed, {plan}"] = case(ranks, **given, scale=2.0**10, rel=1e-2)
    assert_each_is_as_alone(simulated, cases)


@FEW_AND_OTHERS
def test_half_precision_follows_one_device(simulated, names):
    clip = {"gradient_clip_val": 0.5}
    precisions = {
        name: {"trainer": {"precision": name, **clip}}
        for name in ("bf16-mixed", "bf16-true", "16-true")
    }
    precisions["16-mixed"] = {"trainer": clip, "scale": 2.0**10}
    # half precision rounds each microbatch where the whole batch would be rounded once
    cases = {
        f"{name}, {plan}": case(ranks, **given, rel=3e-2)
        for name, given in precisions.items()
        for plan, ranks in {"one": ONE, "idle": IDLE_WITH_ALL_STATE}.items()
    }
    # tests/gpu has one rank
    cases = {name: cases[name] for name in names([f"{each}, idle" for each in precisions], cases)}
    assert_each_is_as_alone(simulated, cases)


@FEW_AND_OTHERS
def test_losses_over_the_batch_and_manual_optimization(simulated, names):
    cases = {}
    for form, ranks in {
        "over_batch": [((3, 2), 0.8), ((3,), 0.2)],
        "manual": [((5,), 0.8), ((3,), 0.2)],
    }.items():
        cases[f"{form}, full"] = case(ranks, **{form: True})
        retained = {form: True, "strategy": {"recompute": False}}
        cases[f"{form}, retained"] = case(ranks, **retained)
        cases[f"{form}, 16-mixed"] = case(ranks, **{form: True}, scale=2.0**10, rel=3e-2)
        cases[f"{form}, 16-mixed, retained"] = case(ranks, **retained, scale=2.0**10, rel=3e-2)
    most_important = [name for name in cases if name.endswith(("full", "16-mixed, retained"))]
    cases = {name: cases[name] for name in names(most_important, cases)}
    assert_each_is_as_alone(simulated, cases)


@FEW_AND_OTHERS
def test_overflow_skips_the_same_steps(simulated, names):
    plans = {"one": ONE, "uneven": UNEVEN, "idle": IDLE_WITH_ALL_STATE}
    given = {"scale": 2.0**30}
    cases = {plan: case(plans[plan], **given) for plan in names(("uneven", "idle"), plans)}
    cases["manual"] = case([((5,), 0.8), ((3,), 0.2)], **given, manual=True)
    references = {"alone": case(None, **given), "by hand": case(None, **given, manual=True)}
    runs = trained_each(simulated, {**references, **cases})
    one_device = {name: runs.pop(name)[0] for name in references}
    for name, found in runs.items():
        wanted = one_device["by hand" if name == "manual" else "alone"]
        assert wanted["scale"] < 2.0**30
        assert [one["scale"] for one in found] == [wanted["scale"]] * len(found), name
        assert_equal(found, wanted, 1e-2, name)


def test_a_checkpoint_continues_under_another_plan(simulated, alone, tmp_path):
    half, epoch = str(tmp_path / "half.ckpt"), str(tmp_path / "epoch.ckpt")
    two_epochs = {"max_epochs": 2}
    runs = trained_each(
        simulated,
        {
            "half": case(UNEVEN, trainer={"max_steps": 2}, save=half),
            "epoch": case(UNEVEN, save=epoch),
            "whole": case(None, trainer=two_epochs),
            "resumed": case(ONE, trainer=two_epochs, resume=epoch),
        },
    )
    assert runs["half"][0]["losses"] == pytest.approx(alone["losses"][:2], rel=1e-5)
    (whole,) = runs["whole"]
    found = runs["resumed"]
    assert found[0]["losses"] == pytest.approx(whole["losses"][STEPS:], rel=1e-5)
    assert found[0]["weights"] == pytest.approx(whole["weights"], rel=1e-5)


def test_a_loss_in_chunks_of_tokens(simulated):
    chunks = case(UNEVEN, tokens=True, trainer={"val_check_interval": 2})
    assert_each_is_as_alone(simulated, {"chunks": chunks})
