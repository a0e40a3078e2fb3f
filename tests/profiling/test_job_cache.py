"""A second start of the same job measures nothing, and another job does."""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from full_disk import file_size_limit
from profiled import GPT, fit, in_ranks, loader
from torch.utils.data import DataLoader, TensorDataset

from lightning_cephalo.plan import Problem, RankProfile, StateBytes
from lightning_cephalo.preparation import prepare as planning
from lightning_cephalo.profiling import job_cache

STEP = """
from profiled import GPT

class Written(GPT):
    def training_step(self, batch, batch_idx):
        return {factor} * super().training_step(batch, batch_idx)
"""


small = functools.partial(loader, batch_size=2)


def started(make=GPT, data=small, **options):
    """Whether this start measures, its plan, and how often the user's step ran before training.

    With ``max_steps=0`` nothing is trained.
    """
    measured, steps, module = [], [], make()
    step, measure = module.training_step, planning.measure

    def counted(batch, batch_idx):
        steps.append(module.trainer.training if module._trainer is not None else None)
        return step(batch, batch_idx)

    def noted(**arguments):
        measured.append(True)
        return measure(**arguments)

    module.training_step = counted
    module.on_train_start = lambda: steps.append("trains")
    planning.measure = noted
    try:
        trainer = fit(module, data(), **options)
    finally:
        planning.measure = measure
    plan = [(r.microbatch_sizes, r.state_fraction) for r in trainer.strategy.plan.ranks]
    return bool(measured), plan, [*steps, "trains"].index("trains")


class _Measures(Exception):
    """A start has found nothing that it could plan with."""


def measures(make=GPT, data=small, **options):
    """Whether a start would measure; it ends there."""

    def ends(**arguments):
        raise _Measures

    measure, planning.measure = planning.measure, ends
    try:
        fit(make(), data(), max_steps=0, **options)
    except _Measures:
        return True
    finally:
        planning.measure = measure
    return False


def files():
    return list((Path(os.environ["LIGHTNING_CEPHALO_CACHE"]) / "jobs").glob("*"))


def test_a_second_start_measures_nothing_says_so_and_has_the_same_plan(capfd):
    # free memory differs between starts, and shares of the state go by memory: the cap is lower
    capped = {"verbose": True, "memory_cap": 2**28}
    first = in_ranks(2, lambda: started(strategy=capped))
    assert [measured for measured, _, _ in first] == [True, True]
    assert all(before > 5 for _, _, before in first)
    said = capfd.readouterr().out
    (line,) = [line for line in said.splitlines() if "rofil" in line]
    assert line.startswith("Profiled microbatches of up to") and "Using times" not in said
    second = in_ranks(2, lambda: started(strategy=capped))
    assert [(measured, before) for measured, _, before in second] == [(False, 0)] * 2
    assert second[0][1] == second[1][1] == first[0][1]
    said = " ".join(capfd.readouterr().out.split())
    assert said.count("Using times measured on") == 1 and "remeasure=True" in said
    assert "Profiled" not in said
    (path,) = files()
    assert json.loads(path.read_text())["problem"]["global_batch_size"] == 4


@pytest.fixture(scope="module")
def cache_of_a_start(tmp_path_factory):
    """What the first start of a job has written."""
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("first")
        patch.setenv("LIGHTNING_CEPHALO_CACHE", str(folder))
        in_ranks(2, started)
    return folder


@pytest.fixture
def second_start(cache_of_a_start):
    """A start has been before."""
    shutil.copytree(cache_of_a_start, os.environ["LIGHTNING_CEPHALO_CACHE"], dirs_exist_ok=True)


def wider():
    return GPT(width=48)


def frozen():
    module = GPT()
    module.network.blocks[0].requires_grad_(False)
    return module


def longer():
    tokens = torch.randint(0, 256, (64, 12), generator=torch.Generator().manual_seed(2))
    return DataLoader(TensorDataset(tokens), batch_size=2)


def with_stride(stride):
    """Strides change no shape of a parameter."""
    module = GPT()
    module.network.blocks[0].pool = torch.nn.AvgPool2d((1, 1), stride=(stride, stride))
    return module


def compiled():
    module = GPT()
    module.network.blocks[0].compile(backend="eager")
    return module


