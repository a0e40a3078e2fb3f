"""Ranks tell their agent of an error that all of them raise, and that would end every start."""

from __future__ import annotations

import json
import os

import pytest
from common import Net, in_ranks, loader, trainer
from lightning.pytorch import Callback

from lightning_cephalo.common.errors import UnsupportedError, UnwritableError
from lightning_cephalo.ranks import refusals
from lightning_cephalo.ranks.starter import TOLD


class Raises(Callback):
    """Raises errors of ranks in a hook behind some steps."""

    def __init__(self, hook, behind, *errors):
        self.behind, self.errors = behind, errors
        setattr(self, hook, self._raise)

    def _raise(self, trainer, *_):
        error = self.errors[trainer.global_rank]
        if error is not None and trainer.global_step == self.behind:
            raise error("of this rank")


class Makes(Net):
    """Raises errors where all ranks make their optimizers together."""

    def __init__(self, *errors):
        super().__init__()
        self.errors = errors

    def configure_optimizers(self):
        error = self.errors[self.global_rank] if self.errors else None
        if error is not None:
            raise error("of this rank")
        return super().configure_optimizers()


def _folder_of_rank(folder):
    own = folder / os.environ["RANK"]
    own.mkdir()
    os.environ[TOLD] = str(own)
    return own


def _told(folder, plan, errors, callbacks, is_caught):
    """What a rank tells the agent where its script ends."""
    path = _folder_of_rank(folder) / "refusal"
    used = trainer(plan, {"recover": False}, callbacks=callbacks)
    try:
        try:
            used.fit(Makes(*errors), loader(24), loader(8))
        except Exception:
            if not is_caught:
                raise
        raise ValueError("of the script")
    except Exception as error:
        refusals.tell(error)
    return json.loads(path.read_text()) if path.exists() else None


U, N = UnsupportedError, None


@pytest.mark.parametrize(
    ("plan", "errors", "callbacks", "is_caught", "told"),
    [
        ("3:1", (U, U), [], False, (False, "UnsupportedError: of this rank")),
        ("3:1", (U, U), [], True, None),
        ("3:1", (N, U), [], False, None),
        ("3:1", (ValueError, U), [], False, None),
        ("3:1", (ValueError, ValueError), [], False, None),
        ("3:1", (UnwritableError, UnwritableError), [], False, None),
        # each by itself
        ("3:1", (), [Raises("on_fit_start", 0, U, U)], False, (False, "UnsupportedError: of")),
        ("3:1", (), [Raises("on_fit_start", 0, U, ValueError)], False, None),
        ("3:1", (), [Raises("on_fit_start", 0, U, N)], False, None),
        ("3:1", (), [Raises("on_before_zero_grad", 0, U, U)], False, (False, "UnsupportedError: ")),
        # a step is done
        ("3:1", (), [Raises("on_before_zero_grad", 1, U, U)], False, None),
    ],
)
def test_ranks_tell_of_an_error_that_all_raise_before_a_step_is_done(
    tmp_path, plan, errors, callbacks, is_caught, told
):
    for found in in_ranks(2, _told, tmp_path, plan, errors, callbacks, is_caught):
        assert (found is None) == (told is None), found
        if told is not None:
            assert found["is_of_hosts"] == told[0] and found["text"].startswith(told[1])


def _told_of_the_plan(folder):
    path = _folder_of_rank(folder) / "refusal"
    used = trainer("3:1", {"global_batch_size": 9})
    try:
        used.fit(Net(), loader(24), loader(8))
    except Exception as error:
        refusals.tell(error)
    return json.loads(path.read_text())


def test_a_plan_that_does_not_fit_is_of_the_hosts_that_are_there(tmp_path):
    for found in in_ranks(2, _told_of_the_plan, tmp_path):
        assert found["is_of_hosts"] and found["text"].startswith("PlanError: ")
