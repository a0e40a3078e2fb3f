"""Who may be a stage: ways to divide atoms (blocks that stay together), equal ones once."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence

from lightning_cephalo.offline.pipeline.problem import Block, PipelineProblem

Atom = tuple[int, ...]
"""Indices of blocks that stay together."""
Partition = tuple[tuple[int, ...], ...]
"""Groups of atoms, by their indices."""

MOST_ATOMS = 8
# Up to so many stages every order is tried.
_ALL_ORDERS = 4


def atoms_of(problem: PipelineProblem, most: int = MOST_ATOMS) -> tuple[Atom, ...]:
    """Return at most ``most`` atoms: blocks, or else nodes, pairs of equal nodes, neighbours."""
    atoms: list[Atom] = [(index,) for index in range(len(problem.blocks))]
    if len(atoms) > most:
        of_node: dict[int, Atom] = {}
        for index, block in enumerate(problem.blocks):
            of_node[block.node] = (*of_node.get(block.node, ()), index)
        atoms = list(of_node.values())
    while len(atoms) > most:
        kinds = kinds_of(problem, atoms)
        pairs = list(itertools.pairwise(range(len(atoms))))
        equal = [pair for pair in itertools.combinations(range(len(atoms)), 2)
                 if kinds[pair[0]] == kinds[pair[1]]]  # fmt: skip
        one, other = min(equal or pairs, key=lambda pair: len(atoms[pair[0]] + atoms[pair[1]]))
        atoms[one] += atoms.pop(other)
    return tuple(tuple(sorted(atom)) for atom in atoms)


def kinds_of(problem: PipelineProblem, atoms: Sequence[Atom]) -> tuple[int, ...]:
    """Return a number for each atom; atoms of one number may be exchanged for each other."""
    nodes = [problem.blocks[block].node for atom in atoms for block in atom]
    if not problem.network.is_uniform or len(set(nodes)) < len(nodes):
        return tuple(range(len(atoms)))
    known: dict[object, int] = {}
    return tuple(
        known.setdefault(tuple(_signature(problem, block) for block in atom), len(known))
        for atom in atoms
    )


def _signature(problem: PipelineProblem, index: int) -> object:
    block: Block = problem.blocks[index]
    ranks = tuple(dataclasses.replace(rank, name="") for rank in block.ranks)
    return ranks, block.update_bytes_per_s, problem.network.inside[block.node]


def partitions(atoms: Sequence[int], kinds: Sequence[int]) -> Iterator[Partition]:
    """Yield every way to divide atoms into groups, one of those that are equal by kind."""
    seen = set()
    for groups in _set_partitions(list(atoms)):
        of_kinds = tuple(sorted(tuple(sorted(kinds[atom] for atom in group)) for group in groups))
        if of_kinds not in seen:
            seen.add(of_kinds)
            yield groups


def _set_partitions(atoms: list[int]) -> Iterator[Partition]:
    if not atoms:
        yield ()
        return
    first, *rest = atoms
    for groups in _set_partitions(rest):
        yield (first,), *groups
        for at, group in enumerate(groups):
            yield *groups[:at], (first, *group), *groups[at + 1 :]


def orders(partition: Partition, kinds: Sequence[int]) -> Iterator[Partition]:
    """Yield the orders to try; beyond four stages, one between each first and last stage."""
    seen = set()
    for order in _some_orders(partition):
        of_kinds = tuple(tuple(sorted(kinds[atom] for atom in group)) for group in order)
        if of_kinds not in seen:
            seen.add(of_kinds)
            yield order


def tries_all_orders(stages: int) -> bool:
    return stages <= _ALL_ORDERS


def _some_orders(partition: Partition) -> Iterator[Partition]:
    if tries_all_orders(len(partition)):
        yield from itertools.permutations(partition)
        return
    for first, last in itertools.permutations(partition, 2):
        yield first, *(group for group in partition if group not in (first, last)), last
