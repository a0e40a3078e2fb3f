"""The logits of a head that never exist as a whole: no rank holds those of all tokens.

They exist as the hidden states that they are computed from. Losses ask the head for three numbers
per token: the log-sum of exponentials, the target's logit, and the mean logit. All else needs the
logits themselves, which are computed once, with a warning. The head
answers by itself (``chunked.py``).

[Note: writes to lazy logits]
Views of lazy logits share no memory, so a write to one would be missing in the others. All writes
to them are refused. They are computed when they are asked for, so a write to their hidden states in
between is refused too, and one to all logits before lazy ones of them are used again.

Private API: ``torch._C.DisableTorchFunctionSubclass`` and ``Tensor._make_wrapper_subclass``, as in
torch's own tensor subclasses. tests/execution/test_vocabulary.py reads attributes through both.
"""

from __future__ import annotations

import inspect
import math
import warnings
from collections.abc import Callable
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils import _pytree as pytree

from lightning_cephalo.common.errors import UnitUseError
from lightning_cephalo.execution.vocabulary.columns import wide
from lightning_cephalo.execution.vocabulary.questions import Kind, Question

_ATTRIBUTES = {"shape", "dtype", "device", "ndim", "layout", "requires_grad", "grad_fn"} | {
    name
    for name in dir(Tensor)
    if name.startswith("is_") and inspect.isdatadescriptor(getattr(Tensor, name))
}
_READS = frozenset(getattr(Tensor, name).__get__ for name in _ATTRIBUTES) | frozenset(
    {
        Tensor.size,
        Tensor.dim,
        Tensor.ndimension,
        Tensor.numel,
        Tensor.nelement,
        Tensor.is_floating_point,
        Tensor.is_complex,
        Tensor.element_size,
        Tensor.__len__,
        Tensor.__hash__,
        torch.is_tensor,
        torch.numel,
    }
)

_OPERATORS = ("add", "sub", "mul", "truediv", "floordiv", "div", "mod", "pow", "and", "or", "xor")
_IN_PLACE = frozenset(f"__i{name}__" for name in (*_OPERATORS, "lshift", "rshift")) | {
    "__setitem__",
    "__set__",
    "__delete__",
}


_HOOKS = frozenset({Tensor.register_hook, Tensor.retain_grad})


class Head(Protocol):
    """A layer that answers questions about its logits.

    Attributes:
        name: Its name.
        computes: How it computes its logits, for messages.
        way_out: A sentence that says how it would compute them as on one device.
        vocabulary: Number of logits of a token.
        has_warned: Whether the user knows that all its logits are needed.
    """

    name: str
    computes: str
    way_out: str
    vocabulary: int
    has_warned: bool

    def ask(self, question: Question, source: Tensor | None, *, differentiable: bool) -> Tensor:
        """Return the answer to a question."""

    def summed_losses(
        self, hidden: Tensor, targets: Tensor, weights: Tensor, smoothing: float
    ) -> Tensor | None:
        """Return the weighted sum of tokens' cross-entropies; None: ask about each token."""


class Watched:
    """Tensors whose values lazy logits, and views of these, are computed from or have shown.

    Args:
        head: The layer.

    Attributes:
        is_used: Whether gradients may pass by without all logits, through views or losses.
    """

    def __init__(self, head: Head) -> None:
        self._head = head
        self.is_used = False
        self._versions: list[tuple[Tensor, int, str]] = []

    def add(self, tensor: Tensor, what: str) -> None:
        """Watch a tensor, which counts its writes.

        Args:
            tensor: No tensor of inference mode, which counts none.
            what: What it is, for messages.
        """
        self._versions.append((tensor, tensor._version, what))

    def check(self) -> None:
        """Raise UnitUseError if a tensor was written to since :meth:`add`."""
        for tensor, version, what in self._versions:
            if tensor._version != version:
                raise UnitUseError(
                    f"{what} of {self._head.name!r} were written to, and its logits are used behind"
                    f" that write. The head {self._head.computes}, and when they are used. Write"
                    f" out of place: x = x + 1 instead of x += 1. Or {_lower_way_out(self._head)}"
                )

    def refuse(self, name: str) -> UnitUseError:
        """Return the error for a write to the logits.

        Args:
            name: Name of the operator.
        """
        return UnitUseError(
            f"{name!r} writes to logits of {self._head.name!r}, which {self._head.computes}: views"
            " of them share no memory. Write out of place:"
            " logits = logits.masked_fill(mask, value) instead of logits.masked_fill_(mask, value)."
            f" Or {_lower_way_out(self._head)}"
        )

    def refuse_hook(self, name: str) -> UnitUseError:
        """Return the error for a hook that would miss gradients.

        Args:
            name: Name of the operator.
        """
        return UnitUseError(
            f"{name!r} of logits of {self._head.name!r} behind their first use. The head"
            f" {self._head.computes}, and the hook would miss gradients of that use. Call it where"
            " the head returns its logits (module.register_forward_hook). Or"
            f" {_lower_way_out(self._head)}"
        )


