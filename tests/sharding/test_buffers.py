"""A pool lends the smallest buffer that is large enough."""

import gc
import weakref

import torch

from lightning_cephalo.sharding.buffers import BufferPool

CPU = torch.device("cpu")


def test_the_smallest_buffer_that_is_large_enough_is_lent():
    pool = BufferPool()
    large, small, medium = (pool.take(nbytes, CPU) for nbytes in (300, 100, 200))
    for buffer in (large, small, medium):
        pool.give(buffer)
    assert pool.take(150, CPU) is medium
    assert pool.take(150, CPU) is large
    assert pool.take(100, CPU) is small


def test_a_larger_one_takes_the_place_of_the_largest():
    pool = BufferPool()
    buffers = [pool.take(nbytes, CPU) for nbytes in (100, 200)]
    largest = weakref.ref(buffers[1])
    for buffer in buffers:
        pool.give(buffer)
    del buffers, buffer
    gc.collect()
    assert pool.take(300, CPU).nbytes == 300
    assert largest() is None and pool.held_bytes == 100 + 300
