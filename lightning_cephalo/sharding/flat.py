"""A flat: parameters laid end to end, sharded in slices over the ranks, gathered for use.

[Note: the tensors of a flat]
``shard``                  this rank's slice, in full precision, persistent: the master copy.
``sharded``                per parameter a DTensor view of ``shard``, for optimizers and users.
``gathered.full``          all parameters in compute dtype; it has memory only while gathered.
``gathered.parameters``    per parameter a view of it, always the same object, for the forward.
``gradient.armed``         this rank's gradient of all parameters. Autograd accumulates in place
                           into views of it, so nothing is copied in before a reduce.
``gradient.reduced``       the reduced gradient of this rank's slice; ``sharded[i].grad`` are views.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn

from lightning_cephalo.sharding.collectives import all_gather_rows, broadcast
from lightning_cephalo.sharding.contents import Contents, Cut
from lightning_cephalo.sharding.context import ShardingContext
from lightning_cephalo.sharding.gathered import Gathered
from lightning_cephalo.sharding.gradient import Gradient
from lightning_cephalo.sharding.layout import Divider, FlatLayout
from lightning_cephalo.sharding.moving import Column, moved
from lightning_cephalo.sharding.placement import like_parameter, local_part, set_rows
from lightning_cephalo.sharding.transfers import Pending
from lightning_cephalo.sharding.write_guard import RowGuard


class Flat:
    """Parameters of one dtype that are gathered and reduced together.

    Args:
        originals: The parameters; rank 0's values count, those of other ranks are ignored.
        names: Their full names.
        layout: Cuts between the ranks; None keeps a copy on every rank (0-d parameters, which
            have no rows to shard).

    Attributes:
        cut: How the ranks cut it now.
        guard: Locks the sharded parameters, and finds writes to them.
    """

    def __init__(
        self,
        originals: Sequence[nn.Parameter],
        names: Sequence[str],
        layout: FlatLayout | None,
        context: ShardingContext,
    ) -> None:
        self.context = context
        shapes = tuple(tuple(original.shape) for original in originals)
        self.contents = contents = Contents(tuple(names), shapes, originals[0].dtype, context)
        master = torch.empty(contents.numel, dtype=contents.master_dtype, device=context.device)
        if dist.get_rank(context.everyone) == 0:
            for original, part in zip(originals, master.split(contents.numels), strict=True):
                part.copy_(original.detach().reshape(-1))
        if not context.is_alone and contents.numel:
            broadcast(master, context.everyone, source=0)
        self.cut = Cut(contents, layout)
        self.shard = master[self.cut.own].clone()
        faces = zip(self.cut.faces(self.shard), originals, strict=True)
        self.sharded = [like_parameter(face, original) for face, original in faces]
        self.guard = RowGuard(names, self.sharded)
        self.gathered = Gathered(contents, self.sharded, self.guard.lock)
        self.gradient = Gradient(contents, self.gathered.parameters, self.sharded)

    @property
    def trainable(self) -> bool:
        """Whether any parameter needs a gradient now; users may freeze and unfreeze."""
        # a loop: every visit asks, and the first parameter answers where none is frozen
        for parameter in self.sharded:  # noqa: SIM110
            if parameter.requires_grad:
                return True
        return False

    def gather(self) -> Pending:
        """Begin to fill the full parameters."""
        return self.gathered.gather(self.shard, self.cut)

    def reduce(self, scale: float, *, in_place: bool = False) -> Pending:
        """Begin to sum the gradients over the ranks; see :meth:`Gradient.reduce`."""
        return self.gradient.reduce(self.cut, scale, in_place=in_place)

    # -- the master copy ----------------------------------------------------------------------

    def plain_parameters(self) -> list[nn.Parameter]:
        """Return full parameters on the CPU in their original dtype; collective."""
        master, context = self.shard, self.context
        if self.cut.layout is not None and context.world_size > 1:
            master = all_gather_rows(self.shard, self.cut.sizes, context.gather_group)
        views = self.contents.views(master.to("cpu", self.contents.original_dtype))
        plain = zip(views, self.sharded, strict=True)
        return [like_parameter(view.clone(), sharded) for view, sharded in plain]

    def change_layout(self, layout: FlatLayout | None, columns: Sequence[Column] = ()) -> None:
        """Move every rank's slice to another layout, in place; collective.

        The sharded parameters stay the same objects. Gradients are forgotten unless they move too.
        """
        old = self.cut.layout
        if old is None or layout is None:
            return
        if (old.cuts, old.cuts_of_groups) == (layout.cuts, layout.cuts_of_groups):
            return
        gradients = [sharded.grad for sharded in self.sharded]
        self.gradient.forget()
        group = self.context.gather_group
        with torch.no_grad():
            self.shard = moved(self.shard, old.cuts, layout.cuts, group)
            self.cut = cut = Cut(self.contents, layout)
            faces = zip(self.sharded, cut.faces(self.shard), cut.placements, strict=True)
            for sharded, face, placement in faces:
                set_rows(sharded, local_part(face), placement)
            for column in columns:
                column.move(old, layout, cut.placements, group)
        self.guard.renew()
        have_moved = {id(tensor) for column in columns for tensor in column.tensors}
        for sharded, gradient in zip(self.sharded, gradients, strict=True):
            if gradient is not None and id(gradient) in have_moved:
                sharded.grad = gradient

    # -- steps with several phases ------------------------------------------------------------

    def rows_written(self) -> list[bool]:
        """Per sharded parameter, whether code has written to it since the last call.

        Raises the versions of their gathered ones, so that graphs that need old values are refused.
        """
        flags = self.guard.written()
        self.gathered.raise_versions(flags)
        return flags


def divide_flat(shapes: Sequence[tuple[int, ...]], divider: Divider) -> FlatLayout | None:
    """Return the layout of parameters of these shapes; None for scalars: every rank holds them."""
    if any(len(shape) == 0 for shape in shapes):
        return None
    return divider.divide(shapes)
