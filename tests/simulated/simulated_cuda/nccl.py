"""A process group "nccl" that keeps NCCL's rules, and refuses what NCCL would hang on.

As torch's: every communicator has a stream of its own, on which its collectives run after the work
of the caller's stream; tensors are kept until the wait; waiting makes the current stream wait, not
the host. Here each two ranks also compare the collectives that both call before these run, over all
communicators: a difference, which on GPUs is a hang or wrong data, is an error that names both
sides.

Sources: torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp; "Using multiple NCCL communicators
concurrently" in NCCL's documentation; pytorch#148590 (what is kept until the wait).
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

from simulated_cuda.device import device_name, operators
from simulated_cuda.order import Order, RuleBroken
from simulated_cuda.torch_cuda import Event, Stream, current_stream, index_of
from simulated_cuda.wire import Wire

_TIMEOUT = datetime.timedelta(minutes=5)
# of this process: one for each job
_ORDERS: list[Order] = []
_DTYPES = {
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.uint8,
    torch.int8,
    torch.int32,
    torch.int64,
    torch.bool,
}
_REDUCTIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "SUM": torch.add,
    "AVG": torch.add,
    "PRODUCT": torch.mul,
    "MAX": torch.maximum,
    "MIN": torch.minimum,
}


def _check(is_kept: bool, rule: str) -> None:
    if not is_kept:
        raise RuleBroken(rule)


def _name_of(op: Any) -> str:
    for name in _REDUCTIONS:
        if op == getattr(dist.ReduceOp, name):
            return name
    raise RuleBroken(f"reduction {op} is not simulated")


class SimulatedWork(dist.Work):
    """The handle of one collective.

    Args:
        group: Its process group.
        end: The end of the collective on its stream; None: it ran on the caller's stream.
        tensors: What must keep its memory until the wait.
        result: For the future.
    """

    def __init__(
        self, group: SimulatedNccl, end: Event | None, tensors: list[Tensor], result: list[Tensor]
    ) -> None:
        super().__init__()
        self._group, self._end, self._result = group, end, result
        if end is not None:
            group.stash[self] = tensors

    def wait(self, timeout: Any = None) -> bool:
        if self._end is not None:
            current_stream(self._group.device_index).wait_event(self._end)
        # from here on the caller's stream keeps the memory from being used again too early
        self._group.stash.pop(self, None)
        return True

    def synchronize(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        return self._end is None or self._end.query()

    def is_success(self) -> bool:
        return self.is_completed()

    def get_future(self) -> torch.futures.Future:
        assert self._group.device_index is not None
        future = torch.futures.Future(
            devices=[torch.device(device_name(), self._group.device_index)]
        )
        self.wait()
        future.set_result(self._result)
        return future

    __hash__ = object.__hash__


@dataclass
class Options:
    """``ProcessGroupNCCL.Options``."""

    _timeout: datetime.timedelta = _TIMEOUT
    is_high_priority_stream: bool = False
    global_ranks_in_group: Sequence[int] = ()
    group_name: str = ""


@dataclass(frozen=True)
class Collective:
    """One collective as a rank calls it.

    Attributes:
        form: Name of the operation.
        reads: What its kernel reads.
        writes: What its kernel writes.
        detail: What else must be the same on all ranks.
        execute: Moves the data, given CPU tensors of the same memory.
    """

    form: str
    reads: Sequence[Tensor]
    writes: Sequence[Tensor]
    detail: str
    execute: Callable[[list[Tensor], list[Tensor]], None] = field(compare=False)


def _at_most(timeout: datetime.timedelta) -> datetime.timedelta:
    return min(timeout, datetime.timedelta(minutes=10))


class SimulatedNccl(dist.ProcessGroup):
    """``ProcessGroupNCCL``."""

    Options = Options
    stash: dict[SimulatedWork, list[Tensor]]

    def __init__(
        self, store: dist.Store, rank: int, size: int, options: Options | None = None, *_: Any
    ) -> None:
        super().__init__(rank, size)
        self._rank, self._size = rank, size
        self._options = options or Options()
        self._members = tuple(self._options.global_ranks_in_group) or tuple(range(size))
        self._is_aborted = False
        self._begun = 0
        self._name = self._options.group_name
        self._stream: Stream | None = None
        self.device_index: int | None = None
        self.stash = {}
        self._wire = self._wire_over(dist.PrefixStore("data", store), rank, size)
        self._order = self._order_of(dist.PrefixStore("order", store))

    def _wire_over(self, store: dist.Store, rank: int, size: int) -> Wire:
        return Wire(store, rank, size, _at_most(self._options._timeout), lambda: self._is_aborted)

    def _order_of(self, store: dist.Store) -> Order:
        """Return the order of the first group with all of these ranks, which is the job's."""
        for order in _ORDERS:
            if order.members.issuperset(self._members):
                return order
        rank = self._members[self._rank]
        _ORDERS.append(Order(store, rank, self._members, self._wire_over))
        return _ORDERS[-1]

    # -- what torch asks of a group

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size

    def getBackendName(self) -> str:
        return "nccl"

    @property
    def group_name(self) -> str:
        return self._name

    @property
    def supports_splitting(self) -> bool:
        return False

    @property
    def options(self) -> Options:
        return self._options

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device(device_name())]

    def _get_backend(self, device: torch.device) -> SimulatedNccl:
        return self

    def _set_group_name(self, name: str) -> None:
        self._name = name

    def _set_sequence_number_for_group(self) -> None:
        pass

    def _get_sequence_number_for_group(self) -> int:
        return self._begun

    def _set_default_timeout(self, timeout: datetime.timedelta) -> None:
        self._options._timeout = timeout
        self._wire.wait_for(_at_most(timeout))

    def _set_group_desc(self, description: str) -> None:
        pass

    def _set_default_backend(self, kind: Any) -> None:
        pass

    def _group_start(self) -> None:
        pass

    def _group_end(self) -> None:
        pass

    def abort(self) -> None:
        self._is_aborted = True
        self.stash.clear()
        if self._order in _ORDERS and self._order.members == set(self._members):
            _ORDERS.remove(self._order)

    def shutdown(self) -> None:
        self.abort()

    # -- one collective

    def _run(self, collective: Collective, options: Any) -> SimulatedWork:
        self._begun += 1
        tensors = [*collective.reads, *collective.writes]
        self._check_tensors(collective.form, tensors)
        self._check_order(collective, tensors[0].dtype)
        assert self.device_index is not None
        caller = current_stream(self.device_index)
        is_async = getattr(options, "asyncOp", True)
        if is_async:
            self._stream = self._stream or Stream(self.device_index)
            self._stream.wait_stream(caller)
        stream = self._stream if is_async and self._stream is not None else caller
        reads, writes = list(collective.reads), list(collective.writes)
        name = f"nccl:{collective.form}"
        with torch.no_grad():
            operators().launch(name, self.device_index, stream.stream_id, reads, writes)
            on_host = operators().on_host
            collective.execute([on_host(t) for t in reads], [on_host(t) for t in writes])
        end = stream.record_event() if is_async else None
        return SimulatedWork(self, end, tensors, writes)

    def _check_tensors(self, form: str, tensors: Sequence[Tensor]) -> None:
        first = tensors[0]
        for tensor in tensors:
            is_ours = tensor.device.type == device_name()
            _check(is_ours, f"{form}: expected CUDA tensors, got one on {tensor.device}")
            _check(
                tensor.layout == torch.strided and tensor.is_contiguous(),
                f"{form}: expected contiguous tensors, got strides {tensor.stride()} for"
                f" {tuple(tensor.shape)}",
            )
            _check(
                tensor.device == first.device,
                f"{form}: expected tensors of one device, got {first.device} and {tensor.device}",
            )
            _check(
                tensor.dtype == first.dtype,
                f"{form}: expected tensors of one dtype, got {first.dtype} and {tensor.dtype}",
            )
        _check(first.dtype in _DTYPES, f"{form}: NCCL has no {first.dtype}")
        if self.device_index is None:
            self.device_index = index_of(first.device)
        _check(
            index_of(first.device) == self.device_index,
            f"{form}: the communicator is that of cuda:{self.device_index}, the tensors are on"
            f" {first.device}",
        )

    def _check_order(self, collective: Collective, dtype: torch.dtype) -> None:
        text = f"{collective.form} in group {self._name} of {dtype}, {collective.detail}"
        others = [member for member in self._members if member != self._members[self._rank]]
        self._order.compare(text, others)

    def _reduced(self, own: Tensor, op: str) -> Tensor:
        rows = self._wire.rows(own, [own.numel()] * self._size)
        total = rows[0]
        for row in rows[1:]:
            total = _REDUCTIONS[op](total, row)
        return total / self._size if op == "AVG" else total

    # -- the operations

    def broadcast(self, tensors: list[Tensor], opts: Any = None) -> SimulatedWork:
        opts = opts or distributed_c10d.BroadcastOptions()
        (tensor,) = tensors
        source = opts.rootRank

        def execute(_: list[Tensor], writes: list[Tensor]) -> None:
            self._wire.broadcast(writes[0], source)

        reads = [tensor] if self._rank == source else []
        detail = f"{tensor.numel()} elements from rank {self._members[source]}"
        return self._run(Collective("broadcast", reads, [tensor], detail, execute), opts)

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> SimulatedWork:
        opts = opts or distributed_c10d.AllreduceOptions()
        (tensor,) = tensors
        op = _name_of(opts.reduceOp)

        def execute(reads: list[Tensor], writes: list[Tensor]) -> None:
            writes[0].copy_(self._reduced(reads[0], op).view_as(writes[0]))

        detail = f"{op} of {tensor.numel()} elements"
        return self._run(Collective("all_reduce", [tensor], [tensor], detail, execute), opts)

    def all_gather_single(self, output: Tensor, tensor: Tensor, opts: Any = None) -> SimulatedWork:
        opts = opts or distributed_c10d.AllgatherOptions()
        _check(
            output.numel() == tensor.numel() * self._size,
            f"all_gather_single: expected {tensor.numel()} times {self._size} elements, got"
            f" {output.numel()}",
        )

        def execute(reads: list[Tensor], writes: list[Tensor]) -> None:
            rows = self._wire.rows(reads[0], [reads[0].numel()] * self._size)
            writes[0].view(-1).copy_(torch.cat(rows))

        detail = f"{tensor.numel()} elements each"
        collective = Collective("all_gather_single", [tensor], [output], detail, execute)
        return self._run(collective, opts)

    def allgather(
        self, outputs: list[list[Tensor]], tensors: list[Tensor], opts: Any = None
    ) -> SimulatedWork:
        opts = opts or distributed_c10d.AllgatherOptions()
        (parts,), (tensor,) = outputs, tensors
        counts = [part.numel() for part in parts]
        _check(len(parts) == self._size, f"all_gather: got {len(parts)} outputs for {self._size}")
        _check(
            counts[self._rank] == tensor.numel(),
            f"all_gather: the own output has {counts[self._rank]} elements, the input"
            f" {tensor.numel()}",
        )

        def execute(reads: list[Tensor], writes: list[Tensor]) -> None:
            for part, row in zip(writes, self._wire.rows(reads[0], counts), strict=True):
                part.view(-1).copy_(row)

        collective = Collective("all_gather", [tensor], parts, f"{counts} elements", execute)
        return self._run(collective, opts)

    def reduce_scatter_single(
        self, output: Tensor, tensor: Tensor, opts: Any = None
    ) -> SimulatedWork:
        opts = opts or distributed_c10d.ReduceScatterOptions()
        op = _name_of(opts.reduceOp)
        _check(
            tensor.numel() == output.numel() * self._size,
            f"reduce_scatter_single: expected {output.numel()} times {self._size} elements, got"
            f" {tensor.numel()}",
        )

        def execute(reads: list[Tensor], writes: list[Tensor]) -> None:
            total = self._reduced(reads[0], op).view(self._size, -1)
            writes[0].view(-1).copy_(total[self._rank])

        detail = f"{op} of {output.numel()} elements each"
        collective = Collective("reduce_scatter_single", [tensor], [output], detail, execute)
        return self._run(collective, opts)

    def reduce_scatter(
        self, outputs: list[Tensor], tensors: list[list[Tensor]], opts: Any = None
    ) -> SimulatedWork:
        opts = opts or distributed_c10d.ReduceScatterOptions()
        (output,), (parts,) = outputs, tensors
        op = _name_of(opts.reduceOp)
        counts = [part.numel() for part in parts]
        _check(len(parts) == self._size, f"reduce_scatter: got {len(parts)} for {self._size} ranks")
        _check(
            counts[self._rank] == output.numel(),
            f"reduce_scatter: the own part has {counts[self._rank]} elements, the output"
            f" {output.numel()}",
        )

        def execute(reads: list[Tensor], writes: list[Tensor]) -> None:
            for index, part in enumerate(reads):
                total = self._reduced(part, op)
                if index == self._rank:
                    writes[0].view(-1).copy_(total)

        detail = f"{op} of {counts} elements"
        return self._run(Collective("reduce_scatter", parts, [output], detail, execute), opts)

    def all_to_all_single(
        self,
        output: Tensor,
        tensor: Tensor,
        output_splits: Sequence[int],
        input_splits: Sequence[int],
        opts: Any = None,
    ) -> SimulatedWork:
        opts = opts or distributed_c10d.AllToAllOptions()
        even = [len(tensor) // self._size] * self._size
        sends, receives = list(input_splits) or even, list(output_splits) or even
        for name, splits, whole in (("input", sends, tensor), ("output", receives, output)):
            _check(
                len(splits) == self._size and sum(splits) == len(whole),
                f"all_to_all_single: the {name} has {len(whole)} rows, its splits are {splits}",
            )

        def execute(reads: list[Tensor], writes: list[Tensor]) -> None:
            splits = self._wire.rows(torch.tensor(sends), [self._size] * self._size)
            rows = self._wire.rows(reads[0], [int(row.sum()) for row in splits])
            parts = [
                row.split(split.tolist())[self._rank]
                for row, split in zip(rows, splits, strict=True)
            ]
            counts = [part.numel() for part in parts]
            _check(counts == receives, f"all_to_all_single: expected {receives}, got {counts}")
            writes[0].view(-1).copy_(torch.cat(parts))

        detail = "of slices"
        collective = Collective("all_to_all_single", [tensor], [output], detail, execute)
        return self._run(collective, opts)

    def barrier(self, opts: Any = None) -> SimulatedWork:
        index = index_of(None) if self.device_index is None else self.device_index
        work = self.allreduce([torch.zeros(1, device=torch.device(device_name(), index))])
        work.wait()
        current_stream(index).synchronize()
        return work

    # older names, by which torch.distributed calls them
    _allgather_base = all_gather_single
    _reduce_scatter_base = reduce_scatter_single


def install() -> None:
    """Make "nccl" a backend of torch.distributed."""
    SimulatedNccl.__module__ = "torch.distributed.distributed_c10d"
    for module in (distributed_c10d, dist):
        module.ProcessGroupNCCL = SimulatedNccl
        module.is_nccl_available = lambda: True
    distributed_c10d._NCCL_AVAILABLE = True
    distributed_c10d.default_pg_nccl_timeout = _TIMEOUT
    torch.distributed.constants.default_pg_nccl_timeout = _TIMEOUT
    torch.cuda.nccl.version = lambda: (2, 28, 3)


def install_for(name: str) -> None:
    """Make "<name>-ccl" a backend of torch.distributed, for devices of this name only."""

    def create(known: Any, options: Any) -> SimulatedNccl:
        members = known.global_ranks_in_group or ()
        chosen = Options(global_ranks_in_group=members, group_name=known.group_id)
        return SimulatedNccl(known.store, known.group_rank, known.group_size, chosen)

    dist.Backend.register_backend(f"{name}-ccl", create, extended_api=True, devices=[name])
