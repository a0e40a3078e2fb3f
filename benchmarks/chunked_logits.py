"""Measures a step whose logits are computed in chunks, beside one with all logits.

    python benchmarks/chunked_logits.py
    python benchmarks/chunked_logits.py --tokens 8192 --width 256 --dtype bfloat16

One rank trains the root of a language model (tied, 128,256 tokens) and two blocks that weigh
nothing, so that the head is nearly all of the step. Both ways take turns, in one process. Prints
the most bytes that a step holds in addition to parameters and their gradients, and the median and
the quartiles of the ratio of seconds, round by round: above 1, chunks are slower.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from lightning_cephalo.accelerator import accelerator_of
from lightning_cephalo.accelerator.emulated import MemoryTracker
from lightning_cephalo.execution.sharded_model import ShardedModel, UnitOptions
from lightning_cephalo.execution.step import MicrobatchCall
from lightning_cephalo.ranks.groups import Groups

LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "cross_entropy": lambda logits, tokens: functional.cross_entropy(logits, tokens),
    "log_softmax and gather": lambda logits, tokens: (
        -logits.log_softmax(-1).gather(-1, tokens[:, None]).mean()
    ),
}


class Root(nn.Module):
    """A tied embedding and head, with two blocks in between that weigh nothing."""

    def __init__(self, vocabulary: int, width: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embed.weight
        nn.init.normal_(self.embed.weight, std=0.02)

    def forward(self, tokens: Tensor, loss: str) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return LOSSES[loss](self.head(x).float(), tokens.roll(1))


def _model(options: argparse.Namespace, groups: Groups, *, chunks: bool) -> ShardedModel:
    torch.manual_seed(1)
    return ShardedModel(
        Root(options.vocabulary, options.width),
        groups,
        accelerator_of(torch.device("cpu")),
        [1.0],
        UnitOptions(types=(nn.LayerNorm,)),
        getattr(torch, options.dtype),
        recompute=True,
        chunks_logits=chunks,
    )


def _step(model: ShardedModel, tokens: Tensor, loss: str) -> float:
    call = MicrobatchCall(
        lambda: model.module(tokens, loss), lambda found: (found, 1.0), samples=len(tokens)
    )
    outcome = model.executor.forward([call])
    found = float(outcome.results[0].detach())
    del outcome
    model.executor.backward()
    model.module.zero_grad()
    return found


def _seconds(step: Callable[[], float]) -> float:
    start = time.perf_counter()
    step()
    return time.perf_counter() - start


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1024, 2048, 4096])
    parser.add_argument("--vocabulary", type=int, default=128256)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--loss", nargs="+", default=[*LOSSES], choices=[*LOSSES])
    parser.add_argument("--rounds", type=int, default=3, help="at least 2; 0: bytes alone")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", f"file://{folder}/store", rank=0, world_size=1)
        groups = Groups.create(timedelta(seconds=600), 0)
        models = [_model(options, groups, chunks=chunks) for chunks in (False, True)]
        print("tokens | loss | all logits | in chunks (MB) | in chunks / all | seconds, ratio")
        for loss in options.loss:
            for count in options.tokens:
                _compare(models, torch.randint(options.vocabulary, (count,)), loss, options.rounds)
        dist.destroy_process_group()


def _compare(models: list[ShardedModel], tokens: Tensor, loss: str, rounds: int) -> None:
    peaks, losses = [], []
    for model in models:
        _step(model, tokens[:8], loss)  # traces, and takes its buffers
        with MemoryTracker() as tracker:
            losses.append(_step(model, tokens, loss))
        peaks.append(tracker.peak_bytes)
    assert abs(losses[1] - losses[0]) < 1e-5 * losses[0], losses
    whole, chunks = peaks
    row = f"{len(tokens):,} | {loss} | {whole / 1e6:,.0f} | {chunks / 1e6:,.0f}"
    row = f"{row} | {chunks / whole:.0%}"
    pairs = []
    for index in range(rounds):
        order = models if index % 2 else models[::-1]
        pair = [_seconds(lambda model=model: _step(model, tokens, loss)) for model in order]
        pairs.append(pair if index % 2 else pair[::-1])
    if pairs:
        ratios = [in_chunks / all_logits for all_logits, in_chunks in pairs]
        low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive")
        seconds = [statistics.median(each) for each in zip(*pairs, strict=True)]
        row = f"{row} | {seconds[0]:.2f}, {seconds[1]:.2f}; {middle:.2f} ({low:.2f} to {high:.2f})"
    print(row, flush=True)


if __name__ == "__main__":
    main()
