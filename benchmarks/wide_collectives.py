"""Compares the ways of gathers and reduces between nodes, measured and simulated.

    python benchmarks/wide_collectives.py --nodes 2,2 4,4 2,2,2,2 --mbit-per-s 200    # as root
    python benchmarks/wide_collectives.py --simulate

The first form makes a network namespace per node, with links of the given rate between nodes, and
times every way on gloo beside what the simulation says. The second simulates nodes of 8 ranks, up
to 512 ranks, for assumed links of NCCL and of gloo.

The ways, for W ranks:

- straight: every rank sends its slice to every other rank.
- by node: a slice crosses to another node once, and is passed on there.
- padded: gloo's own all-gather and reduce-scatter of slots of the largest slice's size.
- ring: every rank passes on the slices of all others to the next rank; their sizes differ.
"""

from __future__ import annotations

import argparse
import datetime
import heapq
import itertools
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parent))

from side_by_side import links

from lightning_cephalo.sharding.by_node import ByNode
from lightning_cephalo.sharding.routes import Route, Straight

ELEMENT_BYTES = 4
SHARES = {"even": lambda rank: 1.0, "3:1": lambda rank: 3.0 if rank % 2 else 1.0}


# -- simulation -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Links:
    """Links between nodes and inside of them.

    Attributes:
        between_bytes_per_s: Rate of a node's link, each way, shared by its ranks.
        inside_bytes_per_s: Rate of a rank's link inside its node, each way.
        message_s: Time of a message in addition to its bytes, on both ends.
        latency_s: Time from a message's end on one side to its use on the other.
    """

    between_bytes_per_s: float
    inside_bytes_per_s: float
    message_s: float
    latency_s: float


@dataclass
class Message:
    """A slice from one rank to another, which may be passed on.

    Attributes:
        source: The sending rank.
        to: The receiving rank.
        nbytes: Its size.
        then: The messages that wait for it.
        waits: Whether it waits for another.
    """

    source: int
    to: int
    nbytes: float
    then: list[Message] = field(default_factory=list)
    waits: bool = False

    def before(self, other: Message) -> None:
        """Let another message wait for this one."""
        self.then.append(other)
        other.waits = True


def seconds_of(messages: Sequence[Message], nodes: Sequence[int], given: Links) -> float:
    """Return when the last message has arrived.

    A message takes time on the sender's link, and from its beginning there on the receiver's: the
    links of two nodes, or those of two ranks of one node. A link takes messages as they come. A
    sender does not wait for a busy receiver: links share like TCP's.
    """
    free: dict[tuple[str, bool, int], float] = {}
    arrived_s = [0.0] * len(messages)
    index_of = {id(message): index for index, message in enumerate(messages)}
    # by time: messages that are ready to leave, and messages that reach their receiver's link
    events = [(0.0, index, "leaves") for index, one in enumerate(messages) if not one.waits]
    heapq.heapify(events)
    while events:
        at_s, index, what = heapq.heappop(events)
        message = messages[index]
        crosses = nodes[message.source] != nodes[message.to]
        rate = given.between_bytes_per_s if crosses else given.inside_bytes_per_s
        rank = message.source if what == "leaves" else message.to
        link = what, crosses, nodes[rank] if crosses else rank
        begin_s = max(at_s, free.get(link, 0.0))
        free[link] = begin_s + message.nbytes / rate + given.message_s
        if what == "leaves":
            heapq.heappush(events, (begin_s, index, "enters"))
            continue
        arrived_s[index] = free[link] + given.latency_s
        for following in message.then:
            heapq.heappush(events, (arrived_s[index], index_of[id(following)], "leaves"))
    return max(arrived_s)


def straight(sizes: Sequence[float], nodes: Sequence[int]) -> list[Message]:
    """Return the messages of a gather from rank to rank."""
    world_size = len(sizes)
    return [
        Message(rank, (rank + step) % world_size, sizes[rank])
        for step in range(1, world_size)
        for rank in range(world_size)
    ]


def by_node(sizes: Sequence[float], nodes: Sequence[int]) -> list[Message]:
    """Return the messages of a gather by node."""
    members = {node: [r for r, of in enumerate(nodes) if of == node] for node in set(nodes)}
    across, inside, passed_on = [], [], []
    for owner, node in enumerate(nodes):
        inside += [Message(owner, peer, sizes[owner]) for peer in members[node] if peer != owner]
        for step in range(1, len(members)):
            there = members[sorted(members)[(sorted(members).index(node) + step) % len(members)]]
            relay = there[members[node].index(owner) % len(there)]
            across.append(Message(owner, relay, sizes[owner]))
            for peer in there:
                if peer != relay:
                    passed_on.append(Message(relay, peer, sizes[owner]))
                    across[-1].before(passed_on[-1])
    return [*across, *inside, *passed_on]


