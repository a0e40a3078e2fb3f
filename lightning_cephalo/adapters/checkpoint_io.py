"""Writes checkpoint files whole or not at all.

Lightning moves a file from the folder of temporary files, a copy across file systems that a kill or
a full disk tears, and syncs nothing. Files stay those of ``torch.save``: plain Lightning and
``torch.load`` read them.
"""

from __future__ import annotations

import errno
import io
import os
import re
import secrets
import shutil
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, cast

import torch
from fsspec import AbstractFileSystem
from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem
from lightning.fabric.plugins import CheckpointIO, TorchCheckpointIO
from lightning.fabric.utilities.cloud_io import _load
from lightning.pytorch.plugins.io.wrapper import _WrappingCheckpointIO
from torch import Tensor
from torch.utils import _pytree as pytree
from typing_extensions import override

from lightning_cephalo.common.errors import CheckpointError, UnwritableError
from lightning_cephalo.common.quantities import format_bytes
from lightning_cephalo.common.texts import printable

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

# where one call with all bytes is several times as fast as a file, and as whole
_TAKE_ALL_AT_ONCE = {"s3", "s3a", "gs", "gcs"}
_NOT_OFFERED = {errno.EINVAL, errno.ENOSYS, errno.ENOTSUP}


class AtomicCheckpointIO(TorchCheckpointIO):
    """Replaces checkpoint files atomically.

    ::

        Trainer(strategy="cephalo")                                  # uses it
        Trainer(strategy="cephalo", plugins=AsyncCheckpointIO())     # wraps it

    A local file is written beside its place, synced and renamed: under its name is the old file or
    the new one, after any failure. Other file systems are written as by Lightning.
    """

    @override
    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None
    ) -> None:
        """Write a checkpoint."""
        if storage_options is not None:
            raise TypeError(
                f"Expected no storage_options, got {storage_options!r}. Leave them out, or give the"
                " Trainer a CheckpointIO plugin that knows them."
            )
        filesystem, location = url_to_fs(str(path))
        if isinstance(filesystem, LocalFileSystem):
            _save_local(checkpoint, Path(location))
        else:
            _save_remote(checkpoint, filesystem, location)

    @override
    def load_checkpoint(
        self,
        path: Any,
        map_location: Callable[..., Any] | None = lambda storage, _: storage,
        weights_only: bool | None = None,
    ) -> dict[str, Any]:
        """Read a checkpoint; raise CheckpointError for a file that is cut off."""
        filesystem, location = url_to_fs(str(path))
        if not filesystem.exists(location):
            raise FileNotFoundError(f"Checkpoint file not found: {path}")
        # Lightning 2.5 has another default, and does not take None
        given = {} if weights_only is None else {"weights_only": weights_only}
        try:
            return _load(str(path), map_location=map_location, **given)
        except (RuntimeError, EOFError) as error:
            if isinstance(error, RuntimeError) and "PytorchStreamReader" not in str(error):
                raise
            said = (str(error) or "it is empty").splitlines()[0]
            raise CheckpointError(
                printable(
                    f"{path}: the checkpoint is damaged: {said}. Pass the ckpt_path= of another"
                    " file, or none to begin anew."
                )
            ) from error


def with_default(plugin: CheckpointIO | None) -> CheckpointIO:
    """Return the user's plugin, or this package's if there is none, also inside of a wrapper."""
    if plugin is None:
        return AtomicCheckpointIO()
    if isinstance(plugin, _WrappingCheckpointIO):
        plugin.checkpoint_io = AtomicCheckpointIO()  # without effect on a plugin that has one
    return plugin


# -- writing ------------------------------------------------------------------------------------


def _save_local(checkpoint: dict[str, Any], path: Path) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists() and not path.is_file():
            raise FileExistsError(errno.EEXIST, "it is not a file")
        _remove_leftovers(path.parent)
        with _replacing(path) as writer:
            torch.save(checkpoint, cast(IO[bytes], writer))
    except OSError as error:
        refused = UnwritableError(_why_unwritable(checkpoint, path, error))
        refused.errno = error.errno
        raise refused from error


def _save_remote(checkpoint: dict[str, Any], filesystem: AbstractFileSystem, location: str) -> None:
    """Write to a remote file system as Lightning does, whose function drops PermissionError."""
    buffer = io.BytesIO()
    torch.save(checkpoint, buffer)
    filesystem.makedirs(os.path.dirname(location), exist_ok=True)
    protocols = filesystem.protocol
    protocols = {protocols} if isinstance(protocols, str) else set(protocols)
    with filesystem.transaction:
        if protocols & _TAKE_ALL_AT_ONCE:
            filesystem.pipe(location, buffer.getvalue())
        else:
            with filesystem.open(location, "wb") as file:
                file.write(buffer.getvalue())


class _Writer:
    """A file for ``torch.save``, which would raise its own error in place of a write's."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self.failure: BaseException | None = None

    def write(self, data: Any) -> int:
        return self._noting(self._file.write, data)

    def flush(self) -> None:
        self._noting(self._file.flush)

    def _noting(self, function: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return function(*arguments)
        except BaseException as error:
            self.failure = error
            raise


@contextmanager
def _replacing(path: Path) -> Iterator[_Writer]:
    """Let ``path`` have what is written, when all of it is on the disk; else leave it alone."""
    # in the same folder: only within a file system is a renaming atomic
    beside = path.with_name(f"{_prefix()}{secrets.token_hex(8)}.tmp")
    try:
        with beside.open("xb") as file:
            if fcntl is not None:
                with suppress(OSError):  # a file system without locks
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            writer = _Writer(file)
            try:
                yield writer
            except Exception:
                if writer.failure is not None:
                    raise writer.failure from None
                raise
            file.flush()
            _sync(file.fileno())
            if os.name == "nt":
                file.close()  # Windows renames no open file
            os.replace(beside, path)
        _sync_folder(path.parent)
    finally:
        beside.unlink(missing_ok=True)


def _prefix() -> str:
    host = re.sub(r"[^\w-]", "-", socket.gethostname())
    return f".cephalo-checkpoint-{host[:64]}-"


def _remove_leftovers(folder: Path) -> None:
    """Remove what killed processes of this host have left: a lock ends with its process."""
    if fcntl is None:
        return
    for left in folder.glob(f"{_prefix()}*.tmp"):
        with suppress(OSError), left.open("rb+") as file:
            # one that is empty may be about to be locked
            if os.fstat(file.fileno()).st_size > 0:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                left.unlink()


def _sync(descriptor: int) -> None:
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _NOT_OFFERED:
            raise


def _sync_folder(folder: Path) -> None:
    """Make a new name in a folder outlive a power failure."""
    if os.name == "nt":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        _sync(descriptor)
    finally:
        os.close(descriptor)


def _why_unwritable(checkpoint: Any, path: Path, error: OSError) -> str:
    tensors = {
        id(leaf): leaf.nbytes
        for leaf in pytree.tree_leaves(checkpoint)
        if isinstance(leaf, Tensor) and leaf.layout == torch.strided
    }
    room = f"Its tensors take {format_bytes(sum(tensors.values()))}"
    with suppress(OSError):
        room += f"; {format_bytes(shutil.disk_usage(path.parent).free)} are free there"
    kept = " The file of before is as it was." if path.is_file() else ""
    return (
        f"{path}: the checkpoint cannot be written: {error.strerror or error}. {room}.{kept} Make"
        " room, keep fewer checkpoints (ModelCheckpoint(save_top_k=...)), or name another folder"
        " (ModelCheckpoint(dirpath=...))."
    )
