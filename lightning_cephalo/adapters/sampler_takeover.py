"""Keeps Lightning from putting a DistributedSampler into dataloaders that are dealt here."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lightning.pytorch import Trainer


class SamplerTakeover:
    """Takes over the insertion of samplers from a Trainer, until it is given back.

    Private: ``_accelerator_connector`` is the only way to get the user's own loader;
    tests/lightning/test_data_order.py fails when it changes.

    Attributes:
        deals: Whether dataloaders are dealt here. False if the user deals the samples and has set
            ``use_distributed_sampler=False``.
    """

    def __init__(self) -> None:
        self.deals = False
        self._is_taken = False

    def take(self, trainer: Trainer) -> None:
        """Take over; does nothing the second time."""
        connector = trainer._accelerator_connector
        if not self._is_taken:
            self.deals, self._is_taken = connector.use_distributed_sampler, True
        connector.use_distributed_sampler = False

    def give_back(self, trainer: Trainer) -> None:
        """Restore the Trainer's own setting."""
        if self._is_taken:
            trainer._accelerator_connector.use_distributed_sampler = self.deals
        self.deals = self._is_taken = False
