"""Memory that a backward uses again and again: taken once, and no more than what is in use."""

import torch

from lightning_cephalo.sharding.buffers import SpareMemory

CPU = torch.device("cpu")


def address(tensor):
    return tensor.untyped_storage().data_ptr()


def test_what_was_given_is_lent_again_for_about_as_many_bytes():
    spare = SpareMemory(keeps=True)
    taken = spare.take(1000, torch.float32, CPU)
    assert taken.shape == (1000,) and taken.dtype == torch.float32
    first = address(taken)
    spare.give(taken)
    assert spare.idle_bytes == 4000
    # a row less, and another dtype
    smaller = spare.take(1900, torch.bfloat16, CPU)
    assert smaller.shape == (1900,) and smaller.dtype == torch.bfloat16
    assert address(smaller) == first and spare.idle_bytes == 0
    spare.give(smaller)
    assert spare.idle_bytes == 4000  # all of it, not only what was in use
    other = spare.take(1000, torch.float32, CPU)
    assert address(other) == first
    assert address(spare.take(1000, torch.float32, CPU)) != first


def test_what_does_not_fit_frees_all_that_is_idle_first():
    for numel in (1001, 900):  # too large for it, and so small that the rest would be wasted
        spare = SpareMemory(keeps=True)
        taken = [spare.take(1000, torch.float32, CPU) for _ in range(2)]
        for each in taken:
            spare.give(each)
        assert spare.idle_bytes == 8000
        assert spare.take(numel, torch.float32, CPU).numel() == numel
        assert spare.idle_bytes == 0


def test_it_keeps_nothing_where_it_should_not_and_gives_all_back():
    spare = SpareMemory()
    spare.give(spare.take(1000, torch.float32, CPU))
    assert spare.idle_bytes == 0
    spare = SpareMemory(keeps=True)
    spare.give(spare.take(0, torch.float32, CPU))  # a rank without rows
    spare.give(spare.take(1000, torch.float32, CPU))
    spare.release()
    assert spare.idle_bytes == 0
