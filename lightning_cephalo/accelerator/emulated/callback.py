"""A Lightning callback that gives the ranks of one machine different speeds and memories."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from lightning_cephalo.accelerator.emulated.clock import VirtualClock
from lightning_cephalo.accelerator.emulated.device import EmulatedDevice
from lightning_cephalo.accelerator.emulated.rate import (
    emulated_flops_per_s,
    measure_flops_per_s,
    usable_processors,
)

Rates = float | Sequence[float | None] | None
"""A rate of every rank, or one for each; None: what has it takes no time."""


def _of_ranks(name: str, given: Rates, count: int) -> tuple[float | None, ...]:
    rates = (given,) * count if given is None or isinstance(given, (int, float)) else tuple(given)
    if len(rates) != count:
        raise ValueError(
            f"{name}: expected one number, or one for each of the {count} speeds, got"
            f" {len(rates)}: {given!r}."
        )
    # on its own rank only, a bad one would be found while others wait for that rank
    if not all(rate is None or (rate > 0 and math.isfinite(rate)) for rate in rates):
        raise ValueError(f"{name}: expected positive numbers or None, got {given!r}.")
    return rates


class Emulation(Callback):
    """Gives every rank of a CPU run an emulated device with its own speed and memory.

    ::

        Trainer(accelerator="cpu", devices=2, strategy="ddp", callbacks=[Emulation(speeds=(3, 1))])

    The callback enters the device in ``setup``, before the strategy uses the model, and leaves it
    in ``teardown`` or ``on_exception``. In between, every rank uses one torch thread.

    The clock is synchronized at the end of every batch. Put this callback first, so that others
    measure true step times, from the end of one batch to the end of the next. (Data loading in
    between is hidden like other host work. To time a part, call :meth:`EmulatedDevice.synchronize`
    before and after it.)

    Parameters and optimizer state count as device memory from the start of training, validation,
    testing or predicting. Tensors that operators make count immediately.

    Works with any strategy and launcher whose ranks all run on this machine.

    Args:
        speeds: Relative speed of every global rank; any unit.
        capacity_bytes: Device memory of every global rank. None sets no limit, for one rank or all.
        total_flops_per_s: Sum of all ranks' rates. By default rank 0 measures this machine, and all
            ranks use the largest total at which the ratios hold (see ``emulated_flops_per_s`` in
            ``accelerator/emulated/rate.py``). Set it to make a run repeatable to the millisecond.
            A rate that is too high breaks the ratios without an error.
        clock: Makes the clock of this rank's device; see :class:`EmulatedDevice`.
        link_bytes_per_s: Rate of every rank's copies between device and host, as for
            :class:`EmulatedDevice`; or one for each rank.
        host_updates_per_s: Parameters per second that every rank's host updates; the same.

    Raises:
        ValueError: On construction, for a speed, capacity or total that is not a positive number,
            or for different lengths. In ``setup``, on every rank, if the number of ranks differs
            from the number of speeds.
        torch.OutOfMemoryError: While running, on a rank whose tensors exceed its capacity.
    """

    def __init__(
        self,
        speeds: Sequence[float] = (3, 1),
        capacity_bytes: Sequence[int | None] | None = None,
        total_flops_per_s: float | None = None,
        clock: Callable[[], VirtualClock] = VirtualClock,
        link_bytes_per_s: Rates = None,
        host_updates_per_s: Rates = None,
    ) -> None:
        super().__init__()
        self.speeds = tuple(float(speed) for speed in speeds)
        if not self.speeds or not all(speed > 0 and math.isfinite(speed) for speed in self.speeds):
            raise ValueError(f"speeds: expected a positive number per rank, got {speeds!r}.")
        if total_flops_per_s is not None and not (
            total_flops_per_s > 0 and math.isfinite(total_flops_per_s)
        ):
            raise ValueError(
                f"total_flops_per_s: expected a positive number or None, got {total_flops_per_s!r}."
            )
        self.total_flops_per_s = total_flops_per_s
        self.capacity_bytes = (
            (None,) * len(self.speeds) if capacity_bytes is None else tuple(capacity_bytes)
        )
        if len(self.capacity_bytes) != len(self.speeds):
            raise ValueError(
                f"capacity_bytes: expected one for each of the {len(self.speeds)} speeds, got "
                f"{len(self.capacity_bytes)}: {capacity_bytes!r}."
            )
        for capacity in self.capacity_bytes:
            if capacity is not None and not capacity > 0:
                raise ValueError(
                    f"capacity_bytes: expected positive numbers or None, got {capacity_bytes!r}."
                )
        count = len(self.speeds)
        self.link_bytes_per_s = _of_ranks("link_bytes_per_s", link_bytes_per_s, count)
        self.host_updates_per_s = _of_ranks("host_updates_per_s", host_updates_per_s, count)
        self._clock = clock
        self._device: EmulatedDevice | None = None
        self._threads = 0
        self._measured: tuple[float, ...] | None = None

    @property
    def device(self) -> EmulatedDevice | None:
        """This rank's device between ``setup`` and ``teardown``, else None."""
        return self._device

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if self._device is not None:
            return
        if trainer.world_size != len(self.speeds):
            raise ValueError(
                f"Emulation has speeds for {len(self.speeds)} ranks, got {trainer.world_size}. "
                f"Use Trainer(devices={len(self.speeds)}) or as many speeds as ranks."
            )
        rank = trainer.global_rank
        flops_per_s = self._rates(trainer)[rank]
        device = EmulatedDevice(
            flops_per_s=flops_per_s,
            capacity_bytes=self.capacity_bytes[rank],
            link_bytes_per_s=self.link_bytes_per_s[rank],
            host_updates_per_s=self.host_updates_per_s[rank],
            name=f"cpu x{self.speeds[rank]:g}",
            clock=self._clock,
        )
        self._threads = torch.get_num_threads()
        torch.set_num_threads(1)
        self._device = device.__enter__()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._leave(None)

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        self._leave(exception)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._track(pl_module, *[optimizer.state for optimizer in trainer.optimizers])

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._track(pl_module)

    on_test_start = on_predict_start = on_validation_start

    def on_train_epoch_start(self, *_: Any) -> None:
        self._forget_delays()

    def on_validation_end(self, *_: Any) -> None:
        self._forget_delays()

    def on_train_batch_end(self, *_: Any, **__: Any) -> None:
        self._synchronize()

    on_validation_batch_end = on_test_batch_end = on_predict_batch_end = on_train_batch_end

    def __getstate__(self) -> dict[str, Any]:
        # A device belongs to the thread that entered it: a copy of the callback has no device.
        return {**self.__dict__, "_device": None}

    def _rates(self, trainer: Trainer) -> tuple[float, ...]:
        if self.total_flops_per_s is not None:
            return tuple(self.total_flops_per_s * speed / sum(self.speeds) for speed in self.speeds)
        if self._measured is None:
            measured: tuple[float, ...] = ()
            if trainer.global_rank == 0:
                processors = usable_processors()
                core_flops_per_s = measure_flops_per_s(min(processors, len(self.speeds)))
                measured = emulated_flops_per_s(self.speeds, core_flops_per_s, processors)
            # If each rank measured on its own, the ratios would be as noisy as the machine.
            self._measured = trainer.strategy.broadcast(measured, src=0)
        return self._measured

    def _track(self, *values: Any) -> None:
        if self._device is not None:
            self._device.track(*values)
        self._forget_delays()

    def _synchronize(self) -> None:
        # The host keeps credit for the cost of the optimizer and the loop after the step's last
        # collective. It catches up in the next step, so steps take their virtual time on average.
        if self._device is not None:
            self._device.synchronize(keep_credit=True)

    def _forget_delays(self) -> None:
        # One second of setup, or of writing a checkpoint, must not make the next steps too fast.
        if self._device is not None:
            self._device.synchronize()

    def _leave(self, exception: BaseException | None) -> None:
        device, self._device = self._device, None
        if device is None:
            return
        device.__exit__(None if exception is None else type(exception), exception, None)
        torch.set_num_threads(self._threads)
