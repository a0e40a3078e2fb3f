"""Replaces the forwards of heads that compute their logits in chunks, on the instances."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.utils import _pytree as pytree

from lightning_cephalo.common.errors import UnsupportedError
from lightning_cephalo.common.quantities import format_mib
from lightning_cephalo.execution.vocabulary import chunked
from lightning_cephalo.execution.vocabulary.chunked import ChunkedHead
from lightning_cephalo.execution.vocabulary.logits import LazyLogits, gather
from lightning_cephalo.sharding.discovery import UnitMembers
from lightning_cephalo.sharding.unit import Unit
from lightning_cephalo.sharding.vocabulary import heads_of

if TYPE_CHECKING:
    from lightning_cephalo.execution.microbatch import Microbatch


def chunked_heads_of(module: nn.Module, root: UnitMembers) -> tuple[tuple[str, nn.Linear], ...]:
    """Return name and layer of the heads of a model that can compute their logits in chunks.

    Args:
        module: The model.
        root: Its root unit.

    Raises:
        UnsupportedError: If it has none, or they are in a module that is compiled.
    """
    heads = heads_of(root)
    if not heads:
        raise UnsupportedError(
            f"chunked_logits=True, but {type(module).__name__} has no head outside of its units:"
            " a torch.nn.Linear, with its own forward, of as many outputs as the largest"
            f" torch.nn.Embedding there has tokens. {ChunkedHead.way_out}"
        )
    for name in _compiled(module, [name for name, _ in heads]):
        raise UnsupportedError(
            f"chunked_logits=True, but {name!r} is inside of a module that torch.compile compiles,"
            " which would look at all logits. Compile the blocks, and not what is around them."
            f" {ChunkedHead.way_out}"
        )
    return heads


def _compiled(module: nn.Module, names: Sequence[str]) -> list[str]:
    """Return which of these layers are inside of a module that is compiled."""
    compiled = [name for name, inner in module.named_modules() if _is_compiled(inner)]
    return [n for n in names if any(not c or n == c or n.startswith(f"{c}.") for c in compiled)]


def _is_compiled(module: nn.Module) -> bool:
    return module._compiled_call_impl is not None or hasattr(module, "_orig_mod")


class VocabularyLayers:
    """The heads of a model whose logits are never whole.

    Args:
        root: The root unit, which has their tables.
        running: Returns the microbatch whose step is running, or None.

    Attributes:
        chunked: Those that are installed.
    """

    def __init__(self, root: Unit, running: Callable[[], Microbatch | None]) -> None:
        self.running = running
        self._heads = [
            ChunkedHead(self, name, module, only_large=root.chunks_only_large)
            for name, module in root.chunked_heads
        ]
        self.chunked: list[ChunkedHead] = []

    def install(self) -> None:
        """Replace the heads' forwards."""
        self.chunked = list(self._heads)
        for layer in self.chunked:
            layer.module.forward = layer  # type: ignore[assignment, method-assign]

    def uninstall(self) -> None:
        """Undo :meth:`install`."""
        for layer in self.chunked:
            if vars(layer.module).get("forward") is layer:
                del layer.module.forward
        self.chunked = []

    def described(self) -> str:
        """Return a line that names the heads, of which there are some."""
        heads = ", ".join(head.name for head in self.chunked)
        where = ""
        if self.chunked[0].only_large:
            where = f" where they are more than {format_mib(chunked.LARGE_BYTES)}"
        return f"logits in chunks of {chunked.CHUNK_TOKENS:,} tokens{where}: {heads}"

    def with_whole_results(self, step: Callable[[], Any]) -> Callable[[], Any]:
        """Return a step whose results have no lazy logits, which nobody could read afterwards."""

        def step_and_gather() -> Any:
            result = step()
            if not any(isinstance(leaf, LazyLogits) for leaf in pytree.tree_leaves(result)):
                return result  # the very object
            return pytree.tree_map_only(
                LazyLogits, lambda logits: gather(logits.detach(), "a result of the step"), result
            )

        return step_and_gather if self.chunked else step
