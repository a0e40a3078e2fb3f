"""Finds files with text that is not written yet, and classes of the user's that act at their end.

An interpreter that ends without a search for cycles loses what files in cycles have in their
buffers. To find these files among all objects takes a tenth of a second of a processor. So a look
at this process's descriptors comes first: most ranks have no file open for writing.
"""

from __future__ import annotations

import io
import itertools
import os
import stat
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from lightning_cephalo.ranks.whereabouts import is_installed

# the interpreter itself writes what these have
_STANDARD = 2


def files_among(objects: Sequence[Any], kinds: Sequence[type]) -> list[Any]:
    """Return those of many objects that are files.

    Args:
        objects: The objects.
        kinds: The class of each: one look at each object, of half a million that no cache of the
            processor holds.
    """
    # the classes of files first: to ask each of all classes takes a tenth of a second
    of_files = _with_subclasses(kind for kind in io.IOBase.__mro__ if kind is not object)
    places = itertools.compress(range(len(kinds)), map(of_files.__contains__, kinds))
    return [objects[place] for place in places]


def flush_files(files: Sequence[io.IOBase]) -> None:
    """Write what files have in their buffers."""
    for each in files:
        with suppress(Exception):  # such as of a closed file
            each.flush()


def descriptors_of(files: Iterable[io.IOBase]) -> set[int]:
    """Return the descriptors of Python's files."""
    numbers = set()
    for each in files:
        with suppress(Exception):  # such as one in memory
            numbers.add(each.fileno())
    return numbers


def classes_that_act_at_their_end() -> set[type]:
    """Return the classes of the user's whose objects do something when they are deleted."""
    classes = _with_subclasses([object])
    modules = {kind.__module__ for kind in classes}
    of_user = set(filter(_is_users, modules))
    return {kind for kind in classes if kind.__module__ in of_user and hasattr(kind, "__del__")}


def _is_users(module: str) -> bool:
    path = getattr(sys.modules.get(module), "__file__", None)
    return module == "__main__" or (path is not None and not is_installed(path))


def _with_subclasses(kinds: Iterable[type]) -> set[type]:
    found, new = set[type](), set(kinds)
    while new:
        found |= new
        new = set(itertools.chain.from_iterable(map(type.__subclasses__, new))) - found
    return found


def descriptors_to_write() -> set[int] | None:
    """Return descriptors of this process that may have text that is not written yet.

    They are open for writing, of a file, a terminal, or a pipe to another process. Connections are
    none of them: nothing here writes text to one. Nor are mappings that kept steps are in, whose
    descriptors Python holds.

    Returns:
        The descriptors; None where the system does not tell them.
    """
    try:
        numbers = [int(name) for name in os.listdir("/proc/self/fd")]
    except OSError:  # not Linux
        return None
    found_to_write, read_pipes = set[int](), set[tuple[int, int]]()
    files, written_pipes = (defaultdict[tuple[int, int], set[int]](set) for _ in range(2))
    for number in numbers:
        with suppress(OSError):  # the one that lists them is closed
            flags = Path(f"/proc/self/fdinfo/{number}").read_text().split()[3]
            mode, found = int(flags, 8) & os.O_ACCMODE, os.fstat(number)
            identity = (found.st_dev, found.st_ino)
            if stat.S_ISFIFO(found.st_mode) and mode == os.O_RDONLY:
                read_pipes.add(identity)
            elif mode == os.O_RDONLY or number <= _STANDARD:
                continue
            elif stat.S_ISFIFO(found.st_mode):
                written_pipes[identity].add(number)
            elif stat.S_ISREG(found.st_mode) or stat.S_ISBLK(found.st_mode):
                files[identity].add(number)
            elif os.isatty(number):
                found_to_write.add(number)
    # gloo and torch's store have pipes to themselves, for threads that wait
    for identity in written_pipes.keys() - read_pipes:
        found_to_write |= written_pipes[identity]
    mapped = Counter(_mapped()) if files else Counter[tuple[int, int]]()
    for identity, held in files.items():
        if len(held) > mapped[identity]:
            found_to_write |= held
    return found_to_write


def _mapped() -> Iterator[tuple[int, int]]:
    """Yield device and number of each file that this process has mapped to write to it."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        _, access, _, device, number, *_ = line.split(maxsplit=5)
        if access.startswith("rw-s"):
            major, minor = (int(part, 16) for part in device.split(":"))
            yield os.makedev(major, minor), int(number)
