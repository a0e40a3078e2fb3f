"""Imports the profiles published with Cephalo (``benson-guo/cephalo``, MIT).

They hold times and memory of one layer, as JSON. They are read from the user's folder and are not
part of this package. The folder holds three files::

    model_latencies.json  [model][device][sequence length][dtype] = one of
        [[f slope, f intercept], [g slope, g intercept], f at sizes 1..k, g at sizes 1..k]   (ms)
        [[f slope, f intercept], [g slope, g intercept]]
        [slope, intercept], or slope             (forward and backward together, an older form)
    model_memory.json     [cluster][model] = {parameters, profiled_compute_memory: {dtype: GiB}}
    model_stats.json      [model] = {num_layers, total_parameters, ...}

The published backward g is without recompute. The backward here is with recompute, f + g, as the
release also computes it.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

from lightning_cephalo.common import files, records
from lightning_cephalo.common.errors import PlanError
from lightning_cephalo.common.quantities import GIB
from lightning_cephalo.offline.estimate.devices import lookup, same_name
from lightning_cephalo.plan import Links, Problem, RankProfile, StateBytes
from paper.release import Line, as_mapping, as_points, expect_known, read_lines

# fp32 parameter, gradient, and both moments of Adam
_STATE_BYTES_PER_PARAMETER = 16
_DTYPES = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}
# The release calls these GB but compares them with GiB, so they are GiB.
_CAPACITY_GIB = {
    "a6000": 47.99,
    "l4": 22.5,
    "p40": 22.5,
    "a10g": 22.49,
    "v100": 16.0,
    "v100x16": 16.0,
    "v100-pciex16": 16.0,
    "v100x32": 32.0,
    "t4": 15.0,
    "p100": 12.0,
    "rtx3090": 24.0,
    "a100x40": 40.0,
    "a100x80": 80.0,
    "h100-nvl": 94.0,
}


@dataclass(frozen=True)
class PublishedModelEntry:
    """The devices with published times of a model in one dtype at one sequence length."""

    model: str
    dtype: str
    sequence_length: int
    devices: tuple[str, ...]


@dataclass(frozen=True)
class UnitTimes:
    """Seconds of one unit at microbatch sizes 1, 2, ...; the backward is with recompute.

    The first ``measured_sizes`` were measured, the others come from the published line.
    """

    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]
    measured_sizes: int


def read_published(folder: str | PathLike[str]) -> PublishedProfiles:
    """Read the three files of a folder.

    Raises:
        PlanError: a file is missing, cannot be read, or does not hold a JSON mapping.
    """
    root = Path(folder)
    contents = []
    for name in ("model_latencies.json", "model_memory.json", "model_stats.json"):
        path = root / name
        what = "profiles published with Cephalo"
        data = files.parse_json(files.read_text(path, what=what), what=what, source=str(path))
        contents.append(as_mapping(str(path), data))
    return PublishedProfiles(str(root), *contents)


@dataclass(frozen=True)
class PublishedProfiles:
    """The contents of the three files; entries are checked when they are used.

    Names are those of the files (``"deepspeedgpt_2.7b"``, ``"l4"``). A device may also be written
    as elsewhere in this package (``"L4"``, ``"V100 16GB"``). Dtypes are ``"fp32"``, ``"fp16"`` or
    ``"bf16"``, or torch's names.

    Every method raises PlanError for unknown names and for entries that are not finite numbers.
    The message gives the field, the value, and the known names.
    """

    source: str
    latencies: Mapping[str, Any]
    memory: Mapping[str, Any]
    statistics: Mapping[str, Any]

    def entries(self) -> tuple[PublishedModelEntry, ...]:
        """List every model, dtype and sequence length with times, and the devices with them."""
        found: dict[tuple[str, str, int], list[str]] = {}
        for model, by_device in self.latencies.items():
            where = self._where("model_latencies.json", model)
            for device, by_length in as_mapping(where, by_device).items():
                for length, by_dtype in as_mapping(f"{where}[{device!r}]", by_length).items():
                    for dtype in as_mapping(f"{where}[{device!r}][{length!r}]", by_dtype):
                        if not str(length).isdigit():
                            raise PlanError(
                                f"{where}[{device!r}]: expected sequence lengths as keys, "
                                f"but got {length!r}."
                            )
                        key = (model, _short_dtype(dtype), int(length))
                        found.setdefault(key, []).append(device)
        return tuple(PublishedModelEntry(*key, tuple(names)) for key, names in found.items())

    def times(
        self, model: str, device: str, dtype: str, sequence_length: int, largest: int
    ) -> UnitTimes:
        """Return the seconds of one unit at microbatch sizes 1 to ``largest``.

        Measured points are taken as they are, dips included, as some dips are not noise (ViT-e on
        P40 takes longer for 4 samples than for 5). The line holds beyond them, or if nothing was
        measured. On the line, no size takes less than a smaller or a measured one. A line with a
        negative intercept may start below zero. Sizes with a time of zero or less get the time of
        the first size with a positive one.
        """
        largest = records.whole("largest", largest, minimum=1)
        forward, backward, measured = self._lines(model, device, dtype, sequence_length)
        unit_f, unit_g = (line.seconds(largest) for line in (forward, backward))
        return UnitTimes(
            unit_f, tuple(f + g for f, g in zip(unit_f, unit_g, strict=True)), measured
        )

    def compute_bytes(
        self, model: str, dtype: str, largest: int, *, memory: str = "paper"
    ) -> tuple[float, ...]:
        """Return the peak without the state at microbatch sizes 1 to ``largest``, in bytes.

        It is equal on all devices. Beyond the profiled sizes the curve continues with the mean
        growth of the last (up to) five, as in the release.
        """
        entry = self._memory_entry(model, memory)
        where = f"{self._where('model_memory.json', memory)}[{model!r}]"
        curves = as_mapping(
            f"{where}: profiled_compute_memory", entry.get("profiled_compute_memory")
        )
        known = [_short_dtype(name) for name in curves]
        expect_known(f"{where}: dtype", _short_dtype(dtype), known)
        name = f"{where}: profiled_compute_memory[{_long_dtype(dtype)!r}]"
        points = as_points(name, curves[_long_dtype(dtype)])
        if not points:
            raise PlanError(f"{name}: expected at least one number of GiB, but got none.")
        last = points[-5:]
        growth = (last[-1] - last[0]) / (len(last) - 1) if len(last) > 1 else last[0]
        beyond = range(1, largest - len(points) + 1)
        extended = [*points, *(points[-1] + max(growth, 0.0) * more for more in beyond)]
        return tuple(GIB * point for point in extended[:largest])

    def units(self, model: str) -> int:
        """Return the number of layers."""
        expect_known(f"{self.source}: model_stats.json: model", model, self.statistics)
        where = self._where("model_stats.json", model)
        entry = as_mapping(where, self.statistics[model])
        return records.whole(f"{where}: num_layers", entry.get("num_layers"), minimum=1)

    def state_bytes(self, model: str, *, memory: str = "paper") -> float:
        """Return the bytes of the training state: 16 per parameter of the memory profile."""
        where = f"{self._where('model_memory.json', memory)}[{model!r}]: parameters"
        parameters = self._memory_entry(model, memory).get("parameters")
        return _STATE_BYTES_PER_PARAMETER * records.real(where, parameters, above_minimum=True)

    def problem(
        self,
        *,
        model: str,
        dtype: str,
        devices: Sequence[str],
        global_batch_size: int,
        sequence_length: int = 512,
        memory: str = "paper",
        gather_s: float = 0.0,
        reduce_s: float = 0.0,
        memory_share: float = 1.0,
        overhead_bytes: float = 2 * GIB,
    ) -> Problem:
        """Return the planning problem of a cluster.

        Tail, optimizer and boundary activations (which the release offloads) are not published and
        count as zero. Curves end at the largest size that fits a rank's memory.

        Args:
            model: as in the files.
            dtype: of compute.
            devices: one per rank, in rank order.
            global_batch_size: samples of one step.
            sequence_length: tokens of one sample.
            memory: the cluster whose memory profile is used.
            gather_s: of one unit.
            reduce_s: of one unit.
            memory_share: part of each device's memory that a rank may use; the release plans with
                0.75 (and ``published()`` applies its own share to the result).
            overhead_bytes: held by every rank in addition to state and compute; 2 GiB in the
                release.
        """
        batch = records.whole("global_batch_size", global_batch_size, minimum=1)
        share = records.real("memory_share", memory_share, above_minimum=True)
        names = records.items("devices", devices, of="device names")
        peaks = self.compute_bytes(model, dtype, batch, memory=memory)
        ranks: dict[str, RankProfile] = {}
        for name in names:
            if name not in ranks:
                times = self.times(
                    model, records.text("devices", name), dtype, sequence_length, batch
                )
                capacity = share * _capacity_bytes(name)
                # a curve has no gaps: a size counts only if all smaller ones fit too
                usable = sum(
                    peak <= capacity - overhead_bytes for peak in itertools.accumulate(peaks, max)
                )
                ranks[name] = RankProfile(
                    name=_canonical(name),
                    forward_s=times.forward_s[:usable],
                    backward_s=times.backward_s[:usable],
                    tail_s=(0.0,) * usable,
                    compute_bytes=peaks[:usable],
                    capacity_bytes=capacity,
                )
        return Problem(
            tuple(ranks[name] for name in names),
            units=self.units(model),
            links=Links(gather_s, reduce_s),
            state=StateBytes(self.state_bytes(model, memory=memory)),
            global_batch_size=batch,
            gathered_bytes=overhead_bytes,
        )

    def _lines(
        self, model: str, device: str, dtype: str, sequence_length: int
    ) -> tuple[Line, Line, int]:
        expect_known(f"{self.source}: model_latencies.json: model", model, self.latencies)
        where = self._where("model_latencies.json", model)
        by_device = as_mapping(where, self.latencies[model])
        key = device if device in by_device else _alias(device, by_device)
        expect_known(f"{where}: device", key, by_device)
        where = f"{where}[{key!r}]"
        by_length = as_mapping(where, by_device[key])
        expect_known(f"{where}: sequence length", str(sequence_length), by_length)
        where = f"{where}[{str(sequence_length)!r}]"
        by_dtype = as_mapping(where, by_length[str(sequence_length)])
        known = [_short_dtype(name) for name in by_dtype]
        expect_known(f"{where}: dtype", _short_dtype(dtype), known)
        where = f"{where}[{_long_dtype(dtype)!r}]"
        return read_lines(where, by_dtype[_long_dtype(dtype)])

    def _memory_entry(self, model: str, memory: str) -> Mapping[str, Any]:
        expect_known(f"{self.source}: model_memory.json: memory", memory, self.memory)
        where = self._where("model_memory.json", memory)
        by_model = as_mapping(where, self.memory[memory])
        expect_known(f"{where}: model", model, by_model)
        return as_mapping(f"{where}[{model!r}]", by_model[model])

    def _where(self, file: str, key: str) -> str:
        return f"{Path(self.source) / file}: [{key!r}]"


def _short_dtype(name: str) -> str:
    return next((short for short, long in _DTYPES.items() if name == long), name)


def _long_dtype(name: str) -> str:
    return _DTYPES.get(name, name)


def _alias(device: str, known: Iterable[str]) -> str:
    return next((name for name in known if same_name(device, name)), device)


def _canonical(device: str) -> str:
    found = lookup(device)
    return found.name if found else device


def _capacity_bytes(device: str) -> float:
    key = device if device in _CAPACITY_GIB else _alias(device, _CAPACITY_GIB)
    if key in _CAPACITY_GIB:
        return _CAPACITY_GIB[key] * GIB
    found = lookup(device)
    if found is None:
        expect_known("devices", device, _CAPACITY_GIB)
        raise AssertionError("unreachable")
    return found.memory_bytes
