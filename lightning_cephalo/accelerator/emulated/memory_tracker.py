"""Counts the bytes of live tensors from outside the allocator."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from weakref import ReferenceType, ref

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_cephalo.accelerator.emulated.operators import Operator, describe, tensors_in
from lightning_cephalo.accelerator.versions import count_foreach_writes


class _Live:
    """A live storage, and its bytes at the last check."""

    __slots__ = ("nbytes", "storage")

    def __init__(self, storage: ReferenceType[torch.UntypedStorage], nbytes: int) -> None:
        self.storage = storage
        self.nbytes = nbytes


class _EagerStance:
    """Sets torch's compiler stance to eager while any tracker is active.

    The stance applies to the whole process. Trackers of several threads overlap without nesting. If
    each restored the stance that it found, one tracker's eager stance could stay forever.
    """

    _lock = threading.Lock()
    _active = 0
    _stance: Any = None

    @classmethod
    def enter(cls) -> None:
        with cls._lock:
            cls._active += 1
            if cls._active == 1:
                cls._stance = torch.compiler.set_stance("force_eager")

    @classmethod
    def leave(cls) -> None:
        with cls._lock:
            cls._active -= 1
            if cls._active == 0:
                cls._stance.__exit__(None, None, None)


class MemoryTracker(TorchDispatchMode):
    """Counts the bytes of the storages that operators make inside the ``with`` block.

    ::

        with MemoryTracker() as tracker:
            loss = model(batch).sum()
            loss.backward()
        print(tracker.peak_bytes)

    Earlier tensors do not count unless they are given to :meth:`track`. Meta tensors
    (``torch.device("meta")``) and fake tensors never count. A DTensor counts with its local shard.
    Works inside another tracker or an emulated device, which then see the same operators. Only the
    thread and the process that entered the block are watched.

    Functions of ``torch.compile`` run eagerly inside, and compiled again afterwards.

    On CUDA, ``torch.cuda.max_memory_allocated`` is the better instrument.

    Source: ``torch.distributed._tools.MemTracker`` for storages by weak reference. That class is
    private, replaces ``UntypedStorage.resize_`` in the whole process and is about ten times slower.
    """

    # Without this torch rejects every higher-order operator (for example control flow) in the mode.
    supports_higher_order_operators = True
    counts_fake = False
    """Whether meta and fake tensors count; for subclasses that count a model without memory."""

    def __init__(self) -> None:
        super().__init__()
        self._operators: dict[Any, Operator] = {}
        self._live: dict[int, _Live] = {}
        self._left_out: dict[int, ref[torch.UntypedStorage]] = {}
        # A storage can be freed in any thread (a gloo worker drops the last reference), and during
        # any statement here (garbage collection). So freeing only appends here, which is atomic.
        self._freed: deque[int] = deque()
        self._current_bytes = 0
        self._peak_bytes = 0
        self._depth = 0
        self._process = 0
        self._is_paused = False

    @property
    def current_bytes(self) -> int:
        """Bytes of the counted storages that are alive now."""
        self._measure()
        self._peak_bytes = max(self._peak_bytes, self._current_bytes)
        return self._current_bytes

    @property
    def peak_bytes(self) -> int:
        """Most bytes alive at the same time since the first entry or last :meth:`reset_peak`."""
        return max(self._peak_bytes, self.current_bytes)

    def reset_peak(self) -> None:
        """Starts a new peak from the bytes that are alive now."""
        self._measure()
        self._peak_bytes = self._current_bytes

    def track(self, *values: Any) -> None:
        """Counts tensors that were not made inside the block.

        Args:
            values: Tensors, modules (parameters with their gradients, and buffers), and mappings
                and sequences of them. Ignores other values, and tensors already counted.

        Raises:
            torch.OutOfMemoryError: If they do not fit into a device with a capacity.
        """
        before_bytes = self._current_bytes
        for storage in _storages(values):
            if id(storage) not in self._live:
                self._add(storage)
        self._check(self._current_bytes - before_bytes)

    def leave_out(self, tensor: Tensor) -> None:
        """Never counts a tensor's memory, which stands for host memory."""
        storage = tensor.untyped_storage()
        key = id(storage)
        self._left_out[key] = ref(storage, lambda _: self._left_out.pop(key, None))

    def counts(self, tensor: Tensor) -> bool:
        """Returns whether a tensor's memory may be counted: it does not stand for host memory."""
        return id(tensor.untyped_storage()) not in self._left_out

    def untrack(self, *values: Any) -> None:
        """Stops counting tensors, for example those that stand for host memory on a CPU.

        Args:
            values: As in :meth:`track`. Ignores tensors that are not counted.
        """
        for storage in _storages(values):
            live = self._live.pop(id(storage), None)
            if live is not None:
                self._freed.append(live.nbytes)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Ignores operators in the block, which work on tensors that stand for host memory.

        Tensors counted before still count until they are freed.
        """
        before, self._is_paused = self._is_paused, True
        try:
            yield
        finally:
            self._is_paused = before

    def __enter__(self) -> Any:
        self._process = os.getpid()
        self._depth += 1
        if self._depth == 1:
            # torch.compile does not compile under a mode. Without the eager stance it would mark
            # every function called inside as not compilable, and never run it compiled again.
            _EagerStance.enter()
        return super().__enter__()

    def __exit__(self, *exception: Any) -> None:
        self._depth -= 1
        super().__exit__(*exception)
        if self._depth == 0:
            _EagerStance.leave()

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        # A DataLoader worker forked inside the block inherits the mode: its tensors are host memory
        # of another process. Fake tensors (DTensor uses them for planning) have no memory.
        is_fake = FakeTensor in types
        is_ignored = is_fake and not self.counts_fake
        if self._is_paused or os.getpid() != self._process or is_ignored:
            result = func(*args, **kwargs)
            count_foreach_writes(func, args)
            return result
        if not is_fake and any(_dispatches_itself(kind) for kind in types):
            return NotImplemented  # DTensor and the like: the local operators inside come back here
        operator = self._operators.get(func)
        if operator is None:
            operator = self._operators[func] = describe(func)
        if operator.composite:
            with self:
                return func.decompose(*args, **kwargs)
        if operator.collective:
            # check first: its arguments may have grown unnoticed, and once the collective is
            # issued, the other ranks depend on it
            before_bytes = self._current_bytes
            self._observe(operator, args, kwargs, None)
            self._check(self._current_bytes - before_bytes)
        self._before(operator)
        result = func(*args, **kwargs)
        count_foreach_writes(func, args)
        self._after(func, operator, args, kwargs, result)
        before_bytes = self._current_bytes
        self._observe(operator, args, kwargs, result)
        try:
            self._check(self._current_bytes - before_bytes)
        except torch.OutOfMemoryError:
            # The traceback keeps this frame and so the result alive, but a real device would not
            # have allocated it.
            del result
            raise
        return result

    def _before(self, operator: Operator) -> None:
        """Runs before an operator; an emulated device overrides it."""

    def _after(
        self, function: Any, operator: Operator, args: Any, kwargs: Any, result: Any
    ) -> None:
        """Runs after an operator; an emulated device overrides it."""

    def _refuse(self, wanted_bytes: int) -> torch.OutOfMemoryError | None:
        """Returns the error of a device whose memory is exceeded; the live bytes are exact here."""
        return None

    def _observe(self, operator: Operator, args: Any, kwargs: Any, result: Any) -> None:
        live = self._live
        seen = set()
        for tensor in tensors_in((args, tuple(kwargs.values())) if kwargs else args):
            storage = _storage(tensor)
            if storage is None:
                continue
            seen.add(id(storage))
            known = live.get(id(storage))
            if known is not None and known.nbytes != (nbytes := storage.nbytes()):
                self._current_bytes += nbytes - known.nbytes
                known.nbytes = nbytes
        if not operator.makes_storage:
            return
        for tensor in tensors_in(result):
            storage = _storage(tensor)
            if storage is None or id(storage) in live:
                continue
            if operator.adopts or id(storage) not in seen:
                self._add(storage)

    def _add(self, storage: torch.UntypedStorage) -> None:
        is_ignored = storage.device.type == "meta" and not self.counts_fake
        if is_ignored or id(storage) in self._left_out:
            return
        key = id(storage)

        def forget(_: Any) -> None:
            gone = self._live.pop(key, None)
            if gone is not None:
                self._freed.append(gone.nbytes)

        nbytes = storage.nbytes()
        self._live[key] = _Live(ref(storage, forget), nbytes)
        self._current_bytes += nbytes

    def _drain(self) -> None:
        while self._freed:
            self._current_bytes -= self._freed.popleft()

    def _measure(self) -> None:
        # UntypedStorage.resize_ is no operator, and replacing it would have effects outside this
        # block. So this method reads all sizes again to find storages that shrank unnoticed. Only a
        # new peak, a rejected allocation and a read of the bytes need it.
        self._drain()
        for live in list(self._live.values()):
            storage = live.storage()
            if storage is not None and (nbytes := storage.nbytes()) != live.nbytes:
                self._current_bytes += nbytes - live.nbytes
                live.nbytes = nbytes

    def _check(self, wanted_bytes: int) -> None:
        self._drain()
        if self._current_bytes <= self._peak_bytes:
            return
        self._measure()
        if self._current_bytes <= self._peak_bytes:
            return
        refusal = self._refuse(wanted_bytes)
        if refusal is not None:
            raise refusal
        self._peak_bytes = self._current_bytes


def _dispatches_itself(kind: type) -> bool:
    own = getattr(kind, "__torch_dispatch__", None)
    return own is not None and own is not Tensor.__torch_dispatch__


def _storage(tensor: Tensor) -> torch.UntypedStorage | None:
    try:
        return tensor.untyped_storage()
    except (NotImplementedError, RuntimeError):  # sparse and opaque tensors have none
        return None


def _storages(value: Any) -> Iterator[torch.UntypedStorage]:
    if isinstance(value, Tensor):
        if value.is_leaf and value.grad is not None:  # reading a non-leaf's grad warns
            yield from _storages(value.grad)
        if hasattr(value, "__tensor_flatten__"):
            # a wrapper's own storage is not real: a DTensor's has the size of the whole tensor
            for name in value.__tensor_flatten__()[0]:
                yield from _storages(getattr(value, name))
        elif (storage := _storage(value)) is not None:
            yield storage
    elif isinstance(value, nn.Module):
        yield from _storages([*value.parameters(), *value.buffers()])
    elif isinstance(value, Mapping):
        yield from _storages(list(value.values()))
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _storages(item)
