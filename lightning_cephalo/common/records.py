"""Records: frozen dataclasses with checked fields that convert to mappings, text and files.

A field's annotation holds its check. The checked value replaces the given value. A wrong value
raises PlanError with the field's name, the given value and the expected one::

    @dataclass(frozen=True)
    class Meal(FileRecord):
        kind = "meal"

        guests: Count
        duration_s: Amount = 0.0

    Meal(guests=0)              PlanError: Meal.guests: expected a whole number of at least 1, ...
    Meal.load("meal.yaml")      the same checks; messages name the file too

:class:`Checked` has the checks only. :class:`Record` adds mappings, :class:`FileRecord` also text
and files. The functions at the top are the checks; they check function arguments as well.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import math
import numbers
import sys
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from os import PathLike
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any, ClassVar, TypeVar

from lightning_cephalo.common import files
from lightning_cephalo.common.errors import PlanError
from lightning_cephalo.common.texts import is_control

Check = Callable[[str, Any], Any]
"""Takes a field's name and the given value; returns the value to store, or raises PlanError."""
_R = TypeVar("_R", bound="Record")
_F = TypeVar("_F", bound="FileRecord")


def real(
    field: str,
    value: Any,
    *,
    minimum: float = 0.0,
    above_minimum: bool = False,
    infinite: bool = False,
) -> float:
    """Return ``value`` as a float, or raise PlanError naming ``field``.

    Accepts numpy numbers, and numbers written as text: YAML 1.1 reads ``1e-5`` as text.
    """
    bound = "greater than" if above_minimum else "at least"
    expected = f"a {'' if infinite else 'finite '}number {bound} {minimum:g}"
    number = value
    if isinstance(value, str):
        try:
            number = float(value)
        except ValueError:
            number = None
    if isinstance(number, bool) or not isinstance(number, numbers.Real):
        raise PlanError(f"{field}: expected {expected}, but got {value!r}.")
    try:
        number = float(number)
    except OverflowError:
        number = math.inf
    if (
        math.isnan(number)
        or number < minimum
        or (above_minimum and number == minimum)
        or (math.isinf(number) and not infinite)
    ):
        raise PlanError(f"{field}: expected {expected}, but got {value!r}.")
    return number


def whole(field: str, value: Any, *, minimum: int) -> int:
    """Return ``value`` as an int, or raise PlanError naming ``field``.

    A float is an error even if it is whole.
    """
    if isinstance(value, bool) or not isinstance(value, numbers.Integral) or value < minimum:
        raise PlanError(
            f"{field}: expected a whole number of at least {minimum}, but got {value!r}."
        )
    return int(value)


def text(field: str, value: Any) -> str:
    """Return ``value`` if it is a str that a terminal shows, or raise PlanError naming ``field``.

    Control characters of a file's text could do anything to the terminal that prints it.
    """
    if not isinstance(value, str):
        raise PlanError(f"{field}: expected text, but got {value!r}.")
    if any(map(is_control, set(value))):
        raise PlanError(
            f"{field}: expected text without control characters, but got {shortened(value)}."
        )
    return value


def filled_text(field: str, value: Any) -> str:
    """Return ``value`` if it is a str that is not blank, or raise PlanError naming ``field``."""
    if not text(field, value).strip():
        raise PlanError(f"{field}: expected a name, but got {value!r}.")
    return str(value)


def curve(field: str, value: Any) -> tuple[float, ...]:
    """Return numbers by microbatch size 1, 2, ..., or raise PlanError naming the size."""
    return tuple(
        real(f"{field} at microbatch size {size}", entry)
        for size, entry in enumerate(items(field, value, of="numbers"), start=1)
    )


def equally_long(where: str, curves: Mapping[str, Sequence[float]], *, remedy: str) -> None:
    """Raise PlanError unless all curves have entries for the same microbatch sizes."""
    if len({len(entries) for entries in curves.values()}) > 1:
        came = ", ".join(f"{name} {len(entries)}" for name, entries in curves.items())
        raise PlanError(
            f"{where}expected one entry per microbatch size in every curve, "
            f"but got lengths {came}. {remedy}"
        )