OTHERS = {
    "compiled units": {"make": compiled},
    "a wider model": {"make": wider},
    "frozen weights": {"make": frozen},
    "a larger batch": {"data": lambda: loader(batch_size=8)},
    "shorter samples": {"data": longer},
    "another precision": {"precision": "bf16-mixed"},
    "no recomputation": {"strategy": {"recompute": False}},
    "one microbatch": {"strategy": {"single_microbatch": True}},
    "when told to": {"strategy": {"remeasure": True}},
}


def slower():
    module = GPT()
    module.learning_rate = 0.5
    return module


SAME = {"the same job": {}, "another learning rate": {"make": slower}}


@pytest.fixture(scope="module")
def measured_again(cache_of_a_start, tmp_path_factory):
    """Which jobs every rank measures, each with what the first start has written."""
    jobs = {**OTHERS, **SAME}
    folders = [tmp_path_factory.mktemp("job") for _ in jobs]
    for folder in folders:
        shutil.copytree(cache_of_a_start, folder, dirs_exist_ok=True)

    def each():
        found = {}
        for (job, options), folder in zip(jobs.items(), folders, strict=True):
            os.environ["LIGHTNING_CEPHALO_CACHE"] = str(folder)
            found[job] = measures(**options)
        return found

    return in_ranks(2, each)


@pytest.mark.parametrize("other", OTHERS)
def test_another_job_is_measured(other, measured_again):
    assert [found[other] for found in measured_again] == [True, True]


@pytest.mark.parametrize("same", SAME)
def test_a_learning_rate_makes_no_other_job(same, measured_again):
    assert [found[same] for found in measured_again] == [False, False]


def test_strides_make_another_job():
    def each():
        one, two = (functools.partial(with_stride, stride) for stride in (1, 2))
        return [started(one, max_steps=0)[0], measures(one), measures(two)]

    assert in_ranks(2, each) == [[True, False, True]] * 2


AT_A_PROMPT = """
class Typed(GPT):
    def training_step(self, batch, batch_idx):
        return 2.0 * super().training_step(batch, batch_idx)
"""


def test_a_class_typed_at_a_prompt_is_no_job_that_could_be_known_again():
    names = {"GPT": GPT, "__name__": "prompt"}
    exec(AT_A_PROMPT, names)
    assert job_cache._sources(GPT())
    with pytest.raises((OSError, TypeError)):
        job_cache._sources(names["Typed"]())
    assert looked_up(lambda: job_cache._sources(names["Typed"]())).path is None


def test_a_change_of_the_file_with_the_training_step_is_measured(tmp_path):
    def start(path, is_first):
        spec = importlib.util.spec_from_file_location("written", path)
        module = importlib.util.module_from_spec(spec)
        sys.modules["written"] = module  # as `import` does: sources are found by it
        spec.loader.exec_module(module)
        if is_first:
            return started(module.Written, max_steps=0)[0]
        return measures(module.Written)

    def each():
        return [start(path, path is paths[0]) for path in paths]

    paths = [tmp_path / f"{index}.py" for index in range(3)]
    for path, factor in zip(paths, (1.0, 1.0, 2.0), strict=True):
        path.write_text(STEP.format(factor=factor))
    assert in_ranks(2, each) == [[True, False, True]] * 2


def test_a_broken_file_is_told_of_and_replaced(capfd, second_start):
    (path,) = files()
    path.write_text('{"measured": "today", "problem": {"ranks": 5}}')
    verbose = {"strategy": {"verbose": True}}
    capfd.readouterr()
    found = in_ranks(2, lambda: [started(**verbose, max_steps=0)[0], measures(**verbose)])
    assert found == [[True, False]] * 2
    assert capfd.readouterr().out.count("Measuring again") == 1
    assert files() == [path]
    day = "\x1b[2Jtoday [red]"
    path.write_text(json.dumps({**json.loads(path.read_text()), "measured": day}))
    in_ranks(2, lambda: measures(**verbose))
    said = capfd.readouterr().out
    assert "\\x1b[2Jtoday [red]" in said and "\x1b" not in said


@pytest.mark.parametrize("content", ["{", "[]", '{"problem": {}}', "null"])
def test_whatever_a_file_holds_is_no_problem_to_plan_with(tmp_path, content):
    path = tmp_path / "job.json"
    path.write_text(content)
    found = job_cache._read(path, [100.0])
    assert found.problem is None and found.said.startswith("Measuring again")


class Alone:
    """Messages between the ranks of a job with one rank."""

    rank = 0

    def gather(self, value):
        return [value]

    def broadcast(self, value):
        return value


