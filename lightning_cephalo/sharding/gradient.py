"""The gradient of a flat: of all parameters on each rank while armed, of this rank's slice after.

[Note: gradients in place]
A unit that is updated inside the backward needs its reduced gradient for a moment only. It stays
in the memory of the full gradient then, as this rank's part of it. That buffer is given back behind
the update rather than behind the reduce, and before the next unit is armed: no more buffers are
needed. New memory for it would cost page faults on a CPU in each step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_cephalo.sharding.buffers import Buffer
from lightning_cephalo.sharding.collectives import all_reduce, reduce_slices
from lightning_cephalo.sharding.contents import Contents, Cut, Memory
from lightning_cephalo.sharding.gathered import passed_on
from lightning_cephalo.sharding.placement import as_dtensor, local_part
from lightning_cephalo.sharding.same_values import cut_gradients
from lightning_cephalo.sharding.spent_gradients import spent
from lightning_cephalo.sharding.transfers import Pending


@dataclass(frozen=True)
class Armed:
    """Memory in which gradients of all parameters add up, and the versions of its zeroed views."""

    buffer: Buffer
    memory: Memory
    versions: Sequence[int]


@dataclass(frozen=True)
class Reduced:
    """The reduced gradient of this rank's slice; without ``shard`` it is given back."""

    # per parameter a view of it, or what is left of it; None: nobody shall see it
    faces: Sequence[DTensor | None]
    shard: Tensor | None = None
    # the memory in which it stays; None: its own
    buffer: Buffer | None = None


