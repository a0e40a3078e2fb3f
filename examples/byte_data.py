"""The source code of Python's standard library, as bytes: real text that every machine has."""

import sysconfig
from pathlib import Path

import numpy
import torch
from lightning.pytorch import LightningDataModule
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

# tests, packages of others, and tables rather than code
SKIPPED_FOLDERS = {
    "site-packages",
    "dist-packages",
    "test",
    "tests",
    "idle_test",
    "encodings",
    "pydoc_data",
}


def standard_library_files() -> list[Path]:
    """Return the library's Python files, in an order that depends only on their names."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files = (file.relative_to(root) for file in root.rglob("*.py"))
    return [root / file for file in sorted(files) if not SKIPPED_FOLDERS & set(file.parts)]


class RandomCrops(Dataset[tuple[Tensor, Tensor]]):
    """``length`` crops of ``context`` bytes, each with the bytes that follow; fixed by index."""

    def __init__(self, text: Tensor, context: int, length: int, seed: int) -> None:
        if len(text) <= context:
            raise ValueError(
                f"got {len(text)} bytes of text, expected more than context={context}; "
                "choose a smaller context"
            )
        self.text = text
        self.context = context
        self.length = length
        self.seed = seed

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        # a generator for each index: samples depend neither on workers nor on ranks
        random = numpy.random.default_rng((self.seed, index))
        start = int(random.integers(len(self.text) - self.context))
        crop = self.text[start : start + self.context + 1].long()
        return crop[:-1], crop[1:]


class StandardLibraryBytes(LightningDataModule):
    """Crops of the standard library; every twentieth file is used for validation only.

    ``batch_size`` has Lightning's usual meaning: the global batch is ``batch_size`` times the
    number of ranks.
    """

    def __init__(
        self,
        batch_size: int,
        context: int = 128,
        training_samples: int = 200_000,
        validation_samples: int = 64,
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.batch_size = batch_size
        self.context = context
        self.training_samples = training_samples
        self.validation_samples = validation_samples
        self.seed = seed

    def setup(self, stage: str) -> None:
        files = [file.read_bytes() for file in standard_library_files()]
        kept_apart = b"".join(files[::20])
        del files[::20]
        self.training = self.crops(b"".join(files), self.training_samples, self.seed)
        self.validation = self.crops(kept_apart, self.validation_samples, self.seed + 1)

    def crops(self, text: bytes, length: int, seed: int) -> RandomCrops:
        # bytearray: torch warns about memory that is not writable
        as_tensor = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        return RandomCrops(as_tensor, self.context, length, seed)

    def train_dataloader(self) -> DataLoader:
        return DataLoader(self.training, batch_size=self.batch_size, shuffle=True, drop_last=True)

    def val_dataloader(self) -> DataLoader:
        return DataLoader(self.validation, batch_size=self.batch_size)
