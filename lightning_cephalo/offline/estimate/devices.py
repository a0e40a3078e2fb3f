"""The catalogue of devices (``devices.yaml``), and descriptions of others."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from importlib import resources
from typing import Any

from lightning_cephalo.common import files, records
from lightning_cephalo.common.errors import PlanError
from lightning_cephalo.common.quantities import BYTES, BYTES_PER_S, FLOPS_PER_S, parse_each

_MAKERS = re.compile(r"nvidia|geforce|tesla|quadro|generation|graphics|[^a-z0-9]")
# key in YAML -> field of Device, dimension
_KEYS = {
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
    fp16_flops_per_s: float
    bandwidth_bytes_per_s: float
    tf32_flops_per_s: float | None = None
    bf16_flops_per_s: float | None = None
    pcie_bytes_per_s: float = 15.75e9  # third generation, sixteen lanes
    source: str = ""
    aliases: tuple[str, ...] = ()
    like: str = ""
    price_per_hour: float | None = None

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
        rate: float | None = getattr(self, f"{dtype}_flops_per_s")
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
    return _by_key(own).get(_key(name))


def find_device(name: str, own: Iterable[Device] = (), *, where: str = "device") -> Device:
    """Return the same as :func:`lookup`, or raise PlanError with similar names."""
    known = _by_key(own)
    if _key(name) in known:
        return known[_key(name)]
    close = difflib.get_close_matches(_key(name), known, n=3)
    hint = ", ".join(dict.fromkeys(known[key].name for key in close))
    names = ", ".join(dict.fromkeys(device.name for device in known.values()))
    raise PlanError(
        f"{where}: expected a known device ({names}), but got {name!r}."
        f"{f' Did you mean {hint}?' if hint else ''} "
        f"Describe another one under devices: in cluster.yaml."
    )


def _by_key(own: Iterable[Device]) -> dict[str, Device]:
    """Return the devices by all of their names; the first of a name counts."""
    known: dict[str, Device] = {}
    for device in (*own, *CATALOGUE):
        for name in (device.name, *device.aliases):
            known.setdefault(_key(name), device)
    return known


def _key(name: str) -> str:
    return _MAKERS.sub("", name.casefold())


def described(name: str, data: Any, *, where: str, base: Device | None = None) -> Device:
    """Return a device as YAML describes it, or ``base`` with what it says otherwise."""
    required = () if base else ("memory", "fp32", "bandwidth")
    values = records.mapping(where, data, known=[*_KEYS, "price"], required=required)
    given: dict[str, Any] = parse_each(where, values, _KEYS)
    if given:
        given["source"] = "cluster.yaml"
    if "price" in values:
        given["price_per_hour"] = records.real(f"{where}: price", values["price"])
    if base is not None:
        return replace(base, **given)
    return Device(name, **{"fp16_flops_per_s": given["fp32_flops_per_s"], **given})


def read_data(name: str) -> Any:
    """Return what a YAML file of this folder holds."""
    content = resources.files(__package__).joinpath(name).read_text(encoding="utf-8")
    return files.parse_yaml(content, what="a catalogue", source=name)


def _of_catalogue(
    name: str, *, source: str, aliases: str = "", like: str = "", **figures: Any
) -> Device:
    device = described(name, figures, where=f"devices.yaml: {name}")
    names = tuple(filter(None, aliases.split(", ")))
    return replace(device, source=source, aliases=names, like=like)


CATALOGUE = tuple(_of_catalogue(name, **row) for name, row in read_data("devices.yaml").items())
