"""Decides whether steps gather the ends of the root unit apart from it.

[Note: ends that are used elsewhere]
While an end is away, its parameters refuse every operator. A module of the last layers lets its
microbatch wait until the losses are due. If anything else uses an end that is away, the step ends
on all ranks and runs again, and steps gather the root unit as one from then on.

The first layers are freed before their backward, which is that of an embedding. Graphs that need
their values are searched for in the first step, and in all steps that update units inside the
backward: there an error would come too late. Elsewhere such a graph raises, as torch finds the
values changed, and the step runs again. So does a gradient that comes to an end behind its reduce.
"""

from __future__ import annotations

from collections.abc import Mapping

from lightning_cephalo.common.errors import ShardedUseError
from lightning_cephalo.execution.user_writes import needs_freed
from lightning_cephalo.plan.program import FIRST_LAYERS, LAST_LAYERS, WHOLE_ROOT, Ends
from lightning_cephalo.sharding.flat_group import FlatGroup
from lightning_cephalo.sharding.unit import Unit

_NONE: frozenset[int] = frozenset()


class EndsPolicy:
    def __init__(self, root: Unit) -> None:
        self._root = root
        self.is_on = bool(root.ends)
        self._repeats = False

    def of_step(self) -> Ends:
        if not self.is_on:
            return WHOLE_ROOT
        ends = self._root.ends
        trains = {end: group.trainable for end, group in ends.items()}
        return Ends(
            first=FIRST_LAYERS in ends,
            last=LAST_LAYERS in ends,
            first_trains=trains.get(FIRST_LAYERS, True),
            last_trains=trains.get(LAST_LAYERS, True),
        )

    def first_layers(self) -> Mapping[int, str]:
        """Return the names of the first layers' gathered parameters, by their ids."""
        group = self._root.ends.get(FIRST_LAYERS) if self.is_on else None
        if group is None:
            return {}
        parameters = [parameter for flat in group.flats for parameter in flat.parameters]
        return {id(each): getattr(each, "full_name", "") for each in parameters}

    def is_misuse(self, failure: BaseException | None) -> bool:
        """Whether a step has failed because code uses an end while it is away."""
        if not isinstance(failure, ShardedUseError):
            return False
        return not failure.names or any(
            failure.names & group.names for group in self._root.ends.values()
        )

    def gather_as_one(self) -> None:
        """Gather the root unit as one from now on; on all ranks together."""
        self.is_on, self._repeats = False, True

    def is_to_repeat(self) -> bool:
        """Whether the step that has failed can run again, now that it gathers all; says so once."""
        repeats, self._repeats = self._repeats, False
        return repeats


def needs_values(error: RuntimeError, group: FlatGroup) -> bool:
    """Whether a backward has failed as the values of some flats are gone, as its shape tells."""
    shapes = {f"[{', '.join(map(str, shape))}]" for flat in group.flats for shape in flat.shapes}
    return needs_freed(error) and any(shape[1:-1] in str(error) for shape in shapes)


def root_gathers_without(ends: Ends) -> frozenset[int]:
    """Return the ends that are not gathered and not reduced with the root unit."""
    return frozenset({LAST_LAYERS}) if ends.last else _NONE


def root_arms_without(ends: Ends) -> frozenset[int]:
    first = frozenset({FIRST_LAYERS}) if ends.first else _NONE
    return first | root_gathers_without(ends)


def used_elsewhere(names: frozenset[str]) -> ShardedUseError:
    shown = ", ".join(sorted(names)[:3])
    return ShardedUseError(
        f"training_step uses parameters at the beginning or the end of the model ({shown}) where"
        " they are not gathered: in another place than in the steps before. Steps from now on"
        " gather them all the time, and this one runs again. If training ends here all the same,"
        " continue from the last checkpoint: fit(model, ckpt_path=...).",
        names,
    )
