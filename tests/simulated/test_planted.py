"""Planted defects are found although the numbers stay right: a checker that is blind fails here."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
from collections import deque
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from device_jobs import train
from launch import torchrun_environments
from test_nccl import connect
from test_training import ONE, UNEVEN

from lightning_cephalo.sharding.collectives import reduce_slices

pytestmark = pytest.mark.simulated


# -- the defects: what each of them replaces ------------------------------------------------------


def nothing():
    return []


def copies_do_not_wait_for_earlier_work():
    from lightning_cephalo.accelerator.torch_device import StreamCopies

    def start(self, target, source, after=None):
        with self._stream:
            target.copy_(source, non_blocking=True)
            return self._stream.record_event()

    return [(StreamCopies, "start", start)]


def nothing_waits_for_copies():
    from lightning_cephalo.accelerator.torch_device import StreamCopies

    return [(StreamCopies, "wait", lambda self, arrival: None)]


def offloaded_memory_is_let_go_at_once():
    from lightning_cephalo.execution.offload import HostArena

    class Nothing(deque):
        def append(self, value):
            pass

    create = HostArena.__init__

    def init(self, *args):
        create(self, *args)
        self._leaving = Nothing()

    return [(HostArena, "__init__", init)]


def offloaded_memory_is_let_go_without_a_wait():
    from lightning_cephalo.execution.offload import HostArena

    def let_go(self, but):
        while len(self._leaving) > but:
            self._leaving.popleft()

    return [(HostArena, "_let_go_of_copied", let_go)]


def collectives_are_not_waited_for():
    from lightning_cephalo.sharding.transfers import Pending

    def wait(self, wait=None):
        self.works, self.tensors = [], ()
        if self.finish is not None:
            finish, self.finish = self.finish, None
            finish()

    return [(Pending, "wait", wait)]


def the_host_reads_what_is_being_copied():
    from lightning_cephalo.execution.offload import HostArena

    offload = HostArena.offload

    def reads(self, leaf):
        away = offload(self, leaf)
        away.host.sum()
        return away

    return [(HostArena, "offload", reads)]


def staged_slices_leave_before_they_arrive():
    from lightning_cephalo.accelerator.torch_device import StreamCopies

    class Now:
        def synchronize(self):
            pass

    start = StreamCopies.start

    def starts(self, target, source):
        start(self, target, source)
        return Now()

    return [(StreamCopies, "start", starts)]


def one_rank_swaps_its_groups():
    from lightning_cephalo.ranks.groups import Groups

    create = Groups.create.__func__

    def swapped(cls, *args):
        made = create(cls, *args)
        if os.environ["RANK"] == "0":
            return made
        return dataclasses.replace(made, gather=made.reduce, reduce=made.gather)

    return [(Groups, "create", classmethod(swapped))]


# -- what is found --------------------------------------------------------------------------------


def with_defect(rank, defect, *args):
    with contextlib.ExitStack() as until_then:
        for owner, name, replacement in globals()[defect]():
            until_then.enter_context(mock.patch.object(owner, name, replacement))
        return train(rank, *args)


def losses_and_kinds(simulated, ranks, defects, **given):
    """Of training with each defect, in one start of ranks: losses, and kinds of findings."""
    environments = torchrun_environments(len(ranks))
    calls = [(defect, environments, ranks, given) for defect in defects]
    found = {}
    for defect, outcomes in zip(
        defects, simulated.run_each(len(ranks), with_defect, calls), strict=True
    ):
        kinds = {line.split(":")[0] for outcome in outcomes for line in outcome.findings}
        found[defect] = outcomes[0].value["losses"], kinds
    return found


@pytest.fixture(scope="module")
def right(simulated):
    ((losses, kinds),) = losses_and_kinds(simulated, ONE, ["nothing"]).values()
    assert not kinds
    return losses


def test_defects_of_offloading(simulated, right):
    kinds_of = {
        "copies_do_not_wait_for_earlier_work": {"race"},
        "nothing_waits_for_copies": {"race"},
        "offloaded_memory_is_let_go_at_once": {"freed early"},
        "offloaded_memory_is_let_go_without_a_wait": {"freed early"},
        "the_host_reads_what_is_being_copied": {"host race"},
    }
    # a defect leaves nothing behind: what comes after them all is right
    defects = [*kinds_of, "nothing"]
    found = losses_and_kinds(simulated, ONE, defects, plan={"offload": True})
    losses, kinds = found.pop("nothing")
    assert losses == pytest.approx(right, rel=1e-5) and not kinds
    for defect, (losses, kinds) in found.items():
        assert losses == pytest.approx(right, rel=1e-5), defect
        assert kinds_of[defect] <= kinds, defect


def test_a_defect_of_staging(simulated, right):
    gloo = {"process_group_backend": "gloo"}
    defects = ["staged_slices_leave_before_they_arrive"]
    ((losses, kinds),) = losses_and_kinds(simulated, UNEVEN, defects, strategy=gloo).values()
    assert losses == pytest.approx(right, rel=1e-5)
    assert "host race" in kinds


def test_collectives_that_nobody_waits_for(simulated, right):
    defects = ["collectives_are_not_waited_for"]
    ((losses, kinds),) = losses_and_kinds(simulated, UNEVEN, defects).values()
    assert losses == pytest.approx(right, rel=1e-5)
    assert "race" in kinds


def is_observed_first(rank, environments, keeps):
    connect(rank, environments)
    full, own = torch.ones(5, device="cuda"), torch.empty(2 + rank, device="cuda")
    pending = reduce_slices(full, (2, 3), dist.group.WORLD, own.copy_, own.dtype)
    if not keeps:
        pending.tensors = ()
    with torch.cuda.stream(torch.cuda.Stream()):
        pending.works[0].wait()  # from here on torch keeps nothing
    del full
    pending.wait()


def test_memory_that_only_a_collective_holds_although_an_observer_has_waited(simulated):
    environments = torchrun_environments(2)
    calls = [(environments, keeps) for keeps in (True, False)]
    for (_, keeps), outcomes in zip(
        calls, simulated.run_each(2, is_observed_first, calls), strict=True
    ):
        for outcome in outcomes:
            assert any("freed early" in line for line in outcome.findings) != keeps


def test_another_order_of_collectives_is_an_error_that_names_both_sides(simulated):
    with pytest.raises(AssertionError) as error:
        losses_and_kinds(simulated, UNEVEN, ["one_rank_swaps_its_groups"])
    said = str(error.value)
    assert "RuleBroken" in said and "ranks call different collectives at the same place" in said
    assert re.search(r"rank 0: \w+ in group", said) and re.search(r"rank 1: \w+ in group", said)
