"""A second simulator, written as loops over units: what the one that plays programs must equal.

It knows the order of a step from its own loops and shares no code with ``plan/program.py``. Only
the costs of one microbatch are the package's.
"""

from __future__ import annotations

from dataclasses import dataclass

from lightning_cephalo.plan import Plan, Problem, RankPlan, RankProfile, cost

_STAY = 2


@dataclass(frozen=True)
class Reference:
    """What a step takes and what every rank holds at most, in rank order."""

    step_s: float
    peak_bytes: tuple[float, ...]
    host_peak_bytes: tuple[float, ...]


def reference_step(problem: Problem, plan: Plan) -> Reference:
    """Play one step."""
    problem = cost.as_planned(problem, plan)
    gather_s, reduce_s = problem.links.gather_s, problem.links.reduce_s
    lanes = [_Lane(problem, *pair) for pair in zip(problem.ranks, plan.ranks, strict=True)]
    link_s = 0.0

    def collective(seconds: float) -> float:
        nonlocal link_s
        link_s = max(link_s, max(lane.free_s for lane in lanes)) + seconds
        return link_s

    units = problem.units
    collective(problem.root_links.gather_s)
    ready_s = collective(gather_s)
    for unit in range(units):
        following_s = collective(gather_s) if unit + 1 < units else ready_s
        for lane in lanes:
            lane.forward(unit, ready_s)
        ready_s = following_s
    for unit in reversed(range(units)):
        following_s = ready_s
        if unit and problem.reshard_after_forward:
            beside_s = 0.0 if unit + 1 == units else problem.links.both_s - gather_s - reduce_s
            following_s = collective(gather_s + beside_s)
        for lane in lanes:
            lane.backward(unit, ready_s)
        collective(reduce_s)
        ready_s = following_s
    step_s = (
        collective(problem.root_links.reduce_s)
        + problem.update_overhead_s
        + problem.step_overhead_s
    )
    peaks = [lane.peaks() for lane in lanes]
    return Reference(step_s, tuple(p for p, _ in peaks), tuple(h for _, h in peaks))


class _Lane:
    def __init__(self, problem: Problem, profile: RankProfile, part: RankPlan) -> None:
        mode = cost.Mode.of(part)
        curves = (
            *cost.time_curves(profile, mode),
            profile.curves(recompute=mode.recompute).compute_bytes,
        )
        self._curves, self._problem, self._sizes = curves, problem, part.microbatch_sizes
        self._copy_s = [cost.copy_time(problem, profile, size, mode) for size in self._sizes]
        self._away = problem.units - _STAY if part.offload else 0
        self._keeps = not mode.recompute
        self._rest = part.state_fraction * problem.state.held_bytes + problem.fixed_bytes
        self._rest += problem.microbatch_bytes * len(self._sizes)
        if part.offload and problem.units > _STAY:
            self._rest += problem.boundary_bytes * part.batch_size
        self._changes: list[tuple[float, float, float]] = []
        self._copied_s: dict[tuple[int, int], float] = {}
        self._copy_free_s = 0.0
        self.free_s = 0.0

    def forward(self, unit: int, ready_s: float) -> None:
        for index, size in enumerate(self._sizes):
            room_s = self._copied_s.pop((unit - _STAY, index), 0.0)
            self._compute(0, size, max(self.free_s, ready_s, room_s), kept=size)
            if unit < self._away:
                start_s, end_s = self._copy(unit, index)
                self._note(start_s, host=size)
                self._note(end_s, boundaries=-size)
            if unit == self._problem.units - 1:
                self._compute(2, size, self.free_s)

    def backward(self, unit: int, ready_s: float) -> None:
        for index, size in reversed([*enumerate(self._sizes)]):
            fetched_s = self._copied_s.pop((unit, index), 0.0)
            self._compute(1, size, max(self.free_s, ready_s, fetched_s), released=size)
            if 0 <= unit - _STAY < self._away:
                start_s, end_s = self._copy(unit - _STAY, index)
                self._note(start_s, boundaries=size)
                self._note(end_s, host=-size)

    def peaks(self) -> tuple[float, float]:
        held = peak = self._rest
        host = host_peak = 0.0
        ordered = sorted(self._changes, key=lambda change: change[0])
        for index, (time_s, on_device, on_host) in enumerate(ordered):
            held, host = held + on_device, host + on_host
            # of changes at one time only their sum is ever held
            if index + 1 == len(ordered) or ordered[index + 1][0] != time_s:
                peak, host_peak = max(peak, held), max(host_peak, host)
        return peak, host_peak

    def _compute(
        self, curve: int, size: int, start_s: float, kept: int = 0, released: int = 0
    ) -> None:
        self.free_s = start_s + self._curves[curve][size - 1]
        inside = self._curves[3][size - 1]
        self._note(start_s, boundaries=kept, kept=kept, inside=inside)
        self._note(self.free_s, boundaries=-released, kept=-released, inside=-inside)

    def _note(
        self,
        time_s: float,
        boundaries: int = 0,
        kept: int = 0,
        host: int = 0,
        inside: float = 0.0,
    ) -> None:
        boundary = self._problem.boundary_bytes
        on_device = boundaries * boundary + kept * self._keeps * self._problem.kept_bytes + inside
        self._changes.append((time_s, on_device, host * boundary))

    def _copy(self, unit: int, index: int) -> tuple[float, float]:
        start_s = max(self.free_s, self._copy_free_s)
        self._copy_free_s = self._copied_s[unit, index] = start_s + self._copy_s[index]
        return start_s, self._copy_free_s