class Gradient:
    """The gradient of a flat: it lands for gathered parameters, and sharded ones show the sum."""

    def __init__(
        self,
        contents: Contents,
        parameters: Sequence[nn.Parameter],
        sharded: Sequence[nn.Parameter],
    ) -> None:
        self._contents, self._parameters, self._sharded = contents, parameters, sharded
        self.armed: Armed | None = None
        self.reduced = Reduced([None] * len(sharded))
        self._spent: dict[int, DTensor] = {}
        # what gathered parameters show between a forward and its backward, and had before
        self._shown: list[Tensor | None] | None = None
        self._hidden: list[Tensor | None] = []

    # -- of all parameters --------------------------------------------------------------------

    def arm(self) -> None:
        """Give autograd zeroed views of memory for all gradients to accumulate into."""
        contents, context = self._contents, self._contents.context
        if self.reduced.buffer is not None:  # of a step that has failed
            self.forget()
        if self.armed is None:
            buffer = context.gradient_buffers.take(contents.master_bytes, context.device)
        else:
            buffer = self.armed.buffer
        memory = contents.memory_in(buffer, contents.master_dtype)
        memory.whole.zero_()
        self.armed = Armed(buffer, memory, [view._version for view in memory.parameters])
        for parameter, view in zip(self._parameters, memory.parameters, strict=True):
            if parameter.requires_grad:
                if parameter.dtype != view.dtype:
                    parameter.grad_dtype = view.dtype
                parameter.grad = view

    @property
    def has_landed(self) -> bool:
        """Whether gradients have come to parameters that are not armed."""
        if self.armed is not None:
            return False
        # a loop: each step asks several times, and mostly the answer is no
        for index, parameter in enumerate(self._parameters):
            gradient = parameter.grad
            if gradient is not None and (self._shown is None or gradient is not self._shown[index]):
                return True
        return False

    def used(self) -> list[bool]:
        """Per parameter, whether a gradient has landed on this rank since :meth:`arm`."""
        assert self.armed is not None
        views = zip(self.armed.memory.parameters, self.armed.versions, strict=True)
        return [view._version != version for view, version in views]

    def disarm(self) -> None:
        """Give back the memory of gradients that have landed; call it after their reduce's wait.

        Gradients that have come behind the reduce stay, until they are refused.
        """
        armed, self.armed, self._shown = self.armed, None, None
        if armed is None:
            for parameter in self._parameters:
                parameter.grad = None
            return
        for parameter, view in zip(self._parameters, armed.memory.parameters, strict=True):
            if parameter.grad is view:
                parameter.grad = None
        if armed.buffer is not self.reduced.buffer:
            self._contents.context.gradient_buffers.give(armed.buffer)

    # -- the reduce ---------------------------------------------------------------------------

    def reduce(self, cut: Cut, scale: float, *, in_place: bool = False) -> Pending:
        """Begin to sum what has landed over the ranks, times ``scale``, for this rank's slice.

        Adds to gradients that the sharded parameters still hold (accumulation over steps). Without
        these the sum may stay ``in_place``; see [Note: gradients in place].
        """
        armed, contents, context = self.armed, self._contents, self._contents.context
        assert armed is not None
        full = armed.memory.whole
        for parameter in self._parameters:
            parameter.grad = None
        accumulate = any(parameter.grad is not None for parameter in self._sharded)
        slices = armed.memory.slices(cut)
        shard = self.reduced.shard
        if shard is None:
            shard = slices.own
            if in_place and not accumulate:
                self.reduced = Reduced(slices.faces, shard, armed.buffer)
            else:
                # every element will be written: zeros would cost another pass
                shard = torch.empty_like(shard)
                self.reduced = Reduced(cut.faces(shard), shard)
        if accumulate:
            self._keep_only_held()

        def deliver(total: Tensor) -> None:
            if accumulate:
                shard.add_(total, alpha=scale)
            else:
                torch.mul(total, scale, out=shard)

        if context.is_alone:
            deliver(full)
            return Pending()
        if cut.layout is None:
            group = context.reduce_group if context.across is None else context.across.reduces
            pending = all_reduce(full, group)
            pending.finish = lambda: deliver(full)
            return pending
        is_sent = contents.sent_dtype == contents.master_dtype
        sent = full if is_sent else full.to(contents.sent_dtype)
        group, way = context.reduce_group, context.way(cut.route)
        parts = slices.of_ranks if is_sent else None
        pending = reduce_slices(sent, cut.sizes, group, deliver, shard.dtype, way, parts)
        pending.nbytes += 0 if is_sent else sent.nbytes
        return pending

    def _keep_only_held(self) -> None:
        cut_gradients(self._sharded)
        for parameter, face in zip(self._sharded, self.reduced.faces, strict=True):
            assert face is not None
            if parameter.grad is None:
                local_part(face).zero_()
            elif parameter.grad is not face:
                local_part(face).copy_(local_part(parameter.grad))

    # -- of this rank's slice -----------------------------------------------------------------

    @property
    def own(self) -> Tensor | None:
        """The reduced gradient, if it has memory of its own; see [Note: gradients in place]."""
        return self.reduced.shard if self.reduced.buffer is None else None

    def publish(self, used: Sequence[bool]) -> None:
        """Set ``.grad`` of the sharded parameters that any rank used, if it is not given back."""
        for parameter, face, is_used in zip(self._sharded, self.reduced.faces, used, strict=True):
            if face is not None and is_used and parameter.requires_grad:
                parameter.grad = face

    def landed(self) -> list[bool]:
        """Per parameter, whether any of this rank's rows is not zero; waits for the device."""
        rows = [local_part(face) for face in self.reduced.faces if face is not None]
        counts = torch.stack([row.count_nonzero() for row in rows])
        return [count > 0 for count in counts.tolist()]

    def give_back(self, updated: Sequence[bool], *, keeps_unused: bool = True) -> None:
        """Release the memory of gradients that have updated their parameters.

        Others move to memory of their own, also unpublished ones with ``keeps_unused``.
        """
        faces = list(self.reduced.faces)
        for index, (parameter, face) in enumerate(zip(self._sharded, faces, strict=True)):
            if face is None:
                continue
            faces[index], is_shown = None, parameter.grad is face
            if updated[index]:
                if index not in self._spent:
                    self._spent[index] = spent(face, self._contents.names[index])
                parameter.grad = self._spent[index]
            elif keeps_unused or is_shown:
                own = faces[index] = as_dtensor(local_part(face).clone(), face._spec)
                if is_shown:
                    parameter.grad = own
        self._release(faces)

    def forget(self) -> None:
        """Release the reduced gradient and all that the sharded parameters show of it."""
        for parameter in self._sharded:
            parameter.grad = None
        self._spent = {}
        self.drop()

    def drop(self) -> None:
        """Release a reduced gradient of which nobody shall see anything."""
        self._release([None] * len(self._sharded))

    def _release(self, faces: Sequence[DTensor | None]) -> None:
        before, self.reduced = self.reduced, Reduced(faces)
        is_armed = self.armed is not None and before.buffer is self.armed.buffer
        if before.buffer is not None and not is_armed:
            self._contents.context.gradient_buffers.give(before.buffer)

    # -- between a forward and its backward ---------------------------------------------------

    def show(self) -> None:
        """Show on gathered parameters the gradients that their shards hold, as on one device.

        The gradients of the running step, which add up there, stay hidden.
        """
        if self._shown is None:
            # those of the loss's backward may have come here already
            self._hidden = [parameter.grad for parameter in self._parameters]
            self._shown = [sharded.grad for sharded in self._sharded]
            for parameter, held in zip(self._parameters, self._shown, strict=True):
                parameter.grad = held
        self.pass_on()

    def pass_on(self) -> None:
        """Pass on what code has assigned to gathered or sharded parameters since they are shown."""
        if self._shown is not None:
            self._shown = passed_on("grad", self._parameters, self._sharded, self._shown)

    def hide(self) -> None:
        """Let gradients of the running step add up again."""
        self.pass_on()
        if self._shown is not None:
            self._shown = None
            for parameter, gradient in zip(self._parameters, self._hidden, strict=True):
                parameter.grad = gradient
