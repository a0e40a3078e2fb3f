"""The tensors at which a microbatch's graph is cut, and the glue between units.

Where the graph is cut, a *leaf* replaces a tensor. A unit receives the leaf instead of its
argument; the code after it receives a stand-in for the leaf of its output. The backward walks the
glue's graph once per tensor; see [Note: cuts] in :mod:`~lightning_cephalo.execution.microbatch`.

Only weak references to the user's tensors are here: a leaf moves to the host when none is left.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, _engine_run_backward, get_gradient_edge
from torch.utils import _pytree as pytree
from torch.utils.hooks import RemovableHandle

from lightning_cephalo.common.errors import UnitUseError
from lightning_cephalo.execution.ends_policy import used_elsewhere
from lightning_cephalo.execution.tensor_hooks import (
    OUTPUT,
    HooksOfEntered,
    Owner,
    RetainedGradient,
    SeenOnce,
    count_of_users,
    gradient_through_units,
    out_of_unit,
)


class _OutsideOfStep(torch.autograd.Function):
    """Makes an output, of a call outside of a step, that refuses gradients."""

    @staticmethod
    def forward(
        ctx: Any, output: Tensor, error: Callable[[], UnitUseError], *inputs: Tensor
    ) -> Tensor:
        ctx.error = error
        return output.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        raise ctx.error()


def refusing_gradients(outputs: Any, inputs: Any, trainable: bool) -> Any:
    """Return a unit's outputs, without graph, so that a gradient that reaches them raises."""
    tensors = [leaf for leaf in pytree.tree_leaves(inputs) if isinstance(leaf, Tensor)]
    reached = [tensor for tensor in tensors if tensor.requires_grad]
    if trainable:
        reached.append(torch.empty(0, requires_grad=True))
    if not reached:
        return outputs

    def refusing(leaf: Any) -> Any:
        is_value = isinstance(leaf, Tensor) and (leaf.is_floating_point() or leaf.is_complex())
        return _OutsideOfStep.apply(leaf, gradient_through_units, *reached) if is_value else leaf

    return pytree.tree_map(refusing, outputs)


