"""``cephalo report``: what was lost where, in one safe HTML file, also where much is missing."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest

from lightning_cephalo.observe.memory import RankMemory
from lightning_cephalo.observe.recording import MEASURED_KINDS, Event, Held, Recording, Stream
from lightning_cephalo.observe.run_record import RECORD_NAME, RankRecord, RunRecord
from lightning_cephalo.offline import figures
from lightning_cephalo.offline.cli import BAD_INPUT, DONE, main
from lightning_cephalo.offline.run_report import page
from lightning_cephalo.offline.run_report.findings import findings
from lightning_cephalo.offline.run_report.lost_time import LostTime, lost_time
from lightning_cephalo.offline.run_report.page import page_of
from lightning_cephalo.plan import Plan, RankPlan
from lightning_cephalo.plan.program import NONE, Instruction, Operation

EVIL = "<script>alert('a')</script> & \"b\""
STREAMS = {Operation.GATHER: Stream.COMMUNICATION, Operation.REDUCE: Stream.REDUCTION}


def event(operation: Operation, unit: int, start_s: float, end_s: float) -> Event:
    stream = STREAMS.get(operation, Stream.COMPUTE)
    return Event(stream, Instruction(operation, unit), start_s, end_s)


def quick_and_slow() -> list[Recording]:
    """Rank 1 is late with the reduce of unit 1, and for the exchange behind it."""
    quick = (
        event(Operation.FORWARD, 1, 0.0, 2.0),
        event(Operation.REDUCE, 1, 2.0, 7.0),
        event(Operation.WAIT, 3, 2.0, 7.0),  # names the instruction that runs meanwhile
        event(Operation.WAIT, NONE, 7.5, 9.0),
        event(Operation.UPDATE, NONE, 9.0, 10.0),
    )
    slow = (
        event(Operation.FORWARD, 1, 0.0, 5.5),
        event(Operation.REDUCE, 1, 5.5, 7.0),
        event(Operation.WAIT, 3, 6.0, 7.0),
        event(Operation.BACKWARD, 1, 7.0, 9.0),
        event(Operation.UPDATE, NONE, 9.0, 10.0),
    )
    return [Recording(0, "quick", quick, (), 0.0, 10.0), Recording(1, "slow", slow, (), 0.0, 10.0)]


def test_waiting_is_for_others_until_the_last_has_come_and_for_the_network_from_then_on():
    quick, slow = lost_time(quick_and_slow())
    assert quick == LostTime(0, "quick", 10.0, 2.0, 1.0, 3.5 + 1.5, 1.5, 0.5)
    assert slow == LostTime(1, "slow", 10.0, 7.5, 1.0, 0.0, 1.0, 0.5)
    assert lost_time(quick_and_slow()[::-1]) == (slow, quick)


def test_a_rank_without_a_recorded_step_is_left_out():
    quick, slow = quick_and_slow()
    alone = lost_time([quick, Recording(1, "slow", ())])
    assert [one.rank for one in alone] == [0]
    # nobody else is known to be late: all of it is the network
    assert (alone[0].others_s, alone[0].network_s) == (1.5, 5.0)
    assert lost_time([slow]) == lost_time(quick_and_slow())[1:]


def record(name: str = "T4") -> RunRecord:
    sizes = tuple(10.0 * (index + 1) for index in range(len(MEASURED_KINDS)))
    peak = sum(sizes)
    plan = Plan(
        (
            RankPlan((2, 1), 0.75, name, 0.1, 0.2, 0.1, peak, 1.01 * peak, offload=True),
            RankPlan((1,), 0.25, memory_bytes=0.5 * peak),
        ),
        step_s=8.0,
    )
    ranks = tuple(
        RankRecord(
            one.rank,
            name,
            step_s=10.0,
            busy_s=one.rank + 2.0,
            waiting_s=6.0 - one.rank,
            between_s=2.5,
            predicted_busy_s=1.5,
            predicted_memory=RankMemory(peak_bytes=peak),
            measured_memory=RankMemory(
                peak_bytes=peak, state_bytes=28.0, resting_state_bytes=24.0, parameters=2, step=2
            ),
            events=one.events,
            held=(Held(0.0, sizes), Held(5.0, sizes, 7.0)),
            end_s=one.end_s,
        )
        for one in quick_and_slow()
    )
    return RunRecord(
        plan,
        ranks,
        is_finished=True,
        model=f"units: {name}",
        updates="inside the backward",
        notes=(f"why {name}",),
        changes=("behind step 7: pace, rank 1",),
        steps_s=(12.0, 10.0, 10.0, 40.0),
    )


def test_findings_say_the_largest_loss_first_and_what_helps():
    run = record()
    found = findings(run, lost_time(run.timelines()))
    shares = [finding.share for finding in found]
    assert shares == sorted(shares, reverse=True)
    said = [finding.text for finding in found]
    assert "ranks wait 25% of the time for ranks that come later" in said[0]
    assert "Rank 1 (T4) waits least" in said[0] and "2.00 times what the plan predicts" in said[0]
    assert "Start again, to measure" in said[0]
    assert any("2.5 s pass between two steps (20% of all time)" in text for text in said)
    assert any("25% longer than the 8 s" in text for text in said)
    assert any("12% of the time for transfers" in text for text in said)
    assert any("Rank 0 (T4) holds 360 B of the 364 B" in text for text in said)
    assert any("Rank 1 (T4) holds 360 B, more than the 180 B" in text for text in said)
    given = findings(replace(run, is_given=True), lost_time(quick_and_slow()))
    assert "Leave plan= out" in given[0].text


def test_a_run_that_goes_as_planned_has_no_findings():
    run = record()
    calm = replace(run.ranks[0], step_s=8.0, between_s=0.1, predicted_memory=None)
    calm = replace(calm, measured_memory=RankMemory(peak_bytes=1.0))
    run = replace(run, ranks=(calm, replace(calm, rank=1)))
    assert findings(run, [LostTime(0, "", 8.0, 7.2, 0.2, 0.2, 0.2, 0.2)]) == []


class Page(HTMLParser):
    """Checks that elements are nested, and keeps their names, attributes and texts."""

    def __init__(self, content: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.names: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.texts: list[str] = []
        self.feed(content)
        self.close()
        assert not self.open

    def handle_starttag(self, name: str, attributes: list[tuple[str, str | None]]) -> None:
        self.names.append(name)
        self.attributes += attributes
        if name != "meta":
            self.open.append(name)

    def handle_endtag(self, name: str) -> None:
        assert self.open.pop() == name

    def handle_data(self, text: str) -> None:
        self.texts.append(text)

    def headings(self) -> list[str]:
        after = {index for index, name in enumerate(self.names) if name == "h2"}
        assert after
        return [text for text in self.texts if text in HEADINGS]


HEADINGS = (
    "What stands out",
    "Where the time went",
    "A step, rank by rank",
    "Memory over the step",
    "The plan, and why",
    "Predicted beside measured",
    "All steps",
    "What is missing here",
)


def test_a_full_record_gives_a_page_with_all_parts_that_loads_nothing_and_escapes_all(tmp_path):
    folder = tmp_path / "a<b>&c"
    folder.mkdir()
    record(EVIL).save(folder / RECORD_NAME)
    assert main(["report", str(folder)]) == DONE
    content = (folder / "report.html").read_text()
    found = Page(content)
    assert found.headings() == list(HEADINGS[:-1])  # nothing is missing
    assert "script" not in found.names and "img" not in found.names
    text = "".join(found.texts)
    assert f"why {EVIL}" in text and f"units: {EVIL}" in text
    assert str(folder) in text
    assert "Memory in B: predicted / measured" in text and "360.0 /" in text
    names = {name for name, _ in found.attributes}
    assert not names & {"src", "srcset", "data", "action"}
    links = {value for name, value in found.attributes if name in ("href", "xlink:href")}
    assert all(value.startswith("#") for value in links)  # marks that the page draws itself
    assert not any(name.startswith("on") for name in names)
    for outside in ("http:", "https:", "@import", "//"):
        assert outside not in content
    assert set(re.findall(r"url\((.)", content)) <= {"#"}
    assert found.names.count("svg") == 3 and found.names.count("path") > 10
    assert not re.search(r"\bnan\b|\binf\b|None", content)
    # drawings have the colours of the page, which is light or dark
    drawn = "".join(re.findall("<svg.*?</svg>", content, re.DOTALL))
    assert "prefers-color-scheme: dark" in content and "currentColor" in drawn
    for colour in (figures.INK, figures.SOFT, figures.PALE, figures.PAPER, "#000000"):
        assert colour not in drawn


def test_what_a_folder_lacks_is_said_with_the_option_that_gives_it(tmp_path):
    plan = record().plan
    unfinished = RunRecord(plan, (RankRecord(0), RankRecord(1)))
    unfinished.save(tmp_path / RECORD_NAME)
    said = page(tmp_path)
    assert Page(said).headings() == ["What stands out", "The plan, and why", HEADINGS[-1]]
    assert "the run has not ended" in said

    whole = record()
    without = [replace(rank, held=(), end_s=None, events=(), busy_s=None) for rank in whole.ranks]
    replace(whole, ranks=tuple(without), plan=replace(plan, step_s=None)).save(
        tmp_path / RECORD_NAME
    )
    said = page(tmp_path)
    for sentence in (
        "Not measured: times, a recorded step, memory over it. Train for more steps",
        "the given plan has none",
    ):
        assert sentence in said
    assert "Where the time went" not in said
    forgetful = [replace(rank, measured_memory=None) for rank in whole.ranks]
    replace(whole, ranks=tuple(forgetful)).save(tmp_path / RECORD_NAME)
    assert "Not measured: memory. Train" in page(tmp_path)


def test_a_folder_of_no_run_is_wrong_input(tmp_path, capsys):
    for folder in ("absent", "."):
        assert main(["report", str(tmp_path / folder)]) == BAD_INPUT
        assert "that is not there. Train with" in " ".join(capsys.readouterr().err.split())
    (tmp_path / RECORD_NAME).write_text("{}")
    assert main(["report", str(tmp_path)]) == BAD_INPUT
    assert "missing 'plan', 'ranks'" in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "report.html").exists()


def test_many_ranks_are_shown_in_part_and_the_page_says_so():
    whole = record()
    part = replace(whole.plan.ranks[0], state_fraction=1 / 80)
    ranks = tuple(replace(whole.ranks[0], rank=rank) for rank in range(80))
    many = replace(whole, plan=replace(whole.plan, ranks=(part,) * 80), ranks=ranks)
    said = page_of("many", many)
    assert "of 80 ranks the 24 that waited least" in said and "the fullest 24 of 80" in said
    assert "the busiest 16 of 80" in said and "the fullest 8 of 80" in said
    assert len(said) < 300_000


CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")


@pytest.mark.processes
@pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium on this machine")
def test_a_browser_shows_the_page_and_complains_of_nothing(tmp_path: Path):
    path, shot = tmp_path / "report.html", tmp_path / "shot.png"
    path.write_text(page_of(EVIL, record(EVIL)))
    assert CHROMIUM is not None
    options = ["--headless", "--disable-gpu", "--enable-logging=stderr", f"--screenshot={shot}"]
    options += ["--no-sandbox", f"--user-data-dir={tmp_path / 'profile'}", path.as_uri()]
    shown = subprocess.run(
        [CHROMIUM, *options],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "HOME": str(tmp_path)},
    )
    assert shown.returncode == 0, shown.stderr
    assert "CONSOLE" not in shown.stderr  # nothing was refused, and no script has run
    assert shot.read_bytes().startswith(b"\x89PNG")
