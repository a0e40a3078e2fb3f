"""Runs the user's own step for profiling, and undoes its side effects.

[Note: what is put back]
Every attribute of every submodule is put back, buffers included: tensors and numpy arrays by
content, random generators by state, lists, dicts, sets and deques by their items, objects of the
user's own classes, optimizers and schedules by their attributes, and all else by reference. A
module may hold the whole run, so changes inside of other objects stay. Parameters need nothing: no
optimizer runs, and manual steps put back what their code writes (``features/manual_step.py``).

[Note: private names of Lightning]
`self.log` writes to the epoch loop's `_results` while training, and refuses to when
`_current_fx_name` is None. Optimizers count steps in two hooks. All are replaced here and nowhere
else; tests/profiling/test_isolation.py fails when they change.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial, wraps
from typing import Any

import numpy as np
import torch
from lightning.pytorch.core.optimizer import do_nothing_closure
from lightning.pytorch.loggers.logger import DummyLogger
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from lightning_cephalo.accelerator import Accelerator
from lightning_cephalo.adapters.view import TrainerView
from lightning_cephalo.data.randomness import (
    GENERATOR_TYPES,
    preserved_randomness,
    read_states,
    write_states,
)
from lightning_cephalo.execution.overlay_slots import MOST_ITEMS, are_same, items_of, refill

_ATOMS = (bool, int, float, complex, str, bytes, type(None), type)
# of functions and modules, of loggers, and of configs that models fill in their first forward
_LIBRARIES = {"builtins", "functools", "lightning", "lightning_cephalo", "logging"}
_LIBRARIES |= {"pytorch_lightning", "torch", "torchmetrics", "transformers"}


@contextmanager
def isolated(view: TrainerView, accelerator: Accelerator) -> Iterator[Callable[[], None]]:
    """Undo what steps in a ``with`` block do to state, randomness, logs and gradients.

    Results and loggers are replaced by throwaway ones. Optimizers update nothing. Yields what puts
    back the state of modules meanwhile.
    """
    strategy = view.strategy
    schedules = [config.scheduler for config in strategy.lr_scheduler_configs]
    results = type(view.epoch_loop._results)(training=True)
    results.batch_size = 1  # of means over an epoch, which nobody reads
    throwaways: list[tuple[Any, str, Any]] = [
        (view.epoch_loop, "_results", results),
        (view.of, "loggers", [DummyLogger() for _ in view.loggers]),
        (view.of, "should_stop", view.of.should_stop),
        (view.module, "_current_fx_name", "training_step"),
    ]
    for own in strategy._lightning_optimizers:
        throwaways += [
            (own, name, do_nothing_closure) for name in ("_on_before_step", "_on_after_step")
        ]
    with ExitStack() as stack:
        stack.enter_context(preserved_randomness())
        stack.callback(accelerator.restore_random_states, accelerator.random_states())
        for owner, name, value in throwaways:
            stack.callback(setattr, owner, name, getattr(owner, name))
            setattr(owner, name, value)
        for optimizer in strategy.optimizers:  # a step would hold state, and take time
            names = vars(optimizer)
            stack.callback(refill, names, items_of(names))
            run = wraps(optimizer.step)  # schedules complain of a step without their mark
            names["step"] = run(lambda closure=None, *_, **__: closure and closure())
        saved = Saved(accelerator)
        saved.container(vars(view.connector("logger")))
        saved.reach(view.module, *strategy.optimizers, *schedules)
        stack.callback(saved.put_back)
        for parameter in view.module.parameters():
            # a step that fails between toggles of optimizers leaves it as it is
            stack.callback(parameter.requires_grad_, parameter.requires_grad)
        stack.callback(forget_gradients, view.module)
        yield saved.put_back


def forget_gradients(module: nn.Module) -> None:
    """Set the gradients of all parameters to None."""
    for parameter in module.parameters():
        parameter.grad = None


class Saved:
    """The contents of the objects that are reached from modules (note above)."""

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator
        self._seen: dict[int, Any] = {}
        self._restores: list[Callable[[], None]] = []

    def put_back(self) -> None:
        for put_back in self._restores:
            put_back()

    def reach(self, *values: Any) -> None:
        """Save values, and what can be reached from them."""
        for value in values:
            if isinstance(value, _ATOMS) or id(value) in self._seen:
                continue
            self._seen[id(value)] = value
            if isinstance(value, Tensor):
                self._tensor(value)
            elif isinstance(value, np.ndarray):
                if value.flags.writeable:  # else it may be a file of data that is mapped
                    self._restores.append(partial(np.copyto, value, value.copy()))
            elif isinstance(value, GENERATOR_TYPES):
                self._restores.append(partial(write_states, [value], read_states([value])))
            elif isinstance(value, (dict, list, deque, set)):
                self.container(value)
            elif isinstance(value, tuple):
                self.reach(*value[:MOST_ITEMS])
            elif isinstance(value, (nn.Module, Optimizer, LRScheduler)) or _is_plain(value):
                if isinstance(value, nn.Module):
                    # parameters switch between their sharded and their full form by themselves
                    self._seen[id(value._parameters)] = value._parameters
                # bypasses __setattr__: modules sort values by type there, frozen dataclasses raise
                self.container(vars(value))

    def container(self, container: Any) -> None:
        saved = items_of(container)

        def put_back() -> None:
            now = items_of(container)
            if len(now) != len(saved) or not are_same(now, saved):
                refill(container, saved)

        self._restores.append(put_back)
        if len(container) <= MOST_ITEMS:  # else it is data: items are put back, not their contents
            self.reach(*(container.values() if isinstance(container, dict) else saved))

    def _tensor(self, tensor: Tensor) -> None:
        if isinstance(tensor, (nn.Parameter, DTensor)) or tensor.is_meta:
            return
        shape = tensor.shape  # tensors that have none raise here, where nothing has run yet
        # on the host, since the device's memory is about to be measured
        with self._accelerator.on_host():
            saved = tensor.detach().to("cpu", copy=True)

        def put_back() -> None:
            with torch.inference_mode(tensor.is_inference()), torch.no_grad():
                if tensor.shape != shape:
                    tensor.data = torch.empty_like(saved, device=tensor.device)
                tensor.detach().copy_(saved)

        self._restores.append(put_back)


def _is_plain(value: Any) -> bool:
    """Whether an object is the user's own: a pool, a counter; not a dataset or a callback."""
    kinds = type(value).__mro__[:-1]  # without object
    is_users = _LIBRARIES.isdisjoint([kind.__module__.split(".")[0] for kind in kinds])
    return is_users and hasattr(value, "__dict__")


@contextmanager
def no_loaders_left(view: TrainerView) -> Iterator[None]:
    """Undo that ``estimated_stepping_batches`` deals the loaders, which the loop keeps."""
    loop, source = view.fit_loop, dict(vars(view.loader_source))
    combined = loop._combined_loader
    try:
        yield
    finally:
        loop._combined_loader = combined
        vars(loop._data_source).update(source)


def moved_to_device(view: TrainerView, batch: Any) -> Any:
    """Convert and move a batch as ``_TrainingEpochLoop.advance`` does, hooks included (a copy)."""
    batch = view.precision.convert_input(batch)
    batch = view.module._on_before_batch_transfer(batch, dataloader_idx=0)
    return view.strategy.batch_to_device(batch, dataloader_idx=0)
