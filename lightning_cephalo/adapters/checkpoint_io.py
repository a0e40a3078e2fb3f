"""Writes checkpoint files whole or not at all.

Lightning writes a local file to the folder of temporary files and moves it: across file systems
that is a copy, which a kill or a full disk tears. It also syncs nothing, and drops a
PermissionError. Files stay those of ``torch.save``, which Lightning reads.
"""

from __future__ import annotations

import io
import os
from pathlib import Path
from typing import Any

import torch
from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem
from lightning.fabric.plugins import CheckpointIO, TorchCheckpointIO
from lightning.pytorch.plugins.io.wrapper import _WrappingCheckpointIO
from typing_extensions import override

from lightning_cephalo.common.errors import UnwritableError
from lightning_cephalo.common.files import remove_leftovers, replacing


class AtomicCheckpointIO(TorchCheckpointIO):
    """Replaces checkpoint files atomically.

    A local file is written next to its place, synced and renamed: under its name is the old file
    or the new one, after any failure.
    """

    @override
    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None
    ) -> None:
        filesystem, location = url_to_fs(str(path))
        if storage_options is not None:
            super().save_checkpoint(checkpoint, path, storage_options)  # Lightning refuses them
        elif isinstance(filesystem, LocalFileSystem):
            try:
                with replacing(Path(location)) as beside:
                    _save_local(checkpoint, beside)
            except UnwritableError as error:
                raise UnwritableError(
                    f"{error} ModelCheckpoint(save_top_k=...) keeps fewer files, and"
                    " ModelCheckpoint(dirpath=...) names another folder."
                ) from error
        else:
            buffer = io.BytesIO()
            torch.save(checkpoint, buffer)
            filesystem.makedirs(os.path.dirname(location), exist_ok=True)
            with filesystem.transaction:
                filesystem.pipe_file(location, buffer.getvalue())


def with_default(plugin: CheckpointIO | None) -> CheckpointIO:
    """Return the user's plugin, or this package's if there is none, also inside of a wrapper."""
    if isinstance(plugin, _WrappingCheckpointIO):
        plugin.checkpoint_io = AtomicCheckpointIO()  # without effect on a plugin that has one
    return plugin or AtomicCheckpointIO()


def _save_local(checkpoint: dict[str, Any], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    remove_leftovers(path.parent)
    try:
        with path.open("wb") as file:
            torch.save(checkpoint, file)
    except RuntimeError as error:  # torch raises it in place of the error of a write
        if isinstance(error.__context__, (OSError, KeyboardInterrupt)):
            raise error.__context__ from None
        raise