def looked_up(describe=lambda: "a job"):
    device = SimpleNamespace(speed_lasts=True, name="cpu", capacity_bytes=100.0)
    return job_cache.look_up(Alone(), device, describe, remeasure=False)


def test_a_cache_that_may_not_be_looked_into_stops_nothing(tmp_path, monkeypatch):
    """As in the home of another user; the name is too long, which stops root, too."""
    monkeypatch.setenv("LIGHTNING_CEPHALO_CACHE", str(tmp_path / ("x" * 300)))
    found = looked_up()
    assert found.problem is None and "File name too long" in found.said
    lost = job_cache.save(found.path, kept_problem(tmp_path / "job.json", 100.0))
    assert "File name too long" in lost


def test_a_pipe_in_the_cache_is_not_waited_for():
    path = looked_up().path
    path.parent.mkdir(parents=True)
    os.mkfifo(path)
    assert "is a pipe" in looked_up().said


def test_a_full_disk_leaves_the_file_of_before_and_says_why(tmp_path):
    path = tmp_path / "job.json"
    problem = kept_problem(path, 100.0)
    before = path.read_bytes()
    with file_size_limit(len(before) // 2):
        lost = job_cache.save(path, problem)
    assert lost.startswith("UnwritableError") and "File too large" in lost
    assert list(tmp_path.iterdir()) == [path] and path.read_bytes() == before


def kept_problem(path, capacity_bytes, forward_s=(1.0, 1.0)):
    """A problem of two ranks that an earlier start has written to ``path``."""
    ranks = [
        RankProfile(
            name="cpu",
            forward_s=[seconds],
            backward_s=[2.0],
            tail_s=[0.5],
            compute_bytes=[10.0],
            capacity_bytes=capacity_bytes,
        )
        for seconds in forward_s
    ]
    problem = Problem(ranks=ranks, units=2, state=StateBytes(40.0), global_batch_size=2)
    assert job_cache.save(path, problem) is None
    return problem


def capacities_found(path, *capacities_bytes):
    problem = job_cache._read(path, capacities_bytes).problem
    return problem and [rank.capacity_bytes for rank in problem.ranks]


def test_small_changes_of_memory_are_planned_with(tmp_path):
    path = tmp_path / "jobs" / "job.json"
    kept_problem(path, 100.0)
    assert capacities_found(path, 90.0, 110.0) == [90.0, 110.0]
    assert capacities_found(path, 90.0, 91.0) == [90.0, 90.0]  # alike but for noise
    kept_problem(path, 100.0, forward_s=(1.0, 5.0))
    assert capacities_found(path, 90.0, 91.0) == [90.0, 91.0]


@pytest.mark.parametrize("capacity", [70.0, 140.0, float("inf")])
def test_other_amounts_of_memory_are_measured(tmp_path, capacity):
    path = tmp_path / "job.json"
    kept_problem(path, 100.0)
    found = job_cache._read(path, [100.0, capacity])
    assert found.problem is None and "rank 1 may fill" in found.said


def test_unlimited_memory_stays_unlimited(tmp_path):
    path = tmp_path / "job.json"
    kept_problem(path, float("inf"))
    assert capacities_found(path, float("inf"), float("inf")) == [float("inf")] * 2


def test_a_problem_of_another_number_of_ranks_is_measured(tmp_path):
    path = tmp_path / "job.json"
    kept_problem(path, 100.0)
    assert job_cache._read(path, [100.0]).problem is None


def test_emulated_devices_are_measured_at_every_start():
    def twice():
        options = {"speeds": (2.0, 1.0), "is_time_shared": False}
        return [started(max_steps=0, **options)[0], measures(**options)]

    assert in_ranks(2, twice) == [[True, True]] * 2
    # nor are they kept for plans of other clusters
    assert not any(Path(os.environ["LIGHTNING_CEPHALO_CACHE"]).iterdir())


def test_a_cache_that_cannot_be_written_stops_nothing(tmp_path, monkeypatch, capfd):
    """Neither the job's own nor that of plans for other clusters."""
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("LIGHTNING_CEPHALO_CACHE", str(tmp_path / "file" / "cache"))
    found = in_ranks(2, lambda: started(strategy={"verbose": True}))
    assert [measured for measured, _, _ in found] == [True, True]
    said = capfd.readouterr().out
    assert "will measure again" in said and "not kept for later" in said
