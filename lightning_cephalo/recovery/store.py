"""Files in the host's memory that outlive the process which writes them.

Each rank has two files, its *slots*: a step goes into the older one, whose header is written last
(docs/design/recovery.md). Each folder belongs to one job, and only one user can enter it.
"""

from __future__ import annotations

import dataclasses
import hashlib
import mmap
import os
import re
import shutil
import stat
import struct
import zlib
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_cephalo.accelerator.cgroup import MemoryLimit, memory_limit
from lightning_cephalo.common.errors import RecoveryError
from lightning_cephalo.common.quantities import format_mib

MEMORY = Path("/dev/shm")
"""Where Linux mounts a file system in memory."""

# magic; serial, attempt, rank, ranks, run; begin and bytes of payload and meta; checksum of meta
_HEAD = struct.Struct("<8s5q4qI")
_CHECK = struct.Struct("<I")
_MAGIC, _PAGE, _ALIGNED = b"cephalo2", 4096, 64
# a file is made a little larger than what it holds, so that it seldom grows
_SLACK = 1.25


@dataclass(frozen=True, order=True)
class Piece:
    """One rank's part of a kept step."""

    serial: int
    attempt: int
    rank: int
    world_size: int
    run: int = 0

    @property
    def step(self) -> tuple[int, int, int, int]:
        """What is equal for the pieces of all ranks."""
        return self.serial, self.attempt, self.world_size, self.run

    def of(self, rank: int) -> Piece:
        """Return another rank's piece of the same step."""
        return dataclasses.replace(self, rank=rank)


def age(piece: Piece) -> tuple[int, int]:
    """Return what is larger for a newer step: each start goes on from those before it."""
    return piece.attempt, piece.serial


class Sizes(NamedTuple):
    """What the file of a piece holds."""

    payload_bytes: int
    meta_bytes: int
    checksum: int


# -- one file -------------------------------------------------------------------------------------


