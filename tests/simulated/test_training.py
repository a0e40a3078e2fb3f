"""Training on simulated CUDA devices over NCCL: one device's results, and nothing out of order."""

from __future__ import annotations

import os

import pytest
from device_jobs import train
from launch import torchrun_environments
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


def trained(simulated, ranks, *, environments=None, **given):
    """What every rank found, after a look at what the checker found."""
    outcomes = outcomes_of(simulated, ranks, environments=environments, **given)
    return [outcome.value for outcome in outcomes]


def outcomes_of(simulated, ranks, *, environments=None, **given):
    environments = environments or torchrun_environments(len(ranks) if ranks else 1)
    outcomes = simulated.run(len(environments), train, environments, ranks, given)
    for outcome in outcomes:
        assert not outcome.findings, "\n".join(outcome.findings)
        losses = outcomes[0].value["losses"]
        assert outcome.value["losses"] == pytest.approx(losses, rel=1e-6)
    return outcomes


def assert_equal(found, wanted, rel=1e-5):
    for one in found:
        assert one["losses"] == pytest.approx(wanted["losses"], rel=rel)
        assert one["validated"] == pytest.approx(wanted["validated"], rel=rel)
        assert one["weights"] == pytest.approx(wanted["weights"], rel=rel)


@pytest.fixture(scope="module")
def alone(simulated):
    """Plain Lightning on one device."""
    (found,) = trained(simulated, None)
    assert len(found["losses"]) == 4 and found["device"] == "cuda:0"
    return found


@pytest.mark.parametrize(
    "ranks",
    [ONE, UNEVEN, IDLE_WITHOUT_STATE, IDLE_WITH_ALL_STATE, FOUR],
    ids=["one", "uneven", "idle without state", "idle with all state", "four"],
)
def test_plans(simulated, alone, ranks):
    found = trained(simulated, ranks)
    assert_equal(found, alone)
    assert [one["device"] for one in found] == [f"cuda:{rank}" for rank in range(len(ranks))]


