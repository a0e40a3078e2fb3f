"""Checkpoint files are replaced whole or not at all."""

from __future__ import annotations

import errno
import os
import resource
import signal
from pathlib import Path

import fsspec
import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem
from lightning.pytorch.plugins import AsyncCheckpointIO, TorchCheckpointIO

from lightning_cephalo import CephaloStrategy
from lightning_cephalo.adapters import checkpoint_io
from lightning_cephalo.adapters.checkpoint_io import AtomicCheckpointIO
from lightning_cephalo.common.errors import CheckpointError, UnwritableError

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


def test_all_is_on_the_disk_before_the_file_has_its_name(path, monkeypatch):
    happened = []
    sync, replace = os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda file: (happened.append("sync"), sync(file)))

    def renames(source, target):
        assert Path(source).parent == Path(target).parent
        happened.append("rename")
        replace(source, target)

    monkeypatch.setattr(os, "replace", renames)
    AtomicCheckpointIO().save_checkpoint(NEW, path.parent / "new folder" / "last.ckpt")
    assert happened == ["sync", "rename", "sync"]
    assert os.listdir(path.parent / "new folder") == ["last.ckpt"]


def fails_after(size, error, monkeypatch):
    """Let the writes of a file fail when it has ``size`` bytes."""
    written = [0]

    def fails(file, data):
        written[0] += len(data)
        if written[0] > size:
            raise error
        return file.write(data)

    def write(writer, data):
        return writer._noting(fails, writer._file, data)

    monkeypatch.setattr(checkpoint_io._Writer, "write", write)


@pytest.mark.parametrize("size", [0, 700, 300_000])
def test_a_full_disk_leaves_the_old_file_and_says_what_is_needed(path, monkeypatch, size):
    fails_after(size, OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), monkeypatch)
    with pytest.raises(UnwritableError) as refused:
        AtomicCheckpointIO().save_checkpoint(NEW, path)
    assert_old_alone(path)
    assert refused.value.errno == errno.ENOSPC
    said = str(refused.value)
    assert said.startswith(f"{path}: the checkpoint cannot be written: No space left on device.")
    assert "Its tensors take 390.6 KiB; " in said and " are free there." in said
    assert "The file of before is as it was. Make room, " in said and "save_top_k" in said


@pytest.mark.parametrize("size", [0, 700, 300_000])
def test_an_interrupt_stays_one_and_leaves_the_old_file(path, monkeypatch, size):
    # torch raises an error of its own where a write is interrupted
    fails_after(size, KeyboardInterrupt(), monkeypatch)
    with pytest.raises(KeyboardInterrupt):
        AtomicCheckpointIO().save_checkpoint(NEW, path)
    assert_old_alone(path)


def test_a_place_that_cannot_hold_a_file_is_named(path):
    (path.parent / "folder.ckpt").mkdir()
    for place, reason in (("folder.ckpt", "it is not a file"), ("last.ckpt/a.ckpt", "")):
        with pytest.raises(UnwritableError, match=f"{place}: the checkpoint cannot be .*{reason}"):
            AtomicCheckpointIO().save_checkpoint(NEW, path.parent / place)
    with pytest.raises(TypeError, match="Expected no storage_options, got 'fast'"):
        AtomicCheckpointIO().save_checkpoint(NEW, path, storage_options="fast")


def ends_in_a_process(function):
    """Run a function in a process of its own, and return how that ends."""
    number = os.fork()
    if number == 0:
        try:
            function()
        finally:
            os._exit(1)
    return os.waitpid(number, 0)[1]


# Python 3.12 and later warn of a fork beside torch's threads
fork = pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")


@fork
@pytest.mark.processes
def test_the_systems_own_limit_on_a_file_is_met_likewise(path):
    def saves():
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
        try:
            AtomicCheckpointIO().save_checkpoint(NEW, path)
        except UnwritableError as error:
            os._exit(0 if error.errno == errno.EFBIG else 2)

    assert ends_in_a_process(saves) == 0
    assert_old_alone(path)


@fork
@pytest.mark.processes
def test_a_process_that_is_killed_in_mid_write_leaves_the_old_file(path):
    def dies():
        with checkpoint_io._replacing(path) as writer:
            writer.write(b"PK" + bytes(1_000_000))
            os.kill(os.getpid(), signal.SIGKILL)

    assert ends_in_a_process(dies) == signal.SIGKILL
    (left,) = path.parent.glob(".cephalo-checkpoint-*.tmp")
    assert left.stat().st_size
    assert AtomicCheckpointIO().load_checkpoint(path) == OLD
    # the next save into the folder cleans up, but leaves what a living process writes
    with checkpoint_io._replacing(path) as writer:
        writer.write(b"PK" + bytes(1_000_000))
        AtomicCheckpointIO().save_checkpoint(OLD, path.parent / "other.ckpt")
        assert not left.exists() and len(os.listdir(path.parent)) == 3
    assert sorted(os.listdir(path.parent)) == ["last.ckpt", "other.ckpt"]


def cut(path, size):
    path.write_bytes(path.read_bytes()[:size])


@pytest.mark.parametrize("size", [0, 100, 200_000, -1])
def test_a_file_that_is_cut_off_is_named(path, size):
    AtomicCheckpointIO().save_checkpoint(NEW, path)
    cut(path, size)
    said = f"{path}: the checkpoint is damaged: .*Pass the ckpt_path= of another file"
    with pytest.raises(CheckpointError, match=said):
        AtomicCheckpointIO().load_checkpoint(path)
    with pytest.raises(FileNotFoundError, match=r"Checkpoint file not found: .*absent.ckpt"):
        AtomicCheckpointIO().load_checkpoint(path.parent / "absent.ckpt")


class Own:
    """What only an unrestricted load makes."""


def test_weights_only_is_torchs(path):
    AtomicCheckpointIO().save_checkpoint({"own": Own()}, path)
    assert isinstance(AtomicCheckpointIO().load_checkpoint(path, weights_only=False)["own"], Own)
    with pytest.raises(Exception, match="Weights only load failed"):
        AtomicCheckpointIO().load_checkpoint(path, weights_only=True)


def test_files_and_folders_are_removed(path):
    (path.parent / "sharded.ckpt").mkdir()
    (path.parent / "sharded.ckpt" / "part").write_text("")
    for name in ("last.ckpt", "sharded.ckpt", "absent.ckpt"):
        AtomicCheckpointIO().remove_checkpoint(path.parent / name)
    assert not os.listdir(path.parent)


class Denies(MemoryFileSystem):
    """Lightning drops this error, and the checkpoint with it."""

    protocol = "denies"

    def _open(self, *args, **options):
        raise PermissionError("Access denied")


def test_remote_file_systems_are_written_and_read():
    url = "memory://run/last.ckpt"
    for checkpoint in (OLD, NEW):
        AtomicCheckpointIO().save_checkpoint(checkpoint, url)
        assert AtomicCheckpointIO().load_checkpoint(url)["step"] == checkpoint["step"]
    assert MemoryFileSystem().ls("/run", detail=False) == ["/run/last.ckpt"]
    AtomicCheckpointIO().remove_checkpoint(url)
    with pytest.raises(FileNotFoundError, match=f"Checkpoint file not found: {url}"):
        AtomicCheckpointIO().load_checkpoint(url)
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
    with pytest.raises(UnwritableError, match="the checkpoint cannot be written"):
        wraps.save_checkpoint(NEW, path / "below a file.ckpt")
        wraps.teardown()
