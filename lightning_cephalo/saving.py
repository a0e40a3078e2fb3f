"""Saves and loads checkpoints, which are those of one device, from and into shards."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from functools import partial
from typing import Any

from lightning.fabric.plugins import CheckpointIO
from torch.optim import Optimizer
from typing_extensions import override

from lightning_cephalo.accelerator import accelerator_of
from lightning_cephalo.adapters import checkpoint, checkpoint_io
from lightning_cephalo.adapters.resuming import KEY, Resumption, saved_order
from lightning_cephalo.connected import ConnectedStrategy
from lightning_cephalo.recovery.options import Wish
from lightning_cephalo.recovery.recovering import Recovering, rows_of_model, rows_of_optimizer


class SavingStrategy(ConnectedStrategy):
    """A strategy whose checkpoints are whole, and whose runs go on from kept steps."""

    def __init__(
        self,
        process_group_backend: str | None,
        timeout: timedelta,
        start_method: str,
        recover: Wish,
    ) -> None:
        super().__init__(process_group_backend, timeout, start_method)
        self._recovering = Recovering(recover)
        # from the loading of a checkpoint to teardown()
        self._resumption: Resumption | None = None

    @property
    @override
    def checkpoint_io(self) -> CheckpointIO:
        self._checkpoint_io = checkpoint_io.with_default(self._checkpoint_io)
        return self._checkpoint_io

    @checkpoint_io.setter
    def checkpoint_io(self, io: CheckpointIO) -> None:
        self._checkpoint_io = io

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        if self._recovering.is_dumping:
            self.session.model.executor.reshard()
            return rows_of_model(self._view, self._module)
        if self._resumption is not None:
            self._resumption.end()
        self._ending.refuse_alone("a checkpoint")
        self._ending.meet(
            "saving a checkpoint",
            "Every rank holds a part of it: call save_checkpoint() on every rank, not on rank 0"
            " alone. Rank 0 writes the file.",
        )
        if self._session is not None:
            self._session.model.executor.reshard()
        with accelerator_of(self.root_device).on_host():
            return checkpoint.full_state_dict(self._module, wanted=self.is_global_zero)

    @override
    def save_checkpoint(
        self, checkpoint_: dict[str, Any], filepath: Any, storage_options: Any = None
    ) -> None:
        if self._ranks is None:  # before the first run: nothing is sharded
            super().save_checkpoint(checkpoint_, filepath, storage_options)
            return
        with accelerator_of(self.root_device).on_host():
            whole = checkpoint.whole_checkpoint(
                checkpoint_, self.is_global_zero, self._connection.control
            )
        order = saved_order(self._view) if "optimizer_states" in checkpoint_ else None
        if order is not None and self.is_global_zero:
            whole[KEY] = order
        write = partial(super().save_checkpoint, whole, filepath, storage_options)
        self._connection.control.together(f"writing the checkpoint {filepath}", write)

    @override
    def load_checkpoint(
        self, checkpoint_path: Any, weights_only: bool | None = None
    ) -> dict[str, Any]:
        kept = self._recovering.of_file(checkpoint_path)
        if kept is not None:
            return kept
        # plugins written for Lightning 2.5 have no such argument
        given = {} if weights_only is None else {"weights_only": weights_only}
        read = partial(super().load_checkpoint, checkpoint_path, **given)
        if self._ranks is None:
            return read()
        self._ending.meet(
            "loading a checkpoint",
            "Call strategy.load_checkpoint() on every rank; one alone can call torch.load().",
        )
        return self._ranks.control.together(f"reading the checkpoint {checkpoint_path}", read)

    @override
    def load_model_state_dict(self, checkpoint_: Mapping[str, Any], strict: bool = True) -> None:
        if self._session is not None:
            self._session.model.executor.reshard()
        self._recovering.check_model(self._module, checkpoint_)
        checkpoint.load_full_state_dict(self._module, checkpoint_["state_dict"], strict)

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        if self._recovering.is_dumping:
            return rows_of_optimizer(optimizer)
        optimizer = getattr(optimizer, "_optimizer", optimizer)
        with accelerator_of(self.root_device).on_host():
            return checkpoint.full_optimizer_state(optimizer, wanted=self.is_global_zero)

    @override
    def load_optimizer_state_dict(self, checkpoint_: Mapping[str, Any]) -> None:
        self._recovering.resume_loops()
        if self._session is not None:  # behind a run of spawned ranks the module belongs to none
            self._resumption = Resumption(self._view, checkpoint_)
        states = list(checkpoint_["optimizer_states"])
        for optimizer, state in zip(self.optimizers, states, strict=False):
            if self._session is None:
                checkpoint.load_full_optimizer_state(optimizer, state)
            else:
                self._session.load_state(optimizer, state)
