"""Prints an example program: ``python -m lightning_cephalo.plan``."""

from __future__ import annotations

from lightning_cephalo.plan.check import check
from lightning_cephalo.plan.program import Visit, compile_step


def example() -> str:
    """Return checked programs of two ranks, with two microbatches and one, for three units."""
    visits = [Visit(1), Visit(2), Visit(3)]
    programs = [compile_step(visits, microbatches, [True] * 4) for microbatches in (2, 1)]
    check(programs)
    return "\n\n".join(f"rank {rank}\n{program}" for rank, program in enumerate(programs))


if __name__ == "__main__":
    print(example())
