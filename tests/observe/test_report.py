"""Tables show what a plan says, and dashes where it says nothing."""

import math
from dataclasses import replace

import pytest
from rich.console import Console
from rich.table import Table

from lightning_cephalo.observe.memory import RankMemory
from lightning_cephalo.observe.report import (
    UnitSize,
    format_microbatches,
    memory_table,
    plan_table,
    show,
    step_line,
    units_text,
)
from lightning_cephalo.plan import Plan, RankPlan

BY_HAND = Plan(
    ranks=(
        RankPlan(microbatch_sizes=(2, 2), state_fraction=0.75),
        RankPlan(microbatch_sizes=(1,), state_fraction=0.25),
    )
)

SOLVED = Plan(
    ranks=(
        RankPlan(
            microbatch_sizes=(4,) * 12 + (3,),
            state_fraction=0.4,
            name="A6000",
            forward_s=0.010,
            backward_s=0.020,
            tail_s=0.1,
            memory_bytes=3 * 2**30,
            capacity_bytes=4 * 2**30,
        ),
        RankPlan(
            microbatch_sizes=(),
            state_fraction=0.6,
            name="P40",
            forward_s=0.0,
            backward_s=0.0,
            tail_s=0.0,
            memory_bytes=2**29,
            capacity_bytes=math.inf,
        ),
    ),
    step_s=0.5,
    bound_s=0.49,
    gap=0.02,
    solve_s=0.123,
    backend="HiGHS",
)


def text_of(table: Table) -> str:
    console = Console(width=140, color_system=None)
    with console.capture() as capture:
        console.print(table)
    return capture.get()


def cells(text: str, *, row: int) -> list[str]:
    rows = [line for line in text.splitlines() if line.startswith("│")]
    return [cell.strip() for cell in rows[row].strip("│").split("│")]


def test_plan_table_says_where_units_stay_gathered() -> None:
    for said, is_shown in ((None, False), (True, False), (False, True)):
        text = text_of(plan_table(replace(SOLVED, reshard_after_forward=said)))
        assert ("units stay gathered from forward to backward" in text) is is_shown


def test_plan_table_says_where_slices_are_padded() -> None:
    for said, is_shown in ((None, False), (False, False), (True, True)):
        text = text_of(plan_table(replace(SOLVED, padded=said)))
        assert ("slices of even shares are padded" in text) is is_shown


def test_plan_table_of_a_solved_plan_shows_every_prediction() -> None:
    text = text_of(plan_table(SOLVED, units=10))
    memory = "3.0 GiB of 4.0 GiB (75%)"
    assert cells(text, row=0) == ["0", "A6000", "51", "12×4 + 3", "40.0%", "400 ms (80%)", memory]
    idle = ["1", "P40", "0", "none", "60.0%", "0 s (0%)", "512.0 MiB of unlimited"]
    assert cells(text, row=1) == idle
    assert cells(text, row=2)[2] == "51"
    assert (
        "predicted step 500 ms (102 samples/s), proven bound 490 ms, gap 2.0%, "
        "solved by HiGHS in 123 ms"
    ) in " ".join(text.split())
    brief = text_of(plan_table(SOLVED, details=False, notes=["It is so.", "And so."]))
    assert "predicted step 500 ms (102 samples/s)\nIt is so." in "\n".join(
        line.strip() for line in brief.splitlines()
    )
    assert "proven bound" not in brief and "solved by" not in brief


def test_plan_table_names_the_units_and_the_global_batch() -> None:
    layers = [UnitSize(f"model.layers.{i}", "Block", 7_110_000) for i in range(12)]
    stages = [UnitSize("a.0.b", "Stage", 1_000), UnitSize("c.0", "Stage", 2_000_000)]
    root = UnitSize("", "Net", 38_600_000)
    text = text_of(plan_table(SOLVED, model=[root, *stages, *layers, UnitSize("d", "Head", 5)]))
    assert (
        "global batch 51, units: 12 × Block (model.layers.0 … model.layers.11, 7.11M each),"
        " 2 × Stage (a.0.b … c.0, 1k–2M each), 1 × Head (d, 5), root 38.6M"
    ) in " ".join(text.split())
    assert units_text([root]) == "units: root 38.6M"
    others = [UnitSize(f"{i}", f"Kind{i}", 9 - i) for i in range(9)]
    assert units_text([root, *others]).endswith("1 × Kind3 (3, 6), 5 of other kinds, root 38.6M")


def test_names_are_shown_and_neither_obeyed_nor_read_as_markup(capsys) -> None:
    unit = UnitSize("a\x1b[2J", "[/]", 5)
    plan = Plan((RankPlan((1,), 1.0, "[red]"),))
    show(plan_table(plan, model=[UnitSize("", "Net", 1), unit]))
    text = capsys.readouterr().out
    assert "\x1b" not in text
    assert "1 × [/] (a\\x1b[2J, 5)" in " ".join(text.split())
    assert "[red]" in text


