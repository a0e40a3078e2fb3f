"""Times of one unit by device and microbatch size, as measured or published: the file format.

One :class:`CurveTable` is one model, dtype and sequence length; it holds one :class:`Curves` per
device. The same format is the cache of what was measured (:func:`cache_folder`) and a user's own
table. Units are in the names: ``_s`` seconds, ``_bytes`` bytes. ``forward_s[3]`` is one unit's
forward for one microbatch of four samples.
"""

from __future__ import annotations

import dataclasses
import os
import re
import sys
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

from lightning_cephalo.common import files, records
from lightning_cephalo.common.errors import PlanError

SOURCES = ("measured", "table", "estimate")
_CURVES = ("forward_s", "backward_s", "tail_s", "compute_bytes")
_OPTIONAL = ("tail_s", "compute_bytes")
# A head of another size or a padded vocabulary does not make another model of it.
_SAME_MODEL = 0.01
_SUFFIXES = (".yaml", ".yml", ".json")


@dataclass(frozen=True)
class Curves:
    """One device's curves, one entry per microbatch size 1, 2, ...

    Args:
        device: canonical name, such as ``"A6000"``.
        forward_s: one unit, one microbatch, forward.
        backward_s: the same, backward, with recompute.
        tail_s: the root unit, forward and backward together; empty: unknown.
        compute_bytes: peak beside the state; empty: unknown.
        source: ``"measured"``, ``"table"`` or ``"estimate"``.
        detail: where the numbers are from, and their error where it is known.

    Raises:
        PlanError: NaN, infinite or negative entries, no entries, or curves of different lengths.
    """

    device: str
    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]
    tail_s: tuple[float, ...] = ()
    compute_bytes: tuple[float, ...] = ()
    source: str = "table"
    detail: str = ""

    def __post_init__(self) -> None:
        _filled_text("Curves.device", self.device)
        where = f"curves of {self.device!r}"
        for name in _CURVES:
            entries = records.items(f"{where}: {name}", getattr(self, name), of="numbers")
            if not entries and name not in _OPTIONAL:
                raise PlanError(
                    f"{where}: {name}: expected at least one number, but got none. "
                    f"Leave out a device that nothing is known of."
                )
            checked = tuple(
                records.real(f"{where}: {name} at microbatch size {size}", entry)
                for size, entry in enumerate(entries, start=1)
            )
            object.__setattr__(self, name, checked)
        lengths = {name: len(getattr(self, name)) for name in _CURVES if getattr(self, name)}
        if len(set(lengths.values())) > 1:
            came = ", ".join(f"{name} {length}" for name, length in lengths.items())
            raise PlanError(
                f"{where}: expected one entry per microbatch size in every curve, "
                f"but got lengths {came}. Cut all to the same sizes."
            )
        if self.source not in SOURCES:
            raise PlanError(
                f"{where}: source: expected one of {', '.join(SOURCES)}, but got {self.source!r}."
            )
        records.text(f"{where}: detail", self.detail)

    @property
    def largest_microbatch_size(self) -> int:
        """The largest microbatch size of these curves."""
        return len(self.forward_s)

    def to_dict(self) -> dict[str, Any]:
        """Plain lists and numbers; what is unknown is left out."""
        data = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {
            name: list(value) if isinstance(value, tuple) else value
            for name, value in data.items()
            if value not in ((), "")
        }

    @classmethod
    def from_dict(cls, data: Any, *, where: str = "curves") -> Curves:
        """Inverse of :meth:`to_dict`. Raises PlanError on unknown or missing keys."""
        return _read(cls, data, where)


