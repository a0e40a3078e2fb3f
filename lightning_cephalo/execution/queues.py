"""Refuses buffers that training_step fills with one row per sample, such as queues of keys.

On one device such a buffer holds the rows of the whole batch. Here each microbatch would write its
own rows and read those of others, and each rank would hold the rows of its own samples.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from lightning_cephalo.common.errors import UnitUseError


@dataclass(frozen=True)
class _Seen:
    """A buffer as it was at the beginning of a step.

    Attributes:
        name: Its full name.
        buffer: The tensor itself.
        version: Its version.
        values: A copy; None if only the version is compared.
    """

    name: str
    buffer: Tensor
    version: int
    values: Tensor | None


class Queues:
    """Finds buffers of which a step changes one row, or column, per sample.

    The first step compares values, and so does every step after one in which another buffer began
    to change. Other steps compare versions only.

    Args:
        modules: Names and modules that may hold such buffers.
    """

    def __init__(self, modules: list[tuple[str, nn.Module]]) -> None:
        self._modules = [(name, inner) for name, inner in modules if inner._buffers]
        self._seen: list[_Seen] = []
        self._compares = True
        self._harmless: set[str] = set()

    def begin(self) -> None:
        """Note the buffers at the beginning of a step."""
        self._seen = [
            _Seen(name, buffer, buffer._version, buffer.clone() if self._compares else None)
            for prefix, inner in self._modules
            # running statistics are of microbatches, as with any accumulation of gradients
            if inner._buffers.get("running_mean") is None
            for attribute, buffer in inner._buffers.items()
            if buffer is not None and buffer.ndim > 1 and not buffer.is_inference()
            for name in [f"{prefix}.{attribute}" if prefix else attribute]
            if name not in self._harmless
        ]

    def finish(self, samples: int) -> None:
        """Check the buffers at the end of a step.

        Args:
            samples: Samples of this rank in this step.

        Raises:
            UnitUseError: If one row per sample of a buffer has changed.
        """
        seen, self._seen = self._seen, []
        changed = [item for item in seen if item.buffer._version != item.version]
        for item in changed:
            if item.values is not None and _has_new_rows(item.buffer, item.values, samples):
                raise UnitUseError(
                    f"training_step writes {samples} rows, one for each sample, into the buffer"
                    f" {item.name!r} of shape {tuple(item.buffer.shape)}. On one device it holds"
                    " those of the whole batch; here microbatches and ranks would hold different"
                    " ones. Return the rows from training_step, and write them in"
                    " on_train_batch_end(outputs), where they are those of this rank's whole"
                    " batch; get those of other ranks by torch.distributed.all_gather_object()."
                )
            if item.values is not None:
                self._harmless.add(item.name)
        self._compares = any(item.values is None for item in changed)


def _has_new_rows(now: Tensor, before: Tensor, samples: int) -> bool:
    """Return whether along some dimension exactly one row per sample differs."""
    differs = now != before
    return samples > 0 and any(
        int(differs.movedim(dim, 0).flatten(1).any(1).sum()) == samples
        for dim in range(now.ndim)
        if now.shape[dim] > samples
    )
