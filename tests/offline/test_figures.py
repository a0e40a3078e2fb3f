"""Figures: files that are whole, and what is written on them."""

from __future__ import annotations

import sys
from dataclasses import replace

import pytest

from lightning_cephalo.offline import figures
from lightning_cephalo.offline.figures import (
    BLUE,
    INK,
    add_legend,
    drawing,
    memory_figure,
    timeline_figure,
)
from lightning_cephalo.offline.simulate import KINDS, Simulation, simulate
from lightning_cephalo.plan import (
    Links,
    Plan,
    PlanError,
    Problem,
    RankPlan,
    RankProfile,
    StateBytes,
)
from lightning_cephalo.plan.program import Instruction, Operation


def profile(name: str, speed: float = 1.0) -> RankProfile:
    return RankProfile(
        name,
        [2 / speed],
        [5 / speed],
        [1 / speed],
        [10],
        60,
        host_capacity_bytes=100,
        offload_bytes_per_s=2,
    )


def problem_of(names: str) -> Problem:
    """One rank per letter; ranks of one letter are equal."""
    return Problem(
        [profile(name, 1 + ord(name) / 100) for name in names],
        units=4,
        links=Links(0.5, 0.5),
        state=StateBytes(20 * len(names)),
        global_batch_size=2 * len(names),
        boundary_bytes=2,
        gathered_bytes=7,
        update_overhead_s=0.5,
        step_overhead_s=0.25,
    )


def case(names: str, *, offload: bool = False) -> Simulation:
    plan = Plan([RankPlan((1, 1), 1 / len(names), offload=offload)] * len(names))
    return simulate(problem_of(names), plan)


@pytest.fixture
def drawn(monkeypatch):
    """The figures that are drawn, instead of files."""
    pytest.importorskip("matplotlib")
    found = []
    monkeypatch.setattr(figures, "save", lambda figure, path: found.append(figure))
    return found


def ticks(axes) -> list[str]:
    return [label.get_text() for label in axes.get_yticklabels()]


def legend(figure) -> list[str]:
    return [text.get_text() for text in figure.legends[0].get_texts()]


@pytest.mark.parametrize(("suffix", "start"), [(".png", b"\x89PNG"), (".svg", b"<?xml")])
def test_every_figure_is_written_whole_and_nothing_beside_it(tmp_path, suffix, start):
    pytest.importorskip("matplotlib")
    simulation = case("ab", offload=True)
    names = [f"{name}{suffix}" for name in ("memory", "timeline")]
    memory_figure(simulation.timelines, tmp_path / names[0])
    timeline_figure(simulation.timelines, tmp_path / names[1])
    assert sorted(path.name for path in tmp_path.iterdir()) == names
    for path in tmp_path.iterdir():
        content = path.read_bytes()
        assert content.startswith(start)
        assert len(content) > 5000


def test_a_figure_that_cannot_be_written_leaves_the_old_one(tmp_path, monkeypatch):
    matplotlib = pytest.importorskip("matplotlib.figure")
    target = tmp_path / "a.png"
    target.write_bytes(b"old")

    def half(self, path, **options):
        path.write_bytes(b"half")
        raise OSError("disk full")

    monkeypatch.setattr(matplotlib.Figure, "savefig", half)
    with pytest.raises(PlanError, match=r"a\.png: cannot be written: disk full"):
        timeline_figure(case("ab").timelines, target)
    assert target.read_bytes() == b"old"
    assert [path.name for path in tmp_path.iterdir()] == ["a.png"]


def test_a_folder_that_is_not_there_is_named(tmp_path):
    pytest.importorskip("matplotlib")
    simulation = case("ab")
    target = tmp_path / "no" / "a.png"
    for draw in (
        lambda: timeline_figure(simulation.timelines, target),
        lambda: memory_figure(simulation.timelines, target),
    ):
        with pytest.raises(PlanError, match=r"no/a\.png: cannot be written: No such file"):
            draw()


