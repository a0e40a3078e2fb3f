"""The end of a run, part by part."""

from __future__ import annotations

from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from lightning.pytorch.trainer.states import TrainerStatus

from lightning_cephalo import CephaloStrategy


@pytest.mark.parametrize("broken", ["session", "samplers"])
def test_an_error_in_one_part_leaves_out_none_of_the_others(broken):
    parts = {name: Mock() for name in ("accelerator", "cluster_environment", "checkpoint_io")}
    strategy = CephaloStrategy()
    for name, part in parts.items():
        setattr(strategy, name, part)
    strategy._precision_plugin = parts["precision"] = Mock()
    strategy._samplers, strategy._ending, session = Mock(), Mock(), Mock()
    strategy._session = session
    state = SimpleNamespace(status=TrainerStatus.FINISHED)
    strategy._lightning_module = SimpleNamespace(_trainer=SimpleNamespace(state=state))
    failing = {"session": session.close, "samplers": strategy._samplers.give_back}[broken]
    failing.side_effect = RuntimeError("no")
    with pytest.raises(RuntimeError, match="no"):
        strategy.teardown()
    session.close.assert_called_once_with()
    strategy._samplers.give_back.assert_called_once()
    strategy._ending.end.assert_called_once_with()
    for part in parts.values():
        part.teardown.assert_called_once_with()
