"""Marks in a graph, and what of torch's engine they build on."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lightning_cephalo.execution.graph import (
    Marks,
    Through,
    Windows,
    is_plain,
    leaves_behind,
    nodes_between,
    nodes_of,
    run,
    take_memory,
)
from lightning_cephalo.execution.recomputed import is_held_alone


def _layered(weight: Tensor, inputs: list[Tensor], marks: Marks, came: list[str]) -> list[Tensor]:
    """Two visits of all inputs; the second one also uses what stands before the first."""
    values = [value * 2.0 for value in inputs]
    for visit in range(2):
        for index, (value, start) in enumerate(zip(list(values), inputs, strict=True)):
            marks.add(visit, lambda _, v=visit, i=index: came.append(f"leave {v}.{i}"))
            body = torch.tanh(value @ weight) + (start.sin() if visit else 0.0)
            body.register_hook(lambda gradient, v=visit, i=index: came.append(f"body {v}.{i}"))
            marks.add(visit, lambda _, v=visit, i=index: came.append(f"arrive {v}.{i}"))
            values[index] = body * 3.0
    return values


def test_the_backward_passes_marks_in_reverse_and_what_is_between_them():
    torch.manual_seed(0)
    weight = torch.randn(3, 3, dtype=torch.float64, requires_grad=True)
    inputs = [torch.randn(n, 3, dtype=torch.float64, requires_grad=True) for n in (2, 1, 4)]
    came: list[str] = []
    marks = Marks()
    values = _layered(weight, inputs, marks, came)
    # the second is a loss of the first visit alone, by another way
    losses = [values[0].sum(), values[1].detach().sum() + inputs[1].sum(), values[2].square().sum()]
    run([*((loss, torch.ones_like(loss)) for loss in losses), *marks.roots(None)])
    body = [place for place in came if place.startswith("body")]
    assert body == ["body 1.2", "body 1.0", "body 0.2", "body 0.0"]
    order = [place for place in came if not place.startswith("body")]
    assert order == [
        f"{what} {visit}.{index}"
        for visit in (1, 0)
        for index in (2, 1, 0)
        for what in ("arrive", "leave")
    ]
    found = [weight.grad, *(each.grad for each in inputs)]
    weight.grad = None
    for each in inputs:
        each.grad = None
    values = _layered(weight, inputs, Marks(), [])
    (values[0].sum() + inputs[1].sum() + values[2].square().sum()).backward()
    for gradient, expected in zip(found, [weight.grad, *(i.grad for i in inputs)], strict=True):
        assert torch.allclose(gradient, expected, rtol=1e-12)


@pytest.mark.parametrize("passes", [False, True])
@pytest.mark.parametrize("has_hooks", [False, True])
def test_what_is_behind_the_last_mark_runs_at_once_and_the_rest_later(passes, has_hooks):
    """The weight is used on both sides, and so is a tensor with a hook."""
    torch.manual_seed(0)
    weight = torch.randn(3, 3, dtype=torch.float64, requires_grad=True)
    head = torch.randn(3, 3, dtype=torch.float64, requires_grad=True)
    x = torch.randn(2, 3, dtype=torch.float64)
    seen: list[Tensor] = []

    def loss_of(marks: Marks) -> tuple[Tensor, Tensor]:
        early = torch.tanh(x @ weight)
        early.register_hook(lambda gradient: seen.append(gradient))
        hidden = torch.sin(early @ weight)
        marks.add(0, lambda _: None)
        if passes:
            hidden = Through.shown(hidden)
            marks.add(1, lambda _: None)
        hidden.retain_grad()
        return ((hidden @ weight @ head).square() * early).sum(), hidden

    loss, hidden = loss_of(Marks())
    loss.backward()
    expected = [weight.grad, head.grad, hidden.grad, seen.pop()]
    weight.grad = head.grad = None

    marks = Marks()
    loss, hidden = loss_of(marks)
    rest = marks.run_behind(loss, has_hooks=has_hooks)
    assert head.grad is not None and not seen
    assert torch.allclose(head.grad, expected[1], rtol=1e-12)
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()
    run([*rest, *marks.roots(None)])
    found = [weight.grad, head.grad, hidden.grad, seen.pop()]
    assert not seen
    for gradient, wanted in zip(found, expected, strict=True):
        assert torch.allclose(gradient, wanted, rtol=1e-12)


def test_a_loss_without_weight_has_no_gradient_even_where_it_is_no_number():
    weight = torch.ones(3, requires_grad=True)
    marks = Marks()
    hidden = weight * 2.0
    marks.add(0, lambda _: None)
    empty = torch.zeros(0, 3)
    loss = (hidden * weight).sum() * empty.mean()
    rest = marks.run_behind(loss, torch.tensor(True))
    run([*rest, *marks.roots(None)])
    assert torch.equal(weight.grad, torch.zeros(3))


def test_a_loss_that_ends_before_the_last_mark_waits():
    weight = torch.ones(3, requires_grad=True)
    marks = Marks()
    loss = (weight * 2.0).sum()
    marks.add(0, lambda _: None)
    rest = marks.run_behind(loss)
    assert weight.grad is None
    run([*rest, *marks.roots(None)])
    assert torch.equal(weight.grad, torch.full((3,), 2.0))


def test_code_without_gradients_makes_no_mark():
    marks = Marks()
    with torch.no_grad():
        marks.add(0, lambda _: None)
    with torch.inference_mode():
        marks.add(0, lambda _: None)
    assert not len(marks)


def test_nodes_of_other_microbatches_visits_are_found():
    weight, windows = torch.ones(2, requires_grad=True), Windows()
    before = weight * 2.0
    made = []
    for owner in (0, 1):
        windows.begin(owner)
        made.append(before.sin())
        windows.end()
    assert not windows.are_of_others([(made[0] + before).sum()], 0)
    assert windows.are_of_others([(made[0] + made[1]).sum()], 0)
    windows.begin(1)  # a visit without gradients has no end
    assert not windows.are_of_others([(made[0] + before).sum()], 0)


def test_nodes_between_outputs_and_inputs():
    first, second = (torch.ones(1, requires_grad=True) for _ in range(2))
    hidden = first.sin()
    out = hidden.cos() + second.tan()
    found = nodes_between(nodes_of([out]), {hidden.grad_fn})
    assert {type(node).__name__ for node in found} == {
        "SinBackward0",
        "CosBackward0",
        "AddBackward0",
    }
    assert {id(leaf) for leaf in leaves_behind([out])} == {id(first), id(second)}


def test_a_tensor_may_be_moved_once_nobody_else_holds_it():
    tensor = (torch.ones(4, requires_grad=True) * 2.0).detach().requires_grad_()
    assert is_held_alone(tensor)
    other = tensor.view(2, 2)
    assert not is_held_alone(tensor)
    del other
    same = tensor.detach()
    saved = torch.ones(4, requires_grad=True) * same  # its node holds it
    del same
    assert not is_held_alone(tensor)
    del saved
    assert is_held_alone(tensor)
    assert not is_held_alone(torch.ones(4))


def test_tensors_without_plain_strides_keep_their_memory():
    sparse = torch.eye(2).to_sparse()
    take_memory(sparse)
    assert not is_plain(sparse) and torch.equal(sparse.to_dense(), torch.eye(2))
    plain = torch.eye(2)
    take_memory(plain)
    assert plain.untyped_storage().nbytes() == 4 and plain.shape == (2, 2)
