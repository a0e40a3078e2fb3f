"""Runs the user's own step for profiling, and undoes its side effects.

[Note: what is put back]
Every attribute of every submodule is put back, buffers included. Numbers, strings and other values
are put back by reference; tensors and numpy arrays by content; lists, dicts, sets, deques,
dataclass instances and plain objects of the user's own classes by their items, into the same
objects; random generators by state; optimizers and schedules that modules hold by their attributes.
Other objects are left alone (a module may hold the trainer,
and through it everything): changes inside of them stay. torchmetrics are modules, so their states
are put back like those of any other module. Parameters need nothing: no optimizer runs, gradients
are dropped, and manual steps put back what their code has written (``features/manual_step.py``).
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from lightning.pytorch.core.optimizer import do_nothing_closure
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.trainer.connectors.logger_connector.result import _ResultCollection
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils import _pytree as pytree
from torch.utils.hooks import RemovableHandle

from lightning_cephalo.accelerator import Accelerator
from lightning_cephalo.data.randomness import (
    GENERATOR_TYPES,
    preserved_randomness,
    read_states,
    write_states,
)
from lightning_cephalo.execution.graph import take_memory
from lightning_cephalo.execution.overlay_slots import are_same, items_of, refill
from lightning_cephalo.sharding.placement import local_part

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

_ATOMS = (bool, int, float, complex, str, bytes, type(None))
# parameters switch between their sharded and their full form by themselves
# and Lightning names the hook that runs, which steps that log need
_NOT_OURS = frozenset({"_parameters", "_trainer", "_fabric", "_current_fx_name"})
_FRAMEWORKS = frozenset(["torch", "lightning", "pytorch_lightning", "torchmetrics"])
# loggers, and configs that models fill in their first forward
_FRAMEWORKS |= {"logging", "transformers"}
_OF_PYTHON = frozenset(["builtins", "enum", "functools", "lightning_cephalo"])
# a container of more items is data, not a counter: its items are put back, but not their contents
_WALKED_ITEMS = 10_000


@contextmanager
def isolated(
    trainer: Trainer,
    module: nn.Module,
    accelerator: Accelerator,
) -> Iterator[None]:
    """Undo what a step inside does to state, randomness, logs and gradients.

    Results and loggers are replaced by throwaway ones. Optimizers update nothing.
    """
    with ExitStack() as stack:
        stack.enter_context(preserved_randomness())
        stack.callback(accelerator.restore_random_states, accelerator.random_states())
        stack.enter_context(preserved_state(module, accelerator))
        stack.enter_context(_muted(trainer, module, accelerator))
        stack.enter_context(_gradients_set_aside(module))
        yield


@contextmanager
def _gradients_set_aside(module: nn.Module) -> Iterator[None]:
    """Begin a ``with`` block without gradients, and put back those of before."""
    kept = [
        (each, gradient, local_part(gradient).clone())
        for each in module.parameters()
        if (gradient := each.grad) is not None
    ]
    forget_gradients(module)
    try:
        yield
    finally:
        forget_gradients(module)
        for parameter, gradient, values in kept:
            local_part(gradient).copy_(values)
            parameter.grad = gradient


def forget_gradients(module: nn.Module) -> None:
    """Set the gradients of all parameters to None."""
    for parameter in module.parameters():
        parameter.grad = None


@contextmanager
def same_flags(module: nn.Module) -> Iterator[None]:
    """Put back ``requires_grad``, which a step that is refused between toggles leaves."""
    flags = [(parameter, parameter.requires_grad) for parameter in module.parameters()]
    try:
        yield
    finally:
        for parameter, flag in flags:
            if parameter.requires_grad != flag:
                parameter.requires_grad_(flag)


@contextmanager
def preserved_state(module: nn.Module, accelerator: Accelerator) -> Iterator[Callable[[], None]]:
    """Put back all submodules' attributes afterwards, and by the yielded function (note above)."""
    snapshot = _Snapshot(accelerator)
    snapshot.take(module)
    try:
        yield snapshot.restore
    finally:
        snapshot.restore()


