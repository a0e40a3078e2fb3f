"""Lets the interpreter of a rank that fails end soon, and lose nothing that is not written yet.

Other ranks and agents wait for it, and on a busy machine a second of a processor is many seconds.
"""

from __future__ import annotations

import ctypes
import gc
from contextlib import suppress

from lightning_cephalo.ranks import unwritten


def end_soon() -> None:
    """Leave out work at the end of this interpreter that only takes time.

    The interpreter searches all objects for cycles, several times. With what Lightning has made
    that is 1.4 s of a processor. A file in a cycle would lose text that is not written yet, so
    files are written here. Objects of the user's may act when they are deleted: where there are
    any, the interpreter searches.

    Behind that, destructors and handlers of libraries run. Those of torch take 0.15 s. A library
    with files of its own, such as HDF5, may write them there: where there are any, they run.
    """
    that_act = unwritten.classes_that_act_at_their_end()
    to_write = unwritten.descriptors_to_write()
    if that_act or to_write is None or to_write:
        objects = gc.get_objects()
        kinds = list(map(type, objects))
        if not that_act.isdisjoint(kinds):
            return
        files = unwritten.files_among(objects, kinds)
        unwritten.flush_files(files)
        if to_write is not None:
            to_write -= unwritten.descriptors_of(files)
    gc.freeze()
    if to_write is not None and not to_write:
        skip_destructors()


def skip_destructors() -> None:
    """Let the process end with the interpreter, without destructors and handlers of libraries.

    glibc calls the handler that is registered last first, and tells it the exit status. Elsewhere
    nothing changes.
    """
    with suppress(AttributeError, OSError):
        system = ctypes.CDLL(None)
        on_exit, end = system.on_exit, system._exit
        system.fflush(None)
        on_exit(end, None)