def _lower_way_out(head: Head) -> str:
    return head.way_out[0].lower() + head.way_out[1:]


class LazyLogits(Tensor):
    """Logits, or their log-softmax, of which the head computes what is asked.

    Args:
        head: The layer.
        hidden: What it was called with, of shape ``(..., width)``.
        dtype: Dtype that the layer computes in.
        dim: The dimension of the vocabulary.
        needs_gradient: Whether the graph of the loss goes through them.
        out: Their own dtype; None: ``dtype``.
        is_normalised: Whether they are log-softmax.
        watched: What must not be written to; None: the hidden states.

    Attributes:
        whole: All of them with their graph, once they are gathered.
        without_graph: All of them, once they are gathered where no graph was wanted.
        watched: What must not be written to.
    """

    head: Head
    hidden: Tensor
    linear_dtype: torch.dtype
    vocabulary_dim: int
    is_normalised: bool
    whole: Tensor | None
    without_graph: Tensor | None
    watched: Watched

    @staticmethod
    def __new__(
        cls,
        head: Head,
        hidden: Tensor,
        dtype: torch.dtype,
        dim: int,
        needs_gradient: bool,
        out: torch.dtype | None = None,
        is_normalised: bool = False,
        watched: Watched | None = None,
    ) -> Any:
        if watched is None:
            watched = Watched(head)
            if hidden.is_inference():
                hidden = hidden.clone()  # it would not count writes
            else:
                watched.add(hidden, "Hidden states")
        shape = list(hidden.shape[:-1])
        shape.insert(dim, head.vocabulary)
        logits = Tensor._make_wrapper_subclass(
            cls,
            torch.Size(shape),
            dtype=out or dtype,
            device=hidden.device,
            requires_grad=needs_gradient,
            storage_size=0,  # else those who count memory would count it
        )
        logits.head, logits.hidden, logits.linear_dtype = head, hidden, dtype
        logits.vocabulary_dim, logits.is_normalised, logits.watched = dim, is_normalised, watched
        logits.whole = logits.without_graph = None
        return logits

    def like(self, hidden: Tensor, **changes: Any) -> Tensor:
        """Return the logits of other hidden states, or in another form."""
        given: dict[str, Any] = {
            "dim": self.vocabulary_dim,
            "needs_gradient": self.requires_grad and torch.is_grad_enabled(),
            "out": self.dtype,
            "is_normalised": self.is_normalised,
            "watched": self.watched,
        }
        logits = LazyLogits(self.head, hidden, self.linear_dtype, **{**given, **changes})
        self.watched.is_used |= logits.requires_grad
        return logits

    def __repr__(  # type: ignore[override]
        self, *, tensor_contents: Any = None
    ) -> str:
        return f"LazyLogits(shape={tuple(self.shape)}, dtype={self.dtype}, of {self.head.name!r})"

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _READS:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        first = args[0] if args else kwargs.get("input")
        name = getattr(func, "__name__", str(func))
        is_in_place = name.endswith("_") and not name.endswith("__")
        written = [kwargs.get("out")]
        if is_in_place or name in _IN_PLACE or kwargs.get("inplace"):
            written.append(first)
        for each in pytree.tree_leaves(written):
            if isinstance(each, LazyLogits):
                raise each.watched.refuse(name)
        if func in _HOOKS and isinstance(first, LazyLogits) and first.watched.is_used:
            raise first.watched.refuse_hook(name)
        rule = _RULES.get(func)
        if rule is not None and isinstance(first, LazyLogits) and first.held is None:
            result = rule(*args, **kwargs)
            if result is not NotImplemented:
                return result
        return _on_gathered(func, args, kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        for place, argument in enumerate(func._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                value = args[place] if place < len(args) else kwargs.get(argument.name)
                for each in pytree.tree_leaves(value):
                    if isinstance(each, LazyLogits):
                        raise each.watched.refuse(str(func))
        return _on_gathered(func, args, kwargs)

    # -- questions ----------------------------------------------------------------------------

    def _ask(self, kind: Kind, shape: tuple[int, ...], targets: Tensor | None = None) -> Tensor:
        hidden = self.hidden
        self.watched.check()
        differentiable = self.requires_grad and torch.is_grad_enabled() and kind is not Kind.BEST
        self.watched.is_used |= differentiable and kind is not Kind.LOGITS
        values = hidden.detach().reshape(-1, hidden.shape[-1]).to(self.linear_dtype)
        question = Question(kind, values, shape, targets)
        return self.head.ask(question, hidden, differentiable=differentiable)

    def statistics(self, targets: Tensor | None = None) -> tuple[Tensor, ...]:
        """Return log-sum of exponentials, the target's logit and the mean logit of each token.

        Args:
            targets: A token of the vocabulary for each, of the shape of the tokens.
        """
        lead = self.hidden.shape[:-1]
        tokens = math.prod(lead)
        if targets is None:
            targets = torch.full((tokens,), -1, dtype=torch.int64, device=self.device)
        wanted = targets.detach().reshape(-1).to(torch.int64)
        found = self._ask(Kind.STATISTICS, (tokens, 3), wanted)
        return tuple(each.view(lead) for each in found.unbind(1))

    def losses(self, targets: Tensor, weights: Tensor, smoothing: float) -> Tensor:
        """Return each token's cross-entropy times its weight.

        Args:
            targets: A token of the vocabulary for each; -1 counts for nothing.
            weights: Of each token.
            smoothing: As for ``torch.nn.functional.cross_entropy``.
        """
        log_sum, picked, mean = self.statistics(targets)
        losses = log_sum - picked
        if smoothing:
            losses = (1.0 - smoothing) * losses + smoothing * (log_sum - mean)
        return torch.where(targets >= 0, losses, 0.0) * weights

    def summed_losses(self, targets: Tensor, weights: Tensor, smoothing: float) -> Tensor:
        """Return the sum of :meth:`losses`."""
        total = None
        if self._wants_graph:
            self.watched.check()
            self.watched.is_used = True
            hidden = self.hidden.reshape(-1, self.hidden.shape[-1]).to(self.linear_dtype)
            tokens = targets.reshape(-1), weights.reshape(-1)
            total = self.head.summed_losses(hidden, *tokens, smoothing)
        return self.losses(targets, weights, smoothing).sum() if total is None else total

    def best(self) -> Tensor:
        """Return the place of each token's largest logit."""
        return self._ask(Kind.BEST, tuple(self.hidden.shape[:-1]))

    def gathered(self) -> Tensor:
        """Return all logits, and remember them."""
        self.watched.check()
        held = self.held
        if held is not None:
            return held
        shape = (*self.hidden.shape[:-1], self.head.vocabulary)
        logits = self._ask(Kind.LOGITS, shape).movedim(-1, self.vocabulary_dim)
        logits = logits.to(self.dtype)
        if self.is_normalised:
            logits = F.log_softmax(logits, self.vocabulary_dim)
        if logits.is_inference():  # writes to them would not be found
            return logits
        self.watched.add(logits, "All logits")
        if self._wants_graph:
            self.whole = logits
        else:
            self.without_graph = logits
        return logits

    @property
    def _wants_graph(self) -> bool:
        return self.requires_grad and torch.is_grad_enabled()

    @property
    def held(self) -> Tensor | None:
        """All logits, if they were gathered with all that is wanted now."""
        if self.whole is not None or self._wants_graph:
            return self.whole
        return self.without_graph


def _on_gathered(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Call a function with all logits; raise UnitUseError if it has written to them."""
    cut: list[LazyLogits] = []

    def whole_of(logits: LazyLogits) -> Tensor:
        cut.append(logits)
        return gather(logits, func)

    args, kwargs = pytree.tree_map_only(LazyLogits, whole_of, (args, kwargs))
    result = func(*args, **kwargs)
    for each in cut:
        each.watched.check()
    return result


def gather(logits: LazyLogits, func: Any) -> Tensor:
    """Return all logits for an operator that needs them; warn once for each head."""
    if logits.held is None and not logits.head.has_warned:
        logits.head.has_warned = True
        name = getattr(func, "__name__", str(func))
        warnings.warn(
            f"{name!r} needs all logits of {logits.head.name!r}, which {logits.head.computes}:"
            " they are there as a whole now, and take as much memory as on one device."
            " cross_entropy, nll_loss, log_softmax with gather, logsumexp and argmax need not. If"
            f" all of training_step needs them, {_lower_way_out(logits.head)}",
            stacklevel=2,
        )
    return logits.gathered()


def refuse_other_device(tensor: Tensor, device: torch.device, what: str) -> None:
    """Raise torch's error for a tensor on another device, before other ranks are asked."""
    if tensor.device != device:
        raise RuntimeError(
            "Expected all tensors to be on the same device, but found at least two devices,"
            f" {device} and {tensor.device} (the {what})."
        )


# -- rules: NotImplemented for what needs all logits --------------------------------------------


def _is_last(logits: LazyLogits) -> bool:
    return logits.vocabulary_dim == logits.ndim - 1


def _is_vocabulary(logits: LazyLogits, dim: Any) -> bool:
    return isinstance(dim, int) and dim % logits.ndim == logits.vocabulary_dim


def _cross_entropy(
    input: LazyLogits,
    target: Any,
    weight: Tensor | None = None,
    size_average: Any = None,
    ignore_index: int = -100,
    reduce: Any = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Any:
    if input.is_normalised:  # the sum of exponentials is 1
        return NotImplemented
    given = (weight, size_average, ignore_index, reduce, reduction, label_smoothing)
    return _negative_likelihood(input, target, *given)


def _nll_loss(
    input: LazyLogits,
    target: Any,
    weight: Tensor | None = None,
    size_average: Any = None,
    ignore_index: int = -100,
    reduce: Any = None,
    reduction: str = "mean",
) -> Any:
    if not input.is_normalised:
        return NotImplemented
    given = (weight, size_average, ignore_index, reduce, reduction, 0.0)
    return _negative_likelihood(input, target, *given)


def _negative_likelihood(
    logits: LazyLogits,
    target: Any,
    weight: Tensor | None,
    size_average: Any,
    ignore_index: int,
    reduce: Any,
    reduction: str,
    smoothing: float,
) -> Any:
    lead = logits.hidden.shape[:-1]
    plain = size_average is None and reduce is None and reduction in ("mean", "sum", "none")
    if not plain or not isinstance(target, Tensor) or isinstance(target, LazyLogits):
        return NotImplemented
    if target.is_floating_point() or target.shape != lead or not 0.0 <= smoothing <= 1.0:
        return NotImplemented
    refuse_other_device(target, logits.device, "targets")
    if target.dtype not in (torch.int64, torch.uint8):
        raise RuntimeError(f"expected target dtype to be Long or Byte, but got {target.dtype}")
    if logits.vocabulary_dim != min(1, logits.ndim - 1) or (weight is not None and smoothing):
        return NotImplemented
    counted = target != ignore_index
    wrong = counted & ((target < 0) | (target >= logits.head.vocabulary))
    if wrong.any():
        raise IndexError(f"Target {int(target[wrong][0])} is out of bounds.")
    targets = torch.where(counted, target, -1)
    weights = counted.to(wide(logits.linear_dtype))
    if weight is not None:
        weights = weights * weight.to(weights.dtype)[torch.where(counted, target, 0)]
    if reduction == "none":
        losses = logits.losses(targets, weights, smoothing)
    else:
        losses = logits.summed_losses(targets, weights, smoothing)
    if reduction == "mean":
        losses = losses / weights.sum()
    return losses.to(_wide_under_autocast(logits))


def _wide_under_autocast(logits: LazyLogits) -> torch.dtype:
    """Return the dtype of losses and log-softmax."""
    if torch.is_autocast_enabled(logits.device.type):
        return torch.promote_types(logits.dtype, torch.float32)
    return logits.dtype


def _log_softmax(
    input: LazyLogits,
    dim: Any = None,
    _stacklevel: int = 3,
    dtype: torch.dtype | None = None,
) -> Any:
    out = dtype or _wide_under_autocast(input)
    widens = torch.promote_types(out, input.dtype) == out
    if input.is_normalised or not _is_vocabulary(input, dim) or not widens:
        return NotImplemented
    return input.like(input.hidden, out=out, is_normalised=True)


def _log_softmax_of_method(
    input: LazyLogits, dim: Any = None, dtype: torch.dtype | None = None
) -> Any:
    return _log_softmax(input, dim, dtype=dtype)


def _logsumexp(input: LazyLogits, dim: Any, keepdim: bool = False) -> Any:
    if isinstance(dim, (tuple, list)) and len(dim) == 1:
        dim = dim[0]
    if input.is_normalised or not _is_vocabulary(input, dim):
        return NotImplemented
    log_sum = input.statistics()[0].to(input.dtype)
    return log_sum.unsqueeze(input.vocabulary_dim) if keepdim else log_sum


def _argmax(input: LazyLogits, dim: Any = None, keepdim: bool = False) -> Any:
    if not _is_vocabulary(input, dim):
        return NotImplemented
    best = input.best()
    return best.unsqueeze(input.vocabulary_dim) if keepdim else best


def _gather(input: LazyLogits, dim: Any, index: Any, *, sparse_grad: bool = False) -> Any:
    lead = input.hidden.shape[:-1]
    if not _is_vocabulary(input, dim) or not _is_last(input) or not isinstance(index, Tensor):
        return NotImplemented
    if index.shape != (*lead, 1) or isinstance(index, LazyLogits):
        return NotImplemented
    refuse_other_device(index, input.device, "index")
    if index.dtype not in (torch.int64, torch.int32):
        raise RuntimeError(f"gather(): Expected dtype int32/int64 for index, not {index.dtype}")
    if index.numel():
        low, high = (int(each) for each in torch.aminmax(index))
        if low < 0 or high >= input.head.vocabulary:
            raise RuntimeError(
                f"index {low if low < 0 else high} is out of bounds for dimension"
                f" {input.vocabulary_dim} with size {input.head.vocabulary}"
            )
    log_sum, picked, _ = input.statistics(index[..., 0])
    found = picked - log_sum if input.is_normalised else picked
    return found.to(input.dtype).unsqueeze(-1)


def _same(input: LazyLogits, *args: Any, **kwargs: Any) -> Any:
    return input if not args and not kwargs else NotImplemented


def _clone(input: LazyLogits, *args: Any, **kwargs: Any) -> Any:
    return input.like(input.hidden) if not args and not kwargs else NotImplemented


def _detach(input: LazyLogits) -> Any:
    return input.like(input.hidden.detach(), needs_gradient=False)


def _float(input: LazyLogits) -> Any:
    return _to(input, torch.float32)


def _double(input: LazyLogits) -> Any:
    return _to(input, torch.float64)


def _to(input: LazyLogits, *args: Any, **kwargs: Any) -> Any:
    wanted = {**dict(zip(("dtype",), args, strict=False)), **kwargs}
    dtype = wanted.pop("dtype", None)
    if len(args) > 1 or wanted or not isinstance(dtype, torch.dtype):
        return NotImplemented
    # the rounding of a narrower dtype would come before sums
    if torch.promote_types(dtype, input.dtype) != dtype:
        return NotImplemented
    return input if dtype == input.dtype else input.like(input.hidden, out=dtype)


def _view(input: LazyLogits, *shape: Any) -> Any:
    if len(shape) == 1 and not isinstance(shape[0], int):
        if not isinstance(shape[0], (tuple, list)):
            return NotImplemented  # as another dtype
        shape = tuple(shape[0])
    if not shape or not _is_last(input) or shape.count(-1) > 1:
        return NotImplemented
    sizes = [int(size) for size in shape]
    if -1 in sizes:
        rest = math.prod(size for size in sizes if size != -1)
        if not rest:
            return NotImplemented
        sizes[sizes.index(-1)] = input.numel() // rest
    if sizes[-1] != input.head.vocabulary or math.prod(sizes) != input.numel():
        return NotImplemented
    hidden = input.hidden.reshape(*sizes[:-1], input.hidden.shape[-1])
    return input.like(hidden, dim=len(sizes) - 1)


def _reshape(input: LazyLogits, *shape: Any, **kwargs: Any) -> Any:
    return NotImplemented if kwargs else _view(input, *shape)


def _flatten(input: LazyLogits, start_dim: int = 0, end_dim: int = -1) -> Any:
    start, end = start_dim % input.ndim, end_dim % input.ndim
    if not _is_last(input) or end >= input.vocabulary_dim:
        return NotImplemented
    hidden = input.hidden.flatten(start, end)
    return input.like(hidden, dim=hidden.ndim - 1)


def _transpose(input: LazyLogits, dim0: Any, dim1: Any) -> Any:
    """Move the vocabulary behind the samples, where ``cross_entropy`` expects it, or back."""
    if input.ndim != 3 or {dim0 % 3, dim1 % 3} != {1, 2} or input.vocabulary_dim == 0:
        return NotImplemented
    return input.like(input.hidden, dim=3 - input.vocabulary_dim)


def _matrix_transpose(input: LazyLogits) -> Any:
    return _transpose(input, 1, 2)


def _permute(input: LazyLogits, *dims: Any) -> Any:
    order = tuple(dims[0]) if len(dims) == 1 and not isinstance(dims[0], int) else dims
    if input.ndim != 3 or tuple(each % 3 for each in order) != (0, 2, 1):
        return NotImplemented
    return _transpose(input, 1, 2)


def _getitem(input: LazyLogits, index: Any) -> Any:
    if not _is_last(input):
        return NotImplemented
    parts = index if isinstance(index, tuple) else (index,)
    consumed = 0
    for part in parts:
        if isinstance(part, Tensor):
            consumed += part.ndim if part.dtype == torch.bool else 1
        elif part is not None and part is not Ellipsis:
            if not isinstance(part, (int, slice)) or isinstance(part, bool):
                return NotImplemented
            consumed += 1
    last = parts[-1] if parts else None
    reaches = any(part is Ellipsis for part in parts) and last is not Ellipsis
    reaches = reaches or consumed >= input.ndim
    if reaches and not (isinstance(last, slice) and last == slice(None)):
        return NotImplemented
    hidden = input.hidden[index]
    return input.like(hidden, dim=hidden.ndim - 1)


_RULES: dict[Any, Callable[..., Any]] = {
    F.cross_entropy: _cross_entropy,
    F.nll_loss: _nll_loss,
    F.log_softmax: _log_softmax,
    torch.log_softmax: _log_softmax_of_method,
    Tensor.log_softmax: _log_softmax_of_method,
    torch.logsumexp: _logsumexp,
    Tensor.logsumexp: _logsumexp,
    torch.argmax: _argmax,
    Tensor.argmax: _argmax,
    torch.gather: _gather,
    Tensor.gather: _gather,
    Tensor.contiguous: _same,
    Tensor.clone: _clone,
    torch.clone: _clone,
    Tensor.detach: _detach,
    Tensor.data.__get__: _detach,  # type: ignore[attr-defined]
    torch.detach: _detach,
    Tensor.float: _float,
    Tensor.double: _double,
    Tensor.to: _to,
    Tensor.view: _view,
    Tensor.reshape: _reshape,
    torch.reshape: _reshape,
    Tensor.flatten: _flatten,
    torch.flatten: _flatten,
    Tensor.transpose: _transpose,
    torch.transpose: _transpose,
    Tensor.swapaxes: _transpose,
    Tensor.permute: _permute,
    torch.permute: _permute,
    Tensor.mT.__get__: _matrix_transpose,  # type: ignore[attr-defined]
    Tensor.__getitem__: _getitem,
}
