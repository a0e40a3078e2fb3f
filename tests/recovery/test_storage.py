"""Steps in a storage are whole or not there, whatever stops in between; a fault is named."""

from __future__ import annotations

import itertools
import threading
import time
import uuid
import warnings
from types import SimpleNamespace

import fsspec
import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem

from lightning_cephalo.common.errors import RecoveryError
from lightning_cephalo.ranks.control import ControlGroup
from lightning_cephalo.recovery import recovering, storage, uploading
from lightning_cephalo.recovery.lookup import Inventory
from lightning_cephalo.recovery.options import Recovery, Wish
from lightning_cephalo.recovery.reading_back import ReadingBack
from lightning_cephalo.recovery.recovering import Recovering
from lightning_cephalo.recovery.storage import KEPT, Storage
from lightning_cephalo.recovery.store import Piece, Slot, Store
from lightning_cephalo.recovery.uploading import Uploading

RANKS = 2


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch):
    monkeypatch.setattr(storage, "_CHUNK_BYTES", 100)
    monkeypatch.setattr(storage, "_CHUNKS_AT_ONCE", 2)


class Denies(MemoryFileSystem):
    """Denies, or is away, from a call on."""

    protocol = "denies"
    left = 10**9

    def _deny(self):
        type(self).left -= 1
        if self.left < 0:
            raise PermissionError("AccessDenied: no rights on the bucket")

    def pipe_file(self, *args, **options):
        self._deny()
        super().pipe_file(*args, **options)

    def cat_file(self, *args, **options):
        self._deny()
        return super().cat_file(*args, **options)

    def ls(self, *args, **options):
        self._deny()
        return super().ls(*args, **options)

    def rm_file(self, *args, **options):
        self._deny()
        return super().rm_file(*args, **options)


fsspec.register_implementation("denies", Denies, clobber=True)


@pytest.fixture(params=["local", "memory"])
def url(request, tmp_path):
    return str(tmp_path / "run") if request.param == "local" else f"memory://{uuid.uuid4().hex}"


@pytest.fixture
def denies():
    Denies.left = 10**9
    yield f"denies://{uuid.uuid4().hex}"
    Denies.left = 10**9


def _slots(tmp_path, piece):
    """The files of each rank's piece of a step, of different sizes."""
    slots = []
    for rank in range(RANKS):
        slot = Slot(tmp_path / f"slot{rank}")
        numbers = torch.arange(60 + 25 * rank) + piece.serial
        slot.write(piece.of(rank), b"meta of %d" % rank, [numbers])
        slots.append(slot)
    return slots


def _send(kept, tmp_path, piece):
    for rank, slot in enumerate(_slots(tmp_path, piece)):
        kept.send(piece.of(rank), *slot.content())


def _read(kept, step, rank):
    whole = torch.empty(sum(step.sent[rank].sizes[:2]), dtype=torch.uint8)
    kept.read(step, rank, whole)
    return bytes(whole.numpy().tobytes())


def _piece(serial, attempt=0, run=5):
    return Piece(serial, attempt, 0, RANKS, run)


def test_what_was_sent_is_read_back_rank_by_rank(url, tmp_path):
    kept = Storage(url)
    assert kept.committed() == [] and kept.last_attempt() == -1
    _send(kept, tmp_path, _piece(3))
    assert kept.committed() == [] and kept.last_attempt() == 0  # not committed
    kept.commit(_piece(3))
    (step,) = Storage(url).committed()
    assert step.pieces == (_piece(3), _piece(3).of(1))
    for rank, slot in enumerate(_slots(tmp_path, _piece(3))):
        sizes, content = slot.content()
        assert step.sent[rank].sizes == sizes
        assert len(step.sent[rank].chunk_checksums) > 2
        assert _read(kept, step, rank) == content.numpy().tobytes()
    kept.remove()
    assert kept.committed() == []


def test_a_later_start_is_newer_and_old_steps_are_removed(url, tmp_path):
    kept = Storage(url)
    kept.check_writable()
    own = f"{kept._root}/of_the_user"
    kept._files.pipe_file(own, b"stays")
    begun = _piece(2)
    _send(kept, tmp_path, begun)
    for piece in (_piece(7), _piece(8), _piece(5, attempt=1, run=6), _piece(6, attempt=1, run=6)):
        _send(kept, tmp_path, piece)
        kept.commit(piece)
    found = [step.piece for step in kept.committed()]
    assert found == [_piece(6, 1, 6), _piece(5, 1, 6)] and len(found) == KEPT
    assert set(kept._steps()) == set(found)
    with pytest.raises(RecoveryError, match=r"another training writes to it: step-000001"):
        kept.commit(_piece(9))
    kept.remove()
    assert kept._files.cat_file(own) == b"stays"
    assert [str(name).rpartition("/")[2] for name in kept._files.ls(kept._root, detail=False)] == [
        "of_the_user"
    ]


