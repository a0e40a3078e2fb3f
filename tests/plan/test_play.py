"""The loop in which ranks meet: groups, links, and ranks that would wait forever."""

from __future__ import annotations

import pytest

from lightning_cephalo.common.errors import ProgramError
from lightning_cephalo.plan.play import Meeting, Player, play


def player(found: list[tuple[float, float]], *meetings: Meeting) -> Player:
    for meeting in meetings:
        found.append((yield meeting))


def played(*programs: list[Meeting]) -> list[list[tuple[float, float]]]:
    """Play programs whose meetings take as many seconds as their last letter says."""
    found: list[list[tuple[float, float]]] = [[] for _ in programs]
    players = [player(own, *program) for own, program in zip(found, programs, strict=True)]
    play(players, lambda meeting: float(meeting.what[-1]))
    return found


def test_a_meeting_begins_when_all_are_ready_and_their_link_is_free():
    both = (0, 1)
    assert (
        played(
            [Meeting(both, "a2", 1.0), Meeting(both, "b3", 2.0)],
            [Meeting(both, "a2", 0.5), Meeting(both, "b3", 4.0)],
        )
        == [[(1.0, 3.0), (4.0, 7.0)]] * 2
    )


def test_each_group_has_a_link_of_its_own_and_goes_on_alone():
    left, right, across = (0, 1), (2,), (1, 2)
    found = played(
        [Meeting(left, "a2")],
        [Meeting(left, "a2"), Meeting(across, "c1", 2.0)],
        [Meeting(right, "b5"), Meeting(right, "b5"), Meeting(across, "c1", 1.0)],
    )
    assert found == [[(0.0, 2.0)], [(0.0, 2.0), (2.0, 3.0)], [(0.0, 5.0), (5.0, 10.0), (2.0, 3.0)]]


@pytest.mark.parametrize(
    ("programs", "message"),
    [
        (([Meeting((0, 1), "a1")], []), "as number 1 rank 0 has a1, but rank 1 has none"),
        (
            (
                [Meeting((0, 1), w) for w in ("a1", "b1")],
                [Meeting((0, 1), w) for w in ("a1", "c1")],
            ),
            "as number 2 rank 0 has b1, but rank 1 has c1",
        ),
        # a ring: each rank waits for the next one
        (
            [
                [Meeting((0, 1), "a1"), Meeting((0, 2), "c1")],
                [Meeting((1, 2), "b1"), Meeting((0, 1), "a1")],
                [Meeting((0, 2), "c1"), Meeting((1, 2), "b1")],
            ],
            "as number 1 rank 0 has a1, but rank 1 has b1",
        ),
    ],
)
def test_ranks_that_would_wait_forever_are_named(programs, message):
    with pytest.raises(ProgramError, match=message):
        played(*programs)
