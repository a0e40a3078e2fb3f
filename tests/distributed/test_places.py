"""Which ranks count as ranks of one node."""

from __future__ import annotations

import pytest

from lightning_cephalo.ranks import groups


@pytest.mark.parametrize(
    ("module", "name", "of_another"),
    [
        (groups, "kernel_of_host", "another start"),
        (groups, "_network", 7),
        (groups.socket, "gethostname", "another name"),
    ],
)
def test_hosts_of_one_name_are_told_apart_by_their_kernels_and_networks(
    monkeypatch, module, name, of_another
):
    own = groups.place(0)
    assert own == groups.place(0) != groups.place(1)
    monkeypatch.setattr(module, name, lambda: of_another)
    assert groups.place(0) != own
