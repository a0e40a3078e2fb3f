"""Slow ranks and small memories on purpose: a mixed cluster on one machine, for demos and tests.

:class:`EmulatedDevice` watches every operator that torch runs in a ``with`` block, lets a virtual
clock run at the device's rate, and makes the host wait for that clock before anything that another
rank could notice. :class:`MemoryTracker` counts the bytes of live tensors and nothing else.
:class:`Emulation` is the Lightning callback that gives every rank its device.

Faithful:

- **Ratios of speed.** Ranks in lock-step hold their nominal ratio within a few percent, as long as
  the rates together stay at or under half of what the machine really does and the fastest stays
  under 0.8 of a core. Absolute seconds mean nothing.
- **A rank that other work on this machine keeps from running catches up**, by at most 0.25 s; a
  rank that waits for another (in a collective, in a sleep, for data) does not gain time by it.
- **Asynchronous collectives overlap with compute** as on a device with a copy engine: gloo moves
  the data in its own threads while this rank computes or sleeps.
- **FLOPs of matrix products, convolutions and attention**, forward and backward, by torch's own
  formulas; recomputation counts again. Causal attention counts as full attention, as in torch.
- **Bytes of live tensors**, storages freed and regrown in place included: within 5% of the
  allocator's own events.

Not faithful:

- An operator without a formula (element-wise work, normalisation, optimizers, the fused CPU
  kernels of ``nn.LSTM`` and of ``nn.TransformerEncoderLayer`` in evaluation) costs no virtual time
  unless ``bytes_per_s`` is given. It costs real time, which the clock hides only while the virtual
  time of the same step is longer.
- One rate for every shape and dtype: no efficiency that falls with small matrices, no caches, no
  launch latency, no tensor cores. The host's own work is hidden for up to 0.25 s at a time; on a
  real device it would leave the device idle once its queue is empty.
- A collective starts only when everything issued before it is done, as if it shared the compute
  stream; on a GPU it may start as soon as its own input is ready. Reading a value (``.item()``)
  does not wait for the device: call :meth:`EmulatedDevice.synchronize` before reading a clock.
- Links are not slowed here.
- Memory has no caching, rounding, fragmentation or scratch space inside an operator. Host and
  device memory are the same thing on a CPU: ``untrack`` what stands for host memory, also a data
  set that is made after the device was entered (in ``train_dataloader()``, say). Tensors that
  were not made by an operator (read from a file, sent by a worker process) count once ``track``-ed.
  Storage that grows through ``UntypedStorage.resize_`` is seen, and refused, at the next operator
  that touches it.
- torch runs compiled functions eagerly while a device or a tracker is active, and refuses those
  with ``fullgraph=True`` and flex attention.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lightning_cephalo.accelerator.emulated.device import EmulatedDevice, active_device
from lightning_cephalo.accelerator.emulated.memory_tracker import MemoryTracker

if TYPE_CHECKING:
    from lightning_cephalo.accelerator.emulated.callback import Emulation

__all__ = ["EmulatedDevice", "Emulation", "MemoryTracker", "active_device"]


def __getattr__(name: str) -> Any:
    # The profiler needs the tracker without Lightning, whose import takes seconds.
    if name != "Emulation":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from lightning_cephalo.accelerator.emulated.callback import Emulation

    return Emulation
