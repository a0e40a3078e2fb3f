"""What a step with several phases finds and changes of a unit between them."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass

from lightning_cephalo.sharding.unit import Unit


@dataclass(frozen=True)
class Seen:
    """Which parameters of a unit needed gradients, flat by flat, and the versions of values."""

    flags: tuple[tuple[bool, ...], ...]
    versions: tuple[tuple[int, ...], ...]


def seen_of(unit: Unit) -> Seen:
    flags = tuple(tuple(p.requires_grad for p in flat.sharded) for flat in unit.flats)
    return Seen(flags, tuple(tuple(flat.gathered.versions) for flat in unit.flats))


def show_flags(unit: Unit, seen: Seen) -> None:
    """Set which gathered parameters need gradients, without a change of the sharded ones."""
    for flat, flags in zip(unit.flats, seen.flags, strict=True):
        flat.gathered.show_flags(flags)


def adopt(unit: Unit) -> None:
    """Pass on to the shards what code has done to gathered parameters."""
    for flat in unit.flats:
        flat.gathered.adopt_flags()
        flat.gradient.pass_on()


def rows_written(unit: Unit) -> list[str]:
    """Return the sharded parameters that code wrote to since the last call.

    Raises the versions of their gathered ones, so that graphs that need old values are refused.
    """
    found: list[str] = []
    for flat in unit.flats:
        names = flat.guard.written()
        flat.gathered.raise_versions(names)
        found += names
    return found


def note_update(unit: Unit, parameters: Container[int]) -> None:
    """Refuse graphs that need what an optimizer has changed, given by the ids of the shards."""
    for flat in unit.flats:
        pairs = zip(flat.contents.names, flat.sharded, strict=True)
        trained = [(name, own) for name, own in pairs if own.grad is not None]
        flat.gathered.raise_versions([name for name, own in trained if id(own) in parameters])
