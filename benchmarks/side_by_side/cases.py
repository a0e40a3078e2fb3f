"""The cases, the contenders' names, and the samples of each rank. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_cephalo.data.shares import deal

SPEEDS = ((1, 1), (2, 1), (3, 1), (4, 2, 1, 1))
FAST, SLOW = "fast", "slow"
LINKS = (FAST, SLOW)
MICROBATCHES = (1, 8)

CEPHALO = "cephalo"
MODEL_PARALLEL, TUNED, FSDP, DDP = "fully_shard", "fully_shard, tuned", "FSDP", "DDP"
DDP_BY_SPEED = "DDP by speed"
EVEN = (MODEL_PARALLEL, TUNED, FSDP, DDP)
OTHERS = (*EVEN, DDP_BY_SPEED)
NAMES = (CEPHALO, *OTHERS)


@dataclass(frozen=True)
class Case:
    """One comparison.

    Attributes:
        speeds: Relative speed of every rank.
        link: ``"fast"`` or ``"slow"``.
        microbatches: Microbatches of a rank in an even split.
        samples: Samples in each of them; no contender runs a larger microbatch.
    """

    speeds: tuple[int, ...]
    link: str
    microbatches: int
    samples: int

    @property
    def global_batch_size(self) -> int:
        return self.microbatches * self.samples * len(self.speeds)

    @property
    def even(self) -> tuple[int, ...]:
        """Samples of every rank in an even split."""
        return (self.microbatches * self.samples,) * len(self.speeds)

    @property
    def by_speed(self) -> tuple[int, ...]:
        """Samples of every rank in proportion to speed, in whole samples, at least one."""
        return deal(self.global_batch_size, self.speeds)

    @property
    def ratio(self) -> str:
        return ":".join(map(str, self.speeds))


def samples_per_microbatch(ranks: int, microbatches: int) -> int:
    """Return a number of samples for which the global batch (nearly) divides by every speed ratio.

    Steps are then also long enough to measure and short enough to repeat.
    """
    if microbatches > 1:
        return 1
    return 6 if ranks <= 2 else 4


def cut(total: int, largest: int) -> tuple[int, ...]:
    """Cut a rank's ``total`` samples into microbatches as large as allowed.

    Example:
        >>> cut(9, 6)
        (6, 3)
    """
    whole, rest = divmod(total, largest)
    return (largest,) * whole + ((rest,) if rest else ())


def parse_speeds(text: str) -> tuple[int, ...]:
    """Read ``"3:1"``.

    Raises:
        ValueError: If it is not two or more positive whole numbers.
    """
    speeds = tuple(int(part) if part.isdigit() else 0 for part in text.split(":"))
    if len(speeds) < 2 or not all(speeds):
        raise ValueError(f"Expected speeds such as 3:1 or 4:2:1:1, but got {text!r}.")
    return speeds