@pytest.mark.parametrize(
    ("ranks", "kinds", "by_node"),
    [
        (UNEVEN, "gpu gpu", None),
        (UNEVEN, "gpu cpu", None),
        (EVEN, "cpu gpu", None),
        (IDLE_WITH_ALL_STATE, "cpu gpu", None),
        (FOUR, "gpu cpu gpu cpu", None),
        (FOUR, "gpu cpu gpu cpu", True),
        ("solve", "gpu cpu", None),
    ],
    ids=["gpus", "uneven", "even", "idle cpu with all state", "four", "by node", "solved"],
)
def test_ranks_of_several_kinds_train_over_gloo(simulated, alone, ranks, kinds, by_node):
    accelerators = kinds.split()
    environments = torchrun_environments(len(accelerators))
    if by_node:
        for rank, environment in enumerate(environments):
            environment["GROUP_RANK"] = str(rank // 2)
    gloo = {"process_group_backend": "gloo"}
    found = trained(
        simulated,
        ranks,
        environments=environments,
        plan={"by_node": by_node},
        accelerators=accelerators,
        strategy=gloo,
        model={"logs_host_values": True},
    )
    assert_equal(found, alone)
    used = {"gpu": "cuda", "cpu": "cpu"}
    assert [one["device"].split(":")[0] for one in found] == [used[k] for k in accelerators]


@pytest.mark.parametrize(
    "given",
    [{}, {"strategy": {"recompute": False}}, {"plan": {"stay_gathered": True}}],
    ids=["plain", "keep", "stay"],
)
def test_slices_of_even_shares_travel_in_single_tensors(simulated, alone, given):
    for ranks in (EVEN, EVEN_FOUR) if given == {} else (EVEN,):
        outcomes = outcomes_of(simulated, ranks, **given, padding=True)
        assert_equal([outcome.value for outcome in outcomes], alone)
        for outcome in outcomes:
            # the head has 17 elements, too few to pad: they go as a list in both passes
            assert outcome.kernels["nccl:reduce_scatter"] == 4
            assert outcome.kernels["nccl:reduce_scatter_single"] == 4 * 3
            held, counted = outcome.value["padding"]
            assert 0 < held[0] <= counted[0] and 0 < held[1] <= counted[1]


def test_a_plan_may_leave_padding_out(simulated, alone):
    outcomes = outcomes_of(simulated, EVEN, plan={"padded": False}, padding=True)
    assert_equal([outcome.value for outcome in outcomes], alone)
    for outcome in outcomes:
        assert outcome.kernels["nccl:reduce_scatter"] == 4 * 4
        assert outcome.value["padding"][0] == [0, 0]


@pytest.mark.parametrize("ranks", [ONE, UNEVEN, IDLE_WITH_ALL_STATE], ids=["1", "2", "idle"])
@pytest.mark.parametrize(
    "given",
    [
        {"plan": {"offload": True}},
        {"plan": {"stay_gathered": True}},
        {"plan": {"offload": True, "stay_gathered": True}},
        {"strategy": {"recompute": False}},
        {"strategy": {"early_update": "auto"}},
        {"plan": {"resident_fraction": 0.3}},
        {"strategy": {"early_update": "auto"}, "plan": MIXED},
    ],
    ids=["offload", "stay", "offload and stay", "keep", "early", "streamed", "early, mixed"],
)
def test_modes(simulated, alone, ranks, given):
    assert_equal(trained(simulated, ranks, **given), alone)


def test_a_trace_and_parameters_on_the_host(simulated, alone, tmp_path):
    given = {"strategy": {"trace": tmp_path / "trace.json"}, "folder": str(tmp_path)}
    found = trained(simulated, UNEVEN, **given, arrays=True)
    assert_equal(found, alone)
    assert "trace.json" in os.listdir(tmp_path)
    assert all(one["arrays"] for one in found)


def test_a_plan_that_is_measured_and_solved(simulated, alone):
    environments = torchrun_environments(2)
    assert_equal(trained(simulated, "solve", environments=environments), alone)


@pytest.mark.parametrize("other", [IDLE_WITHOUT_STATE, EVEN], ids=["idle without state", "even"])
def test_another_plan_in_the_middle_of_training(simulated, alone, other):
    assert_equal(trained(simulated, UNEVEN, change=other), alone)


def test_nodes_with_different_numbers_of_devices(simulated, alone):
    environments = torchrun_environments(3)
    for rank, (node, local, size) in enumerate([(0, 0, 2), (0, 1, 2), (1, 0, 1)]):
        environments[rank] |= {
            "GROUP_RANK": str(node),
            "LOCAL_RANK": str(local),
            "LOCAL_WORLD_SIZE": str(size),
        }
    ranks = [((2, 1), 0.5), ((3,), 0.3), ((2,), 0.2)]
    found = trained(simulated, ranks, environments=environments)
    assert_equal(found, alone)
    assert [one["device"] for one in found] == ["cuda:0", "cuda:1", "cuda:0"]


# -- what users do --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {"gradient_clip_val": 0.1},
        {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"},
        {"accumulate_grad_batches": 2},
        # the average, which is validated, is in host memory
        {"val_check_interval": 1, "callbacks": [WeightAveraging(device="cpu")]},
        {"precision": "64-true"},
    ],
    ids=["clip by norm", "clip by value", "accumulate", "validate the average", "double"],
)
def test_options_of_the_trainer(simulated, options):
    (wanted,) = trained(simulated, None, trainer=options)
    assert_equal(trained(simulated, UNEVEN, trainer=options, plan={"offload": True}), wanted)


