"""Planted defects are found although the numbers stay right: a checker that is blind fails here."""

from __future__ import annotations

import dataclasses
import os
import re
from collections import deque

import pytest
import torch
import torch.distributed as dist
from device_jobs import train
from launch import torchrun_environments
from test_nccl import connect
from test_training import ONE, UNEVEN

from lightning_cephalo.sharding.collectives import reduce_slices

pytestmark = pytest.mark.simulated


# -- the defects ----------------------------------------------------------------------------------


def copies_do_not_wait_for_earlier_work():
    from lightning_cephalo.accelerator.torch_device import StreamCopies

    def start(self, target, source, after=None):
        with self._stream:
            target.copy_(source, non_blocking=True)
            return self._stream.record_event()

    StreamCopies.start = start


def nothing_waits_for_copies():
    from lightning_cephalo.accelerator.torch_device import StreamCopies

    StreamCopies.wait = lambda self, arrival: None


def offloaded_memory_is_let_go_at_once():
    from lightning_cephalo.execution.offload import HostArena

    class Nothing(deque):
        def append(self, value):
            pass

    create = HostArena.__init__

    def init(self, *args):
        create(self, *args)
        self._leaving = Nothing()

    HostArena.__init__ = init


def offloaded_memory_is_let_go_without_a_wait():
    from lightning_cephalo.execution.offload import HostArena

    def let_go(self, but):
        while len(self._leaving) > but:
            self._leaving.popleft()

    HostArena._let_go_of_copied = let_go


def collectives_are_not_waited_for():
    from lightning_cephalo.sharding.transfers import Pending

    def wait(self, wait=None):
        self.works, self.tensors = [], ()
        if self.finish is not None:
            finish, self.finish = self.finish, None
            finish()

    Pending.wait = wait


def the_host_reads_what_is_being_copied():
    from lightning_cephalo.execution.offload import HostArena

    offload = HostArena.offload

    def reads(self, leaf):
        away = offload(self, leaf)
        away.host.sum()
        return away

    HostArena.offload = reads


def staged_slices_leave_before_they_arrive():
    from lightning_cephalo.accelerator.torch_device import StreamCopies

    class Now:
        def synchronize(self):
            pass

    start = StreamCopies.start

    def starts(self, target, source):
        start(self, target, source)
        return Now()

    StreamCopies.start = starts


def one_rank_swaps_its_groups():
    from lightning_cephalo.ranks.groups import Groups

    create = Groups.create.__func__

    def swapped(cls, *args):
        made = create(cls, *args)
        if os.environ["RANK"] == "0":
            return made
        return dataclasses.replace(made, gather=made.reduce, reduce=made.gather)

    Groups.create = classmethod(swapped)


# -- what is found --------------------------------------------------------------------------------


def with_defect(rank, defect, *args):
    globals()[defect]()
    return train(rank, *args)


def losses_and_kinds(simulated, ranks, defect, **given):
    environments = torchrun_environments(len(ranks))
    outcomes = simulated.run(len(ranks), with_defect, defect, environments, ranks, given)
    kinds = {line.split(":")[0] for outcome in outcomes for line in outcome.findings}
    return outcomes[0].value["losses"], kinds


@pytest.fixture(scope="module")
def right(simulated):
    (outcome,) = simulated.run(1, train, torchrun_environments(1), ONE, {})
    return outcome.value["losses"]


@pytest.mark.parametrize(
    ("defect", "kinds"),
    [
        ("copies_do_not_wait_for_earlier_work", {"race"}),
        ("nothing_waits_for_copies", {"race"}),
        ("offloaded_memory_is_let_go_at_once", {"freed early"}),
        ("offloaded_memory_is_let_go_without_a_wait", {"freed early"}),
        ("the_host_reads_what_is_being_copied", {"host race"}),
    ],
)
def test_defects_of_offloading(simulated, right, defect, kinds):
    losses, found = losses_and_kinds(simulated, ONE, defect, plan={"offload": True})
    assert losses == pytest.approx(right, rel=1e-5)
    assert kinds <= found


def test_a_defect_of_staging(simulated, right):
    gloo = {"process_group_backend": "gloo"}
    defect = "staged_slices_leave_before_they_arrive"
    losses, found = losses_and_kinds(simulated, UNEVEN, defect, strategy=gloo)
    assert losses == pytest.approx(right, rel=1e-5)
    assert "host race" in found


def test_collectives_that_nobody_waits_for(simulated, right):
    losses, found = losses_and_kinds(simulated, UNEVEN, "collectives_are_not_waited_for")
    assert losses == pytest.approx(right, rel=1e-5)
    assert "race" in found


def is_observed_first(rank, environments, keeps):
    connect(rank, environments)
    full, own = torch.ones(5, device="cuda"), torch.empty(2 + rank, device="cuda")
    pending = reduce_slices(full, (2, 3), dist.group.WORLD, own)
    if not keeps:
        pending.tensors = ()
    with torch.cuda.stream(torch.cuda.Stream()):
        pending.works[0].wait()  # from here on torch keeps nothing
    del full
    pending.wait()


def test_memory_that_only_a_collective_holds_although_an_observer_has_waited(simulated):
    environments = torchrun_environments(2)
    for keeps in (True, False):
        for outcome in simulated.run(2, is_observed_first, environments, keeps):
            assert any("freed early" in line for line in outcome.findings) != keeps


def test_another_order_of_collectives_is_an_error_that_names_both_sides(simulated):
    with pytest.raises(AssertionError) as error:
        losses_and_kinds(simulated, UNEVEN, "one_rank_swaps_its_groups")
    said = str(error.value)
    assert "RuleBroken" in said and "ranks call different collectives at the same place" in said
    assert re.search(r"rank 0: \w+ in group", said) and re.search(r"rank 1: \w+ in group", said)
