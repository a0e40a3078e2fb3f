"""Cross-entropy of a large vocabulary, of whose logits only a chunk of tokens exists at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import get_device_states, set_device_states

from lightning_cephalo.common.errors import UnitUseError
from lightning_cephalo.execution.graph import leaves_behind
from lightning_cephalo.execution.unit_hooks import UnitForward


def chunked_cross_entropy(
    head: nn.Module,
    hidden: Tensor,
    targets: Tensor,
    *,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    chunk_tokens: int = 1024,
) -> Tensor:
    """Return ``cross_entropy(head(hidden), targets)`` without ever holding all logits.

    ::

        def training_step(self, ids):
            hidden = self.model.model(ids).last_hidden_state       # unmodified Hugging Face
            return chunked_cross_entropy(self.model.lm_head, hidden[:, :-1], ids[:, 1:])

    The head runs on some tokens at a time, and once more for the backward: it takes a third longer,
    and holds the logits and gradients of one chunk. The value and all gradients are those of all
    logits at once. It works with and without this package's strategy, also under autocast.

    Args:
        head: The module that makes logits of hidden states, such as a ``torch.nn.Linear``; frozen,
            tied or wrapped (LoRA) as may be. Each token's logits depend on its own row only.
        hidden: Hidden states, of shape ``(..., width)``, such as ``(batch, tokens, width)``.
        targets: Class indices, of shape ``hidden.shape[:-1]``.
        weight: Weight of each class, of shape ``(classes,)``.
        ignore_index: The target whose tokens count for nothing.
        reduction: ``"mean"``, ``"sum"`` or ``"none"``.
        label_smoothing: As for ``torch.nn.functional.cross_entropy``, 0 to 1.
        chunk_tokens: Tokens of a chunk. More take more memory, and less time on a GPU.

    Returns:
        The loss in float32, or in float64 for such logits. ``"none"``: of the shape of the targets.

    Raises:
        TypeError: If the head is no module, or the targets are no class indices.
        ValueError: If shapes do not fit, or an option has another value.
        UnitUseError: If the head contains a unit, or a part of the graph of other code, or is a
            unit with forward hooks. Or in a backward with ``create_graph=True``.

    Source of the formula: ``torch.nn.functional.cross_entropy``.
    """
    _check(head, hidden, targets, reduction, chunk_tokens)
    rows, wanted = hidden.reshape(-1, hidden.shape[-1]), targets.reshape(-1)
    loss_of = partial(
        functional.cross_entropy,
        weight=weight,
        ignore_index=ignore_index,
        reduction="none",
        label_smoothing=label_smoothing,
    )
    forward = vars(head).get("forward")
    if isinstance(forward, UnitForward):
        # one visit for all chunks, whose output is the losses
        body = partial(_losses, head, forward.body, loss_of, chunk_tokens)
        losses: Tensor = forward.computing(body)(rows, wanted)
    else:
        losses = _losses(head, head, loss_of, chunk_tokens, rows, wanted)
    if reduction == "none":
        return losses.view(targets.shape)
    if reduction == "sum":
        return losses.sum()
    counts = wanted != ignore_index
    if weight is None:
        return losses.sum() / counts.sum()
    weights = weight.to(losses.dtype)[torch.where(counts, wanted, 0)]
    return losses.sum() / torch.where(counts, weights, 0.0).sum()


def _check(
    head: nn.Module, hidden: Tensor, targets: Tensor, reduction: str, chunk_tokens: int
) -> None:
    if not isinstance(head, nn.Module):
        raise TypeError(
            f"head: expected a torch.nn.Module, but got {type(head).__name__}. Its parameters must"
            " be known: write what it computes in the forward() of a module."
        )
    if targets.is_floating_point():
        raise TypeError(
            f"targets: expected class indices, but got {targets.dtype}. For probabilities use"
            " torch.nn.functional.cross_entropy(head(hidden), targets)."
        )
    if hidden.shape[:-1] != targets.shape or not hidden.ndim > 1:
        raise ValueError(
            f"Expected hidden states of shape (..., width) and targets of shape (...), but got"
            f" {tuple(hidden.shape)} and {tuple(targets.shape)}. Shift both by one token:"
            " hidden[:, :-1], ids[:, 1:]."
        )
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f"reduction: expected 'mean', 'sum' or 'none', but got {reduction!r}.")
    if chunk_tokens < 1:
        raise ValueError(f"chunk_tokens: expected 1 or more, but got {chunk_tokens}.")
    is_unit = isinstance(vars(head).get("forward"), UnitForward)
    if is_unit and (head._forward_hooks or head._forward_pre_hooks):
        raise UnitUseError(
            "The head is a unit and has forward hooks, which would see no logits. Remove them, or"
            " register them on a module inside of the head."
        )
    for name, inner in head.named_modules():
        if name and isinstance(vars(inner).get("forward"), UnitForward):
            raise UnitUseError(
                f"The head contains the unit {name!r}, whose logits would be held from forward to"
                " backward. Name the head itself in CephaloStrategy(units=[...]), or give the"
                f" module {name!r} as the head."
            )


def _losses(
    head: nn.Module,
    call: Callable[[Tensor], Tensor],
    loss_of: Callable[[Tensor, Tensor], Tensor],
    chunk_tokens: int,
    rows: Tensor,
    targets: Tensor,
) -> Tensor:
    """Return each token's loss; code in a unit calls its body, all other code the module."""

    def losses_of(own: Tensor, part: slice) -> Tensor:
        logits = call(own)
        wide = torch.promote_types(logits.dtype, torch.float32)
        return loss_of(logits.to(wide), targets[part])

    again = _Again(rows)
    parts = [slice(at, at + chunk_tokens) for at in range(0, max(len(rows), 1), chunk_tokens)]
    with torch.no_grad(), again.autocast():
        losses = torch.cat([losses_of(rows[part], part) for part in parts])
    # only now, as a call may gather them
    trained = [parameter for parameter in head.parameters() if parameter.requires_grad]
    if not torch.is_grad_enabled() or not (trained or rows.requires_grad):
        return losses
    found: Tensor = _ChunkedLosses.apply(losses, losses_of, parts, again, rows, *trained)
    return found