class _Snapshot:
    """The saved contents of the objects that a module reaches."""

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator
        self._seen: dict[int, Any] = {}
        self._restores: list[Callable[[], None]] = []

    def restore(self) -> None:
        for put_back in self._restores:
            put_back()

    def take(self, value: Any) -> None:
        if isinstance(value, (*_ATOMS, type)) or id(value) in self._seen:
            return
        self._seen[id(value)] = value
        if isinstance(value, nn.Module):
            self._attributes(value, skip=_NOT_OURS)
        elif isinstance(value, Tensor):
            self._tensor(value)
        elif isinstance(value, np.ndarray):
            self._array(value)
        elif isinstance(value, GENERATOR_TYPES):
            states = read_states([value])
            self._restores.append(lambda: write_states([value], states))
        elif isinstance(value, (Optimizer, LRScheduler)):
            self._attributes(value)
        elif isinstance(value, (dict, list, deque, set)):
            self._container(value)
        elif isinstance(value, tuple):
            self._walk(list(value))
        elif hasattr(value, "__dict__") and (dataclasses.is_dataclass(value) or _is_plain(value)):
            self._attributes(value)

    def _walk(self, values: list[Any]) -> None:
        if len(values) <= _WALKED_ITEMS:
            for value in values:
                self.take(value)

    def _attributes(self, owner: Any, skip: frozenset[str] = frozenset()) -> None:
        saved = {name: value for name, value in vars(owner).items() if name not in skip}

        def put_back() -> None:
            # bypasses __setattr__: modules sort values by type there, and frozen dataclasses raise
            attributes = vars(owner)
            for name in [name for name in attributes if name not in saved and name not in skip]:
                del attributes[name]
            attributes.update(saved)

        self._restores.append(put_back)
        self._walk(list(saved.values()))

    def _container(self, container: Any) -> None:
        saved = items_of(container)

        def put_back() -> None:
            now = items_of(container)
            if len(now) != len(saved) or not are_same(now, saved):
                refill(container, saved)

        self._restores.append(put_back)
        self._walk([*container.values()] if isinstance(container, dict) else saved)

    def _tensor(self, tensor: Tensor) -> None:
        if isinstance(tensor, (nn.Parameter, DTensor)) or tensor.is_meta:
            return
        shape = tensor.shape  # tensors that have none raise here, where nothing has run yet
        # on the host, since the device's memory is about to be measured
        with self._accelerator.on_host():
            saved = tensor.detach().to("cpu", copy=True)

        def put_back() -> None:
            with torch.inference_mode(tensor.is_inference()), torch.no_grad():
                if tensor.shape == shape:
                    tensor.detach().copy_(saved)
                else:
                    tensor.data = saved.to(tensor.device)

        self._restores.append(put_back)

    def _array(self, array: np.ndarray[Any, Any]) -> None:
        if not array.flags.writeable:  # such as a file of data that is mapped into memory
            return
        saved = array.copy()

        def put_back() -> None:
            if array.flags.writeable:
                array[...] = saved

        self._restores.append(put_back)


def _is_plain(value: Any) -> bool:
    """Whether an object is the user's own: a pool, a counter; not a dataset or a callback."""
    own, *parents = [kind.__module__.split(".")[0] for kind in type(value).__mro__]
    is_users = own not in _OF_PYTHON and _FRAMEWORKS.isdisjoint([own, *parents])
    return is_users and not isinstance(value, (FunctionType, BuiltinFunctionType, MethodType))


# -- Lightning ------------------------------------------------------------------------------------
#
# [Note: private names of Lightning] `self.log` writes to `trainer._results`, which is the training
# epoch loop's `_results` while training, and refuses to when `_current_fx_name` is None. Both are
# replaced here and nowhere else; tests/profiling/test_isolation.py fails when they change.


@contextmanager
def _muted(trainer: Trainer, module: Any, accelerator: Accelerator) -> Iterator[None]:
    """Redirect everything that the step logs or asks of the trainer to throwaway objects."""
    loop = trainer.fit_loop.epoch_loop
    connector = _Snapshot(accelerator)
    connector._attributes(trainer._logger_connector)
    results, loggers, stopping = loop._results, trainer.loggers, trainer.should_stop
    name = module._current_fx_name
    loop._results = _ResultCollection(training=True)
    trainer.loggers = [DummyLogger() for _ in loggers]
    module._current_fx_name = "training_step"
    try:
        with _idle(trainer, accelerator):
            yield
    finally:
        loop._results, trainer.loggers, trainer.should_stop = results, loggers, stopping
        module._current_fx_name = name
        connector.restore()