def ring(sizes: Sequence[float], nodes: Sequence[int]) -> list[Message]:
    """Return the messages of a gather on a ring of the ranks in order."""
    world_size = len(sizes)
    rounds = [
        [Message(rank, (rank + 1) % world_size, sizes[rank - step]) for rank in range(world_size)]
        for step in range(world_size - 1)
    ]
    for earlier, later in itertools.pairwise(rounds):
        for rank, message in enumerate(earlier):
            message.before(later[(rank + 1) % world_size])
    return [message for messages in rounds for message in messages]


def padded(sizes: Sequence[float], nodes: Sequence[int]) -> list[Message]:
    """Return the messages of a gather on a ring of slots that are equal."""
    return ring([max(sizes)] * len(sizes), nodes)


WAYS = {"straight": straight, "by node": by_node, "ring": ring, "padded": padded}


def simulated(
    nodes: Sequence[int], shares: Sequence[float], nbytes: float, given: Links
) -> dict[str, float]:
    """Return the seconds of a gather by way; a reduce sends the same, the other way round."""
    sizes = [nbytes * share / sum(shares) for share in shares]
    return {name: seconds_of(way(sizes, nodes), nodes, given) for name, way in WAYS.items()}


# -- measurement ----------------------------------------------------------------------------------


def gather_on_ring(slices: Sequence[torch.Tensor], group: dist.ProcessGroup) -> None:
    """Gather by passing on the slices of all others to the next rank."""
    rank, world_size = dist.get_rank(group), len(slices)
    for step in range(world_size - 1):
        works = [
            dist.irecv(slices[rank - 1 - step], group_src=(rank - 1) % world_size, group=group),
            dist.isend(slices[rank - step], group_dst=(rank + 1) % world_size, group=group),
        ]
        for work in works:
            work.wait()


def reduce_on_ring(slices: Sequence[torch.Tensor], group: dist.ProcessGroup) -> None:
    """Sum by passing partial sums to the next rank; the last one to add owns the slice."""
    rank, world_size = dist.get_rank(group), len(slices)
    for step in range(world_size - 1):
        summand = torch.empty_like(slices[rank - 2 - step])
        works = [
            dist.irecv(summand, group_src=(rank - 1) % world_size, group=group),
            dist.isend(slices[rank - 1 - step], group_dst=(rank + 1) % world_size, group=group),
        ]
        for work in works:
            work.wait()
        slices[rank - 2 - step].add_(summand)


def operations(
    sizes: Sequence[int], nodes: Sequence[int], group: dist.ProcessGroup
) -> dict[str, tuple[Callable[[], None], Callable[[], None]]]:
    """Return a gather and a reduce of zeros by way."""
    rank = dist.get_rank(group)
    slices = list(torch.zeros(sum(sizes)).split(list(sizes)))
    slot = torch.zeros(max(sizes))
    slots = [torch.zeros_like(slot) for _ in sizes]

    def over(route: Route) -> tuple[Callable[[], None], Callable[[], None]]:
        memory = torch.empty(route.received_numel(sizes, rank))

        def gather() -> None:
            for work in route.gather(slices, group):
                work.wait()

        def reduce() -> None:
            works, total = route.reduce(slices, memory, group, memory.dtype)
            for work in works:
                work.wait()
            total()

        return gather, reduce

    return {
        "straight": over(Straight()),
        "by node": over(ByNode(nodes)),
        "ring": (
            lambda: gather_on_ring(slices, group),
            lambda: reduce_on_ring(slices, group),
        ),
        "padded": (
            lambda: dist.all_gather(slots, slot, group=group),
            lambda: dist.reduce_scatter(slot, slots, group=group),
        ),
    }


