"""Times of one unit by device and microbatch size, measured or published, and their files.

One :class:`CurveTable` covers one model, dtype and sequence length. The cache of measured curves
and a user's own tables share this format. ``forward_s[3]`` is for one microbatch of four samples.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import re
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Annotated, NamedTuple

from lightning_cephalo.common import files
from lightning_cephalo.common.errors import PlanError
from lightning_cephalo.common.records import (
    Count,
    Curve,
    FileRecord,
    ListOf,
    Name,
    OneOf,
    Record,
    Text,
    equally_long,
)

_SOURCES = ("measured", "table", "estimate")
# A model stays the same with a head of another size or a padded vocabulary.
_SAME_MODEL = 0.01


@dataclass(frozen=True)
class Curves(Record):
    """Curves of one device, with one entry per microbatch size 1, 2, ...

    Args:
        device: canonical name, such as ``"A6000"``.
        forward_s: forward time of one unit for one microbatch.
        backward_s: backward time of one unit for one microbatch, with recompute.
        tail_s: time of the root unit, forward and backward together; empty: unknown.
        compute_bytes: peak memory in addition to the state; empty: unknown.
        source: ``"measured"``, ``"table"`` or ``"estimate"``.
        detail: origin of the numbers, and their error if it is known.

    Raises:
        PlanError: entries are NaN, infinite or negative, or curves are empty or differ in length.
    """

    kind = "curves"
    named_by = "device"

    device: Name
    forward_s: Curve
    backward_s: Curve
    tail_s: Curve = ()
    compute_bytes: Curve = ()
    source: Annotated[str, OneOf(_SOURCES, f"one of {', '.join(_SOURCES)}")] = "table"
    detail: Text = ""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.forward_s:
            raise PlanError(
                f"{self._where()}forward_s: expected at least one number, but got none. Leave out a"
                " device that nothing is known of."
            )
        curves = {"forward_s": self.forward_s, "backward_s": self.backward_s}
        known = {"tail_s": self.tail_s, "compute_bytes": self.compute_bytes}
        curves |= {name: curve for name, curve in known.items() if curve}
        equally_long(self._where(), curves, remedy="Cut all to the same sizes.")

    def _where(self) -> str:
        return f"curves of {self.device!r}: "

    @property
    def largest_microbatch_size(self) -> int:
        """Largest microbatch size of these curves."""
        return len(self.forward_s)


@dataclass(frozen=True)
class CurveTable(FileRecord):
    """Curves of one model, dtype and sequence length, device by device.

    Args:
        model: name of the model, such as ``"gpt2"``; compared without case.
        dtype: compute dtype: ``"fp32"``, ``"fp16"`` or ``"bf16"``.
        sequence_length: tokens (or patches) of one sample.
        curves: one :class:`Curves` per device; devices are compared without case.
        parameters: number of parameters of the whole model, which distinguishes models of the same
            name. None: unknown, only the name counts. Measured tables always have it.

    Raises:
        PlanError: a field has an invalid value, or a device occurs twice.
    """

    kind = "curve table"

    model: Name
    dtype: Name
    sequence_length: Count
    curves: Annotated[tuple[Curves, ...], ListOf(Curves, "Curves", "curves")]
    parameters: Count | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        devices = [entry.device.casefold() for entry in self.curves]
        for index, device in enumerate(devices):
            if device in devices[:index]:
                raise PlanError(
                    f"CurveTable.curves[{index}]: expected every device once, but got"
                    f" {self.curves[index].device!r} again. Keep one of them."
                )

    def matches(
        self, model: str, dtype: str, sequence_length: int, parameters: float | None = None
    ) -> bool:
        """Return whether this table is for that model, dtype and sequence length.

        Numbers of parameters must agree within 1 %, if both are known.
        """
        own, other = self.parameters or parameters, parameters or self.parameters
        is_same = own is None or other is None or math.isclose(own, other, rel_tol=_SAME_MODEL)
        names = self.model.casefold(), self.dtype, self.sequence_length
        return is_same and names == (model.casefold(), dtype, sequence_length)

    def merged(self, newer: CurveTable) -> CurveTable:
        """Return this table with the devices of ``newer`` added or replaced."""
        replaced = {entry.device.casefold() for entry in newer.curves}
        kept = tuple(own for own in self.curves if own.device.casefold() not in replaced)
        return dataclasses.replace(self, curves=kept + newer.curves)


class CachedTables(NamedTuple):
    """The tables of a folder, and what is wrong with the files that are broken."""

    tables: tuple[CurveTable, ...]
    broken: tuple[str, ...]


def cached_tables(folder: str | PathLike[str] | None = None) -> CachedTables:
    """Return every table in the folder (default: the user's).

    Broken files are listed, not raised: a file left by another version must not stop a plan.
    """
    root = Path(folder) if folder is not None else files.cache_folder()
    tables, broken = [], []
    for path in sorted(root.iterdir()) if root.is_dir() else []:
        if path.suffix.lower() in files.SUFFIXES and not path.name.startswith("."):
            try:
                tables.append(CurveTable.load(path))
            except PlanError as error:
                broken.append(str(error))
    return CachedTables(tuple(tables), tuple(broken))


def save_measured(table: CurveTable, folder: str | PathLike[str] | None = None) -> Path:
    """Add measured curves to the folder (default: the user's) and return the file.

    There is one file per model, number of parameters, dtype and sequence length. Devices that are
    already in the file stay, unless ``table`` has them too. A broken file is replaced.

    Raises:
        PlanError: some of the curves are not measured, or the folder cannot be written.
    """
    for entry in table.curves:
        if entry.source != "measured":
            raise PlanError(
                f"curves of {entry.device!r}: expected source 'measured' in the cache, "
                f"but got {entry.source!r}. Save other tables with CurveTable.save(path)."
            )
    root = Path(folder) if folder is not None else files.cache_folder()
    stem = re.sub(r"[^A-Za-z0-9._-]+", "-", table.model).strip("-.") or "model"
    size = "" if table.parameters is None else f"_{table.parameters}"
    path = root / f"{stem.lower()}{size}_{table.dtype}_{table.sequence_length}.yaml"
    # model names that differ only in punctuation share a file name
    key = table.model, table.dtype, table.sequence_length, table.parameters
    try:
        with contextlib.suppress(PlanError):  # a broken file
            before = CurveTable.load(path) if path.exists() else table
            table = before.merged(table) if before.matches(*key) else table
        root.mkdir(parents=True, exist_ok=True)
        table.save(path)
    except OSError as error:
        raise PlanError(
            f"{path}: expected a folder to keep measured times in, but it cannot be written: "
            f"{error}. Name another one with LIGHTNING_CEPHALO_CACHE."
        ) from error
    return path
