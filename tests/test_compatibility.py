"""docs/compatibility.md speaks of every feature of Lightning, and names tests that exist."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest
from lightning.pytorch import (
    Callback,
    LightningDataModule,
    LightningModule,
    Trainer,
    loggers,
    plugins,
    profilers,
)
from lightning.pytorch import callbacks as lightnings

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "compatibility.md"
WORDS = {"same", "ranks", "differs", "refused"}


def rows() -> dict[str, list[list[str]]]:
    """The cells of every row, by the heading of their section."""
    found: dict[str, list[list[str]]] = {}
    for section in PAGE.read_text().split("\n## ")[1:]:
        heading, _, text = section.partition("\n")
        lines = [line for line in text.splitlines() if line.startswith("| `")]
        found[heading] = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]
    return found


def names(cell: str) -> set[str]:
    return set(re.findall(r"`(\w+)`", cell))


def hooks() -> set[str]:
    kinds = (Callback, LightningModule, LightningDataModule)
    return {name for kind in kinds for name in dir(kind) if name.startswith("on_")}


FEATURES = {
    "Arguments of the Trainer": set(inspect.signature(Trainer.__init__).parameters) - {"self"},
    "Callbacks": set(lightnings.__all__),
    "Loggers": set(loggers.__all__),
    "Profilers": set(profilers.__all__),
    "Plugins": set(plugins.__all__),
    "Steps": {n for n in dir(LightningModule) if n.endswith("_step")} - hooks() - {"global_step"},
    "Hooks of modules, callbacks and datamodules": hooks(),
}


@pytest.mark.parametrize("section", FEATURES)
def test_every_feature_of_lightning_has_a_row_and_every_row_a_test(section):
    told: list[str] = []
    for features, what, tests in rows()[section]:
        assert re.split(r"\W", what)[0] in WORDS, features
        assert names(tests), features
        told += sorted(names(features))
    assert len(told) == len(set(told))
    # an older Lightning lacks some of those that have rows
    assert set(told) >= FEATURES[section]


def test_the_tests_of_every_row_exist():
    existing = set()
    for path in (ROOT / "tests").rglob("test_*.py"):
        existing |= set(re.findall(r"def (test_\w+)", path.read_text()))
    cited = {name for section in rows().values() for row in section for name in names(row[2])}
    assert cited and cited <= existing
