"""What a training says of itself at its end: who worked, who waited, who changed; and its trace."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from common import Net, RankFailure, in_ranks, loader, trainer
from plans import PLANS
from virtual_time import VirtualHost, virtual_rank

from lightning_cephalo.observe.pace import MeasuredRank

pytestmark = pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no")

STEPS, SLOWER_FROM = 24, 15
PAUSE_S = 0.05


class Paced(Net):
    """One block takes its time, which depends on the rank and the step; nothing else takes any."""

    def __init__(self, host: VirtualHost, pause_s: Callable[[int, int], float]) -> None:
        super().__init__()
        self.host, self.pause_s = host, pause_s
        self.blocks[0].register_forward_pre_hook(self._pause)

    def _pause(self, module: Any, args: Any) -> None:
        self.host.run(self.pause_s(self.global_rank, self.global_step))


def fit(
    pause_s: Callable[[int, int], float], steps: int, options: dict[str, Any], time: Path
) -> tuple[MeasuredRank, ...]:
    made = trainer("even", options, max_epochs=-1, max_steps=steps)
    host = VirtualHost()
    with virtual_rank(host, time):
        made.fit(Paced(host, pause_s), loader(32))
    assert made.global_step == steps
    return made.strategy.report.ranks


def five_times_slower(rank: int, step: int) -> float:
    return PAUSE_S * (5 if rank == 1 and step >= SLOWER_FROM - 1 else 1)


@pytest.mark.slow
def test_a_rank_that_becomes_five_times_slower_is_reported_and_nothing_breaks(
    capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    everywhere = in_ranks(2, fit, five_times_slower, STEPS, {"verbose": True}, tmp_path)
    said = " ".join(capfd.readouterr().out.split())
    found = re.findall(
        r"Rank (\d) \(cpu\) became ([\d.]+) times slower from about step (\d+)", said
    )
    assert len(found) == 1, said
    rank, factor, step = found[0]
    assert (rank, factor, int(step)) == ("1", "5.0", SLOWER_FROM)
    assert "the given plan was made for another speed. Leave plan= out" in said
    assert everywhere[0] == everywhere[1]
    steady, slower = everywhere[0]
    assert steady.drift is None and slower.drift is not None
    assert steady.waiting_s == pytest.approx(0.0)  # as in most steps


def unlike(rank: int, step: int) -> float:
    return PAUSE_S if rank else 0.0


def test_every_rank_knows_how_long_each_worked_and_waited(tmp_path: Path) -> None:
    everywhere = in_ranks(2, fit, unlike, 8, {}, tmp_path)
    assert everywhere[0] == everywhere[1]
    quick, slow = everywhere[0]
    assert (quick.rank, slow.rank, quick.name, quick.steps) == (0, 1, "cpu", 5)
    # two microbatches; hooks are not run again where the block is
    step_s = pytest.approx(2 * PAUSE_S)
    assert (quick.busy_s, quick.waiting_s, quick.step_s) == (pytest.approx(0.0), step_s, step_s)
    assert (slow.busy_s, slow.waiting_s, slow.step_s) == (step_s, pytest.approx(0.0), step_s)
    assert (quick.waiting_share, slow.waiting_share) == (pytest.approx(1.0), pytest.approx(0.0))
    for rank in (quick, slow):
        assert rank.predicted_busy_s is None


def test_work_is_compared_with_what_the_plan_predicted(capfd: pytest.CaptureFixture[str]) -> None:
    plan = PLANS["even"]
    told = [{"forward_s": 0.02, "backward_s": 0.03, "tail_s": 0.01}] * 2
    PLANS["predicted"] = replace(
        plan, ranks=tuple(replace(r, **t) for r, t in zip(plan.ranks, told, strict=True))
    )
    try:
        ranks = in_ranks(2, fit_predicted)[0]
    finally:
        del PLANS["predicted"]
    assert [rank.predicted_busy_s for rank in ranks] == [pytest.approx(0.16)] * 2  # three units
    table = [line for line in capfd.readouterr().out.splitlines() if "160 ms" in line]
    assert len(table) == 2


def fit_predicted() -> tuple[MeasuredRank, ...]:
    made = trainer("predicted", {"verbose": True}, max_epochs=-1, max_steps=4)
    made.fit(Net(), loader(32))
    return made.strategy.report.ranks


def fit_recorded(folder: str, steps: int) -> bool:
    made = trainer("even", {"record": folder}, max_epochs=-1, max_steps=steps)
    made.fit(Net(), loader(32))
    return made.strategy.report.ranks != ()


@pytest.mark.parametrize("steps", [2, 7])
def test_one_step_of_every_rank_is_written_for_perfetto(tmp_path: Path, steps: int) -> None:
    in_ranks(2, fit_recorded, str(tmp_path), steps)
    entries = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    for rank in (0, 1):
        events = [entry for entry in entries if entry["pid"] == rank and entry["ph"] == "X"]
        count = Counter(entry["cat"] for entry in events)
        del count["wait"]  # where nothing is waited for there is no event
        # 3 units and 2 microbatches; the root unit's forward comes before the units, the loss and
        # its update after them
        assert count == {
            **{"gather": 6, "reduce": 4, "forward": 8, "backward": 6, "loss": 2, "update": 4}
        }
        threads = {e["args"]["name"] for e in entries if e["pid"] == rank and "name" in e["args"]}
        assert {"compute", "communication", "reduction", f"rank {rank} (cpu)"} <= threads
        last = max(events, key=lambda entry: entry["ts"])
        assert last["cat"] == "update"
    assert min(entry["ts"] for entry in entries if entry["ph"] == "X") == 0
    assert {found.name for found in tmp_path.iterdir()} == {"trace.json", "cephalo-run.json"}


def test_a_record_that_cannot_be_written_is_refused_before_training(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(RankFailure) as raised:
        in_ranks(2, fit_recorded, str(tmp_path / "file" / "folder"), 2)
    assert str(raised.value).count("the folder cannot be made") >= 2  # on both ranks
