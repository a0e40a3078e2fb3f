"""A second start of the same job measures nothing, and another job does."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from pathlib import Path

import pytest
import torch
from profiled import GPT, fit, in_ranks, loader
from torch.utils.data import DataLoader, TensorDataset

from lightning_cephalo.preparation import prepare as planning
from lightning_cephalo.profiling import job_cache

STEP = """
from profiled import GPT

class Written(GPT):
    def training_step(self, batch, batch_idx):
        return {factor} * super().training_step(batch, batch_idx)
"""


def started(make=GPT, data=loader, **options):
    """Whether this start measures, its plan, and how often the user's step ran before training."""
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
    return bool(measured), plan, steps.index("trains")


def files():
    return list((Path(os.environ["LIGHTNING_CEPHALO_CACHE"]) / "jobs").glob("*"))


def test_a_second_start_measures_nothing_says_so_and_has_the_same_plan(capfd):
    first = in_ranks(2, lambda: started(strategy={"verbose": True}))
    assert [measured for measured, _, _ in first] == [True, True]
    assert all(before > 5 for _, _, before in first)
    said = capfd.readouterr().out
    assert "Profiled" in said and "Using times" not in said
    second = in_ranks(2, lambda: started(strategy={"verbose": True}))
    assert [(measured, before) for measured, _, before in second] == [(False, 0)] * 2
    assert second[0][1] == second[1][1] == first[0][1]
    said = " ".join(capfd.readouterr().out.split())
    assert said.count("Using times measured on") == 1 and "remeasure=True" in said
    assert "Profiled" not in said
    (path,) = files()
    assert json.loads(path.read_text())["problem"]["global_batch_size"] == 8


def measures_again(**options):
    """Whether both ranks measure, after a start that has."""
    in_ranks(2, started)
    found = {measured for measured, _, _ in in_ranks(2, lambda: started(**options))}
    assert len(found) == 1
    return found.pop()


def wider():
    return GPT(width=48)


def frozen():
    module = GPT()
    module.network.blocks[0].requires_grad_(False)
    return module


def longer():
    tokens = torch.randint(0, 256, (64, 12), generator=torch.Generator().manual_seed(2))
    return DataLoader(TensorDataset(tokens), batch_size=4)


def with_stride(stride):
    """Strides change no shape of a parameter."""
    module = GPT()
    module.network.blocks[0].pool = torch.nn.AvgPool2d((1, 1), stride=(stride, stride))
    return module


def compiled():
    module = GPT()
    for block in module.network.blocks:
        block.compile(backend="eager")
    return module


OTHERS = {
    "compiled units": {"make": compiled},
    "a wider model": {"make": wider},
    "frozen weights": {"make": frozen},
    "a larger batch": {"data": lambda: loader(batch_size=8)},
    "shorter samples": {"data": longer},
    "another precision": {"precision": "bf16-mixed"},
    "no recomputation": {"strategy": {"recompute": False}},
    "equal microbatches": {"strategy": {"equal_microbatches": True}},
    "when told to": {"strategy": {"remeasure": True}},
}


@pytest.mark.parametrize("other", OTHERS)
def test_another_job_is_measured(other):
    assert measures_again(**OTHERS[other])


def test_strides_make_another_job():
    in_ranks(2, lambda: started(lambda: with_stride(1)))
    assert in_ranks(2, lambda: started(lambda: with_stride(1)))[0][0] is False
    assert in_ranks(2, lambda: started(lambda: with_stride(2)))[0][0] is True


def slower():
    module = GPT()
    module.learning_rate = 0.5
    return module


def test_a_learning_rate_makes_no_other_job():
    assert not measures_again(make=slower)


AT_A_PROMPT = """
class Typed(GPT):
    def training_step(self, batch, batch_idx):
        return {factor} * super().training_step(batch, batch_idx)

    def forward(self, tokens):
        return [{name}(tokens) for _ in range({count})]
"""


def typed(factor=1.0, count=1, name="abs"):
    """Digests of a class that no file holds."""
    names = {"GPT": GPT, "__name__": "prompt"}
    exec(AT_A_PROMPT.format(factor=factor, count=count, name=name), names)
    return job_cache._sources(names["Typed"]())


def test_classes_typed_at_a_prompt_are_told_apart():
    assert typed() == typed()
    others = ({}, {"factor": 2.0}, {"count": 2}, {"name": "len"})
    assert len({json.dumps(typed(**other)) for other in others}) == len(others)


def test_a_change_of_the_file_with_the_training_step_is_measured(tmp_path):
    def start():
        spec = importlib.util.spec_from_file_location("written", tmp_path / "written.py")
        module = importlib.util.module_from_spec(spec)
        sys.modules["written"] = module  # as `import` does: sources are found by it
        spec.loader.exec_module(module)
        return started(module.Written)[0]

    found = []
    sys.dont_write_bytecode, before = True, sys.dont_write_bytecode
    try:
        for factor in (1.0, 1.0, 2.0):
            (tmp_path / "written.py").write_text(STEP.format(factor=factor))
            found.append(in_ranks(2, start))
    finally:
        sys.dont_write_bytecode = before
    assert found == [[True, True], [False, False], [True, True]]


@pytest.mark.parametrize("content", ["{", "[]", '{"measured": "today", "problem": {"ranks": 5}}'])
def test_a_broken_file_is_told_of_and_replaced(capfd, content):
    in_ranks(2, started)
    (path,) = files()
    path.write_text(content)
    capfd.readouterr()
    found = in_ranks(2, lambda: started(strategy={"verbose": True}))
    assert [measured for measured, _, _ in found] == [True, True]
    assert "Measuring again" in capfd.readouterr().out
    assert not any(measured for measured, _, _ in in_ranks(2, started))


def test_other_amounts_of_memory_are_measured_and_small_changes_planned_with(capfd):
    in_ranks(2, started)
    (path,) = files()
    data = json.loads(path.read_text())
    ranks = data["problem"]["ranks"]
    capacities = [rank["capacity_bytes"] for rank in ranks]
    found = job_cache._read(path, [0.9 * capacity for capacity in capacities])
    assert [rank.capacity_bytes for rank in found.problem.ranks] == pytest.approx(
        [0.9 * min(capacities)] * 2
    )
    for factor in (0.7, 1.4):
        found = job_cache._read(path, [capacities[0], factor * capacities[1]])
        assert found.problem is None and "rank 1 may fill" in found.said
    unknown = [float("inf")] * 2
    assert job_cache._read(path, unknown).problem is None
    data["problem"]["ranks"] = [{**rank, "capacity_bytes": "inf"} for rank in ranks]
    path.write_text(json.dumps(data))
    assert job_cache._read(path, unknown).problem is not None
    assert job_cache._read(path, [1e9]).problem is None  # of another number of ranks


def test_emulated_devices_are_measured_at_every_start():
    options = {"speeds": (2.0, 1.0)}
    for _ in range(2):
        assert [m for m, _, _ in in_ranks(2, lambda: started(**options))] == [True, True]
    assert not files()


def test_a_cache_that_cannot_be_written_stops_nothing(tmp_path, monkeypatch, capfd):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("LIGHTNING_CEPHALO_CACHE", str(tmp_path / "file" / "cache"))
    found = in_ranks(2, lambda: started(strategy={"verbose": True}))
    assert [measured for measured, _, _ in found] == [True, True]
    assert "will measure again" in capfd.readouterr().out