def items(field: str, value: Any, *, of: str) -> tuple[Any, ...]:
    """Return the items of a list, tuple or array, or raise PlanError naming ``field``."""
    if isinstance(value, (str, bytes, Mapping)) or not isinstance(value, Iterable):
        raise PlanError(f"{field}: expected a list of {of}, but got {value!r}.")
    return tuple(value)


def wholes(field: str, value: Any) -> tuple[int, ...]:
    """Return a list of whole numbers from 0 on as a tuple, or raise PlanError naming ``field``."""
    found = items(field, value, of="whole numbers")
    return tuple(whole(f"{field}[{index}]", each, minimum=0) for index, each in enumerate(found))


def mapping(what: str, value: Any, *, known: Sequence[str], required: Sequence[str]) -> dict:
    """Return a mapping that has all required keys and no unknown ones, or raise PlanError."""
    if not isinstance(value, Mapping):
        raise PlanError(
            f"{what}: expected a mapping with the keys {', '.join(known)}, "
            f"but got {type(value).__name__}: {shortened(value)}."
        )
    for key in value:
        if key not in known:
            close = difflib.get_close_matches(str(key), known, n=1)
            hint = f" Did you mean {close[0]!r}?" if close else ""
            raise PlanError(
                f"{what}: unknown key {key!r}; known keys are {', '.join(known)}.{hint}"
            )
    missing = [key for key in required if key not in value]
    if missing:
        raise PlanError(
            f"{what}: missing {', '.join(repr(key) for key in missing)}; "
            f"required keys are {', '.join(required)}. Add what is missing."
        )
    return dict(value)


def shortened(value: Any, length: int = 80) -> str:
    """Return the repr of a value, short enough for a message."""
    shown = repr(value)
    return shown if len(shown) <= length else shown[: length - 3] + "..."


@dataclasses.dataclass(frozen=True)
class OneOf:
    """Checks that a value is one of a few options.

    Attributes:
        options: The allowed values. True and False do not equal 1 and 0.
    """

    options: tuple[Any, ...]
    spelled: str

    def __call__(self, field: str, value: Any) -> Any:
        """Return ``value``, or raise PlanError naming ``field``."""
        for option in self.options:
            if value is option or (isinstance(option, str) and option == value):
                return option
        raise PlanError(f"{field}: expected {self.spelled}, but got {value!r}.")


@dataclasses.dataclass(frozen=True)
class ListOf:
    """Checks a list of records that is not empty, and reads it from a list of mappings.

    Attributes:
        one: Name of one record in a message.
        many: Name of the mappings in a message.
    """

    record: type[Record]
    one: str
    many: str

    def __call__(self, field: str, value: Any) -> tuple[Any, ...]:
        """Return a tuple, or raise PlanError naming ``field`` and the index."""
        entries = items(field, value, of=self.record.__name__)
        for index, entry in enumerate(entries):
            if not isinstance(entry, self.record):
                raise PlanError(
                    f"{field}[{index}]: expected {self.one}, but got {shortened(entry)}."
                )
        if not entries:
            raise PlanError(f"{field}: expected at least one {self.record.__name__}, but got none.")
        return entries

    def read(self, where: str, data: Any) -> tuple[Any, ...]:
        """Return records made from mappings, or raise PlanError starting with ``where``."""
        return tuple(
            self.record.from_dict(entry, where=f"{where}[{index}]")
            for index, entry in enumerate(items(where, data, of=self.many))
        )


@dataclasses.dataclass(frozen=True)
class RecordOf:
    """Checks that a value is a record, and reads it from a mapping."""

    record: type[Record]

    def __call__(self, field: str, value: Any) -> Any:
        """Return ``value``, or raise PlanError naming ``field``."""
        if not isinstance(value, self.record):
            raise PlanError(
                f"{field}: expected {self.record.__name__}(...), but got {shortened(value)}."
            )
        return value

    def read(self, where: str, data: Any) -> Any:
        """Return a record made from a mapping, or raise PlanError starting with ``where``."""
        return self.record.from_dict(data, where=where)


