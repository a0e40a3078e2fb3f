"""Trains several cases in one start of ranks with simulated devices, and compares them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
from device_jobs import train
from launch import torchrun_environments
from simulated_server import Outcome, Server

OURS = ("plan", "strategy", "accelerators", "change", "padding", "arrays")
"""Options of a case that Lightning alone does not know."""


@dataclass(frozen=True)
class Case:
    """One training.

    Attributes:
        ranks: The plan's ranks; "solve": measured and solved; None: Lightning alone.
        given: Options of :func:`device_jobs.train`.
        world_size: Number of ranks where the plan does not tell.
        places: What the launcher tells each rank of its place; default: all on one node.
        rel: How near the results come to those of one device.
    """

    ranks: Any
    given: dict[str, Any] = field(default_factory=dict)
    world_size: int = 0
    places: tuple[dict[str, str], ...] = ()
    rel: float = 1e-5

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.world_size or (len(self.ranks) if self.ranks else 1)

    @property
    def start(self) -> tuple[object, ...]:
        """What cases have in common that share a start: they share a process group too."""
        backend = self.given.get("strategy", {}).get("process_group_backend")
        is_bound_to_devices = backend is None and self.places
        return self.size, backend, repr(self.places) if is_bound_to_devices else ""

    @property
    def alone(self) -> Case:
        """The same for Lightning alone, on one device."""
        return Case(None, {name: own for name, own in self.given.items() if name not in OURS})


def case(
    ranks: Any,
    *,
    world_size: int = 0,
    places: tuple[dict[str, str], ...] = (),
    rel: float = 1e-5,
    **given: Any,
) -> Case:
    """One training, with options by name."""
    return Case(ranks, given, world_size, places, rel)


def outcomes_of_each(server: Server, cases: Mapping[str, Case]) -> dict[str, list[Outcome]]:
    """What the ranks of each case did, after a look at what the checker found."""
    together: dict[tuple[object, ...], dict[str, Case]] = {}
    for name, one in cases.items():
        together.setdefault(one.start, {})[name] = one
    found = {}
    for sharing in together.values():
        of_start = torchrun_environments(next(iter(sharing.values())).size)
        calls = []
        for one in sharing.values():
            places = one.places or ({},) * one.size
            environments = [own | place for own, place in zip(of_start, places, strict=True)]
            calls.append((environments, one.ranks, one.given))
        found.update(zip(sharing, server.run_each(len(of_start), train, calls), strict=True))
    for name, outcomes in found.items():
        for outcome in outcomes:
            assert not outcome.findings, "\n".join([name, *outcome.findings])
            losses = outcomes[0].value["losses"]
            assert outcome.value["losses"] == pytest.approx(losses, rel=1e-6), name
    return {name: found[name] for name in cases}


def trained_each(server: Server, cases: Mapping[str, Case]) -> dict[str, list[dict[str, Any]]]:
    """What every rank found in each case, after a look at what the checker found."""
    outcomes = outcomes_of_each(server, cases)
    return {name: [one.value for one in of_case] for name, of_case in outcomes.items()}


def assert_equal(found, wanted, rel=1e-5, name=""):
    """Every rank's results are those of one device."""
    for one in found:
        assert one["losses"] == pytest.approx(wanted["losses"], rel=rel), name
        assert one["validated"] == pytest.approx(wanted["validated"], rel=rel), name
        assert one["weights"] == pytest.approx(wanted["weights"], rel=rel), name


def assert_each_is_as_alone(
    server: Server, cases: Mapping[str, Case]
) -> dict[str, list[dict[str, Any]]]:
    """Train each case, and the same with Lightning alone; returns what every rank found."""
    alone: list[Case] = []
    for one in cases.values():
        if one.alone not in alone:
            alone.append(one.alone)
    found = trained_each(
        server, {f"alone {number}": one for number, one in enumerate(alone)} | dict(cases)
    )
    for name, one in cases.items():
        (wanted,) = found[f"alone {alone.index(one.alone)}"]
        assert_equal(found[name], wanted, one.rel, name)
    return {name: found[name] for name in cases}