class _Again:
    """The modes of a forward, for computing it again: autocast and random numbers."""

    def __init__(self, like: Tensor) -> None:
        kind = self._kind = like.device.type
        is_on, dtype = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
        # casts that are cached without a graph would lose gradients elsewhere
        self.autocast = partial(
            torch.autocast, kind, enabled=is_on, dtype=dtype, cache_enabled=False
        )
        self._random = torch.get_rng_state()
        self._devices, self._states = get_device_states(like)

    @contextmanager
    def modes(self) -> Iterator[None]:
        kind = self._kind
        with self.autocast(), torch.random.fork_rng(self._devices, device_type=kind):
            torch.set_rng_state(self._random)
            if self._devices:
                set_device_states(self._devices, self._states, device_type=kind)
            yield


class _ChunkedLosses(torch.autograd.Function):
    """Losses that are there already; the backward computes them again, a chunk at a time."""

    @staticmethod
    def forward(
        ctx: Any,
        losses: Tensor,
        losses_of: Callable[[Tensor, slice], Tensor],
        parts: Sequence[slice],
        again: _Again,
        rows: Tensor,
        *trained: nn.Parameter,
    ) -> Tensor:
        ctx.losses_of, ctx.parts, ctx.again, ctx.trained = losses_of, parts, again, trained
        ctx.save_for_backward(rows, *trained)  # finds writes to them
        return losses.view_as(losses)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise UnitUseError(
                "chunked_cross_entropy has no second derivatives (create_graph=True). Use"
                " torch.nn.functional.cross_entropy(head(hidden), targets)."
            )
        rows, *_ = ctx.saved_tensors
        of_rows = torch.empty_like(rows) if ctx.needs_input_grad[4] else None
        sums: list[Tensor | None] = [None] * len(ctx.trained)
        with ctx.again.modes():
            for part in ctx.parts:
                with torch.enable_grad():
                    own = rows[part].detach().requires_grad_(of_rows is not None)
                    losses = ctx.losses_of(own, part)
                wanted = [*ctx.trained] if of_rows is None else [own, *ctx.trained]
                if part.start == 0:
                    _refuse_others(losses, wanted)
                found = list(torch.autograd.grad(losses, wanted, gradient[part], allow_unused=True))
                del losses  # its graph has the logits of the chunk
                if of_rows is not None:
                    own_gradient = found.pop(0)
                    of_rows[part] = 0.0 if own_gradient is None else own_gradient
                for index, each in enumerate(found):
                    if each is None:
                        continue
                    if sums[index] is None:  # chunks add up in float32 or wider
                        wide = torch.promote_types(each.dtype, torch.float32)
                        sums[index] = torch.zeros_like(each, dtype=wide)
                    sums[index].add_(each)  # type: ignore[union-attr]
                del found
        return None, None, None, None, of_rows, *sums


def _refuse_others(losses: Tensor, known: Sequence[Tensor]) -> None:
    """Raise if the graph of a chunk leads to what would get no gradient."""
    ids = set(map(id, known))
    for leaf in leaves_behind([losses]):
        if id(leaf) not in ids:
            raise UnitUseError(
                f"The head uses a tensor of shape {tuple(leaf.shape)} that is none of its"
                " parameters, and would get no gradient. Make it a parameter of the head, or use"
                " torch.nn.functional.cross_entropy(head(hidden), targets)."
            )