def run_rank(
    rank: int,
    nodes: tuple[int, ...],
    namespaces: Sequence[str],
    folder: str,
    sizes: Sequence[int],
    rounds: int,
) -> None:
    """Time every way in turn, and write the medians of the slowest rank."""
    links.enter(namespaces[nodes[rank]])
    os.environ["GLOO_SOCKET_IFNAME"] = links.INTERFACE
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=len(nodes),
        timeout=datetime.timedelta(seconds=300),
    )
    group = dist.group.WORLD
    assert group is not None
    times: dict[tuple[str, str], list[float]] = {}
    ways = operations(sizes, nodes, group)
    for _ in range(1 + rounds):
        for name, functions in ways.items():
            for kind, function in zip(("gather", "reduce"), functions, strict=True):
                dist.barrier()
                begin_s = time.perf_counter()
                function()
                took = torch.tensor(time.perf_counter() - begin_s)
                dist.all_reduce(took, op=dist.ReduceOp.MAX)
                times.setdefault((name, kind), []).append(took.item())
    if not rank:
        torch.save(
            {key: statistics.median(taken[1:]) for key, taken in times.items()},
            f"{folder}/times",
        )
    dist.destroy_process_group()


def measured(
    nodes: tuple[int, ...], shares: Sequence[float], nbytes: float, mbit: float, rounds: int
) -> dict[tuple[str, str], float]:
    """Return the seconds of gather and reduce by way."""
    sizes = [round(nbytes / ELEMENT_BYTES * share / sum(shares)) for share in shares]
    context = multiprocessing.get_context("fork")
    with (
        links.ShapedHosts(1 + max(nodes), mbit) as namespaces,
        tempfile.TemporaryDirectory() as folder,
    ):
        ranks = [
            context.Process(target=run_rank, args=(rank, nodes, namespaces, folder, sizes, rounds))
            for rank in range(len(nodes))
        ]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()
        if any(process.exitcode for process in ranks):
            raise RuntimeError("a rank failed")
        return torch.load(f"{folder}/times")


# -- tables ---------------------------------------------------------------------------------------


def show_measured(options: argparse.Namespace) -> None:
    """Print measured and simulated milliseconds of every layout of ranks."""
    given = Links(options.mbit_per_s * 1e6 / 8, options.inside_gbyte_per_s * 1e9, 2e-4, 2e-4)
    print(
        f"{options.mbyte:g} MB, {options.mbit_per_s:g} Mbit/s between nodes;"
        " milliseconds: gather / reduce (simulated)"
    )
    print("| ranks by node | shares |", " | ".join(WAYS), "|")
    print("|---" * (2 + len(WAYS)) + "|")
    for layout in options.nodes:
        counts = [int(count) for count in layout.split(",")]
        nodes = tuple(node for node, count in enumerate(counts) for _ in range(count))
        for name, share_of in SHARES.items():
            shares = [share_of(rank) for rank in range(len(nodes))]
            nbytes = options.mbyte * 1e6
            times = measured(nodes, shares, nbytes, options.mbit_per_s, options.rounds)
            expected = simulated(nodes, shares, nbytes, given)
            cells = [
                f"{1e3 * times[way, 'gather']:.0f} / {1e3 * times[way, 'reduce']:.0f}"
                f" ({1e3 * expected[way]:.0f})"
                for way in WAYS
            ]
            print(f"| {layout} | {name} |", " | ".join(cells), "|", flush=True)


ASSUMED = {
    "gloo, 10 Gbit/s": Links(1.25e9, 4e9, 5e-5, 5e-5),
    "NCCL, 100 Gbit/s": Links(12.5e9, 200e9, 2e-6, 1e-5),
}


def show_simulated(options: argparse.Namespace) -> None:
    """Print simulated milliseconds for nodes of 8 ranks."""
    print(f"{options.mbyte:g} MB, nodes of 8 ranks; simulated milliseconds of a gather")
    print("| links | shares | ranks |", " | ".join(WAYS), "|")
    print("|---" * (3 + len(WAYS)) + "|")
    for links_name, given in ASSUMED.items():
        for name, share_of in SHARES.items():
            for world_size in (16, 64, 256, 512):
                nodes = [rank // 8 for rank in range(world_size)]
                shares = [share_of(rank) for rank in range(world_size)]
                times = simulated(nodes, shares, options.mbyte * 1e6, given)
                cells = [f"{1e3 * seconds:.1f}" for seconds in times.values()]
                print(
                    f"| {links_name} | {name} | {world_size} |", " | ".join(cells), "|", flush=True
                )


def main() -> None:
    """Measure or simulate."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--nodes", nargs="+", default=["2,2"], help="ranks of every node")
    parser.add_argument("--mbit-per-s", type=float, default=200)
    parser.add_argument("--inside-gbyte-per-s", type=float, default=1)
    parser.add_argument("--mbyte", type=float, default=4, help="size of the gathered unit")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--simulate", action="store_true")
    options = parser.parse_args()
    if options.simulate:
        show_simulated(options)
    else:
        show_measured(options)


if __name__ == "__main__":
    main()
