"""Checkpoint files are replaced whole or not at all."""

from __future__ import annotations

import io
import os
import signal
from pathlib import Path

import fsspec
import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem
from full_disk import file_size_limit
from lightning.pytorch.plugins import AsyncCheckpointIO, TorchCheckpointIO

from lightning_cephalo import CephaloStrategy
from lightning_cephalo.adapters.checkpoint_io import AtomicCheckpointIO
from lightning_cephalo.common.errors import UnwritableError

OLD, NEW = {"step": 1}, {"step": 2, "weight": torch.arange(100_000.0)}


@pytest.fixture
def path(tmp_path):
    """A file with the old checkpoint."""
    AtomicCheckpointIO().save_checkpoint(OLD, tmp_path / "last.ckpt")
    return tmp_path / "last.ckpt"


def assert_old_alone(path):
    assert os.listdir(path.parent) == [path.name]
    assert torch.load(path, weights_only=True) == OLD


def test_what_is_written_is_a_file_of_torch_and_is_read_again(path):
    AtomicCheckpointIO().save_checkpoint(NEW, path)
    for read in (torch.load(path), AtomicCheckpointIO().load_checkpoint(path)):
        assert read["step"] == 2 and torch.equal(read["weight"], NEW["weight"])
    plain = path.parent.parent / f"{path.parent.name}.plain"
    TorchCheckpointIO().save_checkpoint(NEW, plain)
    assert path.read_bytes() == plain.read_bytes()
    assert path.stat().st_mode == plain.stat().st_mode


def test_a_full_disk_leaves_the_old_file_and_the_error_has_a_remedy(path):
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    with file_size_limit(100_000), pytest.raises(UnwritableError) as refused:
        AtomicCheckpointIO().save_checkpoint(NEW, path)
    assert_old_alone(path)
    message = str(refused.value)
    assert message.startswith(f"{path}: cannot be written: File too large.")
    assert "save_top_k" in message


class Interrupted(io.BytesIO):
    """Is interrupted in mid-write, where torch raises an error of its own."""

    def write(self, data):
        if self.tell() + len(data) > 300_000:
            raise KeyboardInterrupt
        return super().write(data)


def test_an_interrupt_leaves_the_old_file_and_stays_one(path, monkeypatch):
    monkeypatch.setattr(Path, "open", lambda *_: Interrupted())
    with pytest.raises(KeyboardInterrupt):
        AtomicCheckpointIO().save_checkpoint(NEW, path)
    assert_old_alone(path)


def test_a_place_that_cannot_hold_a_file_is_named(path):
    (path.parent / "folder.ckpt").mkdir()
    for place in ("folder.ckpt", "last.ckpt/a.ckpt"):
        with pytest.raises(UnwritableError, match=f"{place}: cannot be written: "):
            AtomicCheckpointIO().save_checkpoint(NEW, path.parent / place)
    with pytest.raises(TypeError, match="storage_options"):
        AtomicCheckpointIO().save_checkpoint(NEW, path, storage_options="fast")


# Python 3.12 and later warn of a fork beside torch's threads
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
@pytest.mark.processes
def test_a_process_that_is_killed_in_mid_write_leaves_the_old_file(path):
    class Kills:
        def __reduce__(self):
            os.kill(os.getpid(), signal.SIGKILL)

    number = os.fork()
    if number == 0:
        AtomicCheckpointIO().save_checkpoint({"killed": Kills()}, path)
    assert os.waitpid(number, 0)[1] == signal.SIGKILL
    assert AtomicCheckpointIO().load_checkpoint(path) == OLD
    assert len(os.listdir(path.parent)) == 2
    # the next save into the folder cleans up
    AtomicCheckpointIO().save_checkpoint(OLD, path.parent / "other.ckpt")
    assert sorted(os.listdir(path.parent)) == ["last.ckpt", "other.ckpt"]


class Denies(MemoryFileSystem):
    """Lightning drops this error, and the checkpoint with it."""

    protocol = "denies"

    def pipe_file(self, *args, **options):
        raise PermissionError("Access denied")


def test_remote_file_systems_are_written_and_read():
    url = "memory://run/last.ckpt"
    for checkpoint in (OLD, NEW):
        AtomicCheckpointIO().save_checkpoint(checkpoint, url)
        assert AtomicCheckpointIO().load_checkpoint(url)["step"] == checkpoint["step"]
    assert MemoryFileSystem().ls("/run", detail=False) == ["/run/last.ckpt"]
    AtomicCheckpointIO().remove_checkpoint(url)
    fsspec.register_implementation("denies", Denies, clobber=True)
    with pytest.raises(PermissionError, match="Access denied"):
        AtomicCheckpointIO().save_checkpoint(OLD, "denies://run/last.ckpt")


def test_the_strategy_uses_it_unless_the_user_gives_a_plugin(path):
    assert isinstance(CephaloStrategy().checkpoint_io, AtomicCheckpointIO)
    own = TorchCheckpointIO()
    strategy = CephaloStrategy()
    strategy.checkpoint_io = own
    assert strategy.checkpoint_io is own
    strategy.checkpoint_io = AsyncCheckpointIO(own)
    wraps_own = strategy.checkpoint_io
    assert wraps_own.checkpoint_io is own
    strategy = CephaloStrategy()
    strategy.checkpoint_io = AsyncCheckpointIO()  # as the Trainer's connector sets it
    wraps = strategy.checkpoint_io
    assert wraps is strategy.checkpoint_io and type(wraps.checkpoint_io) is AtomicCheckpointIO
    wraps.save_checkpoint(NEW, path)
    wraps.teardown()
    assert wraps.load_checkpoint(path, weights_only=True)["step"] == 2
    assert os.listdir(path.parent) == [path.name]
    with pytest.raises(UnwritableError, match="cannot be written"):
        wraps.save_checkpoint(NEW, path / "below a file.ckpt")
        wraps.teardown()
