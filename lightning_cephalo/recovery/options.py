"""The user's option ``recover``."""

from __future__ import annotations

import math
import os
from dataclasses import InitVar, dataclass
from pathlib import Path
from typing import Any, Literal

from lightning_cephalo.common.errors import RecoveryError
from lightning_cephalo.recovery.store import Agent, job_named

AGENT = "LIGHTNING_CEPHALO_AGENT"
"""Environment variable with the process number of the agent, if it is not the ranks' parent."""
LAUNCHES = "LIGHTNING_CEPHALO_LAUNCHES"
"""Environment variable with how many times the agent has begun anew: its counts have, too."""
MOST_HOSTS = "LIGHTNING_CEPHALO_MOST_HOSTS"
"""Environment variable with how many hosts may take part."""
_RUN_ID = "TORCHELASTIC_RUN_ID"
SHARE = 0.02
"""Part of the time that keeping steps takes, where the user does not say how often."""


@dataclass(frozen=True)
class Recovery:
    """How steps are kept for a restart.

    ::

        CephaloStrategy(recover=Recovery(every=10, copies=1))
        CephaloStrategy(recover=Recovery(storage="s3://bucket/run"))

    Args:
        every: Updates from one kept step to the next. A restart repeats as many at most. None: so
            many that keeping takes a fiftieth of the time, and copies a twentieth of that of the
            network.
        copies: Copies of each rank's rows on other hosts, so that training goes on where a host is
            lost with its memory. They are made where hosts have room, beside training. A step is
            kept when its copies are; the next one is not begun before.
        folder: A folder on a local disk, where steps are kept. None: the host's memory,
            ``/dev/shm``.
        storage: A folder that outlives all hosts, as a path or a URL for fsspec, such as
            ``"s3://bucket/run"``. Kept steps are sent there beside training. A restart reads back
            only the rows that no host has any more. Each training needs one of its own. What is
            read from it is trusted, as a checkpoint is. Credentials and endpoints are found as
            fsspec finds them.
        storage_every_s: Seconds from one step that is sent there to the next, at least.
        job: A name under which the next start of the script finds the steps, whoever starts it.
            None: the agent that restarts the ranks is the name, or else the storage.
        wait_s: How long to wait for more hosts where those that are here cannot hold the model, if
            the launcher's ``--nnodes`` allows more.

    Raises:
        RecoveryError: If ``every`` is less than 1, ``copies`` or ``storage_every_s`` less than 0,
            or a name empty.
        TypeError: For ``stay``, which went.
    """

    every: int | None = None
    copies: int = 0
    folder: str | os.PathLike[str] | None = None
    storage: str | os.PathLike[str] | None = None
    storage_every_s: float = 300.0
    job: str | None = None
    wait_s: float = 600.0
    stay: InitVar[Any] = None

    def __post_init__(self, stay: Any) -> None:
        if stay is not None:
            raise TypeError(
                "Recovery(stay=...) went: a restart costs less. Leave it out, and start the"
                " ranks with `python -m lightning_cephalo.run`, which forks them with all imports."
            )
        is_number = isinstance(self.every, int) and not isinstance(self.every, bool)
        if self.every is not None and (not is_number or self.every < 1):
            raise RecoveryError(f"every: expected 1 update or more, but got {self.every!r}.")
        if not isinstance(self.copies, int) or isinstance(self.copies, bool) or self.copies < 0:
            raise RecoveryError(f"copies: expected 0 or more, but got {self.copies!r}.")
        for name in ("wait_s", "storage_every_s"):
            seconds = getattr(self, name)
            if not seconds >= 0:
                raise RecoveryError(f"{name}: expected 0 s or more, but got {seconds!r}.")
        if self.storage is not None and not os.fspath(self.storage):
            raise RecoveryError("storage: expected a path, a URL or None, but got an empty text.")
        if self.job == "":
            raise RecoveryError("job: expected a name or None, but got an empty text.")

    @property
    def path(self) -> Path | None:
        """The folder as a path; None: the host's memory."""
        return None if self.folder is None else Path(self.folder)


@dataclass(frozen=True)
class Wish:
    """The option ``recover``, read once; ``is_automatic``: a warning if steps cannot be kept."""

    recovery: Recovery | None
    is_automatic: bool = False

    @classmethod
    def parse(cls, value: bool | Literal["auto"] | Recovery) -> Wish:
        """Read the option, or raise RecoveryError."""
        if isinstance(value, Recovery):
            return cls(value)
        if isinstance(value, bool):
            return cls(Recovery(every=1) if value else None)
        if value == "auto":
            return cls(Recovery(), is_automatic=True)
        raise RecoveryError(
            f"recover: expected True, False, 'auto' or a Recovery, but got {value!r}."
        )

    def job(self) -> str | None:
        """Return the folder's name of this job; None if nothing is kept.

        Raises:
            RecoveryError: If the user wants steps kept, and nothing restarts the ranks.
        """
        if self.recovery is None:
            return None
        if self.recovery.job is not None:
            return job_named(self.recovery.job)
        if int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")) > 0:
            agent = os.environ.get(AGENT)
            return (Agent.above(_RUN_ID) if agent is None else Agent.of(int(agent))).name
        if self.is_automatic:
            return None
        if self.recovery.storage is not None:
            return job_named(os.fspath(self.recovery.storage))
        raise RecoveryError(
            "recover: nothing restarts the ranks of this run. Start it with `python -m"
            " lightning_cephalo.run`, or with torchrun and --max-restarts; or name the job, so that"
            " a start by hand finds its steps: CephaloStrategy(recover=Recovery(job=...))."
        )


def fitting_every(keeping_s: float, update_s: float) -> int:
    """Return how many updates lie between two kept steps, if keeping is to take a fiftieth."""
    return max(1, math.ceil(keeping_s / (SHARE * max(update_s, 1e-6))))


def attempt() -> int:
    """Return how many times the ranks were started again."""
    counts = ("TORCHELASTIC_RESTART_COUNT", LAUNCHES)
    return sum(int(os.environ.get(name, "0")) for name in counts)
