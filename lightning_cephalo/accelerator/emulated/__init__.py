"""Emulates a mixed cluster on one machine, with slow ranks and small memories, for demos and tests.

:class:`EmulatedDevice` watches every operator that torch runs in a ``with`` block. A virtual clock
runs at the device's rate, and the host waits for that clock before any effect that another rank
could observe. :class:`MemoryTracker` only counts the bytes of live tensors.
:class:`Emulation` is the Lightning callback that gives every rank its device.

Faithful:

- **Ratios of speed.** Ranks in lock-step hold their nominal ratio within a few percent. Conditions:
  the sum of the rates is at most half of the machine's real rate, and the fastest rank stays under
  0.8 of a core. Absolute seconds mean nothing.
- **A rank that is slowed by other work on this machine catches up**, by at most 0.25 s. A rank
  that waits for another (in a collective, in a sleep, for data) gains no time.
- **Asynchronous collectives overlap with compute** as on a device with a copy engine: gloo moves
  the data in its own threads while this rank computes or sleeps.
- **FLOPs of matrix products, convolutions and attention**, forward and backward, by torch's own
  formulas; recomputation counts again. Causal attention counts as full attention, as in torch.
- **Bytes of live tensors**, including storages freed and regrown in place: within 5% of the
  allocator's own events.

Not faithful:

- An operator without a formula costs no virtual time unless ``bytes_per_s`` is given. Examples are
  element-wise work, normalisation, optimizers, and the fused CPU kernels of ``nn.LSTM`` and of
  ``nn.TransformerEncoderLayer`` in evaluation. It costs real time, which the clock hides only while
  the virtual time of the same step is longer.
- All shapes and dtypes have one rate: small matrices are not less efficient, and there are no
  caches, launch latencies or tensor cores. The host's own work is hidden for up to 0.25 s at a
  time; a real device would be idle once its queue is empty.
- A collective starts only when everything issued before it is done, as if it shared the compute
  stream; on a GPU it may start as soon as its own input is ready. Reading a value (``.item()``)
  does not wait for the device: call :meth:`EmulatedDevice.synchronize` before reading a clock.
- The emulation does not slow down links.
- Memory has no caching, rounding, fragmentation or scratch space inside an operator.
- Host and device memory are the same on a CPU: ``untrack`` tensors that stand for host memory. This
  includes a dataset made after the device was entered (for example in ``train_dataloader()``).
- Tensors that no operator made (read from a file, sent by a worker process) count only after
  ``track``.
- The tracker notices storage that grows through ``UntypedStorage.resize_``, and may reject it, at
  the next operator that uses the storage.
- torch runs compiled functions eagerly while a device or a tracker is active. It then rejects
  functions with ``fullgraph=True``, and flex attention.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lightning_cephalo.accelerator.emulated.device import EmulatedDevice, active_device
from lightning_cephalo.accelerator.emulated.memory_tracker import MemoryTracker

if TYPE_CHECKING:
    from lightning_cephalo.accelerator.emulated.callback import Emulation

__all__ = ["EmulatedDevice", "Emulation", "MemoryTracker", "active_device"]


def __getattr__(name: str) -> Any:
    # The profiler uses the tracker without Lightning, whose import takes seconds.
    if name != "Emulation":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from lightning_cephalo.accelerator.emulated.callback import Emulation

    return Emulation