def test_wherever_an_upload_stops_the_step_before_is_read(denies, tmp_path):
    kept = Storage(denies)
    _send(kept, tmp_path, _piece(1))
    kept.commit(_piece(1))
    first = kept.committed()[0]
    content = [_read(kept, first, rank) for rank in range(RANKS)]
    for calls in itertools.count():
        Denies.left = calls
        try:
            _send(kept, tmp_path, _piece(2))
            kept.commit(_piece(2))
            break
        except RecoveryError as error:
            assert "AccessDenied" in str(error) and denies in str(error)
        Denies.left = 10**9
        steps = kept.committed()
        # committed, and stopped in the removal of older ones at worst
        step = steps[-1] if steps[0].piece == _piece(2) else steps[0]
        assert step == first
        assert [_read(kept, step, rank) for rank in range(RANKS)] == content
    assert calls > 15


@pytest.mark.parametrize("damage", ["flipped", "cut", "gone"])
def test_damage_is_named_and_never_read(url, tmp_path, damage):
    kept = Storage(url)
    _send(kept, tmp_path, _piece(1))
    kept.commit(_piece(1))
    (step,) = kept.committed()
    name = f"{kept._folder(_piece(1))}/rank1.000001"
    data = bytearray(kept._files.cat_file(name))
    data[7] ^= 1
    if damage == "gone":
        kept._files.rm_file(name)
    else:
        kept._files.pipe_file(name, bytes(data[: 50 if damage == "cut" else 100]))
    with pytest.raises(RecoveryError, match=r"rank1\.000001"):
        _read(kept, step, 1)
    if damage != "flipped":
        with pytest.raises(RecoveryError, match=r"expected 100 bytes in .*rank1\.000001"):
            kept.commit(_piece(1))
    commit = f"{kept._folder(_piece(1))}/COMMIT"
    kept._files.pipe_file(commit, kept._files.cat_file(commit).replace(b"100", b"101", 1))
    assert kept.committed() == []


def test_what_cannot_be_opened_written_or_listed_is_named(denies, tmp_path):
    with pytest.raises(RecoveryError, match=r"storage='nothing://run': opening it.*not known"):
        Storage("nothing://run")
    kept = Storage(denies)
    Denies.left = 0
    for call in (kept.check_writable, kept.committed, kept.last_attempt, kept.remove):
        with pytest.raises(RecoveryError, match=f"storage='{denies}'.*PermissionError.*rights"):
            call()
    if not fsspec.utils.get_package_version_without_import("s3fs"):
        with pytest.raises(RecoveryError, match=r"pip install 'lightning-cephalo\[s3\]'"):
            Storage("s3://bucket/run")
    (tmp_path / "file").touch()
    with pytest.raises(RecoveryError, match="writing to it"):
        Storage(str(tmp_path / "file" / "run")).check_writable()


class Alone(ControlGroup):
    """One rank, which has nobody to exchange with."""

    def __init__(self):
        self.rank, self.world_size, self.raised = 0, 1, None


def _damaged_behind(kept, tmp_path, older, newer):
    """Send two steps, of which the newer is damaged in rank 1's piece."""
    for piece in (older, newer):
        _send(kept, tmp_path, piece)
        kept.commit(piece)
    name = f"{kept._folder(newer)}/rank1.000001"
    kept._files.pipe_file(name, bytes(len(kept._files.cat_file(name))))


def test_a_piece_that_a_damaged_step_has_overwritten_is_read_again(tmp_path):
    kept, store = Storage(str(tmp_path / "run")), Store(tmp_path / "memory", "job")
    _damaged_behind(kept, tmp_path, _piece(1), _piece(2))
    # memory alone has kept rank 1's piece of the older step, where the newer one's goes
    slot = store.slot(1, None, is_copy=True)
    slot.write(_piece(1).of(1), b"meta of 1", [torch.arange(85) + 1])
    wanted = slot.read()
    with pytest.warns(UserWarning, match=r"from an older step: .*rank1\.000001 is damaged"):
        found = ReadingBack(kept, store, Alone()).look(Inventory.take(store, Alone()))
    assert found.whole() == [(_piece(1), _piece(1).of(1))]
    meta, payload = store.pieces()[_piece(1).of(1)].read()
    assert meta == wanted[0] and torch.equal(payload[: 85 * 8], wanted[1][: 85 * 8])


