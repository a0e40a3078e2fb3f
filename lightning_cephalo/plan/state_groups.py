"""Groups of ranks that each hold the whole state: hybrid sharding.

The ranks of a group, such as those of a node, share the state as all ranks do without groups. So
gathers stay inside a group. Gradients are summed inside a group, and then across groups.
"""

from __future__ import annotations

from collections.abc import Sequence

from lightning_cephalo.common.errors import PlanError

_EVEN = 1e-9


def check_groups(field: str, groups: Sequence[int], ranks: int) -> None:
    """Raise if these are not groups of so many ranks."""
    if not groups:
        return
    if len(groups) != ranks:
        raise PlanError(
            f"{field}: expected the group of each of {ranks} ranks, but got {len(groups)} entries."
        )
    if len(set(groups)) == 1:
        raise PlanError(
            f"{field}: expected two or more groups, but all {ranks} ranks are of group"
            f" {groups[0]}. Leave {field} out: then all ranks hold the state together."
        )


def members_of(groups: Sequence[int], ranks: int) -> tuple[tuple[int, ...], ...]:
    """Return the ranks of each group, in the order of their first ranks.

    ::

        members_of((0, 0, 1), 3)     # ((0, 1), (2,))
        members_of((), 3)            # ((0, 1, 2),)
    """
    found: dict[int, list[int]] = {}
    for rank in range(ranks):
        found.setdefault(groups[rank] if groups else 0, []).append(rank)
    return tuple(map(tuple, found.values()))


def groups_by_node(nodes: Sequence[int]) -> tuple[int, ...]:
    """Return the group of every rank where each node is one, numbered from 0."""
    known = sorted(set(nodes))
    return tuple(known.index(node) for node in nodes)


def even_shares(groups: Sequence[int], ranks: int) -> tuple[float, ...]:
    """Return equal shares of the state inside of each group, in rank order."""
    parts = {rank: 1 / len(own) for own in members_of(groups, ranks) for rank in own}
    return tuple(parts[rank] for rank in range(ranks))


def fractions_are_even(fractions: Sequence[float]) -> bool:
    """Return whether these shares of the state are equal."""
    return max(fractions) - min(fractions) <= _EVEN