# Annotations for fields of records. Bytes, seconds and rates are floats of at least 0.
Text = Annotated[str, text]
Name = Annotated[str, filled_text]
Count = Annotated[int, functools.partial(whole, minimum=1)]
Amount = Annotated[float, real]
AmountOrInfinite = Annotated[float, functools.partial(real, infinite=True)]
Positive = Annotated[float, functools.partial(real, above_minimum=True)]
PositiveOrInfinite = Annotated[float, functools.partial(real, above_minimum=True, infinite=True)]
Curve = Annotated[tuple[float, ...], curve]
YesOrNo = Annotated[bool, OneOf((True, False), "true or false")]


# The base classes are dataclasses too, though they have no fields. LightningCLI reads a plan with
# jsonargparse, which treats a class as a dataclass only if all of its bases are dataclasses.
@dataclasses.dataclass(frozen=True)
class Checked:
    """A frozen dataclass that checks its annotated fields on construction.

    Class attributes:
        named_by: The field that names a record in messages; it is checked first.

    Raises:
        PlanError: A field has an unexpected value; the message names the field.
    """

    named_by: ClassVar[str] = ""
    _found_checks: ClassVar[dict[str, Check]]

    def __post_init__(self) -> None:
        for name, check in self.field_checks().items():
            value = getattr(self, name)
            where = f"{type(self).__name__}." if name == self.named_by else self._where()
            object.__setattr__(self, name, check(f"{where}{name}", value))

    def _where(self) -> str:
        """Return the text before a field's name in messages."""
        return f"{type(self).__name__}."

    @classmethod
    def field_checks(cls) -> dict[str, Check]:
        """Return the checks by the name of their field, in the order in which they run."""
        if "_found_checks" not in vars(cls):
            cls._found_checks = _find_checks(cls)
        return cls._found_checks


@dataclasses.dataclass(frozen=True)
class Record(Checked):
    """A checked dataclass that converts to and from a mapping, which omits defaults.

    A field may be another record, or a list of records (:class:`ListOf`).

    Class attributes:
        kind: Name of this kind of record in messages about a wrong mapping.
        renamed: Fields that mappings of earlier versions have, with those of today. A dot leads
            into a record in a field: ``{"gather_s": "links.gather_s"}``.
        removed: Fields that mappings of earlier versions have, with what to do where they are
            neither None, False, 0 nor empty. Without a remedy they are ignored.
    """

    kind: ClassVar[str]
    renamed: ClassVar[Mapping[str, str]] = {}
    removed: ClassVar[Mapping[str, str]] = {}

    def to_dict(self) -> dict[str, Any]:
        """Return plain lists and numbers, for YAML and JSON; infinities become ``"inf"``.

        The name comes first, and lists of records last.
        """
        lists = [name for name, check in self.field_checks().items() if isinstance(check, ListOf)]
        values = {field: getattr(self, field.name) for field in dataclasses.fields(self)}
        data = {
            field.name: _plain(value)
            for field, value in values.items()
            if field.default is dataclasses.MISSING or value != field.default
        }
        return dict(sorted(data.items(), key=lambda e: (e[0] != self.named_by, e[0] in lists)))

    @classmethod
    def from_dict(
        cls: type[_R], data: Any, *, where: str | None = None, source: str | None = None
    ) -> _R:
        """Return a record from a mapping; the inverse of :meth:`to_dict`.

        Args:
            data: The mapping; any other type is an error.
            where: The start of messages, such as ``"plan: ranks[1]"``.
            source: The file that the data came from, for the start of messages without ``where``.

        Raises:
            PlanError: A key is unknown or missing, a value is not as expected, or the mapping asks
                for what only earlier versions did.
        """
        what = where or f"{files.in_source(source)}{cls.kind}"
        fields = dataclasses.fields(cls)
        values = mapping(
            what,
            cls._of_today(what, data),
            known=[field.name for field in fields],
            required=[field.name for field in fields if field.default is dataclasses.MISSING],
        )
        for name, check in cls.field_checks().items():
            check = check.check if isinstance(check, _OrNone) else check
            if isinstance(check, (ListOf, RecordOf)) and values.get(name) is not None:
                values[name] = check.read(f"{what}: {name}", values[name])
        try:
            return cls(**values)
        except PlanError as error:
            raise PlanError(f"{files.in_source(where or source)}{error}") from None

    @classmethod
    def _of_today(cls, what: str, data: Any) -> Any:
        """Return the mapping of an earlier version with the fields of today."""
        if not isinstance(data, Mapping):
            return data
        for name, remedy in cls.removed.items():
            if remedy and data.get(name):
                raise PlanError(
                    f"{what}: {name}: {shortened(data[name])} asks for what only earlier versions"
                    f" did. {remedy}"
                )
        earlier = cls.removed.keys() | cls.renamed.keys()
        found = {name: value for name, value in data.items() if name not in earlier}
        for name in data.keys() & cls.renamed.keys():
            record, _, field = cls.renamed[name].rpartition(".")
            if (record or field) in data:
                raise PlanError(
                    f"{what}: got both {record or field!r} and {name!r}, its name in earlier"
                    f" versions. Leave out {name!r}."
                )
            if data[name] is not None:
                (found.setdefault(record, {}) if record else found)[field] = data[name]
        return found