class Slot:
    """A file that holds one piece, or nothing."""

    def __init__(self, path: Path, is_synced: bool = False) -> None:
        self.path, self._is_synced = path, is_synced
        self._map: mmap.mmap | None = None
        self._bytes: Tensor | None = None
        self._sizes: Sizes | None = None
        self._known: tuple[list[Any], list[Tensor]] = ([], [])
        self._opened: tuple[int, int] | None = None

    def write(self, piece: Piece, meta: bytes, tensors: Sequence[Tensor]) -> None:
        """Replace what the file holds."""
        self.fill(meta, tensors)
        self.finish(piece)

    def fill(self, meta: bytes, tensors: Sequence[Tensor]) -> None:
        """Write all but the header: the file is void until :meth:`finish`."""
        starts, end = places(tensors)
        whole = self.make_room(Sizes(end, len(meta), zlib.crc32(meta)))
        if tensors:
            # one call, in which the thread that trains need not wait for this one's Python
            with torch.no_grad():
                torch._foreach_copy_(self._rooms(whole, tensors, starts), list(tensors))
        if meta:
            whole[end:].copy_(torch.frombuffer(bytearray(meta), dtype=torch.uint8))

    def _rooms(
        self, whole: Tensor, tensors: Sequence[Tensor], starts: Sequence[int]
    ) -> list[Tensor]:
        """Return where tensors are written; most steps have the same tensors."""
        kinds = [(tensor.dtype, tensor.shape) for tensor in tensors]
        if self._known[0] != kinds:
            rooms = [
                whole[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
                for tensor, start in zip(tensors, starts, strict=True)
            ]
            self._known = kinds, rooms
        return self._known[1]

    def make_room(self, sizes: Sizes) -> Tensor:
        """Void the file, and return the bytes of a payload and a meta behind it, to be written."""
        end = _PAGE + sizes.payload_bytes + sizes.meta_bytes
        whole = self._room(end)
        whole[:_PAGE].zero_()
        self._sync(_PAGE)
        self._sizes = sizes
        return whole[_PAGE:end]

    def finish(self, piece: Piece) -> None:
        """Write the header: the file is whole."""
        assert self._map is not None and self._sizes is not None
        sizes, self._sizes = self._sizes, None
        self._sync()
        head = _HEAD.pack(
            _MAGIC,
            *dataclasses.astuple(piece),
            *(_PAGE, sizes.payload_bytes, _PAGE + sizes.payload_bytes, sizes.meta_bytes),
            sizes.checksum,
        )
        self._map[: _HEAD.size + _CHECK.size] = head + _CHECK.pack(zlib.crc32(head))
        self._sync(_PAGE)

    def content(self) -> tuple[Sizes, Tensor]:
        """Return the sizes and the bytes of a file that this process has written."""
        head = _read_head(self.path)
        if self._bytes is None or head is None:
            raise RecoveryError(
                f"{self.path}: expected a piece that this process has written, but it is gone or"
                " void. Leave the folder as it is while training runs."
            )
        *_, payload_bytes, _, meta_bytes, checksum = head
        whole = self._bytes[_PAGE : _PAGE + payload_bytes + meta_bytes]
        return Sizes(payload_bytes, meta_bytes, checksum), whole

    def _sync(self, nbytes: int = 0) -> None:
        """Wait until the first bytes, or all, are on the disk."""
        if self._is_synced and self._map is not None:
            self._map.flush(0, nbytes or len(self._map))

    def _room(self, nbytes: int) -> Tensor:
        if self._bytes is not None and self._bytes.numel() >= nbytes:
            return self._bytes
        self.close()
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        descriptor = os.open(self.path, flags, 0o600)
        try:
            os.pwrite(descriptor, bytes(_PAGE), 0)
            found = os.fstat(descriptor)
            self._opened, size = (found.st_dev, found.st_ino), found.st_size
            if size < nbytes:
                # memory is taken here: else a write to a full tmpfs would kill the process
                size = max(nbytes, int(nbytes * _SLACK) if size > _PAGE else nbytes)
                os.posix_fallocate(descriptor, 0, size)
            self._map = mmap.mmap(descriptor, size)
        finally:
            os.close(descriptor)
        self._bytes = torch.frombuffer(self._map, dtype=torch.uint8)
        return self._bytes

    @property
    def is_removed(self) -> bool:
        """Whether somebody has removed the file that this process writes to."""
        if self._map is None:
            return False
        try:
            found = os.stat(self.path)
        except OSError:
            return True
        return (found.st_dev, found.st_ino) != self._opened

    def close(self) -> None:
        """Let the file go; it stays."""
        self._bytes, self._known = None, ([], [])
        held, self._map = self._map, None
        if held is not None:
            with suppress(BufferError):  # a tensor may still point into it
                held.close()

    def piece(self) -> Piece | None:
        """Return which piece the file holds; None if it is void, or no file."""
        head = _read_head(self.path)
        return None if head is None else Piece(*head[1:6])

    def read(self) -> tuple[bytes, Tensor]:
        """Return the meta and the payload; changes of the payload stay in this process."""
        head = _read_head(self.path)
        if head is not None:
            *_, payload, payload_bytes, meta_at, meta_bytes, checksum = head
            with self.path.open("rb") as file:
                held = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
            meta = held[meta_at : meta_at + meta_bytes]
            if zlib.crc32(meta) == checksum:
                whole = torch.frombuffer(held, dtype=torch.uint8)
                return meta, whole[payload : payload + payload_bytes]
        raise RecoveryError(
            f"{self.path}: expected a whole piece of a kept step, but it is void or damaged. Remove"
            " the folder; training then begins at ckpt_path, or anew."
        )


def places(tensors: Iterable[Tensor]) -> tuple[list[int], int]:
    """Return where each tensor begins in the payload, and the payload's bytes."""
    starts, end = [], 0
    for tensor in tensors:
        starts.append(end)
        end += -(-tensor.nbytes // _ALIGNED) * _ALIGNED
    return starts, end


def _read_head(path: Path) -> tuple[int, ...] | None:
    try:
        with path.open("rb") as file:
            raw = file.read(_HEAD.size + _CHECK.size)
            size = os.fstat(file.fileno()).st_size
    except OSError:
        return None
    if len(raw) < _HEAD.size + _CHECK.size:
        return None
    head: tuple[int, ...] = _HEAD.unpack(raw[: _HEAD.size])
    (check,) = _CHECK.unpack(raw[_HEAD.size :])
    is_whole = check == zlib.crc32(raw[: _HEAD.size]) and head[0] == _MAGIC
    return head if is_whole and head[8] + head[9] <= size else None


# -- the files of a job ---------------------------------------------------------------------------

# pieces of ranks of this host, and copies of others'
_NAME = re.compile(r"((?:rank|copy)\d+)\.\d")


class Store:
    """The kept steps of one job on this host."""

    def __init__(
        self,
        folder: Path | None,
        job: str,
        limit_of: Callable[[], MemoryLimit | None] = memory_limit,
    ) -> None:
        if folder is None and not MEMORY.is_dir():
            raise RecoveryError(
                f"{MEMORY} does not exist, where steps would be kept in memory. Give a folder on a"
                " local disk: CephaloStrategy(recover=Recovery(folder=...))."
            )
        self.folder = folder_of(folder, job)
        self.base = self.folder.parent
        self.is_in_memory = folder is None
        self._limit_of = limit_of
        self._slots: dict[str, Slot] = {}
        _make_private(self.base)
        _make_private(self.folder)

    # -- room -------------------------------------------------------------------------------------

    @property
    def free_bytes(self) -> int:
        """Bytes that can be written here, those of this job's files included."""
        found = os.statvfs(self.folder)
        free_bytes = found.f_bavail * found.f_frsize
        limit = self._limit_of() if self.is_in_memory else None
        if limit is not None:  # pages of /dev/shm count against the control group
            free_bytes = min(free_bytes, int(limit.free_bytes))
        return free_bytes + self.held_bytes

    @property
    def held_bytes(self) -> int:
        """Bytes of this job's files."""
        return _bytes_of(self._paths())

    def bytes_of(self, ranks: Iterable[int]) -> int:
        """Return the bytes of the files of some ranks of this host."""
        names = {f"rank{rank}" for rank in ranks}
        return _bytes_of(path for path in self._paths() if path.name.partition(".")[0] in names)

    @property
    def place(self) -> tuple[str, int, int]:
        """What is equal for processes that see the same files."""
        found = self.folder.stat()
        return _boot(), found.st_dev, found.st_ino

    # -- pieces -----------------------------------------------------------------------------------

    def slot(self, rank: int, *spared: Piece | None, is_copy: bool = False) -> Slot:
        """Return a slot of a rank that holds no spared piece; there is one more than of these."""
        kind = "copy" if is_copy else "rank"
        kept = set(spared) - {None}
        slots = (self._slot(f"{kind}{rank}.{number}") for number in range(len(spared) + 1))
        return next(slot for slot in slots if slot.piece() not in kept)

    def pieces(self) -> dict[Piece, Slot]:
        """Return the whole pieces that lie here."""
        slots = [self._slot(path.name) for path in self._paths()]
        return {piece: slot for slot in slots if (piece := slot.piece()) is not None}

    def renew(self) -> bool:
        """Make ready to write what somebody has removed; return whether anything was missing."""
        removed = [slot for slot in self._slots.values() if slot.is_removed]
        for slot in removed:
            slot.close()
        if not removed and self.folder.is_dir():
            return False
        _make_private(self.base)
        _make_private(self.folder)
        return True

    def remove(self, ranks: Iterable[int] = (), copies: Iterable[int] = ()) -> None:
        """Remove all files but some, and the folder if it is empty then."""
        staying = {*(f"rank{rank}" for rank in ranks), *(f"copy{rank}" for rank in copies)}
        for path in self._paths():
            if path.name.partition(".")[0] not in staying:
                self._slot(path.name).close()
                path.unlink(missing_ok=True)
        for folder in (self.folder, self.base):
            with suppress(OSError):  # others still keep steps here
                folder.rmdir()

    @property
    def is_empty(self) -> bool:
        """Whether no file lies here."""
        return not self._paths()

    def _slot(self, name: str) -> Slot:
        return self._slots.setdefault(name, Slot(self.folder / name, not self.is_in_memory))

    def _paths(self) -> list[Path]:
        with suppress(FileNotFoundError):
            return sorted(p for p in self.folder.iterdir() if _NAME.fullmatch(p.name))
        return []

    # -- other jobs -------------------------------------------------------------------------------

    def remove_stale(self) -> str | None:
        """Remove what jobs of this user have left whose agent is gone; return what to tell."""
        freed, names = 0, []
        for path in sorted(self.base.iterdir()):
            agent = Agent.parse(path.name)
            if path == self.folder or agent is None or agent.may_live:
                continue
            freed += sum(each.stat().st_blocks * 512 for each in path.glob("*"))
            shutil.rmtree(path, ignore_errors=True)
            names.append(path.name)
        if not names:
            return None
        return (
            f"Removed {format_mib(freed)} from {self.base}, which jobs that have ended had kept:"
            f" {', '.join(names)}."
        )


def _bytes_of(paths: Iterable[Path]) -> int:
    return sum(path.stat().st_blocks * 512 for path in paths)


def folder_of(folder: Path | None, job: str) -> Path:
    """Return where a job of this user keeps its steps; without a folder in ``/dev/shm``."""
    return (MEMORY if folder is None else folder) / f"lightning-cephalo-{_user()}" / job


def _user() -> int:
    return os.geteuid()


def _make_private(folder: Path) -> None:
    """Make a folder that only this user can enter, or check that it is one."""
    try:
        folder.mkdir(mode=0o700, parents=not folder.parent.exists())
    except FileExistsError:
        pass
    except OSError as error:
        raise RecoveryError(
            f"{folder}: steps cannot be kept there: {error.strerror}. Give another folder:"
            " CephaloStrategy(recover=Recovery(folder=...))."
        ) from error
    found = folder.lstat()
    fault = None
    if not stat.S_ISDIR(found.st_mode):
        fault = "it is no folder"
    elif found.st_uid != _user():
        fault = f"it belongs to user {found.st_uid}, and this process to {_user()}"
    elif found.st_mode & 0o077:
        fault = f"others may enter it (mode {found.st_mode & 0o777:o}, expected 700)"
    if fault is not None:
        raise RecoveryError(
            f"{folder}: steps are not kept there: {fault}. What is read from it is trusted. Remove"
            " it, or give another folder: CephaloStrategy(recover=Recovery(folder=...))."
        )


# -- names of jobs --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Agent:
    """The process that restarts ranks on this host; it stays the same over all restarts."""

    boot: str
    # of process numbers
    namespace: int
    process: int
    # in ticks since the host's start
    started: int

    @classmethod
    def of(cls, process: int) -> Agent:
        """Return the agent with this process number."""
        return cls(_boot(), _namespace(), process, _started(process) or 0)

    @classmethod
    def above(cls, variable: str) -> Agent:
        """Return the nearest process above this one that did not begin with this variable.

        An agent sets it for its ranks. A shell in between, which ends with its rank, has it, too.
        """
        own, process = os.environ.get(variable), os.getppid()
        while own is not None and _begun_with(process, variable) == own:
            process = int(_stat(process)[1])
        return cls.of(process)

    @classmethod
    def parse(cls, name: str) -> Agent | None:
        """Return the agent of :attr:`name`; None if it is another name."""
        match = re.fullmatch(r"agent-([0-9a-f]{8})-(\d+)-(\d+)-(\d+)", name)
        return None if match is None else cls(match[1], *map(int, match.groups()[1:]))

    @property
    def name(self) -> str:
        """Name of its job."""
        return f"agent-{self.boot}-{self.namespace}-{self.process}-{self.started}"

    @property
    def may_live(self) -> bool:
        """Whether it may still run; processes of other containers cannot be seen from here."""
        if self.boot != _boot():
            return False
        return self.namespace != _namespace() or _started(self.process) == self.started


def job_named(name: str) -> str:
    """Return a folder's name for a job that the user has named."""
    readable = re.sub(r"[^\w-]", "-", name)[:40]
    return f"job-{readable}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"


def _boot() -> str:
    with suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text()[:8]
    return "0" * 8


def _namespace() -> int:
    with suppress(OSError):
        return os.stat("/proc/self/ns/pid").st_ino
    return 0


def _started(process: int) -> int | None:
    with suppress(OSError):
        return int(_stat(process)[19])
    return None


def _stat(process: int) -> list[str]:
    # the name, in parentheses, may contain anything
    return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()


def _begun_with(process: int, variable: str) -> str | None:
    with suppress(OSError):
        pairs = Path(f"/proc/{process}/environ").read_bytes().split(b"\0")
        found = [pair for pair in pairs if pair.startswith(os.fsencode(variable) + b"=")]
        return os.fsdecode(found[0].partition(b"=")[2]) if found else None
    return None
