"""Caps: how much of its device's memory a rank may use, and who sees to it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from numbers import Integral, Real
from typing import Any

from lightning_cephalo.accelerator.device import Device
from lightning_cephalo.accelerator.emulated import EmulatedDevice, active_device
from lightning_cephalo.common.quantities import BYTES
from lightning_cephalo.plan import InfeasibleError, Plan, PlanError
from lightning_cephalo.profiling.errors import TooLittleMemoryError
from lightning_cephalo.ranks.control import ControlGroup

_EXPECTED = (
    "expected a fraction of the device (0.5; 1.0 for all of it), bytes (8_000_000_000 or '8 GB'),"
    " or one of these per rank ({0: '8 GB', 1: 0.5})"
)


@dataclass(frozen=True)
class MemoryCap:
    """What the user allows; a float is a fraction of a device's memory, an int are bytes.

    Attributes:
        everyone: For the ranks that are not named; None: no cap.
        by_rank: For the ranks that are.
    """

    everyone: float | int | None
    by_rank: tuple[tuple[int, float | int], ...] = ()

    @classmethod
    def parse(cls, value: Any) -> MemoryCap:
        """Read what was given as ``memory_cap``.

        Raises:
            PlanError: If it is none; says what was expected.
        """
        if not isinstance(value, Mapping):
            return cls(amount("memory_cap", value))
        for rank in value:
            if isinstance(rank, bool) or not isinstance(rank, Integral) or rank < 0:
                raise PlanError(
                    f"memory_cap: expected ranks (0, 1, ...) as keys, but got {rank!r}."
                )
        amounts = {int(rank): amount(f"memory_cap[{rank}]", cap) for rank, cap in value.items()}
        return cls(None, tuple(sorted(amounts.items())))

    def bytes_of(self, rank: int, total_bytes: float) -> float:
        """Bytes that a rank may use of its device; infinite without a cap.

        Raises:
            PlanError: If it is a fraction of a device that does not tell its size.
        """
        allowed = dict(self.by_rank).get(rank, self.everyone)
        if allowed is None:
            return math.inf
        if isinstance(allowed, int):
            return float(allowed)
        if math.isinf(total_bytes):
            raise PlanError(
                f"memory_cap of rank {rank}: {allowed} of a device that does not tell its memory."
                " Give bytes, such as '8 GB'."
            )
        return allowed * total_bytes


def amount(field: str, value: Any) -> float | int:
    """Read a fraction (a float) or bytes (an int).

    Raises:
        PlanError: Says what was expected.
    """
    if isinstance(value, str):
        return math.floor(BYTES.parse(field, value))
    if isinstance(value, Integral):
        if int(value) > 1:  # 1 may mean all of the device, or True
            return int(value)
    elif isinstance(value, Real) and 0 < float(value) <= 1:
        return float(value)
    raise PlanError(f"{field}: {_EXPECTED}, but got {value!r}.")


def capped(device: Device, cap: MemoryCap | None, control: ControlGroup) -> Device:
    """Return this rank's device with no more capacity than its cap; collective.

    Raises:
        PlanError: On every rank, for a cap of a rank that is not there, or above its device.
    """
    allowed, failure = math.inf, None
    try:
        if cap is not None:
            _check_ranks(cap, control.world_size)
            allowed = cap.bytes_of(control.rank, device.total_bytes)
    except PlanError as raised:
        failure = raised
    control.raise_if_any_failed(failure, "reading memory_cap")
    rows = control.gather((allowed, device.total_bytes, device.name))
    for rank, (bytes_, total, name) in enumerate(rows):
        if not math.isinf(bytes_) and bytes_ > total:
            raise PlanError(
                f"memory_cap of rank {rank} is {_readable(bytes_)}, but its device {name!r} has"
                f" {_readable(total)}. Lower the cap to that, or leave it out."
            )
    smaller = min(device.capacity_bytes, allowed)
    return replace(device, capacity_bytes=smaller, cap_bytes=allowed)


def _check_ranks(cap: MemoryCap, world_size: int) -> None:
    strangers = [rank for rank, _ in cap.by_rank if rank >= world_size]
    if strangers:
        raise PlanError(
            f"memory_cap names rank {', '.join(map(str, strangers))}, but this run has"
            f" {world_size} ranks: expected 0 to {world_size - 1}."
        )


def check_plan(plan: Plan, caps_bytes: Sequence[float]) -> None:
    """Raise if a given plan says itself that it needs more than the caps allow.

    Raises:
        PlanError: Names the rank and the way out.
    """
    for rank, (part, cap_bytes) in enumerate(zip(plan.ranks, caps_bytes, strict=True)):
        if part.memory_bytes is not None and part.memory_bytes > cap_bytes:
            raise PlanError(
                f"The plan needs {_readable(part.memory_bytes)} on rank {rank}, but memory_cap"
                f" allows {_readable(cap_bytes)}. Raise the cap, or leave the plan out"
                " (plan=None) to have one made that obeys it."
            )


@contextmanager
def named_where_nothing_fits(caps_bytes: Sequence[float]) -> Iterator[None]:
    """Add the ranks' caps to the news that there is too little memory."""
    try:
        yield
    except (TooLittleMemoryError, InfeasibleError) as error:
        allowed = [
            f"rank {rank} {_readable(cap_bytes)}"
            for rank, cap_bytes in enumerate(caps_bytes)
            if not math.isinf(cap_bytes)
        ]
        if not allowed:
            raise
        hint = f"memory_cap allows {', '.join(allowed)}: a larger one may do."
        raise type(error)(f"{error} {hint}") from error


class CapOnDevice:
    """Has an emulated device refuse what is above the cap until :meth:`lift`.

    Other devices are left alone. CUDA's allocator could be told to
    (``torch.cuda.set_per_process_memory_fraction``), but it counts what it has reserved, which is
    more than what tensors take, and would refuse a plan that fills the cap.

    Args:
        cap_bytes: What this rank may use.
    """

    def __init__(self, cap_bytes: float) -> None:
        self._device: EmulatedDevice | None = None
        emulated = active_device()
        if emulated is not None and not math.isinf(cap_bytes):
            self._device, self._before = emulated, emulated.capacity_bytes
            emulated.change_capacity(math.floor(cap_bytes))

    def lift(self) -> None:
        """Give the device its own capacity back; does nothing the second time."""
        if self._device is not None:
            self._device.change_capacity(self._before)
            self._device = None


def _readable(amount: float) -> str:
    return f"{amount / 2**20:,.1f} MiB"
