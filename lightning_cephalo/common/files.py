"""Reads and writes YAML and JSON, replaces files atomically, and finds the user's cache folder."""

from __future__ import annotations

import json
import os
import re
import socket
import stat
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import yaml

from lightning_cephalo.common.errors import PlanError, UnwritableError

_UNFINISHED = re.compile(r"\..*\.(?P<host>[\w-]+)-(?P<process>\d+)\.tmp(\.\w+)?")
SUFFIXES = {".yaml": "yaml", ".yml": "yaml", ".json": "json"}


def in_source(source: str | None) -> str:
    """Return the prefix that names the file of a text, or an empty string."""
    return f"{source}: " if source else ""


def dump_yaml(data: dict[str, Any]) -> str:
    """Return YAML in block style, with one line per list of numbers; keys keep their order."""
    return yaml.safe_dump(data, sort_keys=False, default_flow_style=None, width=100)


def parse_yaml(content: str, *, what: str, source: str | None = None) -> Any:
    """Parse YAML text, or raise PlanError naming the place of the first syntax error."""
    return _parsed(_load_yaml, "YAML", content, what, source)


class _UniqueKeys(yaml.SafeLoader):
    """Refuses mappings that have a key twice: the first value would be lost without a word."""

    def compose_mapping_node(self, anchor: str | None) -> yaml.MappingNode:
        """Return the mapping, before those that it merges ("<<") are part of it."""
        node: yaml.MappingNode = super().compose_mapping_node(anchor)
        seen = set()
        for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode)):
            if (key.tag, key.value) in seen:
                raise yaml.composer.ComposerError(problem=_TWICE.format(key.value),
                                                  problem_mark=key.start_mark)  # fmt: skip
            seen.add((key.tag, key.value))
        return node


_TWICE = "the key {!r} is there twice in one mapping: keep one"


def _load_yaml(content: str) -> Any:
    return yaml.load(content, _UniqueKeys)


def _load_json(content: str) -> Any:
    return json.loads(content, object_pairs_hook=_unique)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(_TWICE.format(next(n for n in names if names.count(n) > 1)))
    return found


def _parsed(
    parse: Callable[[str], Any], kind: str, content: str, what: str, source: str | None
) -> Any:
    try:
        return parse(content)
    except RecursionError:
        reason = "it is nested too deeply"
    except (yaml.YAMLError, ValueError) as error:  # the latter also for numbers of 4,300 digits
        reason = f"the text is not {kind}: {' '.join(str(error).split())}"
    raise PlanError(
        f"{in_source(source)}expected {what} in {kind}, but {reason}. Write one with save() and"
        " edit that."
    )


def dump_json(data: dict[str, Any]) -> str:
    """Return indented JSON; infinities in ``data`` must already be text, as JSON has none."""
    return json.dumps(data, indent=2, allow_nan=False)


def parse_json(content: str, *, what: str, source: str | None = None) -> Any:
    """Parse JSON text, or raise PlanError naming the place of the first syntax error."""
    return _parsed(_load_json, "JSON", content, what, source)


def format_of(path: Path) -> str:
    """Return "yaml" or "json" by the suffix, or raise PlanError."""
    try:
        return SUFFIXES[path.suffix.lower()]
    except KeyError:
        raise PlanError(
            f"{path}: expected a file name that ends in {', '.join(SUFFIXES)}, "
            f"but got the suffix {path.suffix!r}. Rename the file."
        ) from None


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a path next to ``path``, with the same suffix, and replace ``path`` by it at the end.

    A reader sees the whole old file or the whole new file, never a partial one.

    Raises:
        UnwritableError: an OSError occurred, such as a missing folder or a full disk.
    """
    beside = path.with_name(f".{path.stem}.{_host()}-{os.getpid()}.tmp{path.suffix}")
    try:
        try:
            yield beside
            with beside.open("rb+") as written:
                os.fsync(written.fileno())  # the name must not reach the disk before the content
            os.replace(beside, path)
        finally:
            beside.unlink(missing_ok=True)
    except OSError as error:
        raise UnwritableError(
            f"{path}: cannot be written: {error.strerror or error}. Name a file in a folder that "
            f"exists, may be written to and has room."
        ) from error


def remove_leftovers(folder: Path) -> None:
    """Remove the files that killed processes of this host were writing in a folder."""
    if os.name == "nt":  # there, no signal asks whether a process lives
        return
    for left in folder.glob(".*.tmp*"):
        named = _UNFINISHED.fullmatch(left.name)
        if named is not None and named["host"] == _host() and not lives(int(named["process"])):
            with suppress(OSError):
                left.unlink()


def _host() -> str:
    return re.sub(r"[^\w-]", "-", socket.gethostname())[:64]


def lives(process: int) -> bool:
    """Return whether a process of this host has not ended, or is not waited for yet."""
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except OSError:  # of another user
        return True
    return True


def write_text(path: Path, content: str) -> None:
    """Write a file completely or not at all; on failure raise UnwritableError naming it."""
    with replacing(path) as beside:
        beside.write_text(content, encoding="utf-8")


def read_text(path: Path, *, what: str) -> str:
    """Read a file, or raise PlanError naming it."""
    try:
        mode = path.stat().st_mode
        if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):  # a pipe would be waited for forever
            raise PlanError(
                f"{path}: expected {what}, but it is a pipe, a socket or a device. Give a file."
            )
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise PlanError(
            f"{path}: expected {what}, but there is no such file. Check the path."
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise PlanError(f"{path}: expected {what}, but it cannot be read: {error}.") from error


def cache_folder() -> Path:
    """Return the folder of stored measurements, which may not exist yet.

    It is ``$LIGHTNING_CEPHALO_CACHE``, or ``lightning-cephalo`` in the platform's cache folder of
    the user. A user without a home, as in containers, has one in the folder of temporary files.
    """
    chosen = os.environ.get("LIGHTNING_CEPHALO_CACHE")
    if chosen:
        return Path(chosen)
    try:
        if sys.platform == "win32":
            base = os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local"
        elif sys.platform == "darwin":
            base = Path.home() / "Library" / "Caches"
        else:
            base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    except RuntimeError:
        user = os.getuid() if sys.platform != "win32" else os.environ.get("USERNAME", "")
        return Path(tempfile.gettempdir()) / f"lightning-cephalo-{user}"
    return Path(base) / "lightning-cephalo"