def test_a_timeline_has_a_row_for_each_kind_of_ranks(drawn):
    simulation = case("ab" * 8)
    timeline_figure(simulation.timelines, "a.png")
    (axes,) = drawn[0].axes
    assert [label.split("\n")[0] for label in ticks(axes)] == ["8 × a", "8 × b"]
    assert ticks(axes)[0].endswith("% busy")
    assert axes.get_xlabel() == "time in the step (s)"
    assert axes.get_title(loc="left").startswith("One step, ")
    assert legend(drawn[0]) == [
        *("gather", "forward", "loss", "backward", "reduce", "update", "overhead")
    ]


def test_copies_are_in_the_legend_where_there_are_any(drawn):
    simulation = case("ab", offload=True)
    timeline_figure(simulation.timelines, "a.png")
    assert {"offload", "fetch"} <= set(legend(drawn[0]))


def test_every_operation_can_be_drawn(drawn):
    simulation = case("a")
    (timeline,) = simulation.timelines
    events = [
        replace(timeline.events[0], instruction=Instruction(operation)) for operation in Operation
    ]
    timeline = replace(timeline, events=tuple(events))
    timeline_figure([timeline], "a.png")
    assert legend(drawn[0]) == [operation.value for operation in Operation]


def test_beyond_16_kinds_the_busiest_are_drawn_and_the_figure_says_so(drawn):
    simulation = case("abcdefghijklmnopqrst")
    timeline_figure(simulation.timelines, "a.png")
    (axes,) = drawn[0].axes
    # later letters are faster
    assert [label.split("\n")[0] for label in ticks(axes)] == [
        f"1 × {letter}" for letter in "abcdefghijklmnop"
    ]
    assert "the busiest 16 of 20" in axes.texts[0].get_text()


def test_memory_has_its_peak_as_predicted_and_shows_what_fills_it_and_who_is_over_capacity(drawn):
    plan = Plan([RankPlan((1, 1), 0.9), RankPlan((1, 1), 0.1)])
    memory_figure(simulate(problem_of("ab"), plan).timelines, "a.png")
    titles = [axes.get_title(loc="left") for axes in drawn[0].axes]
    assert titles == [
        "1 × a: 69 B at its peak, 69 B predicted",
        "1 × b: 37 B at its peak, 37 B predicted",
    ]
    over, under = (axes._left_title.get_color() for axes in drawn[0].axes)
    assert over != under == INK
    said = [text.get_text() for text in drawn[0].axes[0].texts]
    assert said == ["predicted peak 69 B", "may use 60 B"]
    assert sorted(legend(drawn[0])) == sorted(KINDS)
    # of 40 bytes of state, 7 gathered, 4 units x 2 samples x 2 bytes, a peak of 10
    tops = [
        max(y for _, y in each.get_paths()[0].vertices) for each in drawn[0].axes[0].collections
    ]
    assert tops == [36, 36 + 7, 36 + 7 + 16, 69]


def test_equal_ranks_share_a_panel_and_the_fullest_are_shown(drawn):
    memory_figure(case("aab").timelines, "a.png")
    titles = [axes.get_title(loc="left") for axes in drawn[0].axes]
    assert [title.partition(":")[0] for title in titles] == ["2 × a", "1 × b"]
    memory_figure(case("abcdefghij").timelines, "a.png")
    assert len(drawn[1].axes) == 8
    assert drawn[1].axes[-1].get_xlabel().endswith("the fullest 8 of 10")


def test_without_matplotlib_the_error_says_what_to_install(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"pip install 'lightning-cephalo\[plot\]'"):
        timeline_figure(case("ab").timelines, tmp_path / "a.png")


def test_a_file_of_another_kind_is_refused(tmp_path):
    with pytest.raises(PlanError, match=r"\.png, \.svg, but got the suffix '\.pdf'"):
        timeline_figure(case("ab").timelines, tmp_path / "a.pdf")
    assert not list(tmp_path.iterdir())


def test_a_legend_takes_the_rows_that_its_labels_need(drawn):
    for count, rows in ((3, 1), (10, 2)):
        with drawing("a.png", 3) as (axes,):
            labels = [f"traffic gathered from ranks {i}" for i in range(count)]
            add_legend(axes.figure, dict.fromkeys(labels, BLUE))
        (legend,) = drawn[-1].legends
        box = legend.get_window_extent()
        assert 0 <= box.x0 < box.x1 <= drawn[-1].bbox.width
        heights = {text.get_window_extent().y0 for text in legend.get_texts()}
        assert len(heights) >= rows
