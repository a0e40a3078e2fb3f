"""Which steps may send gradients to the host."""

from lightning_cephalo.execution.updates import Updates


def test_only_a_step_that_was_announced_sends_gradients_and_its_repetition_does_too():
    updates = Updates(())

    def sends() -> bool:
        updates.begin()
        return updates.passes()["sends_gradients"]

    updates.sends_gradients = True
    assert sends()
    updates.forget_sent()
    assert sends()
    assert not sends()  # such as one that only accumulates
    updates.forget_sent()
    assert not sends()
