"""Profiling as training starts it: through Lightning, on real ranks."""

import functools
import warnings
from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch
from lightning.pytorch.utilities import CombinedLoader
from profiled import GPT, BatchNormNet, fit, in_ranks, loader, profile
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from lightning_cephalo import Problem, RankProfile
from lightning_cephalo.accelerator.emulated.device import host_now_s
from lightning_cephalo.plan import Links, StateBytes
from lightning_cephalo.plan.cost import fixed_time
from lightning_cephalo.plan.curves import cached_tables
from lightning_cephalo.plan.moving import least_update_s, with_updates
from lightning_cephalo.preparation import prepare as planning
from lightning_cephalo.profiling.rank_curves import remember


def problem_of_a_gpt(**options):
    return profile(GPT(), loader(), **options).to_dict()


@pytest.fixture(scope="module")
def profiled_once(tmp_path_factory):
    """What every rank measures, and the cache that this has filled."""
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LIGHTNING_CEPHALO_CACHE", str(folder))
        return in_ranks(2, problem_of_a_gpt), folder


def test_every_rank_gets_the_same_problem_with_dense_curves(profiled_once):
    (first, second), _ = profiled_once
    assert first == second
    assert first["units"] == 2
    assert first["global_batch_size"] == 8
    for rank in first["ranks"]:
        assert len(rank["forward_s"]) >= 4
        assert all(seconds > 0 for seconds in rank["forward_s"] + rank["backward_s"])
    assert first["links"]["gather_s"] > 0 and first["links"]["reduce_s"] > 0
    assert first["step_overhead_s"] > 0 and first["fill_s"] > 0


def test_what_was_measured_is_kept_for_plans_of_other_clusters(profiled_once, monkeypatch):
    (problem, _), folder = profiled_once
    monkeypatch.setenv("LIGHTNING_CEPHALO_CACHE", str(folder))
    (table,) = cached_tables().tables
    assert (table.model, table.dtype, table.sequence_length) == ("GPT", "fp32", 16)
    assert table.parameters == sum(p.numel() for p in GPT().parameters())
    (curves,) = table.curves
    assert curves.source == "measured"
    # of one of the ranks: on a busy machine they may not count as equal
    names = ("forward_s", "backward_s", "compute_bytes")
    measured = [[rank[name] for name in names] for rank in problem["ranks"]]
    assert [list(getattr(curves, name)) for name in names] in measured


def both_kinds_of_shares(capacity_bytes, uneven_s=(3.0, 3.0, 6.0)):
    """What one of the two kinds of shares saves, by a clock that counts bytes moved."""
    from lightning_cephalo.profiling import network

    seen = []
    timed = network.mean_times

    def recorded(model, clock, units):
        if len(units) > 1:  # blocks
            seen.append(model.fractions)
        even = len(set(model.fractions)) == 1
        return network.Links(*((1.0, 2.0, 3.0) if even else uneven_s))

    network.mean_times = recorded
    try:
        problem = profile(GPT(), loader(), capacity_bytes=capacity_bytes, is_time_shared=False)
    finally:
        network.mean_times = timed
    return seen, problem.links, problem.even_links


def test_even_and_uneven_shares_are_both_timed():
    def each():
        cases = [(None,), ((3 * 10**8, 10**8),), (None, (1.0, 2.1, 3.1))]
        return [both_kinds_of_shares(*case) for case in cases]

    alike, other, noise = in_ranks(2, each)[0]
    links, even_links = Links(3.0, 3.0, 6.0), Links(1.0, 2.0, 3.0)
    assert alike == ([(0.5, 0.5), (0.25, 0.75)], links, even_links)
    assert noise[1:] == (Links(1.0, 2.1, 3.1), None)
    assert other == ([(0.75, 0.25), (0.5, 0.5)], links, even_links)


