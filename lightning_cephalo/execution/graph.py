"""Runs the backward of a whole step in one call of autograd's engine, in the order of its program.

[Note: marks]
The engine, in one thread, runs the ready node that was made last. The forward is layered: visit by
visit, and in each visit microbatch by microbatch. So the backward passes the visits in exactly the
reverse order. A *mark* is a node without a gradient that calls a function of ours in its turn.
One behind each visit tells the executor that the backward comes to it::

    forward     body of unit 1  |  glue, body of unit 2  |  glue  |  loss
                                ^                        ^        ^
    marks                    arrive                   arrive     stop

Every mark is a root of the engine's call, so it comes in its turn whatever the loss depends on.
What stands behind a microbatch's last visit runs at once, when its loss is there, down to the last
mark, which stops that call. The step's call goes on from there. See docs/design/step.md.
"""

from __future__ import annotations

import weakref
from bisect import bisect_right
from collections.abc import Callable, Container, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils import _pytree as pytree
from torch.utils.hooks import RemovableHandle

from lightning_cephalo.common.errors import UnitUseError
from lightning_cephalo.execution.call_tree import flatten_result

Root = tuple[Tensor | GradientEdge, Tensor]
"""Where a backward begins, and the gradient there."""

# Private names, each used here only; tests/execution/test_graph.py holds what is expected of them.
_run = torch.autograd.Variable._execution_engine.run_backward
_number_of_next_node: Callable[[], int] = torch._C._autograd._get_sequence_nr
_push_hooks = torch._C._autograd._push_saved_tensors_default_hooks
_pop_hooks = torch._C._autograd._pop_saved_tensors_default_hooks
_top_hooks = torch._C._autograd._top_saved_tensors_default_hooks

_LEAF = "AccumulateGrad"
# a node with a lower number than those of all steps
_EARLIEST = torch.zeros(0, requires_grad=True).view(0)


def now() -> int:
    """Return a number that nodes of before are below, and later ones are not."""
    return _number_of_next_node()


