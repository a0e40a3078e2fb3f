"""The pure parts of benchmarks/throughput.py: who gets what, where a step goes, what a row says."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from lightning_cephalo.plan import Plan, RankPlan

BENCHMARKS = Path(__file__).resolve().parent.parent / "benchmarks"


@pytest.fixture(autouse=True)
def benchmarks(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))


def make_case(speeds=(3, 1), link="slow", microbatches=8, samples=1):
    from side_by_side.cases import Case

    return Case(speeds, link, microbatches, samples)


def make_result(case, steps):
    """Of steps in seconds by name, each round as one (step, busy, blocked) for every rank."""
    from side_by_side.results import RankRecord, StepTimes, combine

    plan = Plan([RankPlan((1,) * 12, 0.5), RankPlan((1,) * 4, 0.5)])
    records = [
        RankRecord(
            {name: (12, 4)[rank] if name == "cephalo" else 8 for name in steps},
            {name: [StepTimes(*ranks[rank]) for ranks in rounds] for name, rounds in steps.items()},
            {"FSDP": "no such thing here"},
            plan,
        )
        for rank in (0, 1)
    ]
    return combine(case, records)


# ranks of 12 and 4 samples/s: ideal is one second for 16 samples
STEPS = {
    "cephalo": [((1.1, 1.0, 0.06), (1.09, 1.0, 0.07))],
    "fully_shard": [((4.0, 2 / 3, 3.0), (4.0, 2.0, 1.5))],
    "DDP": [((2.0, 2 / 3, 1.3), (2.5, 2.0, 0.4))],
    "DDP by speed": [((1.2, 1.0, 0.2), (1.2, 1.0, 0.15))],
}


def test_batches_by_speed_are_whole_and_sum_to_the_global_batch():
    assert make_case().by_speed == (12, 4)
    assert make_case((2, 1)).by_speed == (11, 5)
    assert make_case((4, 2, 1, 1), samples=4, microbatches=1).by_speed == (8, 4, 2, 2)


def test_the_slowest_rank_has_a_sample():
    assert make_case((9, 1), microbatches=1).by_speed == (1, 1)


def test_no_microbatch_is_larger_than_allowed():
    from side_by_side.cases import cut

    assert cut(9, 6) == (6, 3)
    assert cut(12, 6) == (6, 6)
    assert cut(0, 6) == ()


@pytest.mark.parametrize("text", ["3", "3:0", "3:-1", "a:b", ""])
def test_speeds_that_make_no_sense_are_refused(text):
    from side_by_side.cases import parse_speeds

    assert parse_speeds("4:2:1:1") == (4, 2, 1, 1)
    with pytest.raises(ValueError, match="Expected speeds"):
        parse_speeds(text)


def test_the_difference_to_the_ideal_is_split_by_the_rank_with_the_most_work():
    result = make_result(make_case(), STEPS)
    assert result.ideal_samples_per_s == pytest.approx(16.0)
    even, ours = result.splits["DDP"], result.splits["cephalo"]
    assert (even.waiting_s, even.communication_s, even.overhead_s) == pytest.approx((1.0, 0.4, 0.1))
    assert ours.waiting_s == pytest.approx(0.0)
    assert ours.communication_s == pytest.approx(0.06)  # of equal ranks the one that idles less
    assert even.step_s == pytest.approx(2.5)
    assert sum(ours.shares()) == pytest.approx(1.0)


def test_ratios_are_of_the_same_round_and_parts_of_a_round_that_was():
    slow, fast = ((2.0, 1.0, 0.9), (2.0, 1.0, 0.9)), ((1.0, 1.0, 0.0), (1.0, 1.0, 0.0))
    steps = {"cephalo": [slow, fast, slow], "DDP": [slow, fast, slow]}
    result = make_result(make_case(), steps)
    assert result.ratios["DDP"].lower == result.ratios["DDP"].upper == 1.0
    assert result.splits["cephalo"].step_s == pytest.approx(2.0)


def test_cells_sum_to_a_hundred():
    from side_by_side.report import cell

    assert cell((0.333, 0.333, 0.334, 0.0)) == "33 (33 34 0)"
    assert cell((0.986, 0.004, 0.005, 0.005)) == "99 (0 1 0)"


def test_a_row_names_the_best_even_one_and_leaves_out_what_did_not_run():
    from side_by_side.report import HEADINGS, rows

    row = dict(zip(HEADINGS, *rows([make_result(make_case(), STEPS)]), strict=True))
    assert row["over the best even"] == "2.27 (2.27 to 2.27) DDP"
    assert row["FSDP"] == "–"
    assert row["cephalo"] == "91 (0 5 4)"
    assert row["cephalo's batches"] == "12:4"


def test_claims_are_of_the_cases_that_they_are_about():
    from side_by_side.report import claims

    slow, fast = make_case(), make_case(link="fast")
    even, single = make_case((1, 1), link="fast"), make_case(microbatches=1)
    assert [claim.holds for claim in claims([make_result(slow, STEPS)])] == [True]
    assert [claim.holds for claim in claims([make_result(fast, STEPS)])] == [False]  # 0.91
    assert [claim.holds for claim in claims([make_result(even, STEPS)])] == [True]
    assert not claims([make_result(single, STEPS)])
    behind = {**STEPS, "DDP by speed": STEPS["cephalo"], "cephalo": STEPS["DDP by speed"]}
    assert [claim.holds for claim in claims([make_result(slow, behind)])] == [False]


def test_a_record_holds_the_table_the_claims_and_what_did_not_run():
    import json

    from side_by_side.report import dump, markdown, reasons

    results = [make_result(make_case(), STEPS)]
    notes = reasons(results)
    text = markdown(results, ["title", "how"], notes)
    assert notes == ["FSDP did not run: no such thing here"]
    assert "| 3:1 | slow | 8 × 1 | 16.0 | 91 (0 5 4) |" in text
    assert "- reached: 3:1, slow link" in text and notes[0] in text
    assert json.loads(dump(results, ["title"], notes))["results"][0]["batches"] == [12, 4]


def test_shaped_hosts_are_gone_after_an_error():
    from side_by_side.links import LinkError, ShapedHosts

    def listed():
        return subprocess.run(["ip", "netns", "list"], capture_output=True, text=True).stdout

    hosts = ShapedHosts(2, 100)
    try:
        with pytest.raises(KeyError), hosts as names:
            assert all(name in listed() for name in names)
            raise KeyError
    except LinkError as reason:
        pytest.skip(str(reason))
    assert not any(name in listed() for name in hosts.names)


def test_a_figure_is_written_with_a_panel_for_each_link(tmp_path):
    pytest.importorskip("matplotlib")
    from side_by_side.report import figure

    results = [make_result(make_case(link=link), STEPS) for link in ("fast", "slow")]
    figure(results, tmp_path / "throughput.png")
    assert (tmp_path / "throughput.png").stat().st_size > 10_000
