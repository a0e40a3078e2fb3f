"""The order of a step: a pure list of actions, the same on every rank but for its microbatches.

Layered accumulation (Cephalo, ICS 2025, figure 4): all microbatches pass a unit before any passes
the next, so that a unit is gathered once per pass and reduced once per step, however many
microbatches a rank has. With visits ``a b c`` and two microbatches::

    gather a | prefetch b, forward a0 a1, free a | prefetch c, forward b0 b1, free b
             | forward c0, tail 0, forward c1, tail 1                        (c stays gathered)
    prefetch b, backward c0 c1, reduce c, free c | prefetch a, backward b0 b1, reduce b, free b
             | backward a0 a1, reduce a, free a

A *visit* is one use of a unit by every microbatch; a unit that is used twice has two visits and is
reduced after the one that comes last in the backward. The root unit is not in these lists: it is
gathered before them and reduced after.

Without ``reshard`` (FSDP's ``reshard_after_forward=False``) no unit is freed before its last
backward: each is gathered once a step.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass


class Operation(enum.Enum):
    """What an action does; see the module's text for the order."""

    GATHER = "gather"
    FORWARD = "forward"
    TAIL = "tail"
    BACKWARD = "backward"
    REDUCE = "reduce"
    FREE = "free"


@dataclass(frozen=True)
class Visit:
    """One use of a unit.

    Attributes:
        unit: Index of the unit.
        differentiable: Whether a backward passes through it (not so for a frozen unit whose
            inputs need no gradient, or a use under ``torch.no_grad``).
    """

    unit: int
    differentiable: bool = True


@dataclass(frozen=True)
class Action:
    """One thing to do.

    Attributes:
        operation: What.
        unit: Index of the unit (-1 for TAIL).
        visit: Position in the order of visits (-1 where it does not matter).
        microbatch: Index on this rank (-1 where all are meant).
    """

    operation: Operation
    unit: int = -1
    visit: int = -1
    microbatch: int = -1


def forward_actions(
    visits: Iterable[Visit], microbatches: int, *, prefetch: bool = True, reshard: bool = True
) -> Iterator[Action]:
    """Yield the actions of the forward pass.

    Args:
        visits: In order. Pulled one ahead of use with ``prefetch``, never ahead without it, so
            that an order that is still being discovered can be given lazily.
        microbatches: Of this rank; 0 for a rank that only communicates.
        prefetch: Gather the next unit before the microbatches pass the current one.
        reshard: Free a unit when the microbatches have passed it.
    """
    pending = iter(visits)
    current = next(pending, None)
    position = 0
    gathered: set[int] = set()
    while current is not None:
        if current.unit not in gathered:
            yield Action(Operation.GATHER, current.unit, position)
            gathered.add(current.unit)
        following = next(pending, None) if prefetch else None
        if following is not None and following.unit not in gathered:
            yield Action(Operation.GATHER, following.unit, position + 1)
            gathered.add(following.unit)
        for microbatch in range(microbatches):
            yield Action(Operation.FORWARD, current.unit, position, microbatch)
            if prefetch and following is None:
                yield Action(Operation.TAIL, microbatch=microbatch)
        if not prefetch:
            following = next(pending, None)
        # the last unit is the first that the backward needs
        if reshard and following is not None and following.unit != current.unit:
            yield Action(Operation.FREE, current.unit, position)
            gathered.discard(current.unit)
        current, position = following, position + 1


def backward_actions(
    visits: Sequence[Visit],
    microbatches: int,
    trainable: Sequence[bool],
    *,
    prefetch: bool = True,
    reshard: bool = True,
) -> Iterator[Action]:
    """Yield the actions of the backward pass; the unit of the last visit is gathered already.

    Args:
        visits: In the order of the forward.
        microbatches: Of this rank.
        trainable: Per unit, whether it has gradients to reduce.
        prefetch: Gather the next unit before the microbatches pass the current one.
        reshard: As in the forward: without it, all units are gathered already.
    """
    order = [p for p in reversed(range(len(visits))) if visits[p].differentiable]
    final: dict[int, int] = {}
    for position in order:
        final[visits[position].unit] = position
    last = {visit.unit: position for position, visit in enumerate(visits)}
    held, needed = (visits[-1:], order[:1]) if reshard else (visits, order)
    gathered = {visit.unit for visit in held}
    wanted = {visits[position].unit for position in needed}
    for unit in sorted(gathered - wanted, key=last.__getitem__):
        yield Action(Operation.FREE, unit, last[unit])
    gathered &= wanted
    for index, position in enumerate(order):
        unit = visits[position].unit
        if unit not in gathered:
            yield Action(Operation.GATHER, unit, position)
            gathered.add(unit)
        following = order[index + 1] if index + 1 < len(order) else None
        if prefetch and following is not None and visits[following].unit not in gathered:
            yield Action(Operation.GATHER, visits[following].unit, following)
            gathered.add(visits[following].unit)
        for microbatch in range(microbatches):
            yield Action(Operation.BACKWARD, unit, position, microbatch)
        if final[unit] == position and trainable[unit]:
            yield Action(Operation.REDUCE, unit, position)
        if reshard:
            is_done = following is None or visits[following].unit != unit
        else:
            is_done = final[unit] == position
        if is_done:
            yield Action(Operation.FREE, unit, position)
            gathered.discard(unit)