@contextmanager
def _idle(trainer: Trainer, accelerator: Accelerator) -> Iterator[None]:
    """Let the optimizers change nothing (private API: Lightning's step counters)."""
    strategy: Any = trainer.strategy
    kept = _Snapshot(accelerator)
    schedules = [config.scheduler for config in strategy.lr_scheduler_configs]
    for each in (*strategy.optimizers, *schedules):
        kept.take(each)
    counts = [(e, e._on_before_step, e._on_after_step) for e in strategy._lightning_optimizers]
    for each, _, _ in counts:
        each._on_before_step = each._on_after_step = do_nothing_closure
    try:
        with _updating_nothing(strategy.optimizers):
            yield
    finally:
        for each, before_step, after_step in counts:
            each._on_before_step, each._on_after_step = before_step, after_step
        kept.restore()


@contextmanager
def _updating_nothing(optimizers: Sequence[Optimizer]) -> Iterator[None]:
    """Let the steps of optimizers find no gradients in a ``with`` block."""
    handles = [handle for each in optimizers for handle in _update_nothing(each)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _update_nothing(optimizer: Optimizer) -> list[RemovableHandle]:
    """Hide all gradients from an optimizer's ``step()``: it would hold state, and take time."""
    hidden: dict[Tensor, Tensor] = {}

    def hide() -> None:
        for group in optimizer.param_groups:
            for each in group["params"]:
                if each.grad is not None:
                    hidden[each], each.grad = each.grad, None

    def before(optimizer: Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        hide()
        own, *rest = args
        if rest and callable(rest[0]):
            return (own, hiding(rest[0]), *rest[1:]), kwargs
        if callable(kwargs.get("closure")):
            return args, {**kwargs, "closure": hiding(kwargs["closure"])}
        return None

    def hiding(closure: Callable[[], Any]) -> Callable[[], Any]:
        def without_gradients() -> Any:
            outcome = closure()
            hide()
            return outcome

        return without_gradients

    def after(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        for parameter, gradient in hidden.items():
            parameter.grad = gradient
        hidden.clear()

    return [optimizer.register_step_pre_hook(before), optimizer.register_step_post_hook(after)]


@contextmanager
def state_on_host(optimizers: Sequence[Optimizer], accelerator: Accelerator) -> Iterator[None]:
    """Let rows of state that exist already, as of Adagrad, take no memory of the device."""
    leaves = pytree.tree_leaves([list(own.state.values()) for own in optimizers])
    rows = [local_part(leaf) for leaf in leaves if isinstance(leaf, DTensor)]
    with accelerator.on_host():
        kept = [own.to("cpu", copy=True) for own in rows]
    for own in rows:
        take_memory(own)
    try:
        yield
    finally:
        for own, values in zip(rows, kept, strict=True):
            own.data = values.to(accelerator.device, copy=True)


@contextmanager
def no_loaders_left(trainer: Trainer) -> Iterator[None]:
    """Undo that ``trainer.estimated_stepping_batches`` deals the loaders, before there is a plan.

    Private API: Lightning keeps them, and their source, in the loop.
    """
    loop = trainer.fit_loop
    combined, source = loop._combined_loader, dict(vars(loop._data_source))
    try:
        yield
    finally:
        loop._combined_loader = combined
        vars(loop._data_source).update(source)


def expect_samples(trainer: Trainer, count: int) -> None:
    """Set the number of samples of a batch in the throwaway results, for means over an epoch."""
    trainer.fit_loop.epoch_loop._results.batch_size = count


def moved_to_device(trainer: Trainer, module: Any, batch: Any) -> Any:
    """Convert and move a batch as ``_TrainingEpochLoop.advance`` does, hooks included (a copy)."""
    batch = trainer.precision_plugin.convert_input(batch)
    batch = module._on_before_batch_transfer(batch, dataloader_idx=0)
    return trainer.strategy.batch_to_device(batch, dataloader_idx=0)
