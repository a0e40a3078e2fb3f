"""Where the steps of a training are kept, and who keeps them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lightning_cephalo.adapters.view import TrainerView
from lightning_cephalo.ranks.control import ControlGroup
from lightning_cephalo.recovery.lookup import Inventory
from lightning_cephalo.recovery.options import Recovery
from lightning_cephalo.recovery.storage import Committed, Storage
from lightning_cephalo.recovery.store import Store


@dataclass
class Place:
    """The place of a training's kept steps; ``sent`` are those that the storage has."""

    view: TrainerView
    control: ControlGroup
    recovery: Recovery
    store: Store
    inventory: Inventory
    storage: Storage | None = None
    sent: Sequence[Committed] = ()