def test_plan_table_of_a_plan_written_by_hand_shows_dashes() -> None:
    table = plan_table(BY_HAND)
    text = text_of(table)
    assert table.caption is None
    assert cells(text, row=0) == ["0", "–", "4", "2+2", "75.0%", "–", "–"]
    assert cells(text, row=1) == ["1", "–", "1", "1", "25.0%", "–", "–"]


def test_what_happens_to_activations_is_shown_where_the_plan_says_it() -> None:
    host_bytes = 3.1 * 2**30
    ranks = (
        RankPlan((1,), 0.25, recompute=True),
        RankPlan((1,), 0.25, recompute=False),
        RankPlan((1,), 0.25, recompute=True, offload=True, host_bytes=host_bytes),
        RankPlan((), 0.25),
    )
    text = text_of(plan_table(Plan(ranks)))
    assert "activations" in text
    assert [cells(text, row=row)[4] for row in range(4)] == [
        *("recomputed", "kept", "recomputed, offloaded 3.1 GiB", "–")
    ]
    assert "activations" not in text_of(plan_table(BY_HAND))
    only_offload = Plan((RankPlan((1,), 1, offload=True),))
    assert cells(text_of(plan_table(only_offload)), row=0)[4] == "offloaded"


def many(ranks: int) -> Plan:
    kinds = [RankPlan((2,), 1 / ranks, "A6000"), RankPlan((1,), 1 / ranks, "L4")]
    return Plan([kinds[0]] * (ranks - 2) + [kinds[1]] + [kinds[0]])


def test_beyond_24_ranks_equal_neighbours_share_a_row() -> None:
    text = text_of(plan_table(many(130)))
    assert cells(text, row=0)[:4] == ["0–127", "128 × A6000", "2", "2"]
    assert cells(text, row=1)[:4] == ["128", "L4", "1", "1"]
    assert cells(text, row=2)[:4] == ["129", "A6000", "2", "2"]
    assert cells(text, row=3)[2] == "259"
    assert len(plan_table(many(130)).rows) == 3
    assert len(plan_table(many(24)).rows) == 24
    named = [replace(rank, name=f"node {i}") for i, rank in enumerate(many(25).ranks)]
    assert len(plan_table(Plan(named)).rows) == 25


def test_plan_table_without_units_shows_the_time_of_one() -> None:
    text = text_of(plan_table(SOLVED))
    assert "busy per unit" in text
    assert cells(text, row=0)[5] == "30 ms"


def test_a_line_compares_the_step_with_its_prediction() -> None:
    assert step_line(2.0, 2.1) == "Step: predicted 2 s, measured 2.1 s (+5.0%)"
    assert step_line(None, 2.1) == "Step: predicted –, measured 2.1 s"


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ((), "none"),
        ((3,), "3"),
        ((4, 4, 3), "4+4+3"),
        ((4,) * 5, "5×4"),
        ((4, 4, 4, 3, 3), "3×4 + 2×3"),
    ],
)
def test_many_microbatches_of_one_size_are_counted(sizes: tuple[int, ...], expected: str) -> None:
    assert format_microbatches(sizes) == expected


HELD = RankMemory(
    peak_bytes=20 * 2**20,
    state_bytes=12.5 * 2**20,
    gathered_bytes=2**20,
    gradients_bytes=2**20,
    boundaries_bytes=2**20,
    inside_bytes=4.5 * 2**20,
    other_bytes=1000,
    step=2,
)


def test_memory_table_shows_predicted_beside_measured_by_kind() -> None:
    predicted = [replace(HELD, inside_bytes=5 * 2**20), RankMemory(peak_bytes=30 * 2**20)]
    lines = text_of(memory_table(predicted, [HELD, HELD])).splitlines()
    assert lines[0].strip() == "Memory in MiB: predicted / measured"
    assert lines[-1].strip() == "measured in step 2"
    above, below, above_second, below_second = (line.split() for line in lines[3:7])
    assert above[:3] == ["0", "20.0", "/"] and below[0] == "20.0"
    assert above[11:] == ["5.00", "/", "0.00", "/"] and below[5:] == ["4.50", "0.00"]
    assert above_second == ["1", "30.0", "/"] and below_second == below


def test_memory_table_of_many_ranks_shows_the_fullest() -> None:
    measured = [replace(HELD, peak_bytes=2**20 * rank, step=None) for rank in range(30)]
    text = text_of(memory_table([RankMemory(peak_bytes=1.0)] * 30, measured))
    shown = [line.split()[0] for line in text.splitlines() if " /" in line][1:]
    assert shown == [str(rank) for rank in range(6, 30)]
    assert "the fullest 24 of 30 ranks" in text


def test_memory_table_fits_eighty_columns_without_cutting_words() -> None:
    console = Console(width=80, color_system=None)
    with console.capture() as capture:
        console.print(memory_table([HELD], [HELD]))
    assert "…" not in capture.get() and " other" in capture.get()
    assert all(len(line) <= 80 for line in capture.get().splitlines())