def refusing_freed(outputs: Any) -> Any:
    """Return outputs so that a gradient raises, where torch would read freed parameters."""

    def refusing(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or leaf.grad_fn is None:
            return leaf
        reached = torch.empty(0, requires_grad=True)
        return _OutsideOfStep.apply(leaf, _gradient_behind_call, reached)

    return pytree.tree_map(refusing, outputs)


_top_saved_tensor_hooks = torch._C._autograd._top_saved_tensors_default_hooks
_run_on_host = torch.autograd.Variable._execution_engine.run_backward

# the backward that needs no values of a parameter
_EMBEDDING = "EmbeddingBackward"
# nodes where the glue's graph ends: parameters and other leaves, and outputs of units
_ENDS = ("AccumulateGrad", OUTPUT)


@dataclass(slots=True)
class _Cut:
    source: weakref.ref[Tensor]
    node: Any
    leaf: Tensor
    is_output: bool = False
    is_used: bool = False
    retained: RetainedGradient | None = None


@dataclass(slots=True)
class _Glue:
    edge: GradientEdge
    leaf: Tensor


@dataclass
class VisitsBehind:
    """The visits that a backward passes, by their positions."""

    direct: set[Any]
    positions: set[int] = field(default_factory=set)
    glue: set[int] = field(default_factory=set)
    nodes: set[Any] = field(default_factory=set)


class Boundaries:
    """The cuts of one microbatch."""

    def __init__(
        self,
        inside: frozenset[int] | None = None,
        several_backwards: bool = False,
        *,
        lets_go: bool = True,
        first_layers: Mapping[int, str] = MappingProxyType({}),
    ) -> None:
        self._inside, self._first_layers = inside, first_layers
        self._searches = inside is not None or bool(first_layers)
        self._several_backwards = several_backwards
        # in other steps nobody asks where a leaf comes from
        self._names_leaves = self._searches or several_backwards
        self._cuts: dict[int, _Cut] = {}
        self._glue: dict[int, list[_Glue]] = {}
        self._entered: dict[int, list[_Cut]] = {}
        # leaves whose values are needed until the backward of the visit that they entered, with its
        # position; the backward comes to the last one first
        self._needed: list[Tensor] = []
        self._needed_until: list[int] = []
        self._shown: list[_Cut] = []
        self._lets_go = lets_go
        self.owner = Owner()
        self._refuse = self.owner.refuse
        self._without_memory: dict[tuple[Any, ...], Tensor] = {}
        self._handles: list[RemovableHandle] = []
        self._hooked: list[dict[Any, Any]] = []
        self._with_hooks: list[dict[Any, Any]] = []
        self._reached: set[int] = set()
        self.own_hooks = 0
        self._watched: set[int] = set()

    def leaf_of(self, value: Any, position: int, *, is_inside: bool = False) -> Any:
        """Return the leaf of a unit's argument; see :meth:`to_leaves`."""
        values = [value]
        self.to_leaves(values, position, is_inside=is_inside)
        return values[0]

    def to_leaves(self, values: list[Any], position: int, *, is_inside: bool = False) -> None:
        """Replace a unit's arguments by their leaves; those that need no gradient stay."""
        for place, value in enumerate(values):
            if not isinstance(value, Tensor) or not value.requires_grad:
                continue
            cut = self._cuts.get(id(value))
            if cut is None or cut.source() is not value or cut.node is not value.grad_fn:
                cut = self._cut_glue(value, position, is_inside=is_inside)
            if not cut.is_used:
                hooks = value._backward_hooks
                if (
                    cut.is_output
                    and hooks is None
                    and not value.retains_grad
                    and not cut.node.has_hooks
                ):
                    cut.node.has_entered = True
                    # private, as in torch's register_hook(), whose handle takes as long again
                    value._backward_hooks = HooksOfEntered({self.owner: self._refuse})
                    cut.node._register_hook_dict(value)
                else:
                    cut = self._cut_watched(cut, value, position, is_inside=is_inside)
                cut.is_used = True
                if self._lets_go:
                    self._entered.setdefault(position, []).append(cut)
                if not self._several_backwards:  # else a later one may need the values
                    self._needed.append(cut.leaf)
                    self._needed_until.append(position)
            values[place] = cut.leaf

    def _cut_watched(self, cut: _Cut, value: Tensor, position: int, *, is_inside: bool) -> _Cut:
        """Let hooks of a tensor that first enters a unit see its gradient; return its cut."""
        is_output = cut.is_output
        if is_output:
            cut.node.has_entered = True
            cut = self._cut_glue(value, position, is_inside=is_inside)
        hooks: dict[Any, Callable[[Tensor], Any]] | None = value._backward_hooks
        if hooks is None:
            hooks = OrderedDict()  # which, unlike a dict, can have weak references
            value._backward_hooks = hooks
            if cut.node is not None:
                cut.node._register_hook_dict(value)
        self._with_hooks.append(hooks)
        if isinstance(hooks, HooksOfEntered):  # of another microbatch
            dict.__setitem__(hooks, self.owner, self._refuse)
        else:
            node_has_hooks = is_output and cut.node.has_hooks
            hooks[self.owner] = SeenOnce(self.owner, weakref.ref(hooks), node_has_hooks)
        if cut.node is None:  # it lives on, unlike what the step computes
            self._hooked.append(hooks)
        return cut

    def _cut_glue(self, value: Tensor, position: int, *, is_inside: bool) -> _Cut:
        if not is_inside and self._searches:
            self.refuse_leaks(value)
            self._watch_before(value)
        leaf = value.detach().requires_grad_()
        if self._names_leaves:
            leaf._leaf_of_unit = None  # type: ignore[attr-defined]
        cut = self._cuts[id(value)] = _Cut(weakref.ref(value), value.grad_fn, leaf)
        self._glue.setdefault(position, []).append(_Glue(get_gradient_edge(value), leaf))
        return cut

    def _watch_before(self, value: Tensor) -> None:
        """Refuse gradients of the user's code at what a unit's argument was computed from."""
        if self._inside is None:
            return
        for node in _nodes([value.grad_fn]):
            variable = getattr(node, "variable", None)
            if variable is not None and id(variable) not in self._watched:
                self._watched.add(id(variable))
                self.own_hooks += 1
                self._handles.append(variable.register_hook(self.owner.refuse))

    def show(self, output: Tensor, position: int) -> tuple[Tensor, Tensor]:
        """Cut an output of a unit; return its leaf and the glue's stand-in for it."""
        leaf = output.detach().requires_grad_()
        if self._names_leaves:
            # the microbatch, and the position of the visit whose output it is
            leaf._leaf_of_unit = (self.owner, position)  # type: ignore[attr-defined]
        shown: Tensor = out_of_unit(leaf, self.owner)
        cut = self._cuts[id(shown)] = _Cut(weakref.ref(shown), shown.grad_fn, leaf, True)
        self._shown.append(cut)
        return leaf, shown

    def drop_values(self) -> None:
        """Release the memory of outputs that entered no unit: only their gradients are needed."""
        for cut in self._shown:
            if not cut.is_used and cut.source() is None:
                self._take_memory(cut.leaf)
        self._shown.clear()

    def let_go(self, position: int) -> list[Tensor]:
        """Return leaves that first entered a unit there, and that only this microbatch holds."""
        cuts = self._entered.pop(position, [])
        return [cut.leaf for cut in cuts if cut.source() is None]

    def end_forward(self) -> None:
        """Drop the cuts: from now on leaves live as long as the backward needs them."""
        self._keep_retained()
        self._cuts.clear()
        self._entered.clear()
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self._unhook(of_all=False)

    def _keep_retained(self) -> None:
        """Let outputs retain gradients that go past them, into units: ``x.retain_grad()``."""
        for cut in self._cuts.values():
            if not cut.is_used or not cut.is_output:
                continue
            source = cut.source()
            if source is not None and source.retains_grad:
                if cut.retained is None:
                    cut.retained = RetainedGradient(cut.source)
                    cut.leaf.register_post_accumulate_grad_hook(cut.retained)
                cut.retained.before = source.grad

    def clear(self) -> None:
        """Drop all cuts and their glue; the backward cannot run any more."""
        self.end_forward()
        self._unhook(of_all=True)
        self._glue.clear()
        self._needed.clear()
        self._needed_until.clear()
        self._shown.clear()

    @contextmanager
    def own_gradients(self) -> Iterator[None]:
        """Let this package compute gradients in a ``with`` block, within the user's code."""
        before, self.owner.runs = self.owner.runs, False
        try:
            yield
        finally:
            self.owner.runs = before

    def refuse_leaks(self, tensor: Tensor) -> None:
        """Raise if a graph breaks what :class:`Boundaries` was made to search for."""
        if not self._searches:
            return
        nodes = _nodes([tensor.grad_fn])
        self._refuse_uses_of_values(nodes)
        if self._inside is None:
            return
        variables = [n.variable for n in nodes if type(n).__name__ == "AccumulateGrad"]
        # a tensor stored on a module is the last microbatch's: any microbatch's leaves count
        if any(id(v) in self._inside or hasattr(v, "_leaf_of_unit") for v in variables):
            raise UnitUseError(
                "The loss depends on a tensor that was computed inside a unit and is not one of"
                " its outputs: the unit has put it into a list that is already there, or stored it"
                " outside of its modules; or the unit's parameters are used outside of it. Its"
                " gradient would be lost. Store it in an attribute of a module in the unit"
                " (self.balance = loss), return it from the unit's forward, take it out by a"
                " forward hook of a module in the unit, or leave it out of the loss."
            )
        leaves = [node.next_functions[0][0].variable for node in nodes if _is_output(node)]
        origins = [getattr(leaf, "_leaf_of_unit", None) for leaf in leaves]
        if any(origin is None or origin[0] is not self.owner for origin in origins):
            raise UnitUseError(
                "The loss depends on a tensor of another microbatch, which a hook has put into a"
                " list, dict or object that microbatches share. They take turns at units. Let the"
                " hook assign a new container to an attribute of a module: `self.features ="
                " {**self.features, name: output}`. Or let training_step make the list, and hand it"
                " to hooks by a contextvars.ContextVar, of which each microbatch has its own."
            )

    def _refuse_uses_of_values(self, nodes: set[Any]) -> None:
        """Raise ShardedUseError if a backward will need the values of the first layers."""
        if not self._first_layers:
            return
        names = {
            self._first_layers.get(id(getattr(following, "variable", None)))
            for node in nodes
            if not type(node).__name__.startswith(_EMBEDDING)
            for following, _ in node.next_functions
        }
        if found := frozenset(name for name in names if name is not None):
            raise used_elsewhere(found)

    def shares_glue(self, loss: Tensor) -> bool:
        """Whether the graph of the loss has nodes in common with the graphs of units' inputs."""
        pending = [entry.edge.node for entries in self._glue.values() for entry in entries]
        return bool(pending) and bool(_reachable([loss.grad_fn]) & _reachable(pending))

    @property
    def watched_hooks(self) -> int:
        """Number of hooks of users at what entered units, which see no gradient in parts."""
        return sum(map(count_of_users, self._with_hooks))

    def in_parts(self, loss: Tensor) -> set[Any]:
        """Return the nodes that the backward passes several times, each with a part."""
        seen = _nodes([loss.grad_fn])
        shared: set[Any] = set()
        for position, entries in self._glue.items():
            if self._several_backwards and position not in self._reached:
                continue
            reached: set[Any] = set()
            stack = [entry.edge.node for entry in entries]
            while stack:
                node = stack.pop()
                if node in seen:
                    shared.add(node)
                elif node not in reached:
                    reached.add(node)
                    if type(node).__name__ not in _ENDS:
                        stack += [each for each, _ in node.next_functions if each is not None]
            seen |= reached
        return {node for node in _nodes([*shared]) if _may_have_hooks(node)}

    def passed(self, position: int, retain: bool = False) -> None:
        """Go on behind the backward of a visit, with that of the glue before it."""
        needed_until = self._needed_until
        while needed_until and needed_until[-1] >= position:
            needed_until.pop()
            self._take_memory(self._needed.pop())
        if position in self._glue:
            self.through_glue(position, retain)
        if self._hooked and not self._glue:
            self._unhook(of_all=True)

    def _unhook(self, *, of_all: bool) -> None:
        """Remove our hooks of leaves, or only where users have none."""
        for hooks in self._hooked:
            if of_all or not count_of_users(hooks):
                hooks.pop(self.owner, None)
        self._hooked = [hooks for hooks in self._hooked if self.owner in hooks]

    def _take_memory(self, leaf: Tensor) -> None:
        """Do as :func:`take_memory`, with one stand-in for all leaves of a shape."""
        if not is_plain(leaf):
            return
        kind = (leaf.shape, leaf.dtype, leaf.device)
        stand_in = self._without_memory.get(kind)
        if stand_in is None:
            stand_in = self._without_memory[kind] = without_memory(leaf)
        leaf.data = stand_in

    def through_glue(self, position: int, retain: bool = False) -> None:
        """Run the glue's backward for the leaves that first entered a unit there."""
        entries = self._glue.pop(position, None)
        if entries is None:
            return
        reached = [(entry, grad) for entry in entries if (grad := entry.leaf.grad) is not None]
        if reached:
            run_backward(
                [entry.edge for entry, _ in reached], [grad for _, grad in reached], retain=True
            )
        if not self._several_backwards:
            return
        for entry, _ in reached:
            entry.leaf.grad = None
        passed = [entry for entry, _ in reached]
        rest = entries if retain else [each for each in entries if each not in passed]
        if rest:
            self._glue[position] = rest

    def visits_behind(
        self, roots: Sequence[Tensor], inputs_of: Callable[[int], Sequence[Tensor]]
    ) -> VisitsBehind:
        entries = {
            id(entry.leaf): (position, entry.edge.node)
            for position, entries in self._glue.items()
            for entry in entries
        }
        self._keep_retained()
        nodes = _nodes([root.grad_fn for root in roots])
        found = VisitsBehind(direct=nodes)
        while True:
            leaves = [node.next_functions[0][0].variable for node in nodes if _is_output(node)]
            glue = []
            while leaves:
                leaf = leaves.pop()
                origin = getattr(leaf, "_leaf_of_unit", None)
                position = None if origin is None else origin[1]
                if position in found.positions:
                    continue
                if position is not None:
                    found.positions.add(position)
                    leaves.extend(inputs_of(position))
                elif id(leaf) in entries:
                    position, node = entries[id(leaf)]
                    found.glue.add(position)
                    glue.append(node)
                else:
                    raise passed_before()
            if not glue:
                self._reached = found.glue
                return found
            nodes = _nodes(glue, found.nodes)
            found.nodes.update(nodes)


def run_backward(
    roots: Sequence[Tensor | GradientEdge], gradients: Sequence[Tensor], *, retain: bool
) -> None:
    """Run a backward from tensors whose gradients are known.

    Private API: ``torch.autograd.backward`` also checks shapes in Python, which takes as long as a
    small backward. torch's wrapper of the engine hands context variables to the threads of devices;
    on the CPU the engine runs in this thread. tests/execution/test_boundaries.py compares them.
    """
    run = _engine_run_backward
    if gradients[0].is_cpu:
        run = _run_on_host
    run(
        tuple(roots),
        tuple(gradients),
        retain,
        False,  # create_graph
        (),  # all leaves
        allow_unreachable=True,
        accumulate_grad=True,
    )


def _gradient_behind_call() -> UnitUseError:
    return UnitUseError(
        "Your code computes a gradient behind a call of the module in a hook. Full parameters are"
        " freed when the call ends, and the gradient needs them. Put both, the call and the"
        " gradient, inside of `with trainer.strategy.full_parameters():`, on all ranks."
    )


def passed_before() -> UnitUseError:
    return UnitUseError(
        "A second backward through the same graph: the first one has freed it. Call"
        " self.manual_backward(loss, retain_graph=True) the first time, or sum the losses."
    )


@contextmanager
def zeroed_where(loss: Tensor, condition: Tensor) -> Iterator[None]:
    """Make all gradients zero, in backwards of this loss, where a bool on the device is true.

    Multiplying by zero would not do: a loss of 0/0 has gradients of NaN.
    """

    def zeroed(gradients: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
        return tuple(None if each is None else _zeroed(each, condition) for each in gradients)

    ends = [node for node in _nodes([loss.grad_fn]) if type(node).__name__ in _ENDS]
    handles = [end.register_prehook(zeroed) for end in ends]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _zeroed(gradient: Tensor, condition: Tensor) -> Tensor:
    dense = gradient if is_plain(gradient) else gradient.to_dense()
    with torch.no_grad():
        if dense.is_contiguous():
            # in place: the head's gradient may be the largest tensor of all
            return dense.masked_fill_(condition, 0.0)
        return dense.masked_fill(condition, 0.0)


def take_memory(leaf: Tensor) -> None:
    """Release the memory of a plain leaf's values; keep the shape, for its gradient."""
    if is_plain(leaf):
        leaf.data = without_memory(leaf)


def without_memory(like: Tensor) -> Tensor:
    """Return a tensor of the same shape whose elements share the memory of one."""
    return like.new_empty(()).expand(like.shape)


def can_have_gradient(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def refuse_saved_tensor_hooks(what: str, other_remedy: str = "") -> None:
    if has_saved_tensor_hooks():
        raise UnitUseError(
            f"A {what} is called inside a saved-tensor-hooks context (torch.utils.checkpoint or"
            " save_on_cpu around it). Cephalo recomputes units itself: switch gradient"
            f" checkpointing off in the model{other_remedy}."
        )


def has_saved_tensor_hooks() -> bool:
    """Whether code runs inside of a saved-tensor-hooks context, such as a checkpoint."""
    return _top_saved_tensor_hooks(True) is not None


def is_plain(tensor: Tensor) -> bool:
    """Whether shape and strides locate all values; not the case for nested and sparse tensors."""
    return type(tensor) is Tensor and tensor.layout is torch.strided and not tensor.is_nested


def _reachable(roots: Sequence[Any]) -> set[Any]:
    """Return the nodes that hold buffers, from these roots down to the leaves of outputs."""
    return {node for node in _nodes(roots) if type(node).__name__ not in _ENDS}


def _may_have_hooks(node: Any) -> bool:
    if type(node).__name__ != "AccumulateGrad":
        return True
    return bool(node.variable._backward_hooks)


def _is_output(node: Any) -> bool:
    return type(node).__name__ == OUTPUT


def _nodes(roots: Sequence[Any], known: set[Any] | None = None) -> set[Any]:
    """Return the nodes from these roots down, without those that are known already."""
    seen: set[Any] = set()
    known = known or set()
    stack = [node for node in roots if node is not None]
    while stack:
        node = stack.pop()
        if node in seen or node in known:
            continue
        seen.add(node)
        if type(node).__name__ not in _ENDS:
            stack.extend(following for following, _ in node.next_functions if following is not None)
    return seen


def leaves_behind(roots: Sequence[Tensor]) -> list[Tensor]:
    """Return the leaves that a backward from these tensors reaches, past the outputs of units."""
    found: dict[int, Tensor] = {}
    open_nodes: list[Any] = [get_gradient_edge(t).node for t in roots if t.requires_grad]
    seen: set[Any] = set()
    while open_nodes:
        node = open_nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)
        if leaf is not None:
            found[id(leaf)] = leaf
        open_nodes.extend(following for following, _ in node.next_functions)
    return list(found.values())
