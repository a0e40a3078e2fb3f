"""Copies lie on other hosts, where there is room, and none is ever torn."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest
import torch

from lightning_cephalo.accelerator import accelerator_of
from lightning_cephalo.common.errors import RecoveryError
from lightning_cephalo.recovery.drafts import Draft, Task
from lightning_cephalo.recovery.keeper import Keeper
from lightning_cephalo.recovery.lookup import Inventory
from lightning_cephalo.recovery.peers import DOMAIN, Peers, own_domain
from lightning_cephalo.recovery.placing import Holder, Needed, Placement, on_hosts, placed
from lightning_cephalo.recovery.store import Piece, Slot, Store


def _holders(*ranks):
    return [Holder(*rank) for rank in ranks]


def test_the_largest_piece_goes_where_the_most_room_is():
    ranks = _holders(("a", 5, 9), ("a", 1, 9), ("b", 3, 5), ("c", 2, 4))
    found = placed(ranks, 1)
    # 5 to b (5 left), 3 to a (9), 2 to a (6), 1 to a other host with room: c (4)
    assert found == Placement(((2,), (3,), (0,), (1,)))
    assert found.senders(0) == (2,) and found.senders(1) == (3,)


def test_no_two_copies_share_a_host_nor_one_its_origin():
    ranks = _holders(*[(host, 1, 10) for host in "aabbc"])
    found = placed(ranks, 2)
    for rank, receivers in enumerate(found.receivers):
        hosts = [ranks[rank].domain, *(ranks[r].domain for r in receivers)]
        assert sorted(hosts) == ["a", "b", "c"]
    received = [len(found.senders(rank)) for rank in range(5)]
    assert received == [2, 1, 2, 1, 4]  # 5 of 10 from b and c go to a, and so on


def test_what_finds_no_room_is_named():
    ranks = _holders(("a", 8, 4), ("b", 3, 9), ("b", 2, 9))
    found = placed(ranks, 1)
    assert found == Placement(((1,), (0,), ()), lacking=(2,))
    alone = placed(_holders(("a", 1, 9), ("a", 1, 9)), 1)
    assert alone == Placement(((), ()), lacking=(0, 1))
    assert placed(ranks, 0) == Placement(((), (), ()))


def test_hosts_that_leave_send_and_take_nothing():
    ranks = _holders(*[(host, 1, 10) for host in "abc"])
    assert placed(ranks, 1, sources=[1], leaving=[1]) == Placement(((), (0,), ()))
    assert placed(ranks, 1, None, leaving=[0]) == Placement(((1,), (2,), (1,)))


def test_a_failure_domain_is_the_kernel_unless_it_is_named(monkeypatch):
    monkeypatch.delenv(DOMAIN, raising=False)
    assert own_domain() == own_domain() != ""
    monkeypatch.setenv(DOMAIN, "rack 4")
    assert own_domain() == "rack 4"


@pytest.mark.parametrize("writes", [False, True])
def test_a_draft_is_whole_only_if_nobody_has_written_meanwhile(tmp_path, writes):
    rows = torch.arange(8.0)
    slot, piece = Slot(tmp_path / "slot"), Piece(3, 0, 0, 1)
    draft = Draft(slot, piece, b"meta", [rows], accelerator_of(torch.device("cpu")))
    assert slot.piece() is None
    if writes:
        rows.mul_(1.0)
    assert draft.finish() is not writes
    assert slot.piece() == (None if writes else piece)
    if not writes:
        assert torch.equal(slot.read()[1].view(torch.float32)[:8], rows)


def test_a_full_memory_is_told_when_a_draft_is_finished(tmp_path):
    (tmp_path / "folder").mkdir()
    slot = Slot(tmp_path / "folder")  # no file can be made here
    rows = [torch.zeros(2)]
    draft = Draft(slot, Piece(0, 0, 0, 1), b"", rows, accelerator_of(torch.device("cpu")))
    with pytest.raises(OSError):
        draft.finish()


def test_a_task_that_does_not_end_is_not_waited_for_forever():
    go = threading.Event()
    task = Task("waiting", go.wait)
    with pytest.raises(TimeoutError, match=r"waiting has not ended within 0\.01 s"):
        task.wait(0.01)
    assert not task.is_done
    go.set()
    task.wait()
    assert task.is_done


def test_pieces_and_copies_of_one_rank_number_do_not_meet(tmp_path):
    store = Store(tmp_path, "job")
    own, copy = Piece(4, 1, 0, 2), Piece(4, 0, 0, 3)
    store.slot(0, None).write(own, b"own", [])
    store.slot(0, None, is_copy=True).write(copy, b"copy", [])
    assert set(store.pieces()) == {own, copy}
    assert store.slot(0, copy, is_copy=True) is not store.pieces()[copy]
    store.remove(ranks=[0])
    assert set(store.pieces()) == {own}
    store.remove()
    assert store.is_empty and not any(tmp_path.iterdir())


class Recorded(Peers):
    """Rank 0's part of an exchange, of which nothing leaves the process."""

    def __init__(self):
        self._rank, self.sent = 0, []

    def _transfer(self, sent, received):
        self.sent.append([[chunk.tolist() for chunk in chunks] for chunks, _ in sent])


def test_a_piece_that_is_gone_is_told_behind_the_exchange(tmp_path):
    slot, piece = Slot(tmp_path / "slot"), Piece(1, 0, 0, 2)
    slot.write(piece, b"meta", [torch.arange(8)])
    slot.path.unlink()
    peers = Recorded()
    with pytest.raises(RecoveryError, match=r"slot: .* is gone or void"):
        peers.exchange(Placement(((1,), ())), piece, slot, None)
    ((head,),), content = peers.sent
    assert head == [0, 1, 0, 0, 2, 0, 0, 0, 0] and content == []


class Tight(Store):
    """A host's memory with room for some files of a MiB, those that lie there included."""

    free_bytes = 0


@pytest.mark.parametrize(("copies", "wanted_mib"), [(0, 2), (1, 2), (3, 4)])
def test_the_first_step_must_fit_beside_copies_that_were_read_back(tmp_path, copies, wanted_mib):
    mib = 1 << 20
    store = Tight(tmp_path, "job")
    for rank in range(1, copies + 1):
        piece = Piece(1, 0, rank, copies + 1)
        store.slot(rank, None, is_copy=True).write(piece, b"", [torch.zeros(mib, dtype=torch.int8)])
    keeper = object.__new__(Keeper)
    keeper._view = SimpleNamespace(optimizers=[SimpleNamespace(state={"is": "there"})])
    keeper._control = SimpleNamespace(rank=0, gather=lambda own: [own])
    keeper._copying = SimpleNamespace(place=lambda *_: None)
    keeper._uploading, keeper._store = None, store
    keeper._inventory = Inventory.take(store, keeper._control)
    store.free_bytes = wanted_mib * mib + mib // 2
    keeper._check_room(mib)
    store.free_bytes = wanted_mib * mib - mib // 2
    with pytest.raises(RecoveryError, match=rf"about {wanted_mib}\.\d MiB .* rank 0, .* room for"):
        keeper._check_room(mib)


def test_files_that_are_left_count_once_for_all_ranks_of_a_host():
    ranks = [Needed("a", 4, 3, 5), Needed("b", 4, 2, 1), Needed("a", 6, 3, 5)]
    assert on_hosts(ranks) == [11, 4, 11]
