"""Measures the peak memory of a step, and derives the terms of the planner's memory formula.

The formula is in plan/cost.py. The memory between forward and backward gives what samples and
microbatches keep, by its growth; ``compute_bytes[m]`` is the rest of the peak. (The peak's own
growth would be wrong: it may lie where part of the retained bytes is released.) Both are measured
up to the step's first reduce and from there on, when a rank holds what reduces receive into.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

from lightning_cephalo.accelerator.emulated import MemoryTracker
from lightning_cephalo.common.errors import TooLittleMemoryError
from lightning_cephalo.common.quantities import format_mib
from lightning_cephalo.execution.observer import Observer
from lightning_cephalo.execution.sharded_model import ShardedModel
from lightning_cephalo.observe.memory import MemoryMeter
from lightning_cephalo.plan import StateBytes
from lightning_cephalo.plan.program import Instruction, Operation
from lightning_cephalo.sharding.discovery import UnitKind
from lightning_cephalo.sharding.placement import local_part
from lightning_cephalo.sharding.unit import Unit

# The parameter, its gradient and Adam's two moments; ``prepare.with_optimizers`` counts others.
_STATE_COPIES = 4
_EARLY_COPIES = 3  # early updates use gradients in the memory of full ones
# Temporary tensors of an update, of the size of what it updates: torch's loops over parameters make
# two of one parameter, its loops over lists one of each.
_UPDATE_COPIES = 2
# Cuts lie between rows: a rank may have a row more than its share, with its state, its gradient and
# two buffers that receive it.
_ROW_COPIES = _STATE_COPIES + 2
# One number per parameter, rounded up as an allocator does.
_COUNTER_BYTES = 64


def state_of(model: ShardedModel) -> tuple[StateBytes, StateBytes]:
    """Return the whole model's state, which the plan's fractions divide, and with early updates.

    A trained parameter takes 16, or 12 with early updates. Then what reduces receive comes from the
    first reduce of a block on, and what an update makes while a unit is updated.
    """
    (root, *others), heads = model.units, model.of_kind(UnitKind.HEAD)
    received = _received(model.units, model)
    # heads' gradients and their reduces precede the first block's
    of_heads = sum(unit.gradient_bytes for unit in heads) + _received(heads, model)
    makes = _UPDATE_COPIES * max((unit.gradient_bytes for unit in others), default=0)
    updating = max(
        makes + _received(others, model),
        makes + _received([root], model) + root.gradient_bytes,
        (1 + _UPDATE_COPIES) * root.gradient_bytes,
    )

    def held(copies: int) -> float:
        masters = ((flat.contents.master_bytes, flat.trainable) for flat in model.flats)
        return float(sum(nbytes * (copies if is_trained else 1) for nbytes, is_trained in masters))

    return StateBytes(held(_STATE_COPIES) + received), StateBytes(
        held(_EARLY_COPIES) + of_heads,
        reducing_bytes=max(0.0, received - of_heads),
        updating_bytes=max(0.0, updating - of_heads),
    )


def _received(units: Sequence[Unit], model: ShardedModel) -> int:
    """Return the bytes that one reduce receives into, over all ranks; reduces do not overlap."""
    pairs = [(unit.sent_gradient_bytes, unit.gradient_bytes) for unit in units]
    # summands that were rounded are added up in memory of their own
    return max((model.summands * sent + whole * (sent < whole) for sent, whole in pairs), default=0)


def resting_bytes(model: ShardedModel, optimizers: Sequence[Optimizer]) -> float:
    """Return what this rank holds between steps beyond its share: buffers, copies, counters."""
    storages = [buffer.untyped_storage() for buffer in model.module.buffers()]
    resting = sum({each.data_ptr(): each.nbytes() for each in storages}.values())
    resting += model.executor.overlay.buffers.resting_bytes
    resting += _COUNTER_BYTES * sum(len(flat.sharded) for flat in model.flats)
    allocator = model.accelerator.allocator
    if allocator is not None:
        state = [flat.shard for flat in model.flats]
        state += [flat.gradient.own for flat in model.flats if flat.gradient.own is not None]
        leaves = pytree.tree_leaves([dict(own.state) for own in optimizers])  # a new Adagrad's
        state += [local_part(leaf) for leaf in leaves if isinstance(leaf, DTensor)]
        lent = sum(pool.held_bytes for pool in model.buffer_pools)
        rows = sum(own.nbytes for own in state)
        resting = max(resting, allocator.current_bytes - lent - rows)
    return float(resting + _ROW_COPIES * math.prod(largest_row(model)))


def largest_row(model: ShardedModel) -> tuple[int, int]:
    """Return the elements of the largest row of a trained parameter, and the bytes of each."""
    rows = (
        (math.prod(shape[1:]), flat.contents.master_dtype.itemsize)
        for flat in model.flats
        for shape in flat.contents.shapes
        if flat.trainable and shape
    )
    return max(rows, key=math.prod, default=(0, 0))


def check_capacities(
    model: ShardedModel,
    capacity_bytes: float,
    keeps_gradients: bool = True,
    *,
    reshard_after_forward: bool = True,
) -> None:
    """Raise TooLittleMemoryError on all ranks if any cannot hold its minimum; collective."""
    gathered, ways_out = model.gathered_bytes, "smaller units (units=)"
    if not reshard_after_forward:
        gathered += model.unresharded_bytes
        ways_out = f"reshard_after_forward=True, {ways_out}"
    held = float(sum(flat.shard.nbytes for flat in model.flats))
    if keeps_gradients:
        held += sum(flat.shard.nbytes for flat in model.flats if flat.trainable)
    else:
        held += model.fractions[model.control.rank] * _received(model.units, model)
    for rank, (capacity, own) in enumerate(model.control.gather([capacity_bytes, held])):
        if own + gathered > capacity:
            raise TooLittleMemoryError(
                f"Rank {rank} cannot take part: it may fill {format_mib(capacity)}, but gathered"
                f" units take {format_mib(gathered)} and its parameters and gradients"
                f" {format_mib(own)}; {format_mib(own + gathered - capacity)} are missing. Use"
                f" {ways_out}, a lower precision, or leave this device out."
            )


class StepMeter(Observer):
    """Measures what a step holds beyond the state, not by an emulated device's own figures."""

    def __init__(self, model: ShardedModel) -> None:
        self._model = model
        self._meter = MemoryMeter(model.accelerator.allocator, _StepTracker(model))
        self._figures = self._meter.figures
        self._resting_bytes = self._kept_bytes = 0
        self._at_first_reduce: tuple[int, int] | None = None

    def forward_done(self) -> None:
        """Record the memory between the forward and the backward."""
        self._kept_bytes = self._figures.current_bytes

    def before(self, instruction: Instruction) -> None:
        is_first = instruction.operation is Operation.REDUCE and self._at_first_reduce is None
        if is_first and self._model.units[instruction.unit].kind is not UnitKind.HEAD:
            self._at_first_reduce = self._figures.peak_bytes, self._figures.current_bytes
            self._figures.reset_peak()

    @contextmanager
    def measuring(self) -> Iterator[None]:
        """Measure the step inside."""
        # these exist already, and are empty until units are gathered
        buffers = [*[flat.gathered.full for flat in self._model.flats], *self._model.buffers()]
        with self._meter.measuring(*buffers):
            lent = sum(pool.held_bytes for pool in self._model.buffer_pools)
            self._resting_bytes = self._figures.current_bytes - lent
            with self._model.executor.link.observed_by(self):
                yield

    def held(self, samples_bytes: int) -> Held:
        """Return what the step held."""
        last_bytes, reducing = self._figures.peak_bytes, self._at_first_reduce
        peak_bytes, reducing_kept_bytes = reducing or (last_bytes, 0)
        figures = (peak_bytes, self._kept_bytes, last_bytes if reducing else 0, reducing_kept_bytes)
        return Held(*(max(0, each - self._resting_bytes) + samples_bytes for each in figures))


class _StepTracker(MemoryTracker):
    """Leaves out the buffers of a reduce: the state counts them, by the planned shares."""

    def __init__(self, model: ShardedModel) -> None:
        super().__init__()
        self._model = model

    def _after(self, function: Any, operator: Any, args: Any, kwargs: Any, result: Any) -> None:
        if not operator.collective or "recv" not in str(function):
            return
        # the buffers that a gather receives into are counted
        known = {flat.gathered.full.untyped_storage()._cdata for flat in self._model.flats}
        known |= {b.storage._cdata for pool in self._model.parameter_pools for b in pool.buffers}
        self.untrack(*[own for own in args[0] if own.untyped_storage()._cdata not in known])


class Held(NamedTuple):
    """Bytes of a step beyond the state, up to the first reduce and (``reducing_``) from it on."""

    peak_bytes: float = 0.0
    kept_bytes: float = 0.0  # between the forward and the backward
    reducing_peak_bytes: float = 0.0
    reducing_kept_bytes: float = 0.0


class RetainedBytes(NamedTuple):
    """Bytes that are retained from the forward until the backward."""

    sample_bytes: float = 0.0
    microbatch_bytes: float = 0.0
    reducing_sample_bytes: float = 0.0  # from the first reduce on