def on_unequal_ranks():
    """The problem, and the step time that its plan predicts and that training measures."""
    problems, measure = [], planning.measure

    def keeping(**arguments):
        problems.append(measure(**arguments))
        return problems[-1]

    planning.measure = keeping
    try:
        trainer = fit(
            GPT(width=32, depth=3, context=16),
            loader(batch_size=8),
            speeds=(3.0, 1.0),
            total_flops_per_s=1e7,
            max_steps=4,
        )
    finally:
        planning.measure = measure
    plan = trainer.strategy.plan
    batches = [rank.batch_size for rank in plan.ranks]
    return problems[0].to_dict(), batches, plan.step_s, trainer.strategy.report.step_s


@functools.cache
def unequal_ranks():
    return in_ranks(2, on_unequal_ranks)


def test_a_rank_of_a_third_of_the_speed_gets_a_quarter_of_the_batch():
    problem, batches, _, _ = unequal_ranks()[0]
    fast, slow = problem["ranks"]
    for curve in ("forward_s", "backward_s"):
        assert len(slow[curve]) < len(fast[curve])
        assert slow[curve] == pytest.approx(
            [3.0 * seconds for seconds in fast[curve][: len(slow[curve])]], rel=0.01
        )
    assert batches == [12, 4]


def test_the_predicted_step_time_comes_true():
    for _, _, predicted_s, measured_s in unequal_ranks():
        assert predicted_s == pytest.approx(measured_s, rel=0.01)


def balanced_step_s(problem):
    """Return the seconds of a step in which every rank computes from its beginning to its end."""
    problem = with_updates(problem, least_update_s(problem))
    samples_per_s = sum(
        rank.largest_microbatch_size
        / (problem.units * (rank.forward_s[-1] + rank.backward_s[-1]) + rank.tail_s[-1])
        for rank in problem.ranks
        if rank.forward_s
    )
    return problem.global_batch_size / samples_per_s + fixed_time(problem)


def cost_in_steps():
    spent_s, measure = [], planning.measure

    def timed(**arguments):
        start_s = host_now_s()
        problem = measure(**arguments)
        spent_s.append((host_now_s() - start_s) / balanced_step_s(problem))
        return problem

    planning.measure = timed
    try:
        trainer = fit(
            GPT(width=32, depth=3, context=16),
            loader(samples=128, batch_size=20),
            speeds=(3.0, 1.0),
            total_flops_per_s=1e7,
        )
    finally:
        planning.measure = measure
    largest_share = max(rank.batch_size for rank in trainer.strategy.plan.ranks)
    return spent_s[0], largest_share


@pytest.mark.slow
def test_profiling_takes_less_than_ten_steps():
    steps, largest_share = in_ranks(2, cost_in_steps)[0]
    assert steps < 10.0
    assert largest_share == pytest.approx(30, abs=2)


def test_a_budget_that_is_spent_leaves_the_smallest_size():
    def tight():
        return problem_of_a_gpt(strategy={"budget_s": 1e-3})

    problem = in_ranks(2, tight)[0]
    assert [len(rank["forward_s"]) for rank in problem["ranks"]] == [1, 1]


@pytest.mark.filterwarnings("ignore:The layers .* are batch normalisation")
def test_batch_normalisation_is_never_given_a_single_sample():
    def normalised():
        data = DataLoader(TensorDataset(torch.randn(32, 8)), batch_size=4)
        return profile(BatchNormNet(), data).to_dict()

    problem = in_ranks(2, normalised)[0]
    assert problem["minimum_microbatch_size"] == 2
    assert problem["ranks"][0]["forward_s"][0] == problem["ranks"][0]["forward_s"][1]


class OneLayer(BatchNormNet):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(8, 8)])