def test_what_a_damaged_step_has_overwritten_is_not_taken_to_be_in_memory(tmp_path):
    kept, store = Storage(str(tmp_path / "run")), Store(tmp_path / "memory", "job")
    _damaged_behind(kept, tmp_path, _piece(2), _piece(4))
    for serial in (1, 3):  # the newest whole step in memory, 3, stays; the older one may go
        for rank in range(RANKS):
            store.slot(rank, _piece(1).of(rank), is_copy=True).write(
                _piece(serial).of(rank), b"meta", [torch.arange(9)]
            )
    with pytest.warns(UserWarning, match=r"hosts' memory, .*rank1\.000001 is damaged"):
        found = ReadingBack(kept, store, Alone()).look(Inventory.take(store, Alone()))
    assert found.whole() == [(_piece(3), _piece(3).of(1))]
    assert found.whole() == Inventory.take(store, Alone()).whole() and found.last_sent == 0


# -- beside training ------------------------------------------------------------------------------


class Ranks:
    """Uploads of two ranks, whose notes are exchanged by hand."""

    def __init__(self, url, tmp_path, every_s=0.0):
        self.tmp_path, self.storage = tmp_path, Storage(url)
        self.each = [
            Uploading(self.storage, every_s, SimpleNamespace(rank=rank), None)
            for rank in range(RANKS)
        ]

    def step(self, serial):
        """Take a step that all ranks keep; return whether its upload began."""
        slots = _slots(self.tmp_path, _piece(serial))
        notes = [one.note() for one in self.each]
        for rank, (one, slot) in enumerate(zip(self.each, slots, strict=True)):
            one.learn(notes)
            one.offer(_piece(serial).of(rank), {_piece(serial).of(rank): slot}.get)
        assert len({one._phase for one in self.each}) == 1
        return self.each[0].pinned == _piece(serial)

    def rest(self):
        """Take steps without anything new until nothing is under way."""
        while any(one._phase is not uploading._Phase.IDLE for one in self.each):
            notes = [one.note() for one in self.each]
            for one in self.each:
                one.learn(notes)
            time.sleep(0.001)


def test_a_step_is_sent_when_it_is_time_and_stays_pinned(tmp_path):
    ranks = Ranks(str(tmp_path / "run"), tmp_path, every_s=1e6)
    assert ranks.step(1)
    ranks.rest()
    assert [step.piece for step in ranks.storage.committed()] == [_piece(1)]
    assert not ranks.step(2)  # not yet
    assert [one.pinned for one in ranks.each] == list(ranks.storage.committed()[0].pieces)
    for one in ranks.each:
        one._next_s = 0.0
    assert ranks.step(3)
    ranks.rest()
    assert ranks.storage.committed()[0].piece == _piece(3) and ranks.each[0].uploads == 2


def test_a_storage_that_denies_is_told_once_and_training_goes_on(denies, tmp_path, monkeypatch):
    monkeypatch.setattr(uploading, "_AGAIN_S", 0.0)
    ranks = Ranks(denies, tmp_path)
    assert ranks.step(1)
    ranks.rest()
    Denies.left = 3
    assert ranks.step(2)
    with pytest.warns(UserWarning, match=r"could not send a step: storage='denies.*goes on"):
        ranks.rest()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert ranks.step(3)
        ranks.rest()
    Denies.left = 10**9
    assert ranks.storage.committed()[0].piece == _piece(1)
    assert ranks.step(4)
    ranks.rest()
    assert ranks.storage.committed()[0].piece == _piece(4)


def test_an_upload_that_is_cancelled_stops_and_commits_nothing(tmp_path):
    kept = Storage(str(tmp_path / "run"))
    sizes, content = _slots(tmp_path, _piece(1))[1].content()
    asked = []

    def cancelled():
        asked.append(1)
        return len(asked) > 1

    assert kept.send(_piece(1).of(1), sizes, content, cancelled) is None
    assert len(list((tmp_path / "run").rglob("rank1.*"))) == 2
    with pytest.raises(ValueError, match="1 objects do not hold 502 bytes"):
        storage.Sent(500, 2, 3, 100, (4,)).lengths()


