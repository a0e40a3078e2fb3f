"""Update times that others have published, beside those of this planner's model.

    python benchmarks/update_logs.py FOLDER

FOLDER is a copy of github.com/mauryaavinash95/deep-optimizer-states-results (a9408cd here): logs
of "Deep Optimizer States" (arXiv 2410.21316). In these runs all optimizer state, or a part of it,
lives in host memory. The host updates it, but every k-th piece is fetched, updated by the device,
and stored. The update follows the backward, so that no compute hides it.

The model is that of ``lightning_cephalo/plan/moving.py``: the host's memory is busy with what
copies and updates read and write. One number for each kind of host is fitted: the bytes that its
memory serves per second.
"""

from __future__ import annotations

import argparse
import re
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from lightning_cephalo.plan.moving import HostTraffic

# There parameter and moments are fetched and stored, in fp32. Gradients are on the host already,
# and the device gets parameters of two bytes.
TRAFFIC = HostTraffic(fetched=12.0, stored=12.0, arrived=0.0, updated=28.0, returned=2.0)
_NAME = re.compile(
    r"log-(?P<model>[\w.]+)-tp1-dp(?P<ranks>\d+)-.*-ratio(?P<ratio>[\d.]+)-.*"
    r"-prefetch1-flush_async1-opt_gaps(?P<every>\d+)\.log$"
)
# By kind of host, the folders of runs with one host of four ranks.
HOSTS = {
    "A100": ("act-output-*-scale-gaps-a100",),
    "H100": ("act-output-20B-scale-twinflow", "act-output-scale-models-twinflow-0.8/*"),
}
# The first steps allocate memory.
_WARM = 2


@dataclass(frozen=True)
class Logged:
    """The updates of one run.

    Attributes:
        host: Kind of host.
        model: Name of the model.
        parameters: Of one rank.
        away: Part of them whose state lives in host memory.
        every: One of so many pieces is updated by the device.
        update_s: Median time of an update.
    """

    host: str
    model: str
    parameters: float
    away: float
    every: int
    update_s: float

    def memory_s(self, bytes_per_s: float) -> float:
        """Return the time that the model predicts.

        Args:
            bytes_per_s: What the memory of the host serves for each rank.
        """
        moved = self.parameters * self.away
        streamed = moved / self.every
        return TRAFFIC.memory_s(streamed, moved - streamed, bytes_per_s)


def read(folder: Path) -> Iterator[Logged]:
    """Yield the runs whose pieces are updated on both sides, with asynchronous gradients."""
    for host, patterns in HOSTS.items():
        for path in sorted(p for pattern in patterns for p in folder.glob(f"{pattern}/*.log")):
            named = _NAME.match(path.name)
            text = path.read_text(encoding="utf-8", errors="replace")
            counted = re.search(r"number of parameters on [^\n]*: (\d+)", text)
            seconds = [float(each) / 1e3 for each in re.findall(r"\| step: ([\d.]+)", text)]
            if named and counted and len(seconds) > _WARM and int(named["every"]) > 1:
                yield Logged(
                    host,
                    named["model"],
                    int(counted[1]) / int(named["ranks"]),
                    float(named["ratio"]),
                    int(named["every"]),
                    statistics.median(seconds[_WARM:]),
                )


def fitted(runs: Sequence[Logged]) -> float:
    """Return the bytes per second with which half of the runs are slower than predicted."""
    return statistics.median(run.memory_s(1.0) / run.update_s for run in runs)


def lines(folder: Path) -> list[str]:
    """Return a table in Markdown, and a sentence for each kind of host."""
    runs = list(read(folder))
    if not runs:
        raise SystemExit(f"{folder}: no logs. It has to be a copy of the authors' repository.")
    found = [
        "| host | model | on the host | every k-th | update, s | predicted | error |",
        "|---|---|---|---|---|---|---|",
    ]
    said = []
    for host in HOSTS:
        own = [run for run in runs if run.host == host]
        if not own:
            continue
        rate = fitted(own)
        errors = [run.memory_s(rate) / run.update_s - 1 for run in own]
        for run, error in zip(own, errors, strict=True):
            found.append(
                f"| {host} | {run.model} | {run.away:.0%} | {run.every} | {run.update_s:.3f}"
                f" | {run.memory_s(rate):.3f} | {error:+.1%} |"
            )
        sizes = [abs(error) for error in errors]
        others = [_from_others(own, model) for model in dict.fromkeys(run.model for run in own)]
        unseen = statistics.fmean(abs(error) for part in others for error in part)
        said.append(
            f"- {host}: {len(own)} update times, {rate / 1e9:.1f} GB/s for each rank: mean error"
            f" {statistics.fmean(sizes):.1%}, median {statistics.median(sizes):.1%}, largest"
            f" {max(sizes):.1%}. With the rate of the other models only: mean {unseen:.1%}."
        )
    return [*found, "", *said]


def _from_others(runs: Sequence[Logged], model: str) -> list[float]:
    """Return the errors of a model's runs with the rate of the other models' runs."""
    rest = [run for run in runs if run.model != model]
    if not rest:
        return []
    rate = fitted(rest)
    return [run.memory_s(rate) / run.update_s - 1 for run in runs if run.model == model]


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("folder", type=Path, help="a copy of the authors' repository")
    print("\n".join(lines(arguments.parse_args().folder)))


if __name__ == "__main__":
    main()
