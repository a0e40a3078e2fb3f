"""A slot is whole or void at every moment, and a store refuses what it cannot trust."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys

import pytest
import torch

from lightning_cephalo.accelerator.cgroup import MemoryLimit
from lightning_cephalo.common.errors import RecoveryError
from lightning_cephalo.recovery import store as module
from lightning_cephalo.recovery.lookup import Inventory
from lightning_cephalo.recovery.options import AGENT, Recovery, Wish, fitting_every
from lightning_cephalo.recovery.store import Agent, Piece, Slot, Store

TENSORS = [torch.arange(7, dtype=torch.float64), torch.tensor(True), torch.empty(0, 3)]


def _read(slot):
    meta, payload = slot.read()
    starts, _ = module.places(TENSORS)
    pairs = zip(starts, TENSORS, strict=True)
    parts = [payload[s : s + t.nbytes].view(t.dtype).view(t.shape) for s, t in pairs]
    return meta, parts


def test_a_slot_holds_what_was_written_and_grows(tmp_path):
    slot = Slot(tmp_path / "slot")
    assert slot.piece() is None
    for serial, meta in enumerate([b"small", b"large" * 5000, b""]):
        slot.write(Piece(serial, 2, 1, 3, run=2**62), meta, TENSORS)
        other = Slot(slot.path)
        assert other.piece() == Piece(serial, 2, 1, 3, run=2**62)
        found, parts = _read(other)
        assert found == meta
        for part, wanted in zip(parts, TENSORS, strict=True):
            torch.testing.assert_close(part, wanted, rtol=0, atol=0)
    assert slot.path.stat().st_mode & 0o777 == 0o600


def test_a_slot_follows_tensors_of_other_kinds(tmp_path):
    """Also of the same bytes, and those that do not lie behind each other in memory."""
    slot = Slot(tmp_path / "slot")
    rows = torch.arange(6.0)
    kinds = [
        [rows.view(2, 3), torch.arange(4)],
        [rows.view(3, 2).t(), torch.arange(4).int()],
        [rows.view(torch.int32), torch.arange(4).requires_grad_(False)],
        [rows.requires_grad_(), torch.zeros(0), torch.arange(4).bfloat16()],
    ]
    for serial, tensors in enumerate([*kinds, *kinds]):
        slot.write(Piece(serial, 0, 0, 1), b"meta", tensors)
        meta, payload = Slot(slot.path).read()
        assert meta == b"meta"
        for start, tensor in zip(module.places(tensors)[0], tensors, strict=True):
            found = payload[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            torch.testing.assert_close(found, tensor.detach(), rtol=0, atol=0)


class Stop(BaseException):
    pass


@pytest.mark.parametrize("cut", ["first tensor", "second tensor", "header"])
def test_a_write_that_stops_anywhere_leaves_the_spared_piece_and_a_void(tmp_path, cut, monkeypatch):
    kept = Store(tmp_path, "job")
    pieces = [Piece(serial, 0, 0, 1) for serial in range(3)]
    kept.slot(pieces[0].rank, None).write(pieces[0], b"0", TENSORS)
    kept.slot(pieces[1].rank, pieces[0]).write(pieces[1], b"1", TENSORS)

    class Cut(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            if func is not torch._foreach_copy_:
                return super().__torch_function__(func, types, args, kwargs)
            rooms, sources = args
            for room, source in zip(rooms[:index], sources[:index], strict=True):
                room.copy_(source)
            raise Stop

    class Head:
        size, unpack = module._HEAD.size, module._HEAD.unpack

        @staticmethod
        def pack(*_):
            raise Stop

    tensors, index = list(TENSORS), int(cut == "second tensor")
    if cut == "header":
        monkeypatch.setattr(module, "_HEAD", Head)
    else:
        tensors[index] = TENSORS[index].as_subclass(Cut)
    with pytest.raises(Stop):
        kept.slot(pieces[2].rank, pieces[1]).write(pieces[2], b"2", tensors)
    assert set(Store(tmp_path, "job").pieces()) == {pieces[1]}


def test_on_a_disk_no_part_is_written_before_the_one_it_relies_on(tmp_path, monkeypatch):
    seen = []

    class Watched(mmap.mmap):
        def flush(self, *where):
            seen.append((where, bytes(self[:8]), bytes(self[4096:4104]), bytes(self[4224:4227])))
            return super().flush(*where)

    monkeypatch.setattr(module.mmap, "mmap", Watched)
    parts = [torch.full((), value, dtype=torch.float64) for value in (1, 2)]
    slot = Slot(tmp_path / "slot", is_synced=True)
    for serial, part in enumerate(parts):
        seen.clear()
        slot.write(Piece(serial, 0, 0, 1), b"old" if serial == 0 else b"new", [part, part])
    old, new = (part.numpy().tobytes() for part in parts)
    whole = slot.path.stat().st_size
    assert seen == [
        ((0, 4096), bytes(8), old, b"old"),
        ((0, whole), bytes(8), new, b"new"),
        ((0, 4096), module._MAGIC, new, b"new"),
    ]
    seen.clear()
    Slot(tmp_path / "other").write(Piece(0, 0, 0, 1), b"", parts)
    assert seen == []
    assert Store(tmp_path, "job")._slot("rank0.0")._is_synced


@pytest.mark.parametrize("place", [0, 9, 30, 70])
def test_a_flipped_bit_of_the_header_voids_it(tmp_path, place):
    slot = Slot(tmp_path / "slot")
    slot.write(Piece(1, 0, 0, 1), b"meta", TENSORS)
    with slot.path.open("r+b") as file:
        file.seek(place)
        byte = file.read(1)[0]
        file.seek(place)
        file.write(bytes([byte ^ 4]))
    assert slot.piece() is None


def test_a_damaged_description_and_a_cut_file_are_refused(tmp_path):
    slot = Slot(tmp_path / "slot")
    slot.write(Piece(1, 0, 0, 1), b"meta" * 9, TENSORS)
    with slot.path.open("r+b") as file:
        file.seek(-2, os.SEEK_END)
        file.write(b"x")
    with pytest.raises(RecoveryError, match="void or damaged"):
        slot.read()
    os.truncate(slot.path, 5000)
    assert slot.piece() is not None  # its payload begins there: the description is cut
    os.truncate(slot.path, 4200)
    assert slot.piece() is None


def test_the_newest_step_is_one_of_which_every_piece_is_somewhere():
    def pieces(serial, attempt, world_size, without=()):
        ranks = set(range(world_size)) - set(without)
        return {Piece(serial, attempt, rank, world_size) for rank in ranks}

    hosts = [pieces(7, 1, 3, [1]), pieces(7, 0, 3, [0, 2]) | pieces(6, 0, 2, [0])]
    hosts[0] |= pieces(6, 0, 2, [1])
    seen = Inventory(tuple(map(frozenset, hosts)), ("a", "b"))
    # step 7 is of two attempts: they are not mixed
    assert seen.whole() == [tuple(sorted(pieces(6, 0, 2)))]
    assert seen.last_attempt == 1 and seen.leads(1)
    # step 8 is of two jobs: they are not mixed either
    hosts[0].add(Piece(8, 1, 0, 2, run=1))
    hosts[1].add(Piece(8, 1, 1, 2, run=2))
    mixed = Inventory(tuple(map(frozenset, hosts)), ("a", "b"))
    assert mixed.whole() == seen.whole()
    assert mixed.missing() == "the newest kept step lacks the rows of rank 0"
    hosts[0].remove(Piece(8, 1, 0, 2, run=1))
    alone = Inventory((frozenset(hosts[0]),), ("a",))
    assert alone.whole() == []
    assert alone.missing() == "the newest kept step lacks the rows of rank 1"
    assert Inventory((frozenset(),), ("a",)).missing() == ""


def test_a_folder_that_others_may_enter_or_own_is_refused(tmp_path, monkeypatch):
    base = tmp_path / f"lightning-cephalo-{os.geteuid()}"
    base.mkdir()
    base.chmod(0o755)
    with pytest.raises(RecoveryError, match=r"others may enter it \(mode 755, expected 700\)"):
        Store(tmp_path, "job")
    base.rmdir()
    base.write_text("")
    with pytest.raises(RecoveryError, match="it is no folder"):
        Store(tmp_path, "job")
    base.unlink()
    base.symlink_to(tmp_path)
    with pytest.raises(RecoveryError, match="it is no folder"):
        Store(tmp_path, "job")
    base.unlink()
    base.mkdir(mode=0o700)
    monkeypatch.setattr(module, "_user", lambda: os.geteuid() + 1)
    base.rename(tmp_path / f"lightning-cephalo-{os.geteuid() + 1}")
    with pytest.raises(RecoveryError, match=f"belongs to user {os.geteuid()}, and this process"):
        Store(tmp_path, "job")


def test_a_system_without_tmpfs_is_told(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "MEMORY", tmp_path / "shm")
    with pytest.raises(RecoveryError, match=r"shm does not exist.*Recovery\(folder=...\)"):
        Store(None, "job")


@pytest.mark.processes
def test_only_what_ended_jobs_have_left_is_removed(tmp_path):
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        lives = Agent.of(process.pid)
        kept = Store(tmp_path, lives.name)
        kept.slot(0, None).write(Piece(0, 0, 0, 1), b"", TENSORS)
        named = Store(tmp_path, "job-mine")
        assert named.remove_stale() is None
        process.kill()
    said = named.remove_stale()
    assert said is not None and lives.name in said
    assert [path.name for path in named.base.iterdir()] == ["job-mine"]
    named.remove()
    assert not any(tmp_path.iterdir())


def test_agents_are_told_apart_by_their_start_and_by_their_container():
    own = Agent.of(os.getpid())
    assert Agent.parse(own.name) == own and own.may_live
    assert not Agent(own.boot, own.namespace, own.process, own.started + 1).may_live
    assert not Agent("00000000", own.namespace, own.process, own.started).may_live
    assert Agent(own.boot, own.namespace + 1, own.process, own.started + 1).may_live
    assert Agent.parse("job-mine") is None


@pytest.mark.parametrize("between", ["", "sh -c 'python -c \"$PRINTS\"; :'"])
def test_an_agent_is_found_behind_a_shell(between):
    """A launcher may start ``sh train.sh``, and the shell waits for its last command."""
    prints = (
        "from lightning_cephalo.recovery.store import Agent; print(Agent.above('OF_RANKS').process)"
    )
    ranks = {**os.environ, "OF_RANKS": "job", "PRINTS": prints}
    python = [sys.executable, "-c", prints]
    script = between.replace("python", sys.executable)
    command = ["sh", "-c", f"{script}; :"] if between else python
    found = subprocess.run(command, env=ranks, capture_output=True, text=True, check=True)
    assert int(found.stdout) == os.getpid()


def test_room_in_memory_is_that_of_the_control_group(monkeypatch, tmp_path):
    """Its limit kills a process that writes more, whatever the file system has free."""
    monkeypatch.setattr(module, "MEMORY", tmp_path)
    limit = MemoryLimit(2**30, 2**20, "memory.max")
    store = Store(None, "job", lambda: limit)
    store.slot(0, None).write(Piece(1, 0, 0, 1), b"", [torch.ones(2**16)])
    assert store.held_bytes > 2**18
    assert store.free_bytes == 2**20 + store.held_bytes
    assert Store(tmp_path / "disk", "job", lambda: limit).free_bytes > 2**21


def test_the_job_is_the_agent_or_the_users_name(monkeypatch):
    for name in ("TORCHELASTIC_MAX_RESTARTS", AGENT):
        monkeypatch.delenv(name, raising=False)
    assert Wish.parse("auto").job() is None and Wish.parse(False).job() is None
    with pytest.raises(RecoveryError, match=r"nothing restarts.*lightning_cephalo\.run"):
        Wish.parse(True).job()
    assert Wish.parse(Recovery(job="a/b")).job() != Wish.parse(Recovery(job="a b")).job()
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "3")
    assert Wish.parse("auto").job() == Agent.of(os.getppid()).name
    monkeypatch.setenv(AGENT, str(os.getpid()))
    assert Wish.parse(True).job() == Agent.of(os.getpid()).name


@pytest.mark.parametrize(
    ("keeping_s", "update_s", "every"),
    [(0.001, 1.0, 1), (0.02, 1.0, 1), (0.1, 1.0, 5), (2.0, 0.5, 200)],
)
def test_keeping_takes_a_fiftieth_of_the_time_unless_the_user_says_how_often(
    keeping_s, update_s, every
):
    assert fitting_every(keeping_s, update_s) == every
    assert Wish.parse("auto").recovery.every is None and Wish.parse(True).recovery.every == 1


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: Wish.parse("always"), "recover: expected True, False, 'auto' or a Recovery"),
        (lambda: Recovery(every=0), "every: expected 1 update or more, but got 0"),
        (lambda: Recovery(copies=-1), "copies: expected 0 or more, but got -1"),
        (lambda: Recovery(job=""), "job: expected a name"),
    ],
)
def test_other_options_are_refused(make, said):
    with pytest.raises(RecoveryError, match=said):
        make()


def test_ranks_that_stay_over_a_loss_are_refused_with_the_way_on():
    with pytest.raises(TypeError, match=r"stay=.*python -m lightning_cephalo\.run"):
        Recovery(stay=True)
    assert Recovery(every=3) == Recovery(3)
