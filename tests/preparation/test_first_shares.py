"""Shares of the state before there is a plan let a model be measured that needs uneven ones."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import nn

from lightning_cephalo.plan import Plan, RankPlan
from lightning_cephalo.preparation.first_shares import first_shares
from lightning_cephalo.preparation.job import Job
from lightning_cephalo.preparation.limits import Device, Limits
from lightning_cephalo.preparation.options import Options, Planner
from lightning_cephalo.sharding.discovery import find_units


def job(*capacities, **fields):
    limits = tuple(
        replace(Limits(), device=Device("card", capacity_bytes=capacity)) for capacity in capacities
    )
    return Job(Options(planner=Planner(verbose=False)), limits, len(capacities), **fields)


def shares(asked, dtype=None, trained=True):
    """Of ten units of 100 parameters: 4,000 bytes; 800 more are received, 1,600 are gathered."""
    model = nn.Sequential(*(nn.Linear(100, 1, bias=False) for _ in range(10)))
    model.requires_grad_(trained)
    return first_shares(asked, find_units(model, [nn.Linear]), dtype)


@pytest.mark.parametrize(
    ("capacities", "expected"),
    [
        ((8000, 8000), [0.5, 0.5]),
        ((8000, 7500), [0.5, 0.5]),
        ((9000, 3000), [0.75, 0.25]),
        ((6600, 2200), [5 / 5.6, 0.6 / 5.6]),  # a quarter of it and gathered units take 2,800
        ((5600, 1500), [1.0, 0.0]),
        ((1500, 1000), [0.6, 0.4]),  # it fits nowhere
        ((math.inf, 1000), [0.5, 0.5]),
    ],
)
def test_shares_go_by_memory_and_by_what_units_leave_of_it_where_they_would_not_fit(
    capacities, expected
):
    assert shares(job(*capacities)) == pytest.approx(expected)


def test_what_is_frozen_kept_or_gathered_in_half_precision_counts_as_such():
    # gathered 800 bytes, not 1,600; kept gradients make 8,000 of 4,800
    assert shares(job(6300, 2100)) != [0.75, 0.25]
    assert shares(job(6300, 2100), torch.bfloat16) == [0.75, 0.25]
    assert shares(job(6300, 2100), trained=False) == [0.75, 0.25]
    assert shares(job(9000, 3000, late="clips")) == pytest.approx([7.4 / 8.8, 1.4 / 8.8])


def test_each_group_shares_its_own_state():
    found = shares(job(6600, 2200, 9000, 6600, state_groups=(0, 0, 1, 1)))
    assert found[:2] == pytest.approx([5 / 5.6, 0.6 / 5.6])
    assert found[2:] == pytest.approx([7.4 / 12.4, 5 / 12.4])


def test_a_given_plan_says_its_own():
    given = Plan((RankPlan((1,), 0.1), RankPlan((1,), 0.9)))
    assert shares(job(9000, 3000, plan=given)) == [0.1, 0.9]
