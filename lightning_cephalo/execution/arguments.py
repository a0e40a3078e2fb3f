"""Checks the arguments of units: removes empty caches, rejects changed containers."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from lightning_cephalo.common.errors import UnitUseError
from lightning_cephalo.execution.call_tree import flatten


def without_empty_caches(
    args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Replace Hugging Face's empty key-value caches by None: recomputation would fill them."""

    def without(value: Any) -> Any:
        if not (hasattr(value, "get_seq_length") and hasattr(value, "update")):
            return value
        if int(value.get_seq_length()) > 0:
            raise UnitUseError(
                f"A unit is called with a filled {type(value).__name__} (prefix tuning?); computed"
                " again in the backward it would append to it twice. Use recompute=False."
            )
        return None

    return tuple(without(a) for a in args), {key: without(v) for key, v in kwargs.items()}


def refuse_changed_containers(args: Any, kwargs: Any, inputs: Sequence[Any]) -> None:
    """Raise UnitUseError if a unit has changed a container: it got a copy, so changes are lost."""
    values = (*args, *kwargs.values())
    if not any(isinstance(v, (list, dict)) or dataclasses.is_dataclass(v) for v in values):
        return
    now = flatten((args, kwargs))[0]
    same = len(now) == len(inputs) and all(a is b for a, b in zip(now, inputs, strict=True))
    if not same:
        raise UnitUseError(
            "A unit changes a list, dict or dataclass that it is called with. It gets a copy, so"
            " the change would be lost: return the new values instead."
        )