def test_a_model_that_is_one_unit_is_profiled_as_a_tail():
    def whole():
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "No repeated block")
            data = DataLoader(TensorDataset(torch.randn(32, 8)), batch_size=4)
            return profile(OneLayer(), data).to_dict()

    problem = in_ranks(2, whole)[0]
    rank = problem["ranks"][0]
    assert problem["units"] == 1 and Problem.from_dict(problem).links.both_s == 0.0
    assert set(rank["forward_s"]) == {0.0} and all(seconds > 0 for seconds in rank["tail_s"])


class Lines(IterableDataset):
    def __iter__(self):
        generator = torch.Generator().manual_seed(3)
        for _ in range(64):
            yield (torch.randint(0, 256, (16,), generator=generator),)


def test_an_iterable_dataset_is_profiled():
    def iterable():
        return profile(GPT(), DataLoader(Lines(), batch_size=4)).to_dict()

    assert len(in_ranks(2, iterable)[0]["ranks"][0]["forward_s"]) >= 4


class PairGPT(GPT):
    """Takes batches of two loaders at once."""

    sizes: ClassVar[list] = []  # of the class: profiling puts back what instances hold

    def training_step(self, batch, batch_idx):
        self.sizes.append((len(batch["left"][0]), len(batch["right"][0])))
        return super().training_step(batch["left"], batch_idx)


def test_several_loaders_give_batches_in_proportion_to_their_own():
    def several():
        loaders = {"left": loader(batch_size=4), "right": loader(batch_size=8)}
        model = PairGPT()
        # equal ranks: a plan by times that a loaded machine measures may deal a rank one sample
        data = CombinedLoader(loaders, "max_size_cycle")
        profile(model, data, speeds=(1.0, 1.0), is_time_shared=False)
        return set(model.sizes[:5])

    found = in_ranks(2, several)[0]
    assert found and all(right == 2 * left for left, right in found)


class RateLogger(GPT):
    """Logs its learning rate, as many do, and its own metric over ranks."""

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.log("rate", self.optimizers().param_groups[0]["lr"])
        self.log("shared", loss, sync_dist=True, on_epoch=True)
        assert self.lr_schedulers() is not None
        return loss

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.5)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]


def test_a_step_may_ask_for_its_optimizer_and_its_scheduler():
    assert in_ranks(2, lambda: profile(RateLogger(), loader()).units)[0] == 2


def test_nothing_that_goes_wrong_in_remembering_is_raised():
    problem = Problem([RankProfile("a", [1], [1], [1], [1], 10)], units=1, state=StateBytes(1),
                      global_batch_size=1)  # fmt: skip

    def told(**wrong):
        given = {"module": nn.Linear(2, 2), "parameter_count": 5, "compute_dtype": None}
        executor = SimpleNamespace(recompute=True)
        return remember(problem, SimpleNamespace(executor=executor, **{**given, **wrong}), None)

    assert told() is None
    assert "CurveTable.parameters" in told(parameter_count=-1)
    assert "TypeError" in told(compute_dtype=[1])


FIRST = loader().dataset[0][0]


class FirstCountsNothing(GPT):
    """The first sample has no weight, and alone a loss of 0/0."""

    def training_step(self, batch, batch_idx):
        (tokens,) = batch
        logits = self.network(tokens)[:, :-1].flatten(0, 1)
        losses = torch.nn.functional.cross_entropy(
            logits, tokens[:, 1:].flatten(), reduction="none"
        ).view(len(tokens), -1)
        counts = (tokens != FIRST).any(1, keepdim=True)
        weight = counts.sum() * losses.shape[1]
        return {"loss": (losses * counts).sum() / weight, "weight": weight}


@pytest.mark.slow
def test_a_first_sample_without_weight_is_measured_like_any_other():
    def both():
        speeds = {"speeds": (1.0, 1.0)}
        plain = profile(GPT(), loader(), **speeds).ranks[0]
        found = profile(FirstCountsNothing(), loader(), **speeds).ranks[0]
        return plain.backward_s[0], found.backward_s[0]

    for plain_s, found_s in in_ranks(2, both):
        assert found_s == pytest.approx(plain_s, rel=0.05)
