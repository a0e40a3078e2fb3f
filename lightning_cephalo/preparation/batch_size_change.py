"""Makes plans for other global batches while a training runs, for searches for a batch size.

Every batch is measured as at a start with it, or found in what an earlier start has measured. So a
trial trains by the plan that a training with its batch would have.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from torch.optim import Optimizer

from lightning_cephalo.common.errors import InfeasibleError, RemoteRankError
from lightning_cephalo.plan import Problem
from lightning_cephalo.plan.reasons import reasons, surprises
from lightning_cephalo.preparation.planned import Planned, planned
from lightning_cephalo.preparation.prepare import Job
from lightning_cephalo.preparation.session import Session
from lightning_cephalo.profiling.isolation import forget_gradients
from lightning_cephalo.profiling.memory_model import predicted


def begin_with_less(job: Job, session: Session, plan_of: Callable[[Job], Planned]) -> Planned:
    """Return a plan for a job, or for the largest half, quarter and so on that has one; collective.

    A search may begin with a batch that is too large: its first trial will find so.

    Args:
        job: The training to run.
        session: Its session.
        plan_of: Measures a job and makes its plan; collective.

    Raises:
        InfeasibleError: On rank 0, if there is no plan for the smallest batch.
        RemoteRankError: On the other ranks, for the same reason.
    """
    control = session.control
    while True:
        try:
            return plan_of(job)
        except (InfeasibleError, RemoteRankError) as error:
            is_short = control.any(isinstance(error, InfeasibleError))
            half = job.global_batch_size // 2
            if not is_short or half < control.world_size:
                raise
            job = replace(job, global_batch_size=half)


def follow_batch_size(
    size: int,
    session: Session,
    optimizers: Sequence[Optimizer],
    measure: Callable[[Job], Problem],
) -> Planned:
    """Follow a plan for another global batch from the next step on; collective.

    Args:
        size: Samples of the batch over all ranks.
        session: The session of the training, between two steps.
        optimizers: All optimizers.
        measure: Measures a job, or loads an earlier measurement.

    Raises:
        InfeasibleError: On rank 0, if no plan fits the batch. The old plan stays.
        TooLittleMemoryError: On every rank, if none can run the smallest microbatch.
        RemoteRankError: On the other ranks, for the same reason.

    Returns:
        The job with that batch, what was measured for it, and the plan.
    """
    session.optimizers = list(optimizers)
    forget_gradients(session.model.module)  # those of the last step may be given back already
    job = replace(session.job, global_batch_size=size, late=session.late)
    found = planned(job, session.model, measure)
    session.check_move(found.plan)
    session.apply(found.plan, predicted(found.problem, found.plan, session.model))
    session.job = found.job
    session.notes = (
        *reasons(found.problem, found.plan),
        *surprises(found.problem, found.plan),
    )
    return found
