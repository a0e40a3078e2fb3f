"""Draws problems and plans to simulate, like those of real clusters."""

from __future__ import annotations

import dataclasses

import numpy as np

from lightning_cephalo.plan import (
    KeptCurves,
    Links,
    Plan,
    Problem,
    RankPlan,
    RankProfile,
    StateBytes,
    predict,
)

_SPREAD = 0.2
_MIB = 2**20
_LONGEST = 8
_BOUNDARY_BYTES = 16.0 * _MIB


@dataclasses.dataclass(frozen=True)
class Model:
    """The common ratios of the ranks' profiles, relative to a unit's forward of one sample.

    A rank's own ratios are these times or divided by up to 1.2.

    Attributes:
        backward: A unit's backward without recompute.
        tail: The root's forward and backward.
    """

    backward: float
    tail: float

    def profile(self, random: np.random.Generator) -> RankProfile:
        """Draw a rank of up to 5 times the slowest speed.

        A microbatch takes a fixed time and a time per sample. The rank can retain activations and
        offload boundaries.
        """
        forward_s = 4e-3 / random.uniform(1, 5)
        backward, tail = (
            ratio * (1 + _SPREAD) ** random.uniform(-1, 1) for ratio in (self.backward, self.tail)
        )
        size = np.arange(1, _LONGEST + 1) + random.uniform(0, 1)
        compute_bytes = (50 + 100 * size) * _MIB
        return RankProfile(
            name=f"{4e-3 / forward_s:.1f}x",
            forward_s=forward_s * size,
            backward_s=forward_s * (backward + 1) * size,
            tail_s=forward_s * tail * size,
            compute_bytes=compute_bytes,
            capacity_bytes=np.inf,
            kept=KeptCurves(forward_s * backward * size, compute_bytes),
            host_capacity_bytes=np.inf,
            # copying a unit's boundaries takes 2 to 100 % of its forward
            offload_bytes_per_s=_BOUNDARY_BYTES / (forward_s * random.uniform(0.02, 1)),
        )


def random_case(random: np.random.Generator, units: int) -> tuple[Problem, Plan]:
    """Draw a problem and a plan of 2 to 12 ranks.

    Each rank has its own speed and mode, and microbatches of up to 8 samples. Half of the plans
    share the samples by speed, with up to 12 microbatches on a rank. The others draw up to 6
    microbatches at random. A unit's gather takes up to 1.5 times the slowest rank's forward of it,
    its reduce half to twice the gather. Three in ten plans hold even shares.
    """
    model = Model(random.uniform(2, 2.3), random.uniform(0.5, 6))
    ranks = int(random.integers(2, 13))
    profiles = [model.profile(random) for _ in range(ranks)]
    fractions = (
        random.dirichlet(np.ones(ranks)) if random.random() < 0.7 else np.ones(ranks) / ranks
    )
    most = 8 * 6 / max(1 / profile.forward_s[0] for profile in profiles)
    balanced = random.random() < 0.5
    parts = []
    for profile, fraction in zip(profiles, fractions, strict=True):
        if balanced:
            samples = max(1, round(most / profile.forward_s[0]))
            count = -(-samples // int(random.integers(4, 9)))
            sizes = [samples // count + (index < samples % count) for index in range(count)]
        else:
            sizes = random.integers(1, 9, size=int(random.integers(0, 7))).tolist()
        offload = bool(random.random() < 0.3)
        parts.append(
            RankPlan(
                sizes,
                float(fraction),
                recompute=offload or bool(random.random() < 0.6),
                offload=offload,
            )
        )
    if not any(part.batch_size for part in parts):
        parts[0] = dataclasses.replace(parts[0], microbatch_sizes=(4,))
    problem = Problem(
        profiles,
        units,
        state=StateBytes(units * 200.0 * _MIB),
        global_batch_size=sum(part.batch_size for part in parts),
        boundary_bytes=_BOUNDARY_BYTES,
        kept_bytes=8 * _BOUNDARY_BYTES,
    )
    forward_s = max(rank.forward_s for rank in predict(problem, parts).ranks)
    gather_s = forward_s * random.uniform(0, 1.5)
    reduce_s = gather_s * random.uniform(0.5, 2)
    both_s = gather_s + reduce_s
    problem = dataclasses.replace(
        problem,
        links=Links(
            gather_s,
            reduce_s,
            gather_and_reduce_s=random.choice([None, max(gather_s, reduce_s), 1.2 * both_s]),
        ),
        even_links=Links(0.8 * gather_s, 0.8 * reduce_s),
        fill_s=both_s,  # as in profiles and estimates
        root_links=dataclasses.replace(
            problem.root_links,
            gather_s=gather_s * random.uniform(0, 2),
            reduce_s=reduce_s * random.uniform(0, 2),
        ),
        update_overhead_s=forward_s * random.uniform(0, 1),
        gathered_bytes=800.0 * _MIB,
    )
    return problem, Plan(parts)