def test_a_commit_that_is_slow_at_the_end_of_training_declares_nothing(tmp_path, monkeypatch):
    kept = Storage(str(tmp_path / "run"))
    _send(kept, tmp_path, _piece(1))
    is_checked, may_go_on = threading.Event(), threading.Event()
    check = Storage._check_sizes

    def slow_check(*args):
        check(*args)
        is_checked.set()
        assert may_go_on.wait(60)

    monkeypatch.setattr(Storage, "_check_sizes", slow_check)
    one = Uploading(kept, 0.0, SimpleNamespace(rank=0), None)
    one._phase, one.pinned = uploading._Phase.SENDING, _piece(1)
    one.learn([uploading._DONE, uploading._DONE])
    assert is_checked.wait(60)
    assert not one.cancel(0.0)
    may_go_on.set()
    assert one.cancel(60)
    assert kept.committed() == []


@pytest.mark.parametrize("has_stopped", [(True, True), (True, False), (False, True)])
def test_what_a_rank_still_writes_to_is_not_removed(tmp_path, monkeypatch, has_stopped):
    monkeypatch.setenv(recovering._FITS, "0")
    kept = Storage(str(tmp_path / "run"))
    _send(kept, tmp_path, _piece(1))
    kept.commit(_piece(1))
    recovery = Recovery(storage=str(tmp_path / "run"))
    one = Recovering(Wish(recovery))
    one._keeper = SimpleNamespace(end=lambda: has_stopped[0])
    control = SimpleNamespace(rank=0, gather=lambda own: [own, float(has_stopped[1])])
    store = SimpleNamespace(remove=lambda: None)
    one._place = SimpleNamespace(recovery=recovery, control=control, store=store, storage=kept)
    if all(has_stopped):
        one.finish()
        assert kept.committed() == []
        return
    writing = has_stopped.index(False)
    with pytest.warns(UserWarning, match=f"stay in the storage.* rank {writing} writes.* Remove"):
        one.finish()
    assert [step.piece for step in kept.committed()] == [_piece(1)]


@pytest.mark.parametrize("seen", ["before", "behind"])
def test_files_that_are_removed_while_training_runs_fail_one_upload(tmp_path, seen):
    """They go before or behind the look that the offer takes at them."""
    ranks = Ranks(str(tmp_path / "run"), tmp_path)
    slots = _slots(tmp_path, _piece(1))
    notes = [one.note() for one in ranks.each]
    slots[1].path.unlink()
    for rank, (one, slot) in enumerate(zip(ranks.each, slots, strict=True)):
        one.learn(notes)
        is_found = rank == 0 or seen == "behind"
        one.offer(_piece(1).of(rank), {_piece(1).of(rank): slot}.get if is_found else {}.get)
    why = (
        "the files of kept steps were removed" if seen == "before" else "slot1: .* is gone or void"
    )
    with pytest.warns(UserWarning, match=f"Rank 1 could not send a step: .*{why}"):
        ranks.rest()
    assert ranks.storage.committed() == []
    for one in ranks.each:
        one._next_s = 0.0
    assert ranks.step(2)
    ranks.rest()
    assert [step.piece for step in ranks.storage.committed()] == [_piece(2)]


class Blocked:
    """A storage that neither answers nor fails until it is let go."""

    url = "mount/run"

    def __init__(self):
        self.sends, self.commits = threading.Event(), threading.Event()

    def send(self, piece, *_):
        assert piece.rank == 0 or self.sends.wait(60)

    def commit(self, *_):
        assert self.commits.wait(60)


@pytest.mark.parametrize(("every_s", "limit_s"), [(5.0, 600.0), (300.0, 900.0)])
def test_a_storage_that_hangs_is_told_of_once_with_the_ranks_that_wait(tmp_path, every_s, limit_s):
    clock, blocked = [0.0], Blocked()
    each = [
        Uploading(blocked, every_s, SimpleNamespace(rank=rank), None, lambda: clock[0])
        for rank in range(RANKS)
    ]

    def learn():
        notes = [one.note() for one in each]
        for one in each:
            one.learn(notes)

    learn()
    for one, slot in zip(each, _slots(tmp_path, _piece(1)), strict=True):
        one.offer(_piece(1).of(one._control.rank), lambda _, slot=slot: slot)
    each[0]._task.wait(60)
    for released, busy, doing in ((blocked.sends, 1, "send"), (blocked.commits, 0, "commit")):
        clock[0] += limit_s
        learn()  # says nothing yet: warnings are errors
        clock[0] += 1.0
        told = rf"^Rank {busy} has begun to {doing} .*'mount/run' {limit_s + 1:.0f} s ago"
        with pytest.warns(UserWarning, match=told) as caught:
            learn()
        assert len(caught) == 1  # of rank 0 alone
        clock[0] += limit_s
        learn()  # once
        released.set()
        each[busy]._task.wait(60)
        learn()
    assert [one.uploads for one in each] == [1, 1]
