"""Leaves at which the graph of a microbatch is cut, and the glue between them."""

from __future__ import annotations

import gc
import io

import pytest
import torch
from torch import Tensor

from lightning_cephalo.common.errors import UnitUseError
from lightning_cephalo.execution.boundaries import (
    Boundaries,
    is_plain,
    run_backward,
    take_memory,
)


def weight(*values: float) -> Tensor:
    return torch.tensor(values or (2.0,), dtype=torch.float64, requires_grad=True)


@pytest.mark.parametrize("as_edges", [False, True])
def test_the_short_way_to_the_engine_gives_the_gradients_of_autograds_backward(as_edges):
    def gradients(backward) -> list[Tensor]:
        x, y = weight(2.0, 3.0), weight(5.0, 7.0)
        roots = [x * y, (x**2).sum()]
        given = [torch.tensor([1.0, 0.5], dtype=torch.float64), torch.tensor(3.0).double()]
        for _ in range(2):  # the graph is there a second time
            edges = [torch.autograd.graph.get_gradient_edge(root) for root in roots]
            backward(edges if as_edges else roots, given)
        return [x.grad, y.grad]

    expected = gradients(lambda roots, given: torch.autograd.backward(roots, given, True))
    found = gradients(lambda roots, given: run_backward(roots, given, retain=True))
    assert all(map(torch.equal, found, expected))


def test_a_graph_that_is_not_retained_is_freed():
    root = weight() ** 2
    run_backward([root], [torch.ones_like(root)], retain=False)
    with pytest.raises(RuntimeError, match="second time"):
        run_backward([root], [torch.ones_like(root)], retain=False)


def test_what_needs_no_gradient_is_not_cut():
    boundaries, constant = Boundaries(), torch.ones(1)
    assert boundaries.leaf_of(constant, 0) is constant
    assert boundaries.leaf_of("text", 0) == "text"


def test_a_tensor_has_one_leaf_in_all_units_until_it_changes():
    boundaries = Boundaries()
    hidden = weight() * 3
    leaf = boundaries.leaf_of(hidden, 0)
    assert leaf.is_leaf and leaf.data_ptr() == hidden.data_ptr()
    assert boundaries.leaf_of(hidden, 1) is leaf
    hidden += 1
    assert boundaries.leaf_of(hidden, 2) is not leaf


def test_gradients_pass_units_and_the_glue_between_them():
    """y = (x + f(x)) with x = 3w, then loss = g(y) * y: a residual around each of two units."""
    w, boundaries = weight(), Boundaries()
    x = 3 * w
    leaf_x = boundaries.leaf_of(x, 0)
    inside_0 = leaf_x**2
    out_0, shown_0 = boundaries.show(inside_0.detach().requires_grad_(), 0)
    y = x + shown_0
    leaf_y = boundaries.leaf_of(y, 1)
    inside_1 = leaf_y.sin()
    out_1, shown_1 = boundaries.show(inside_1.detach().requires_grad_(), 0)
    loss = (shown_1 * y).sum()
    boundaries.end_forward()
    torch.autograd.backward([loss], retain_graph=boundaries.shares_glue(loss))
    inside_1.backward(out_1.grad)
    boundaries.passed(1)
    boundaries.through_glue(1)
    inside_0.backward(out_0.grad)
    boundaries.passed(0)
    boundaries.through_glue(0)

    expected = weight()
    x = 3 * expected
    y = x + x**2
    (y.sin() * y).sum().backward()
    assert torch.allclose(w.grad, expected.grad)


@pytest.mark.parametrize("is_leaf", [False, True])
def test_gradients_of_what_entered_a_unit_are_refused_while_code_runs_and_its_hooks_stay(is_leaf):
    boundaries, hidden = Boundaries(), weight(2.0, 3.0)
    hidden = hidden if is_leaf else hidden * 3
    first, later = [], []
    hidden.register_hook(first.append)
    boundaries.leaf_of(hidden, 0)
    handle = hidden.register_hook(later.append)
    boundaries.owner.runs = True
    with pytest.raises(UnitUseError, match="through a unit itself"):
        torch.autograd.grad((hidden * 2).sum(), hidden)
    boundaries.owner.runs = False
    boundaries.end_forward()
    # ours refuses nothing but a gradient in parts
    assert len(hidden._backward_hooks) == 3
    (hidden * 2).sum().backward(retain_graph=True)
    assert len(first) == 1 + 1 and len(later) == 1  # the first came before the error, too
    handle.remove()
    with pytest.raises(UnitUseError, match="in parts"):
        (hidden * 2).sum().backward(retain_graph=True)
    if is_leaf:  # it lives on; others go with the graph
        boundaries.passed(0)
        assert len(hidden._backward_hooks) == 1


