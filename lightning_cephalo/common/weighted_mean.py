"""The weighted mean of numbers or tensors, some of which may be NaN and weigh nothing."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, TypeVar

from torch import Tensor

Value = TypeVar("Value", float, Tensor)


def weighted_mean(values: Sequence[Value], weights: Sequence[float]) -> Value:
    """Returns the mean of values by weights; the plain mean if all weigh nothing.

    A value of weight 0 has no part in it: it may be a mean over nothing, and NaN stays NaN if it
    is multiplied by 0. Tensors may have any one shape, are summed in double precision, and need
    no copy to or from the device, as weights are numbers.

    Raises:
        ValueError: there is no value, or there are other numbers of values and weights.

    Example:
        >>> weighted_mean([1.0, 4.0, math.nan], [3.0, 1.0, 0.0])
        1.75
    """
    if not values:
        raise ValueError("Expects at least one value, of which nothing is the mean.")
    pairs = list(zip(values, weights, strict=True))
    chosen = [pair for pair in pairs if pair[1]] or [(value, 1.0) for value in values]
    whole = math.fsum(weight for _, weight in chosen)
    total: Any = sum(_wide(value) * (weight / whole) for value, weight in chosen)
    return total.to(values[0].dtype) if isinstance(values[0], Tensor) else total


def _wide(value: Any) -> Any:
    return value.detach().double() if isinstance(value, Tensor) else value
