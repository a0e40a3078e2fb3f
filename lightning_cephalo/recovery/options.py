"""The user's option ``recover``."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from lightning_cephalo.common.errors import RecoveryError
from lightning_cephalo.recovery.store import Agent, job_named

AGENT = "LIGHTNING_CEPHALO_AGENT"
"""Environment variable with the process number of the agent, if it is not the ranks' parent."""
SHARE = 0.02
"""Part of the time that keeping steps takes, where the user does not say how often."""


@dataclass(frozen=True)
class Recovery:
    """How steps are kept for a restart.

    ::

        CephaloStrategy(recover=Recovery(every=10, folder="/local/disk"))

    Args:
        every: Updates from one kept step to the next. A restart repeats as many at most. None: so
            many that keeping takes a fiftieth of the time.
        folder: A folder on a local disk, where steps are kept. None: the host's memory,
            ``/dev/shm``.
        job: A name under which the next start of the script finds the steps, whoever starts it.
            None: the agent that restarts the ranks is the name.

    Raises:
        RecoveryError: If ``every`` is less than 1, or the name is empty.
    """

    every: int | None = 1
    folder: str | os.PathLike[str] | None = None
    job: str | None = None

    def __post_init__(self) -> None:
        is_number = isinstance(self.every, int) and not isinstance(self.every, bool)
        if self.every is not None and (not is_number or self.every < 1):
            raise RecoveryError(f"every: expected 1 update or more, but got {self.every!r}.")
        if self.job == "":
            raise RecoveryError("job: expected a name or None, but got an empty text.")

    @property
    def path(self) -> Path | None:
        """The folder as a path; None: the host's memory."""
        return None if self.folder is None else Path(self.folder)


@dataclass(frozen=True)
class Wish:
    """What the user wants: the option ``recover``, read once.

    Attributes:
        recovery: How steps are kept; None: they are not.
        is_automatic: Whether nothing is kept, with a warning at most, where that cannot be.
    """

    recovery: Recovery | None
    is_automatic: bool = False

    @classmethod
    def parse(cls, value: bool | Literal["auto"] | Recovery) -> Wish:
        """Read the option.

        Raises:
            RecoveryError: If the value is none that it may have.
        """
        if isinstance(value, Recovery):
            return cls(value)
        if isinstance(value, bool):
            return cls(Recovery() if value else None)
        if value == "auto":
            return cls(Recovery(every=None), is_automatic=True)
        raise RecoveryError(
            f"recover: expected True, False, 'auto' or a Recovery, but got {value!r}."
        )

    def job(self) -> str | None:
        """Return the folder's name of this job; None if nothing restarts the ranks.

        Raises:
            RecoveryError: If the user wants steps kept, and nothing restarts the ranks.
        """
        if self.recovery is None:
            return None
        if self.recovery.job is not None:
            return job_named(self.recovery.job)
        if int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")) > 0:
            return Agent.of(int(os.environ.get(AGENT, os.getppid()))).name
        if self.is_automatic:
            return None
        raise RecoveryError(
            "recover: nothing restarts the ranks of this run. Start it with `python -m"
            " lightning_cephalo.run`, or with torchrun and --max-restarts; or name the job, so that"
            " a start by hand finds its steps: CephaloStrategy(recover=Recovery(job=...))."
        )


def fitting_every(keeping_s: float, update_s: float) -> int:
    """Return how many updates lie between two kept steps, if keeping is to take a fiftieth.

    Args:
        keeping_s: Seconds that keeping a step takes.
        update_s: Seconds from one update to the next, without keeping.
    """
    return max(1, math.ceil(keeping_s / (SHARE * max(update_s, 1e-6))))


def attempt() -> int:
    """Return how many times the agent has restarted the ranks."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
