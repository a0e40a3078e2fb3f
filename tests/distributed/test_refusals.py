"""An agent whose ranks refuse to train starts them no more; a refusal may be of too few hosts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from lightning_cephalo.ranks import refusals
from lightning_cephalo.ranks.starter import TOLD

ROOT = Path(__file__).parents[2]


class _Meets:
    """Lets an agent meet so many others."""

    def __init__(self, hosts):
        self.hosts = hosts

    def next_rendezvous(self):
        return SimpleNamespace(world_size=self.hosts)


@pytest.mark.parametrize(
    ("is_of_hosts", "starts", "hosts", "ends"),
    [
        (False, 1, 1, True),
        (False, 2, 1, True),
        (False, 1, 2, True),
        (True, 1, 2, True),
        # another host may come
        (True, 1, 1, False),
        # what was there at the first start is gone, or a lost rank still holds memory
        (True, 2, 2, False),
    ],
)
def test_only_what_every_start_would_meet_ends_the_agent(
    tmp_path, is_of_hosts, starts, hosts, ends
):
    path = tmp_path / "refusal"
    handler = refusals.UnlessRefused(_Meets(hosts), tmp_path, most_hosts=2)
    for _ in range(starts):
        handler.next_rendezvous()
    path.write_text(json.dumps({"text": "PlanError: no", "is_of_hosts": is_of_hosts}))
    if ends:
        with pytest.raises(refusals.RefusedError, match=r"^PlanError: no$"):
            handler.next_rendezvous()
    else:
        assert handler.next_rendezvous().world_size == hosts
    assert not path.exists()
    handler.next_rendezvous()


def test_a_file_that_is_cut_ends_nothing(tmp_path):
    path = tmp_path / "refusal"
    path.write_text('{"text": "Pl')
    assert refusals.UnlessRefused(_Meets(1), tmp_path, 1).next_rendezvous().world_size == 1


_RAISES = """
from lightning_cephalo.common.errors import PlanError
from lightning_cephalo.ranks import refusals
error = PlanError("no")
refusals.note(error)
raise {raised}
"""


@pytest.mark.slow
@pytest.mark.parametrize(("raised", "is_told"), [("error", True), ("ValueError()", False)])
def test_an_interpreter_that_ends_by_a_refusal_tells_of_it(tmp_path, raised, is_told):
    path = tmp_path / "refusal"
    environment = {**os.environ, TOLD: str(tmp_path), "PYTHONPATH": str(ROOT)}
    script = _RAISES.format(raised=raised)
    ended = subprocess.run([sys.executable, "-c", script], env=environment, check=False)
    assert ended.returncode == 1
    assert path.exists() == is_told
