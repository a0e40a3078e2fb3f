"""The catalogue of devices (``devices.yaml``), and descriptions of others."""

from __future__ import annotations

import dataclasses
import difflib
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib import resources
from typing import Any

from lightning_cephalo.common import files, records
from lightning_cephalo.common.errors import PlanError
from lightning_cephalo.common.quantities import BYTES, BYTES_PER_S, FLOPS_PER_S, Dimension

DTYPES = ("fp32", "tf32", "fp16", "bf16")
_MAKERS = re.compile(r"nvidia|geforce|tesla|quadro|generation|graphics|[^a-z0-9]")
_PCIE_BYTES_PER_S = 15.75e9  # third generation, sixteen lanes
# key in YAML -> field of Device, dimension
KEYS: dict[str, tuple[str, Dimension]] = {
    "memory": ("memory_bytes", BYTES),
    "fp32": ("fp32_flops_per_s", FLOPS_PER_S),
    "tf32": ("tf32_flops_per_s", FLOPS_PER_S),
    "fp16": ("fp16_flops_per_s", FLOPS_PER_S),
    "bf16": ("bf16_flops_per_s", FLOPS_PER_S),
    "bandwidth": ("bandwidth_bytes_per_s", BYTES_PER_S),
    "pcie": ("pcie_bytes_per_s", BYTES_PER_S),
}


@dataclass(frozen=True)
class Device:
    """One kind of device.

    fp32 is without matrix units, as torch computes it by default; fp16 accumulates in fp32. None:
    the device has no tf32 or bf16. ``pcie_bytes_per_s`` is to the host, each way. ``like`` names a
    device with the same chip, whose efficiencies are used.
    """

    name: str
    memory_bytes: float
    fp32_flops_per_s: float
    tf32_flops_per_s: float | None
    fp16_flops_per_s: float
    bf16_flops_per_s: float | None
    bandwidth_bytes_per_s: float
    pcie_bytes_per_s: float
    source: str = ""
    aliases: tuple[str, ...] = ()
    like: str = ""

    @property
    def shares_fp32_units(self) -> bool:
        """Whether half of the fp32 units are also the integer units (GA10x, Ada, RTX Blackwell).

        Matrix products then reach about half of the datasheet's fp32 rate. Such devices have matrix
        units that are hardly faster than fp32; on A100 and H100 they are seven times as fast.
        """
        return self.tf32_flops_per_s is not None and (
            self.tf32_flops_per_s < 3 * self.fp32_flops_per_s
        )

    def peak_flops_per_s(self, dtype: str) -> float:
        """Return the datasheet's rate of matrix products in ``dtype``, or raise PlanError."""
        if dtype not in DTYPES:
            raise PlanError(f"dtype: expected one of {', '.join(DTYPES)}, but got {dtype!r}.")
        rate: float | None = getattr(self, KEYS[dtype][0])
        if rate is None:
            raise PlanError(
                f"device {self.name!r}: expected a dtype that it computes in, but got {dtype!r}. "
                f"Use fp16 or fp32, or give its rate under devices: in cluster.yaml."
            )
        return rate


def same_name(one: str, other: str) -> bool:
    """Whether two names are spellings of the same kind of device."""
    if _key(one) == _key(other):
        return True
    found = lookup(one)
    return found is not None and found == lookup(other)


def lookup(name: str, own: Iterable[Device] = ()) -> Device | None:
    """Return the device of that name, from ``own`` first; None if there is none."""
    key = _key(name)
    for device in (*own, *CATALOGUE):
        if key in {_key(known) for known in (device.name, *device.aliases)}:
            return device
    return None


def find_device(name: str, own: Iterable[Device] = (), *, where: str = "device") -> Device:
    """Return the same as :func:`lookup`, or raise PlanError with similar names."""
    own = tuple(own)
    found = lookup(name, own)
    if found is not None:
        return found
    names = [device.name for device in (*own, *CATALOGUE)]
    known = {_key(known): d.name for d in (*own, *CATALOGUE) for known in (d.name, *d.aliases)}
    close = difflib.get_close_matches(_key(name), known, n=3)
    hint = (
        f"Did you mean {', '.join(dict.fromkeys(known[key] for key in close))}? " if close else ""
    )
    raise PlanError(
        f"{where}: expected a known device ({', '.join(names)}), but got {name!r}. "
        f"{hint}Describe another one under devices: in cluster.yaml."
    )


def _key(name: str) -> str:
    return _MAKERS.sub("", name.casefold())


def described(name: str, data: Any, *, where: str, base: Device | None = None) -> Device:
    """Return a device as YAML describes it, or ``base`` with what it says otherwise."""
    known, required = list(KEYS), () if base else ("memory", "fp32", "bandwidth")
    values = records.mapping(where, data, known=known, required=required)
    given: dict[str, Any] = {
        KEYS[key][0]: KEYS[key][1].parse(f"{where}: {key}", value) for key, value in values.items()
    }
    if base is not None:
        return dataclasses.replace(base, **given, source="cluster.yaml")
    rest: dict[str, Any] = {
        "tf32_flops_per_s": None,
        "fp16_flops_per_s": given["fp32_flops_per_s"],
        "bf16_flops_per_s": None,
        "pcie_bytes_per_s": _PCIE_BYTES_PER_S,
    }
    return Device(name=name, source="cluster.yaml", **(rest | given))


def read_data(name: str) -> Any:
    """Return what a YAML file of this folder holds."""
    content = resources.files(__package__).joinpath(name).read_text(encoding="utf-8")
    return files.parse_yaml(content, what="a catalogue", source=name)


def _read_catalogue() -> Iterator[Device]:
    for name, row in read_data("devices.yaml").items():
        where = f"devices.yaml: {name}"
        texts: dict[str, Any] = {
            key: records.text(f"{where}: {key}", row.pop(key, ""))
            for key in ("source", "aliases", "like")
        }
        texts["aliases"] = tuple(filter(None, texts["aliases"].split(", ")))
        yield dataclasses.replace(described(name, row, where=where), **texts)


CATALOGUE = tuple(_read_catalogue())