class Through(torch.autograd.Function):
    """Passes an output of the last visit on, and holds its gradient between two calls.

    The engine would hold the gradients with which a call begins until the call ends.
    """

    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        ctx.held = ctx.stand_in = None
        return value.detach()  # a view could not be changed in place

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        held, stand_in = ctx.held, ctx.stand_in
        ctx.held = ctx.stand_in = None
        if held is None:
            return gradient
        is_all = gradient.data_ptr() == stand_in.data_ptr()
        return held if is_all else gradient + held

    @classmethod
    def shown(cls, tree: Any) -> Any:
        """Return nested outputs whose tensors have passed through."""
        leaves, structure = flatten_result(tree)
        places = [n for n, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        for place in places:
            if leaves[place].requires_grad:
                leaves[place] = value = cls.apply(leaves[place])
                value.grad_fn.shown = weakref.ref(value)
        return structure.unflatten(leaves)

    @staticmethod
    def hold(edge: GradientEdge, gradient: Tensor) -> Root:
        """Return where a backward begins that goes on with a gradient."""
        node: Any = edge.node
        if type(node).__name__ != "ThroughBackward" or not is_plain(gradient):
            return edge, gradient
        shown = node.shown()
        if shown is not None and shown.retains_grad:
            return edge, gradient
        node.held = gradient if node.held is None else node.held + gradient
        node.stand_in = gradient.new_zeros(()).expand(gradient.shape)
        return edge, node.stand_in


class _Passed(Exception):
    """Ends a backward at a mark."""


def _stop(gradients: Any) -> None:
    raise _Passed


class Marks:
    """Nodes of one microbatch that call a function when the backward comes to them."""

    def __init__(self) -> None:
        self._anchor = torch.zeros(0, requires_grad=True)
        self._nothing = torch.zeros(0)
        self._marks: list[tuple[int, Tensor]] = []

    def add(self, position: int, call: Callable[[Any], None]) -> None:
        """Let the next node of this thread's graph call a function; it belongs to a visit."""
        mark = self._anchor.view(0)
        if mark.grad_fn is None:  # code without gradients
            return
        mark.grad_fn.register_prehook(call)
        self._marks.append((position, mark))

    def roots(self, positions: Container[int] | None) -> list[Root]:
        """Return the marks of visits as roots of a backward; None: all."""
        return [
            (mark, self._nothing)
            for position, mark in self._marks
            if positions is None or position in positions
        ]

    def drop(self, count: int) -> None:
        """Forget all marks but the first ones."""
        del self._marks[count:]

    def clear(self) -> None:
        """Forget all marks."""
        self._marks.clear()

    def __len__(self) -> int:
        return len(self._marks)

    def run_behind(
        self, root: Tensor, without_weight: Tensor | None = None, *, has_hooks: bool = False
    ) -> list[Root]:
        """Run the backward of what was made behind the last mark; return where the rest begins.

        What the rest begins with has not passed hooks of tensors yet: they see all of it then.

        Args:
            without_weight: A bool on the device; all gradients are zero if it is true. Multiplying
                the root by zero would not do: a loss of 0/0 has gradients of NaN.
            has_hooks: Whether tensors may have hooks.
        """
        *_, (_, last) = self._marks
        stop = get_gradient_edge(last).node
        number = stop._sequence_nr()
        begin = get_gradient_edge(root)
        if not is_leaf(begin.node) and begin.node._sequence_nr() < number:
            one = torch.ones_like(root)
            return [(begin, one if without_weight is None else _zeroed(one, without_weight))]
        part = _Behind(begin.node, number, without_weight)
        roots: list[Root] = [(root, torch.ones_like(root))]
        if part.has_rest:
            roots.append((last, self._nothing))
        handle = stop.register_prehook(_stop)
        try:
            run(roots)
        except _Passed:
            pass
        finally:
            roots.clear()
            handle.remove()
            part.forget()
        rest = part.rest()
        return [*rest] if has_hooks else [Through.hold(edge, gradient) for edge, gradient in rest]


class _Behind:
    """The part of a graph, from a node down, that was made after a number.

    Its backward ends where the rest is due. Hooks note what has been sent there until then: to
    nodes of the rest, and to leaves that the rest sends gradients to, too.
    """

    def __init__(self, node: Any, number: int, without_weight: Tensor | None) -> None:
        self._without_weight = without_weight
        self._rest: list[tuple[GradientEdge, Tensor]] = []
        self._of_leaves: dict[Any, list[Tensor]] = {}
        self._handles: list[RemovableHandle] = []
        self.has_rest = False
        seen, nodes = {node}, [node]
        while nodes:
            node = nodes.pop()
            if is_leaf(node):
                self._handles.append(node.register_prehook(partial(self._collect, node)))
                continue
            edges = []
            for index, (following, output) in enumerate(node.next_functions):
                if following is None:
                    continue
                is_end = is_leaf(following)
                if not is_end and following._sequence_nr() < number:
                    is_end = self.has_rest = True
                elif following not in seen:
                    seen.add(following)
                    nodes.append(following)
                if is_end:
                    edges.append((index, GradientEdge(following, output)))
            if edges:
                self._handles.append(node.register_hook(partial(self._note, edges)))

    def _note(
        self,
        edges: Sequence[tuple[int, GradientEdge]],
        gradients: Sequence[Tensor | None],
        of_outputs: Any,
    ) -> None:
        """Behind a node: note what it sends to the ends."""
        for index, edge in edges:
            gradient = gradients[index]
            if gradient is None:
                continue
            if is_leaf(edge.node):
                self._of_leaves.setdefault(edge.node, []).append(gradient)
            else:
                self._rest.append((edge, gradient))

    def _collect(
        self, leaf: Any, gradients: Sequence[Tensor | None]
    ) -> Sequence[Tensor | None] | None:
        """Before a leaf collects its gradient, to which the rest adds nothing."""
        self._of_leaves.pop(leaf, None)
        if self._without_weight is None:
            return None
        return tuple(None if each is None else self._zeroed(each) for each in gradients)

    def forget(self) -> None:
        for handle in self._handles:
            handle.remove()

    def rest(self) -> list[tuple[GradientEdge, Tensor]]:
        """Return where the rest begins; leaves without hooks have what was sent to them."""
        rest, self._rest = self._rest, []
        for leaf, gradients in self._of_leaves.items():
            for gradient in gradients:
                if leaf.variable._backward_hooks:  # which see all of it
                    rest.append((GradientEdge(leaf, 0), gradient))
                else:
                    _accumulate(leaf.variable, self._zeroed(gradient))
        return [(edge, self._zeroed(gradient)) for edge, gradient in rest]

    def _zeroed(self, gradient: Tensor) -> Tensor:
        return gradient if self._without_weight is None else _zeroed(gradient, self._without_weight)


def _accumulate(leaf: Tensor, gradient: Tensor) -> None:
    """Add to a leaf's gradient, as the engine does."""
    with torch.no_grad():
        if leaf.grad is None:
            leaf.grad = gradient.clone()
        else:
            leaf.grad.add_(gradient)


def run(roots: Sequence[Root], *, retain: bool = False) -> None:
    """Run a backward in this thread, down to all leaves.

    ``torch.autograd.backward`` also checks shapes in Python, which takes as long as a small
    backward.
    """
    try:
        _run_engine(roots, retain=retain)
    except _Passed:
        raise
    except BaseException:
        # the engine of this thread goes on holding what was ready, until it comes to lower numbers
        _run_engine([(_EARLIEST, torch.zeros(0))], retain=True)
        raise


def _run_engine(roots: Sequence[Root], *, retain: bool) -> None:
    tensors, gradients = zip(*roots, strict=True)
    with torch.autograd.set_multithreading_enabled(False):
        _run(
            tensors,
            gradients,
            retain,
            False,  # create_graph
            (),  # all leaves
            allow_unreachable=True,
            accumulate_grad=True,
        )


def _zeroed(gradient: Tensor, condition: Tensor) -> Tensor:
    dense = gradient if gradient.layout is torch.strided else gradient.to_dense()
    with torch.no_grad():
        return dense.masked_fill(condition, 0.0)


def is_leaf(node: Any) -> bool:
    """Whether a node collects the gradient of a tensor that no function has made."""
    return type(node).__name__ == _LEAF


# -- whose nodes ----------------------------------------------------------------------------------


class Windows:
    """Whose visits have made which nodes: the numbers of all visits of a step, in order.

    Attributes:
        joint: Numbers of nodes that belong to all microbatches.
    """

    def __init__(self) -> None:
        self.joint: set[int] = set()
        self._starts: list[int] = []
        self._ends: list[int] = []
        self._owners: list[int] = []

    def begin(self, owner: int) -> None:
        """Note that the nodes that come next are a microbatch's."""
        del self._starts[len(self._ends) :], self._owners[len(self._ends) :]  # of one that failed
        self._starts.append(now())
        self._owners.append(owner)

    def end(self) -> None:
        """Note that they end here."""
        self._ends.append(now())

    def are_of_others(self, roots: Sequence[Tensor], owner: int) -> bool:
        """Whether tensors depend on visits of other microbatches than their owner."""
        for node in nodes_of(roots, self.joint):
            if is_leaf(node):
                continue
            number = node._sequence_nr()
            place = bisect_right(self._starts, number) - 1
            is_inside = 0 <= place < len(self._ends) and number < self._ends[place]
            if is_inside and self._owners[place] != owner:
                return True
        return False


def nodes_of(roots: Sequence[Tensor], ends: Container[int] = ()) -> set[Any]:
    """Return the nodes that a backward from these tensors reaches, those of leaves too.

    Args:
        ends: Numbers of nodes where the search stops.
    """
    seen: set[Any] = set()
    stack: list[Any] = [get_gradient_edge(root).node for root in roots if root.requires_grad]
    while stack:
        node = stack.pop()
        if node in seen:
            continue
        seen.add(node)
        if node._sequence_nr() not in ends:
            stack += [each for each, _ in node.next_functions if each is not None]
    return seen


def nodes_between(nodes: set[Any], ends: set[Any]) -> set[Any]:
    """Return those of some nodes that lead to one of the ends, with the ends."""
    before: dict[Any, list[Any]] = {}
    for node in nodes:
        for following, _ in node.next_functions:
            before.setdefault(following, []).append(node)
    found: set[Any] = set()
    stack = [end for end in ends if end in nodes]
    while stack:
        node = stack.pop()
        if node not in found:
            found.add(node)
            stack += before.get(node, [])
    return found


def leaves_behind(roots: Sequence[Tensor]) -> list[Tensor]:
    """Return the leaves that a backward from these tensors reaches."""
    return [node.variable for node in nodes_of(roots) if hasattr(node, "variable")]


# -- saved tensors --------------------------------------------------------------------------------


def has_saved_tensor_hooks() -> bool:
    """Whether code runs inside of a saved-tensor-hooks context, such as a checkpoint."""
    return _top_hooks(True) is not None


def push_saved_tensor_hooks(pack: Callable[[Tensor], Any], unpack: Callable[[Any], Tensor]) -> None:
    """Let these functions store and return what nodes save from now on, in this thread."""
    _push_hooks(pack, unpack)


def pop_saved_tensor_hooks() -> None:
    """Undo the last :func:`push_saved_tensor_hooks`."""
    _pop_hooks()


def refuse_saved_tensor_hooks(what: str, other_remedy: str = "") -> None:
    """Raise UnitUseError inside of a saved-tensor-hooks context of the user's code."""
    if has_saved_tensor_hooks():
        raise UnitUseError(
            f"A {what} is called inside a saved-tensor-hooks context (torch.utils.checkpoint or"
            " save_on_cpu around it). Cephalo recomputes units itself: switch gradient"
            f" checkpointing off in the model{other_remedy}."
        )


# -- tensors --------------------------------------------------------------------------------------


def can_have_gradient(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def is_plain(tensor: Tensor) -> bool:
    """Whether shape and strides locate all values; not the case for nested and sparse tensors."""
    return type(tensor) is Tensor and tensor.layout is torch.strided and not tensor.is_nested


def take_memory(leaf: Tensor) -> None:
    """Release the memory of a plain leaf's values; keep the shape."""
    if is_plain(leaf):
        leaf.data = leaf.new_empty(()).expand(leaf.shape)


# -- gradients that are refused -------------------------------------------------------------------


def gradient_through_units() -> UnitUseError:
    return UnitUseError(
        "Your code computes a gradient through a unit itself (torch.autograd.grad for a gradient"
        " penalty or in evaluation, or a backward). A unit's parameters are there only in the"
        " layered backward. Leave that network out of the units: CephaloStrategy(units=[...])"
        " with the blocks of other networks, or units=[] if there is no other."
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
        is_value = isinstance(leaf, Tensor) and can_have_gradient(leaf)
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


def _gradient_behind_call() -> UnitUseError:
    return UnitUseError(
        "Your code computes a gradient behind a call of the module in a hook. Full parameters are"
        " freed when the call ends, and the gradient needs them. Put both, the call and the"
        " gradient, inside of `with trainer.strategy.full_parameters():`, on all ranks."
    )
