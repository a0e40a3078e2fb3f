"""Which steps may send gradients to the host."""

from lightning_cephalo.execution.state_moves import StateMoves


def test_only_a_step_that_was_announced_sends_gradients_and_its_repetition_does_too():
    moves = StateMoves()
    moves.sends_gradients = True
    assert moves.begin_step()
    moves.repeat(())
    assert moves.begin_step()
    assert not moves.begin_step()  # such as one that only accumulates
    moves.repeat(())
    assert not moves.begin_step()
