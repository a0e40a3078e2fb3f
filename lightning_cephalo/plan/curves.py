"""File format for times of one unit by device and microbatch size, measured or published.

One :class:`CurveTable` covers one model, dtype and sequence length. It holds one :class:`Curves`
per device. The cache of measured curves and a user's own tables share this format. Names end in
their unit of measure: ``_s`` is seconds, ``_bytes`` is bytes. ``forward_s[3]`` is one unit's
forward for one microbatch of four samples.
"""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Annotated

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

SOURCES = ("measured", "table", "estimate")
_CURVES = ("forward_s", "backward_s", "tail_s", "compute_bytes")
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
        PlanError: entries are NaN, infinite or negative, there are none, or curves differ in
            length.
    """

    kind = "curves"
    named_by = "device"

    device: Name
    forward_s: Curve
    backward_s: Curve
    tail_s: Curve = ()
    compute_bytes: Curve = ()
    source: Annotated[str, OneOf(SOURCES, f"one of {', '.join(SOURCES)}")] = "table"
    detail: Text = ""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("forward_s", "backward_s"):
            if not getattr(self, name):
                raise PlanError(
                    f"{self._where()}{name}: expected at least one number, but got none. "
                    f"Leave out a device that nothing is known of."
                )
        equally_long(
            self._where(),
            {name: getattr(self, name) for name in _CURVES if getattr(self, name)},
            remedy="Cut all to the same sizes.",
        )

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
        curves: one :class:`Curves` per device.
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
        seen = set()
        for index, entry in enumerate(self.curves):
            if entry.device.casefold() in seen:
                raise PlanError(
                    f"CurveTable.curves[{index}]: expected every device once, "
                    f"but got {entry.device!r} again. Keep one of them."
                )
            seen.add(entry.device.casefold())

    def find(self, device: str) -> Curves | None:
        """Return the curves of this device (compared without case), or None."""
        wanted = device.casefold()
        return next((entry for entry in self.curves if entry.device.casefold() == wanted), None)

    def matches(
        self, model: str, dtype: str, sequence_length: int, parameters: float | None = None
    ) -> bool:
        """Return whether this table is for that model, dtype and sequence length.

        Numbers of parameters must agree within 1 %, if both are known.
        """
        if self.parameters is not None and parameters is not None:
            apart = abs(self.parameters - parameters)
            if apart > _SAME_MODEL * max(self.parameters, parameters):
                return False
        return (
            self.model.casefold() == model.casefold()
            and self.dtype == dtype
            and self.sequence_length == sequence_length
        )

    def merged(self, newer: CurveTable) -> CurveTable:
        """Return this table with the devices of ``newer`` added or replaced."""
        kept = tuple(entry for entry in self.curves if newer.find(entry.device) is None)
        return dataclasses.replace(self, curves=kept + newer.curves)


@dataclass(frozen=True)
class CachedTables:
    """Result of :func:`cached_tables`."""

    tables: tuple[CurveTable, ...]
    broken: tuple[str, ...]


def cached_tables(folder: str | PathLike[str] | None = None) -> CachedTables:
    """Return every table in the folder (default: the user's).

    Broken files are listed, not raised: a file left by another version must not stop a plan.
    """
    root = Path(folder) if folder is not None else files.cache_folder()
    tables, broken = [], []
    paths = sorted(root.iterdir()) if root.is_dir() else []
    for path in paths:
        if path.suffix.lower() not in files.SUFFIXES or path.name.startswith("."):
            continue
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
    try:
        root.mkdir(parents=True, exist_ok=True)
        _merged_with(path, table).save(path)
    except OSError as error:
        raise PlanError(
            f"{path}: expected a folder to keep measured times in, but it cannot be written: "
            f"{error}. Name another one with LIGHTNING_CEPHALO_CACHE."
        ) from error
    return path


def _merged_with(path: Path, table: CurveTable) -> CurveTable:
    if not path.exists():
        return table
    try:
        before = CurveTable.load(path)
    except PlanError:
        return table
    # model names that differ only in punctuation share a file name
    same = before.matches(table.model, table.dtype, table.sequence_length, table.parameters)
    return before.merged(table) if same else table
