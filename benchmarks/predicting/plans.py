"""Plans to predict and to train with: good ones and bad ones, for any number of ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from lightning_cephalo.plan import Plan, Problem, RankPlan
from lightning_cephalo.plan.solver.solve import priced

SOLVED = "the solver's"
QUICK = ("by speed, even state", "state all on the last", "many microbatches", "last offloads")


@dataclass(frozen=True)
class Case:
    """A plan other than the solver's, with its predictions."""

    name: str
    plan: Plan


def pieces(samples: int, size: int) -> tuple[int, ...]:
    """Return microbatches of ``size`` samples; the last one has the rest."""
    whole, rest = divmod(samples, size)
    return (size,) * whole + ((rest,) if rest else ())


def ragged(samples: int) -> tuple[int, ...]:
    """Return microbatches of 3, 2 and 1 samples in turn."""
    found: list[int] = []
    while samples:
        found.append(min((3, 2, 1)[len(found) % 3], samples))
        samples -= found[-1]
    return tuple(found)


def even(samples: int, ranks: int) -> list[int]:
    """Return the samples of every rank; the first ranks get one remaining sample each."""
    whole, rest = divmod(samples, ranks)
    return [whole + (rank < rest) for rank in range(ranks)]


def cases(problem: Problem, speeds: Sequence[float]) -> list[Case]:
    """Return all plans except the solver's.

    Args:
        problem: Measured, with and without recomputation.
        speeds: Relative speeds of the ranks; the global batch divides by their sum.
    """
    world, samples = len(speeds), problem.global_batch_size
    fair = [round(samples * speed / sum(speeds)) for speed in speeds]
    idle = [samples - sum(fair[1:-1]), *fair[1:-1], 0]
    halves = [1 / world] * world
    skewed = [speed / sum(speeds) for speed in speeds]
    lone = [1.0] + [0.0] * (world - 1)

    def case(
        name: str,
        batches: Sequence[tuple[int, ...]],
        fractions: Sequence[float],
        keeping: Sequence[int] = (),
        offloading: int | None = None,
        reshard: bool = True,
    ) -> Case:
        ranks = [
            RankPlan(
                sizes,
                fraction,
                recompute=rank not in keeping,
                offload=rank == offloading,
            )
            for rank, (sizes, fraction) in enumerate(zip(batches, fractions, strict=True))
        ]
        chosen = replace(problem, reshard_after_forward=reshard)
        return Case(name, priced(chosen, ranks, backend="by hand"))

    def cut(batches: Sequence[int], size: int) -> list[tuple[int, ...]]:
        largest = [profile.largest_microbatch_size for profile in problem.ranks]
        return [pieces(b, min(size, most)) for b, most in zip(batches, largest, strict=True)]

    everyone, last = range(world), world - 1
    return [
        case("even batches, even state", cut(even(samples, world), 4), halves),
        case("by speed, even state", cut(fair, 4), halves),
        case("state all on the first", cut(fair, 4), lone),
        case("state all on the last", cut(fair, 4), lone[::-1]),
        case("many microbatches", cut(fair, 1), skewed),
        case("large microbatches", cut(fair, samples), skewed),
        case("ragged (3, 2, 1)", [ragged(batch) for batch in fair], skewed[::-1]),
        case("last without data", cut(idle, 4), halves),
        case("last offloads", cut(fair, 2), skewed, offloading=last),
        case("first offloads", cut(fair, 2), halves, offloading=0),
        case("none recomputes", cut(fair, 2), skewed, keeping=everyone),
        case("units stay gathered", cut(fair, 4), skewed, reshard=False),
        case("none recomputes, all stay", cut(fair, 2), halves, everyone, reshard=False),
        case("the last recomputes", cut(fair, 4), halves, keeping=everyone[:-1]),
    ]