@pytest.mark.parametrize("given", [{}, {"scale": 2.0**10}], ids=["full", "16-mixed"])
def test_a_microbatch_without_weight_adds_nothing(simulated, given):
    """Its loss is 0/0, and the host does not know when the backward begins."""
    given = {"model": {"weighted": True}, "data": {"without_target": 3}, **given}
    (wanted,) = trained(simulated, None, **given)
    for ranks in (UNEVEN, IDLE_WITH_ALL_STATE):
        assert_equal(trained(simulated, ranks, **given), wanted, 1e-2 if "scale" in given else 1e-5)


@pytest.fixture(scope="module", params=["16-mixed", "bf16-mixed", "bf16-true", "16-true"])
def in_half_precision(simulated, request):
    """Options of training in half precision, and what one device finds with them."""
    given = {"trainer": {"precision": request.param, "gradient_clip_val": 0.5}}
    if request.param == "16-mixed":
        given = {"trainer": {"gradient_clip_val": 0.5}, "scale": 2.0**10}
    (wanted,) = trained(simulated, None, **given)
    return given, wanted


@pytest.mark.parametrize("ranks", [ONE, IDLE_WITH_ALL_STATE], ids=["one", "idle"])
def test_half_precision_follows_one_device(simulated, in_half_precision, ranks):
    given, wanted = in_half_precision
    # half precision rounds each microbatch where the whole batch would be rounded once
    assert_equal(trained(simulated, ranks, **given), wanted, rel=3e-2)


IN_EACH_WAY = pytest.mark.parametrize(
    ("given", "rel"),
    [({}, 1e-5), ({"strategy": {"recompute": False}}, 1e-5), ({"scale": 2.0**10}, 3e-2)],
    ids=["full", "retained", "16-mixed"],
)


@IN_EACH_WAY
def test_a_loss_over_the_batch(simulated, given, rel):
    (wanted,) = trained(simulated, None, over_batch=True, **{**given, "strategy": {}})
    ranks = [((3, 2), 0.8), ((3,), 0.2)]
    assert_equal(trained(simulated, ranks, over_batch=True, **given), wanted, rel)


@IN_EACH_WAY
def test_manual_optimization(simulated, given, rel):
    (wanted,) = trained(simulated, None, manual=True, **{**given, "strategy": {}})
    assert_equal(trained(simulated, [((5,), 0.8), ((3,), 0.2)], manual=True, **given), wanted, rel)


def test_overflow_skips_the_same_steps(simulated):
    given = {"scale": 2.0**30}
    (wanted,) = trained(simulated, None, **given)
    assert wanted["scale"] < 2.0**30
    for ranks in (ONE, UNEVEN, IDLE_WITH_ALL_STATE):
        found = trained(simulated, ranks, **given)
        assert [one["scale"] for one in found] == [wanted["scale"]] * len(ranks)
        assert_equal(found, wanted, rel=1e-2)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_blocks(simulated, alone, backend):
    assert_equal(trained(simulated, UNEVEN, compile=backend), alone)


def test_a_checkpoint_continues_under_another_plan(simulated, alone, tmp_path):
    path = str(tmp_path / "half.ckpt")
    first = trained(simulated, UNEVEN, trainer={"max_steps": 2}, save=path)
    assert first[0]["losses"] == pytest.approx(alone["losses"][:2], rel=1e-5)
    (whole,) = trained(simulated, None, trainer={"max_epochs": 2})
    path = str(tmp_path / "epoch.ckpt")
    trained(simulated, UNEVEN, save=path)
    found = trained(simulated, FOUR, trainer={"max_epochs": 2}, resume=path)
    assert found[0]["losses"] == pytest.approx(whole["losses"][4:], rel=1e-5)
    assert found[0]["weights"] == pytest.approx(whole["weights"], rel=1e-5)


def test_a_vocabulary_that_stays_cut(simulated):
    given = {"tokens": True, "trainer": {"val_check_interval": 2}}
    (alone,) = trained(simulated, None, **given)
    assert_equal(trained(simulated, FOUR, strategy={"vocabulary_sharding": True}, **given), alone)
