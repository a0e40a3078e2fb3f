"""Plans that several tests train by, and the options of their Trainers."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from lightning_cephalo import CephaloStrategy, Planner
from lightning_cephalo.plan import Plan, RankPlan

GLOBAL_BATCH = 8

QUIET: dict[str, Any] = {
    "max_epochs": 1,
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "num_sanity_val_steps": 0,
}
"""Options of a Trainer that shows and writes nothing."""


def quiet_strategy(**options: Any) -> CephaloStrategy:
    """Return a strategy that prints nothing; options of its planner may stand among its own."""
    of_planner = {field.name for field in fields(Planner)} & options.keys()
    planner = {"verbose": False, **{name: options.pop(name) for name in of_planner}}
    return CephaloStrategy(planner=Planner(**planner), **options)


def plan_of(
    *ranks: tuple[tuple[int, ...], float],
    offload: bool = False,
    stay_gathered: bool = False,
    padded: bool | None = None,
    groups: tuple[int, ...] = (),
    **each: Any,
) -> Plan:
    """A plan from each rank's microbatch sizes and share of the state."""
    each["offload"] = offload
    return Plan(
        tuple(RankPlan(microbatch_sizes=m, state_fraction=f, **each) for m, f in ranks),
        reshard_after_forward=not stay_gathered,
        padded=padded,
        groups=groups,
    )


# all of them deal GLOBAL_BATCH samples
PLANS = {
    "one": plan_of(((4, 4), 1.0)),
    "even": plan_of(((2, 2), 0.5), ((2, 2), 0.5)),
    "3:1": plan_of(((3, 3), 0.75), ((2,), 0.25)),
    "no state": plan_of(((4,), 0.0), ((2, 2), 1.0)),
    "no data": plan_of(((4, 4), 0.2), ((), 0.8)),
    "idle first": plan_of(((), 0.5), ((4, 4), 0.5)),
    "idle last": plan_of(((3, 3, 2), 0.2), ((), 0.8)),
    "three": plan_of(((2, 1), 0.6), ((4,), 0.4), ((1,), 0.0)),
    "whole": plan_of(((6,), 0.75), ((2,), 0.25)),
    "whole even": plan_of(((4,), 0.5), ((4,), 0.5)),
    "whole three": plan_of(((3,), 0.6), ((4,), 0.4), ((1,), 0.0)),
    "hybrid 2 + 1": plan_of(((3,), 0.3), ((2,), 0.7), ((2, 1), 1.0), groups=(0, 0, 1)),
    "hybrid 2 x 2": plan_of(
        ((2, 1), 0.75), ((2,), 0.25), ((3,), 0.4), ((), 0.6), groups=(0, 0, 1, 1)
    ),
    "hybrid in turns": plan_of(
        ((2,), 0.5), ((2,), 0.4), ((3,), 0.5), ((1,), 0.6), groups=(0, 1, 0, 1)
    ),
}
