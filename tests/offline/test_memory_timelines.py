"""``cephalo memory-timeline``: the planner's own peaks, tables, figures and traces."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from rich.console import Console
from test_figures import case

from lightning_cephalo.observe.run_record import RECORD_NAME, RankRecord, RunRecord
from lightning_cephalo.observe.trace import write_timelines
from lightning_cephalo.offline.cli import BAD_INPUT, DONE, main
from lightning_cephalo.offline.memory_timelines import (
    memory_timeline_figure,
    simulated,
    tables,
)
from lightning_cephalo.offline.simulate import simulate
from lightning_cephalo.plan import PlanError, predict
from lightning_cephalo.plan.timeline import Phase


@pytest.mark.parametrize("offload", [False, True])
def test_the_simulated_peak_is_the_planners_prediction(offload):
    simulation, problem, plan = case("ABA", offload=offload)
    timelines = simulated(simulation, problem, plan)
    assert [timeline.ranks for timeline in timelines] == [(0, 2), (1,)]
    predicted = predict(problem, plan).ranks
    for timeline in timelines:
        own = predicted[timeline.ranks[0]]
        assert timeline.planned_bytes == own.memory_bytes
        assert timeline.peak_bytes == pytest.approx(own.memory_bytes, rel=1e-12)
        # by kind or not: the same memory
        memory = dict(simulation.timeline(timeline.ranks[0]).memory)
        by_kind = {held.time_s: held.device_bytes for held in timeline.held}
        assert {time_s: by_kind[time_s] for time_s in memory} == pytest.approx(memory)
        host = dict(simulation.timeline(timeline.ranks[0]).host_memory)
        assert {held.time_s: held.host_bytes for held in timeline.held}.items() >= host.items()


def test_phases_follow_each_other_through_the_whole_step():
    simulation, problem, plan = case("AB", offload=True)
    for timeline in simulated(simulation, problem, plan):
        forward, backward, update = timeline.phases
        assert [span.phase for span in timeline.phases] == list(Phase)
        assert (forward.start_s, update.end_s) == (0.0, simulation.step_s)
        assert forward.end_s == backward.start_s < backward.end_s == update.start_s
        copied = {phase.phase: phase.to_host_bytes for phase in timeline.summary()}
        # two microbatches of one sample, over all units but the two that stay
        assert copied == {Phase.FORWARD: 2 * 2 * 2, Phase.BACKWARD: 0, Phase.UPDATE: 0}
        back = sum(phase.to_device_bytes for phase in timeline.summary())
        assert back == 2 * 2 * 2


def test_state_that_moves_is_traffic_of_the_simulated_step():
    _, problem, plan = case("AB")
    rates = {"to_device_bytes_per_s": 16.0, "to_host_bytes_per_s": 8.0}
    ranks = [replace(rank, **rates, host_updated_parameters_per_s=4.0) for rank in problem.ranks]
    sizes = (0, 2, 2, 2, 2)
    state = {"unit_parameters": sizes, "moment_bytes": 8.0, "state_bytes": 16.0 * sum(sizes)}
    problem = replace(problem, ranks=ranks, **state)
    moved = {"resident_fraction": 0.5, "host_update_fraction": 0.25}
    plan = replace(plan, ranks=[replace(rank, **moved) for rank in plan.ranks])
    simulation = simulate(problem, plan)
    for timeline in simulated(simulation, problem, plan):
        own = predict(problem, plan).ranks[timeline.ranks[0]]
        assert timeline.peak_bytes == pytest.approx(own.memory_bytes)
        assert max(held.host_bytes for held in timeline.held) == own.state_host_bytes > 0
        device, link, copies, host = timeline.lanes()
        assert device and link and len(host) == 1
        # half of two parameters: one unit's moments each way, one's gradients and rows
        phases = timeline.summary()
        assert sum(phase.to_host_bytes for phase in phases) == 8 + 4
        assert sum(phase.to_device_bytes for phase in phases) == 8 + 4
        assert sum(event.moved_bytes for event in copies) == 2 * (8 + 4)
        assert max(phase.host_busy for phase in phases) > 0


def shown(table) -> str:
    console = Console(width=80)
    with console.capture() as said:
        console.print(table)
    return said.get()


def test_tables_fit_a_terminal_and_compare_the_peak_with_the_plan():
    found = [shown(table) for table in tables(simulated(*case("AAB", offload=True)))]
    assert len(found) == 2
    for text in found:
        assert "…" not in text
        assert "predicted by the plan (+0.0%)" in text
        assert "buffers of full units" in text
    assert "2 × A" in found[0] and "rank 2 (B)" in found[1]


@pytest.mark.slow
def test_the_figure_is_drawn_and_at_most_eight_kinds_of_ranks(tmp_path):
    pytest.importorskip("matplotlib")
    for names, offload in (("AB", True), ("ABCDEFGHIJ", False)):
        memory_timeline_figure(simulated(*case(names, offload=offload)), tmp_path / "a.svg")
        assert (tmp_path / "a.svg").read_text().count('id="axes_') == 3 * 2 if offload else 2 * 8
    with pytest.raises(PlanError, match="at least one rank"):
        memory_timeline_figure([], tmp_path / "b.svg")


def test_the_trace_has_memory_by_kind_and_traffic(tmp_path):
    timelines = simulated(*case("AB", offload=True))
    write_timelines(timelines, tmp_path / "a.json")
    entries = json.loads((tmp_path / "a.json").read_text())["traceEvents"]
    for timeline in timelines:
        counters = [e for e in entries if e["ph"] == "C" and e["pid"] == timeline.ranks[0]]
        memory = [e["args"] for e in counters if e["name"] == "memory by kind"]
        assert max(sum(sizes.values()) for sizes in memory) == timeline.peak_bytes
        assert {e["name"] for e in counters} >= {"host memory", "to the host", "to the device"}


def test_the_command_simulates_a_saved_problem(tmp_path, capsys):
    _, problem, plan = case("AB", offload=True)
    problem.save(tmp_path / "problem.yaml")
    plan.save(tmp_path / "plan.yaml")
    asked = ["--problem", f"{tmp_path}/problem.yaml", "--plan", f"{tmp_path}/plan.yaml"]
    assert main(["memory-timeline", *asked, "--json"]) == DONE
    said = json.loads(capsys.readouterr().out)
    assert [rank["peak_bytes"] for rank in said] == pytest.approx(
        [rank.memory_bytes for rank in predict(problem, plan).ranks]
    )
    assert main(["memory-timeline", *asked, "--trace", f"{tmp_path}/t.json"]) == DONE
    assert (tmp_path / "t.json").is_file()
    assert "one simulated step" in capsys.readouterr().out


def test_a_folder_without_a_recorded_step_says_how_to_get_one(tmp_path, capsys):
    assert main(["memory-timeline", str(tmp_path)]) == BAD_INPUT
    assert "CephaloStrategy(record=FOLDER)" in " ".join(capsys.readouterr().err.split())
    plan = case("AB")[2]
    RunRecord(plan, (RankRecord(0), RankRecord(1))).save(tmp_path / RECORD_NAME)
    assert main(["memory-timeline", str(tmp_path)]) == BAD_INPUT
    assert "has not come to its end" in " ".join(capsys.readouterr().err.split())
