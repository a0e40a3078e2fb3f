"""SIGTERM to any rank: all ranks end after the same step, as Lightning ends a single process."""

from __future__ import annotations

import os
import signal

import pytest
import torch
from common import Net, in_ranks, loader, trainer
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint
from lightning.pytorch.utilities.exceptions import SIGTERMException

# Lightning says so of every fit with this callback
pytestmark = pytest.mark.filterwarnings("ignore:.*fit.ckpt_path=")

# where the signal comes when two steps are done, and the steps that are done at the end
PLACES = {
    "on_train_batch_start": 3,
    "on_before_backward": 3,  # behind the exchange of the third step: validation's carries it
    "on_train_batch_end": 2,
    "on_validation_start": 2,
}


class Signal(Callback):
    """Sends SIGTERM to chosen ranks in the third step, from one place of it."""

    def __init__(self, ranks, place):
        self.ranks = ranks
        setattr(self, place, self._send)

    def _send(self, trainer, *_):
        if trainer.global_rank in self.ranks and trainer.global_step == 2:
            os.kill(os.getpid(), signal.SIGTERM)


class Ends(Callback):
    """Notes with which exception, and after which step."""

    def __init__(self):
        self.seen = []

    def on_exception(self, trainer, _, exception):
        self.seen.append((type(exception).__name__, trainer.global_step))


def ended(plan, ranks, place, folder):
    ends = Ends()
    callbacks = [Signal(ranks, place), OnExceptionCheckpoint(folder), ends]
    options = {"max_epochs": 20, "val_check_interval": 1, "default_root_dir": folder}
    used = trainer(plan, callbacks=callbacks, enable_checkpointing=True, **options)
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SIGTERMException):
        used.fit(Net(), loader(), loader(samples=24))
    assert "_broadcast_sigterm_tensor" not in vars(used.fit_loop.epoch_loop)
    return ends.seen, signal.getsignal(signal.SIGTERM) == before


@pytest.mark.parametrize(
    ("ranks", "place"),
    [
        *(((1,), place) for place in PLACES),
        ((0,), "on_train_batch_start"),
        ((0, 1), "on_before_backward"),
    ],
)
def test_all_ranks_end_after_the_same_step(tmp_path, ranks, place):
    found = in_ranks(2, ended, "3:1", ranks, place, tmp_path)
    assert found[0] == found[1]
    (((name, step),), is_restored) = found[0]
    assert name == "SIGTERMException" and is_restored
    assert step == PLACES[place]
    saved = torch.load(tmp_path / "on_exception.ckpt", weights_only=False)
    assert saved["global_step"] == step


def test_a_single_rank_ends_too(tmp_path):
    ((seen, is_restored),) = in_ranks(1, ended, "one", (0,), "on_train_batch_start", tmp_path)
    assert seen == [("SIGTERMException", 3)] and is_restored


def hears_other_handlers(folder):
    heard = []
    signal.signal(signal.SIGTERM, lambda number, _: heard.append(number))
    seen, _ = ended("one", (0,), "on_train_batch_start", folder)
    return seen, heard


def test_the_users_own_handler_is_called_too(tmp_path):
    ((seen, heard),) = in_ranks(1, hears_other_handlers, tmp_path)
    assert seen == [("SIGTERMException", 3)] and heard == [signal.SIGTERM]


def evaluates(folder):
    ends = Ends()

    class Sends(Callback):
        def on_validation_batch_start(self, trainer, module, batch, index, loader_index=0):
            if trainer.global_rank == 1 and index == 1:
                os.kill(os.getpid(), signal.SIGTERM)

    used = trainer("3:1", callbacks=[Sends(), ends])
    with pytest.raises(SIGTERMException):
        used.validate(Net(), loader(samples=80), verbose=False)
    return ends.seen


def test_evaluation_ends_on_all_ranks(tmp_path):
    first, second = in_ranks(2, evaluates, tmp_path)
    assert first == second == [("SIGTERMException", 0)]


class Between(Callback):
    """Sends SIGTERM to one rank when all are between two epochs."""

    def on_train_epoch_end(self, trainer, _):
        if trainer.global_rank == 1:
            os.kill(os.getpid(), signal.SIGTERM)


def between_epochs(folder):
    ends = Ends()
    last = ModelCheckpoint(folder, save_last=True, save_on_exception=True)
    options = {"enable_checkpointing": True, "default_root_dir": folder, "max_epochs": 9}
    used = trainer("three", callbacks=[Between(), last, ends], **options)
    with pytest.raises(SIGTERMException):
        used.fit(Net(), loader(24), loader(8))
    return ends.seen


def test_between_epochs_the_next_step_ends_all_ranks_and_last_is_written(tmp_path):
    assert in_ranks(3, between_epochs, tmp_path) == [[("SIGTERMException", 4)]] * 3
    assert torch.load(tmp_path / "last.ckpt", weights_only=False)["global_step"] == 4


def test_what_this_relies_on_in_lightning_is_there():
    used = trainer(None)
    assert callable(used.fit_loop.epoch_loop._broadcast_sigterm_tensor)
    connector = used._signal_connector
    assert callable(connector._sigterm_notifier_fn) and connector.received_sigterm is False
    vars(connector)["_sigterm_notifier_fn"] = ours = lambda number, frame: None
    before = signal.getsignal(signal.SIGTERM)
    connector.register_signal_handlers()
    handlers = signal.getsignal(signal.SIGTERM).signal_handlers
    connector.teardown()
    assert ours in handlers and signal.getsignal(signal.SIGTERM) == before
