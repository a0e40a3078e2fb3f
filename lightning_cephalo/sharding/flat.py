"""A flat: parameters laid end to end, sharded in slices over the ranks, gathered for use.

docs/design/flats.md shows its tensors, which are views of each other: nothing is copied in between.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import nn

from lightning_cephalo.sharding.collectives import all_gather_rows, broadcast
from lightning_cephalo.sharding.contents import Contents, Cut
from lightning_cephalo.sharding.context import ShardingContext
from lightning_cephalo.sharding.discovery import Member
from lightning_cephalo.sharding.gathered import Gathered
from lightning_cephalo.sharding.gradient import Gradient
from lightning_cephalo.sharding.layout import Divider
from lightning_cephalo.sharding.moving import Column, moved
from lightning_cephalo.sharding.placement import like_parameter, local_part, set_rows
from lightning_cephalo.sharding.write_guard import RowGuard


class Flat:
    """Parameters of one dtype that are gathered and reduced together.

    Rank 0's values count, those of other ranks are ignored.

    Args:
        members: Each parameter with the places where modules hold it.
        divider: Cuts them between the ranks; carries rounding errors from flat to flat.

    Attributes:
        cut: How the ranks cut it now.
        guard: Locks the sharded parameters, and finds writes to them.
    """

    def __init__(
        self,
        members: Sequence[Member],
        divider: Divider,
        context: ShardingContext,
    ) -> None:
        self.context = context
        originals = [parameter for parameter, _ in members]
        self.owners = [owners for _, owners in members]
        names = [owners[0].name for owners in self.owners]
        shapes = tuple(tuple(original.shape) for original in originals)
        self.contents = contents = Contents(tuple(names), shapes, originals[0].dtype, context)
        master = torch.empty(contents.numel, dtype=contents.master_dtype, device=context.device)
        if dist.get_rank(context.everyone) == 0:
            for original, part in zip(originals, master.split(contents.numels), strict=True):
                part.copy_(original.detach().reshape(-1))
        if not context.is_alone and contents.numel:
            broadcast(master, context.everyone, source=0)
        self.cut = Cut(contents, divider)
        self.shard = master[self.cut.own].clone()
        faces = zip(self.cut.faces(self.shard), originals, strict=True)
        self.sharded = [like_parameter(face, original) for face, original in faces]
        self.guard = RowGuard(names, self.sharded)
        self.gathered = Gathered(contents, self.sharded, self.guard)
        self.gradient = Gradient(contents, self.gathered.parameters, self.sharded)
        self._replaced: list[str] = []
        self._shown = originals
        self.show(self.sharded)

    @property
    def trainable(self) -> bool:
        """Whether any parameter needs a gradient now; users may freeze and unfreeze."""
        # a loop: every visit asks, and the first parameter answers where none is frozen
        for parameter in self.sharded:  # noqa: SIM110
            if parameter.requires_grad:
                return True
        return False

    def show(self, parameters: list[nn.Parameter]) -> None:
        """Let modules hold other parameters; notes where code has put some of its own."""
        for owners, parameter, shown in zip(self.owners, parameters, self._shown, strict=True):
            for owner in owners:
                if owner.module._parameters.get(owner.attribute) is not shown:
                    self._replaced.append(owner.name)
                show_in(owner.module, owner.attribute, parameter)
        self._shown = parameters

    # -- the master copy ----------------------------------------------------------------------

    def restore(self, originals: Mapping[str, nn.Parameter]) -> None:
        """Give the modules plain full parameters on the CPU; collective. Ends the flat's use.

        Parameters that the modules had before, and that are still held, get the values and are
        given back: an optimizer may be used in the next run.
        """
        master, context = self.shard, self.context
        if self.cut.layout is not None and context.world_size > 1:
            master = all_gather_rows(self.shard, self.cut.sizes, context.gather_group)
        views = self.contents.views(master.to("cpu", self.contents.original_dtype))
        plain = []
        for name, view, sharded in zip(self.contents.names, views, self.sharded, strict=True):
            parameter = like_parameter(view.clone(), sharded)
            original = originals.get(name)
            if original is not None and not original.is_meta:
                original.data, original.grad = parameter.data, None
                original.requires_grad_(parameter.requires_grad)
                original.__dict__.update(parameter.__dict__)
                parameter = original
            plain.append(parameter)
        self.show(plain)

    def change_layout(self, divider: Divider, columns: Sequence[Column] = ()) -> None:
        """Move every rank's slice to where a divider cuts now, in place; collective.

        The sharded parameters stay the same objects. Gradients are forgotten unless they move too.

        Args:
            columns: What has the rows of the parameters and moves with them.
        """
        old, cut = self.cut.layout, Cut(self.contents, divider)
        if old is None or cut.layout is None or old == cut.layout:
            return
        moving = {id(tensor) for column in columns for tensor in column.tensors}
        gradients = [p.grad if id(p.grad) in moving else None for p in self.sharded]
        self.gradient.forget()
        group = self.context.gather_group
        with torch.no_grad():
            self.shard, self.cut = moved(self.shard, old.cuts, cut.layout.cuts, group), cut
            faces = zip(self.sharded, cut.faces(self.shard), cut.placements, strict=True)
            for sharded, face, placement in faces:
                set_rows(sharded, local_part(face), placement)
            for column in columns:
                column.move(old, cut.layout, cut.placements, group)
        self.guard.renew()
        for sharded, gradient in zip(self.sharded, gradients, strict=True):
            sharded.grad = gradient

    def written(self) -> list[str]:
        """Return the names of gathered parameters that code wrote to or replaced since a call."""
        replaced, self._replaced = self._replaced, []
        return self.gathered.written() + replaced


def show_in(module: nn.Module, attribute: str, parameter: nn.Parameter) -> None:
    """Let a module hold a parameter; LSTM, GRU and RNN compute with a list of their own."""
    module._parameters[attribute] = parameter
    if isinstance(module, nn.RNNBase) and attribute in module._flat_weights_names:
        module._flat_weights[module._flat_weights_names.index(attribute)] = parameter