@dataclass(frozen=True)
class CurveTable:
    """What is known of one model, dtype and sequence length, device by device.

    Args:
        model: name of the model, such as ``"gpt2"``; compared without case.
        dtype: compute dtype: ``"fp32"``, ``"fp16"`` or ``"bf16"``.
        sequence_length: tokens (or patches) of one sample.
        curves: one :class:`Curves` per device.
        parameters: of the whole model, which tells models of one name apart; None: not known, the
            name alone counts. What is measured always has it.

    Raises:
        PlanError: a field is not what is expected, or a device comes twice.
    """

    model: str
    dtype: str
    sequence_length: int
    curves: tuple[Curves, ...]
    parameters: int | None = None

    def __post_init__(self) -> None:
        _filled_text("CurveTable.model", self.model)
        _filled_text("CurveTable.dtype", self.dtype)
        length = records.whole("CurveTable.sequence_length", self.sequence_length, minimum=1)
        object.__setattr__(self, "sequence_length", length)
        if self.parameters is not None:
            count = records.whole("CurveTable.parameters", self.parameters, minimum=1)
            object.__setattr__(self, "parameters", count)
        curves = records.items("CurveTable.curves", self.curves, of="Curves")
        if not curves:
            raise PlanError("CurveTable.curves: expected at least one Curves, but got none.")
        seen = set()
        for index, entry in enumerate(curves):
            if not isinstance(entry, Curves):
                raise PlanError(
                    f"CurveTable.curves[{index}]: expected Curves, "
                    f"but got {records.shortened(entry)}."
                )
            if entry.device.casefold() in seen:
                raise PlanError(
                    f"CurveTable.curves[{index}]: expected every device once, "
                    f"but got {entry.device!r} again. Keep one of them."
                )
            seen.add(entry.device.casefold())
        object.__setattr__(self, "curves", curves)

    def find(self, device: str) -> Curves | None:
        """The curves of this device (compared without case), or None."""
        wanted = device.casefold()
        return next((entry for entry in self.curves if entry.device.casefold() == wanted), None)

    def matches(
        self, model: str, dtype: str, sequence_length: int, parameters: float | None = None
    ) -> bool:
        """Whether this table is of that model, dtype and sequence length; parameters within 1 %,
        where both sides know them.
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
        """This table with the devices of ``newer`` put in or replaced."""
        kept = tuple(entry for entry in self.curves if newer.find(entry.device) is None)
        return dataclasses.replace(self, curves=kept + newer.curves)

    def to_dict(self) -> dict[str, Any]:
        """Plain lists and numbers, for YAML and JSON; what is unknown is left out."""
        data: dict[str, Any] = {
            field.name: getattr(self, field.name)
            for field in dataclasses.fields(self)
            if getattr(self, field.name) is not None
        }
        data["curves"] = [entry.to_dict() for entry in self.curves]
        return data

    @classmethod
    def from_dict(cls, data: Any, *, source: str | None = None) -> CurveTable:
        """Inverse of :meth:`to_dict`. Raises PlanError on unknown or missing keys, naming
        ``source``.
        """
        what = f"{records.in_source(source)}curve table"
        known = [field.name for field in dataclasses.fields(cls)]
        required = [name for name in known if name != "parameters"]
        values = records.mapping(what, data, known=known, required=required)
        entries = records.items(f"{what}: curves", values["curves"], of="curves")
        values["curves"] = tuple(
            Curves.from_dict(entry, where=f"{what}: curves[{index}]")
            for index, entry in enumerate(entries)
        )
        return records.built(cls, values, source)

    def save(self, path: str | PathLike[str]) -> None:
        """Write YAML or JSON by the suffix; the file is replaced whole or not at all."""
        target = Path(path)
        dump = files.dump_json if files.format_of(target) == "json" else files.dump_yaml
        files.write_text(target, dump(self.to_dict()))

    @classmethod
    def load(cls, path: str | PathLike[str]) -> CurveTable:
        """Read what :meth:`save` wrote. Raises PlanError naming the file."""
        source = Path(path)
        parse = files.parse_json if files.format_of(source) == "json" else files.parse_yaml
        content = files.read_text(source, what="a curve table")
        data = parse(content, what="a curve table", source=str(source))
        return cls.from_dict(data, source=str(source))


@dataclass(frozen=True)
class CachedTables:
    """What :func:`cached_tables` found.

    Attributes:
        tables: the valid ones, in order of file name.
        broken: one message per file that is not a table, each naming its file.
    """

    tables: tuple[CurveTable, ...]
    broken: tuple[str, ...]


def cache_folder() -> Path:
    """Where measured tables are kept: ``$LIGHTNING_CEPHALO_CACHE``, or the user's cache folder of
    this platform / lightning-cephalo. It need not exist.
    """
    chosen = os.environ.get("LIGHTNING_CEPHALO_CACHE")
    if chosen:
        return Path(chosen)
    if sys.platform == "win32":
        base = os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local"
    elif sys.platform == "darwin":
        base = Path.home() / "Library" / "Caches"
    else:
        base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "lightning-cephalo"


def cached_tables(folder: str | PathLike[str] | None = None) -> CachedTables:
    """Every table in the folder (default :func:`cache_folder`); what is broken is named, not
    raised, as a file left by another version must not stop a plan.
    """
    root = Path(folder) if folder is not None else cache_folder()
    tables, broken = [], []
    paths = sorted(root.iterdir()) if root.is_dir() else []
    for path in paths:
        if path.suffix.lower() not in _SUFFIXES or path.name.startswith("."):
            continue
        try:
            tables.append(CurveTable.load(path))
        except PlanError as error:
            broken.append(str(error))
    return CachedTables(tuple(tables), tuple(broken))


def save_measured(table: CurveTable, folder: str | PathLike[str] | None = None) -> Path:
    """Put measured curves into the folder (default :func:`cache_folder`) and return the file.

    One file per model, number of parameters, dtype and sequence length. Devices that the file holds
    already are kept unless ``table`` has them too; a file that is broken is replaced.

    Raises:
        PlanError: some of the curves are not measured, or the folder cannot be written.
    """
    for entry in table.curves:
        if entry.source != "measured":
            raise PlanError(
                f"curves of {entry.device!r}: expected source 'measured' in the cache, "
                f"but got {entry.source!r}. Save other tables with CurveTable.save(path)."
            )
    root = Path(folder) if folder is not None else cache_folder()
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
    # names that differ in punctuation only share a file name
    same = before.matches(table.model, table.dtype, table.sequence_length, table.parameters)
    return before.merged(table) if same else table


def _filled_text(field: str, value: Any) -> None:
    if not records.text(field, value).strip():
        raise PlanError(f"{field}: expected a name, but got {value!r}.")


def _read(cls: Any, data: Any, where: str) -> Any:
    fields = dataclasses.fields(cls)
    return cls(
        **records.mapping(
            where,
            data,
            known=[field.name for field in fields],
            required=[field.name for field in fields if field.default is dataclasses.MISSING],
        )
    )
