"""What a step has stored on modules is undone."""

from __future__ import annotations

from typing import Any

from torch import nn

from lightning_cephalo.execution.undone_step import UndoneStep


def _module() -> Any:
    module: Any = nn.Linear(2, 2)
    module.taken, module.count = ["before"], 1
    return module


def test_a_list_that_the_forward_has_filled_and_replaced_is_as_before() -> None:
    module = _module()
    taken = module.taken
    undo = UndoneStep([vars(module)], ())
    module.taken.append("of the forward")
    module.taken, module.new, module.count = [], 3, 2
    undo.finish()
    undo.put_back(())
    assert module.taken is taken and taken == ["before"]
    assert module.count == 1 and not hasattr(module, "new")


def test_what_is_stored_behind_the_forward_stays() -> None:
    module = _module()
    undo = UndoneStep([vars(module)], ())
    module.count = 2
    undo.finish()
    module.taken.append("of a hook")
    module.count = 5
    undo.put_back(())
    assert module.taken == ["before", "of a hook"] and module.count == 5
