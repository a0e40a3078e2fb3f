"""Writes checkpoint files whole or not at all.

Lightning writes a local file to the folder of temporary files and moves it: across file systems
that is a copy, which a kill or a full disk tears. It also syncs nothing, and drops a
PermissionError. Files stay those of ``torch.save``, which Lightning reads.
"""

from __future__ import annotations

import io
import os
import shutil
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

import torch
from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem
from lightning.fabric.plugins import CheckpointIO, TorchCheckpointIO
from lightning.pytorch.plugins.io.wrapper import _WrappingCheckpointIO
from torch import Tensor
from torch.utils import _pytree as pytree
from typing_extensions import override

from lightning_cephalo.common.errors import UnwritableError
from lightning_cephalo.common.files import remove_leftovers, replacing
from lightning_cephalo.common.quantities import format_bytes


class AtomicCheckpointIO(TorchCheckpointIO):
    """Replaces checkpoint files atomically.

    ::

        Trainer(strategy="cephalo")                                  # uses it
        Trainer(strategy="cephalo", plugins=AsyncCheckpointIO())     # wraps it

    A local file is written next to its place, synced and renamed: under its name is the old file
    or the new one, after any failure.
    """

    @override
    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None
    ) -> None:
        """Write a checkpoint."""
        filesystem, location = url_to_fs(str(path))
        if storage_options is not None:
            super().save_checkpoint(checkpoint, path, storage_options)  # Lightning refuses them
        elif isinstance(filesystem, LocalFileSystem):
            _save_local(checkpoint, Path(location))
        else:
            buffer = io.BytesIO()
            torch.save(checkpoint, buffer)
            filesystem.makedirs(os.path.dirname(location), exist_ok=True)
            with filesystem.transaction:
                filesystem.pipe_file(location, buffer.getvalue())


def with_default(plugin: CheckpointIO | None) -> CheckpointIO:
    """Return the user's plugin, or this package's if there is none, also inside of a wrapper."""
    if plugin is None:
        return AtomicCheckpointIO()
    if isinstance(plugin, _WrappingCheckpointIO):
        plugin.checkpoint_io = AtomicCheckpointIO()  # without effect on a plugin that has one
    return plugin


def _save_local(checkpoint: dict[str, Any], path: Path) -> None:
    try:
        with replacing(path) as beside:
            path.parent.mkdir(parents=True, exist_ok=True)
            remove_leftovers(path.parent)
            with beside.open("wb") as file:
                _save(checkpoint, file)
    except UnwritableError as error:
        leaves = pytree.tree_leaves(checkpoint)
        tensors = {id(leaf): leaf.nbytes for leaf in leaves if isinstance(leaf, Tensor)}
        room = f"The checkpoint's tensors take {format_bytes(sum(tensors.values()))}"
        with suppress(OSError):
            room += f"; {format_bytes(shutil.disk_usage(path.parent).free)} are free there"
        raise UnwritableError(
            f"{error} {room}. ModelCheckpoint(save_top_k=...) keeps fewer files, and"
            " ModelCheckpoint(dirpath=...) names another folder."
        ) from error


def _save(checkpoint: dict[str, Any], file: IO[bytes]) -> None:
    try:
        torch.save(checkpoint, file)
    except RuntimeError as error:  # torch raises it in place of the error of a write
        if isinstance(error.__context__, (OSError, KeyboardInterrupt)):
            raise error.__context__ from None
        raise