@dataclasses.dataclass(frozen=True)
class FileRecord(Record):
    """A record that converts to and from YAML, JSON and files."""

    def to_yaml(self) -> str:
        """Return the record as YAML text."""
        return files.dump_yaml(self.to_dict())

    @classmethod
    def from_yaml(cls: type[_F], content: str, *, source: str | None = None) -> _F:
        """Return a record from YAML text, or raise PlanError naming ``source``."""
        data = files.parse_yaml(content, what=f"a {cls.kind}", source=source)
        return cls.from_dict(data, source=source)

    def to_json(self) -> str:
        """Return the record as JSON text."""
        return files.dump_json(self.to_dict())

    @classmethod
    def from_json(cls: type[_F], content: str, *, source: str | None = None) -> _F:
        """Return a record from JSON text, or raise PlanError naming ``source``."""
        data = files.parse_json(content, what=f"a {cls.kind}", source=source)
        return cls.from_dict(data, source=source)

    def save(self, path: str | PathLike[str]) -> None:
        """Write YAML or JSON by the suffix; replace the file completely or not at all."""
        target = Path(path)
        as_json = self._format_of(target) == "json"
        files.write_text(target, self.to_json() if as_json else self.to_yaml())

    @classmethod
    def load(cls: type[_F], path: str | PathLike[str]) -> _F:
        """Read a file that :meth:`save` or a user wrote, or raise PlanError naming the file."""
        source = Path(path)
        read = cls.from_json if cls._format_of(source) == "json" else cls.from_yaml
        return read(files.read_text(source, what=f"a {cls.kind}"), source=str(source))

    @staticmethod
    def _format_of(path: Path) -> str:
        return files.format_of(path)


def _find_checks(kind: type[Checked]) -> dict[str, Check]:
    """Return the check of every annotated field, that of the field ``named_by`` first."""
    fields = dataclasses.fields(kind)
    # not the class's own annotations: Python 3.10 rejects KW_ONLY there, which is no field
    annotated = SimpleNamespace(__annotations__={field.name: field.type for field in fields})
    hints = typing.get_type_hints(
        annotated, vars(sys.modules[kind.__module__]), include_extras=True
    )
    found = {name: check for name, hint in hints.items() if (check := _check_of(hint)) is not None}
    return dict(sorted(found.items(), key=lambda item: item[0] != kind.named_by))


def _check_of(hint: Any) -> Check | None:
    """Return the check in an annotation, alone or in a union with None; else None."""
    if isinstance(hint, type) and issubclass(hint, Record):
        return RecordOf(hint)
    if typing.get_origin(hint) is Annotated:
        return typing.cast(Check, hint.__metadata__[0])
    options = typing.get_args(hint)
    if type(None) not in options:
        return None
    check = next((check for option in options if (check := _check_of(option)) is not None), None)
    return None if check is None else _OrNone(check)


@dataclasses.dataclass(frozen=True)
class _OrNone:
    check: Check

    def __call__(self, field: str, value: Any) -> Any:
        return None if value is None else self.check(field, value)


def _plain(value: Any) -> Any:
    if isinstance(value, Record):
        return value.to_dict()
    if isinstance(value, tuple):
        return [_plain(entry) for entry in value]
    return "inf" if isinstance(value, float) and math.isinf(value) else value