@pytest.mark.parametrize("is_output", [False, True])
def test_what_entered_a_unit_is_saved_without_a_warning_about_our_hook(is_output):
    boundaries, hidden = Boundaries(), weight(2.0, 3.0) * 3
    if is_output:
        _, hidden = boundaries.show(hidden, 0)
    boundaries.leaf_of(hidden, 1)
    boundaries.end_forward()
    torch.save(hidden, io.BytesIO())  # warnings are errors


def test_hooks_see_one_gradient_in_each_of_several_backwards():
    boundaries, hidden = Boundaries(several_backwards=True), weight(2.0, 3.0) * 3
    seen = []
    hidden.register_hook(seen.append)
    leaf = boundaries.leaf_of(hidden, 0)
    for count in (1, 2):
        boundaries.owner.backwards += 1
        leaf.grad = torch.ones_like(leaf)
        boundaries.through_glue(0, retain=True)
        assert len(seen) == count
    with pytest.raises(UnitUseError, match="in parts"):
        hidden.sum().backward()


@pytest.mark.parametrize("shares", [False, True])
def test_the_loss_shares_glue_only_with_what_units_were_called_with(shares):
    boundaries, w = Boundaries(), weight()
    hidden = w.exp()
    boundaries.leaf_of(hidden, 0)
    _, shown = boundaries.show(weight(), 0)
    loss = shown * hidden if shares else shown * 2
    assert boundaries.shares_glue(loss.sum()) is shares


def test_an_input_of_a_unit_may_be_moved_once_nobody_else_holds_it():
    boundaries, hidden = Boundaries(), weight() * 3
    leaf = boundaries.leaf_of(hidden, 0)
    held = weight() * 4
    boundaries.leaf_of(held, 0)
    del hidden
    gc.collect()
    (moved,) = boundaries.let_go(0)
    assert moved is leaf
    assert boundaries.let_go(0) == [], "to be asked once"


def has_memory(tensor: Tensor) -> bool:
    return tensor.untyped_storage().nbytes() >= tensor.numel() * tensor.element_size()


def test_values_of_outputs_that_nobody_can_ask_for_are_dropped():
    boundaries = Boundaries()
    dropped, shown = boundaries.show(weight(1, 2, 3), 0)
    used, shown_used = boundaries.show(weight(1, 2, 3), 0)
    held, shown_held = boundaries.show(weight(1, 2, 3), 0)
    boundaries.leaf_of(shown_used, 0)
    del shown, shown_used
    gc.collect()
    boundaries.drop_values()
    assert not has_memory(dropped) and dropped.shape == (3,)
    assert has_memory(used) and has_memory(held)
    assert shown_held.sum().item() == 6


def test_inputs_of_a_unit_are_dropped_when_its_backward_is_done():
    boundaries, hidden = Boundaries(), weight(1, 2) * 3
    first, later = boundaries.leaf_of(hidden, 0), boundaries.leaf_of(weight(1, 2) * 3, 1)
    boundaries.passed(1)
    assert has_memory(first) and not has_memory(later)
    boundaries.passed(0)
    assert not has_memory(first)


def test_tensors_without_plain_strides_keep_their_memory():
    sparse = torch.eye(2).to_sparse()
    nested = torch.nested.nested_tensor([torch.ones(1), torch.ones(2)], layout=torch.jagged)
    for tensor in (sparse, nested):
        assert not is_plain(tensor)
        take_memory(tensor)
    assert torch.equal(sparse.to_dense(), torch.eye(2))
    assert [part.numel() for part in nested.unbind()] == [1, 2]


def test_a_tensor_that_leaves_a_unit_otherwise_is_refused_in_a_step_that_looks():
    parameter = weight()
    stored = parameter * 2  # computed inside a unit, stored elsewhere
    looking = Boundaries(frozenset({id(parameter)}))
    with pytest.raises(UnitUseError, match="is not one of its outputs"):
        looking.refuse_leaks(stored + 1)
    with pytest.raises(UnitUseError, match="is not one of its outputs"):
        looking.leaf_of(stored, 0)
    Boundaries(None).refuse_leaks(stored)
    looking.refuse_leaks(weight() * 2)


def test_a_leaf_that_leaves_a_unit_is_refused_and_an_output_is_not():
    boundaries = Boundaries(frozenset({0}))
    leaf = boundaries.leaf_of(weight() * 3, 0)
    with pytest.raises(UnitUseError):
        boundaries.refuse_leaks(leaf * 2)
    _, shown = boundaries.show(leaf.detach().requires_grad_(), 0)
    boundaries.refuse_leaks(shown * 2)
