"""Catalogue of devices, with figures from their public datasheets. Nothing here was measured.

Rates are dense (no sparsity). Rates for fp16 are those of matrix products that accumulate in fp32,
as torch's do. On GeForce cards this is half the rate of accumulating in fp16. Devices without
matrix units for fp16 (Pascal) list their fp32 rate for fp16, as cuBLAS computes such products in
fp32.

Memory is the driver's figure with ECC on if that is known, else the datasheet's.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from dataclasses import dataclass

from lightning_cephalo.common.errors import PlanError
from lightning_cephalo.common.quantities import GIB

DTYPES = ("fp32", "tf32", "fp16", "bf16")
_MAKERS = re.compile(r"nvidia|geforce|tesla|quadro|generation|graphics|[^a-z0-9]")
# PCIe generation -> bytes per second and direction of sixteen lanes, after encoding
_PCIE = {3: 15.75e9, 4: 31.5e9, 5: 63e9}


@dataclass(frozen=True)
class Device:
    """One kind of device.

    Attributes:
        name: canonical.
        memory_bytes: total memory.
        fp32_flops_per_s: without matrix units, which torch does not use for fp32 by default.
        tf32_flops_per_s: matrix units on fp32 numbers; None: the device has none.
        fp16_flops_per_s: accumulating in fp32.
        bf16_flops_per_s: None: the device does not support bf16.
        bandwidth_bytes_per_s: of its memory.
        pcie_bytes_per_s: to the host, each way.
        source: document with the figures.
        aliases: other names.
        like: name of a device with the same chip, whose efficiencies are used; "": none.
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
        rates = {
            "fp32": self.fp32_flops_per_s,
            "tf32": self.tf32_flops_per_s,
            "fp16": self.fp16_flops_per_s,
            "bf16": self.bf16_flops_per_s,
        }
        if dtype not in rates:
            raise PlanError(f"dtype: expected one of {', '.join(DTYPES)}, but got {dtype!r}.")
        rate = rates[dtype]
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


def _nvidia(
    name: str,
    memory_gib: float,
    fp32: float,
    tf32: float | None,
    fp16: float,
    bandwidth_gb: float,
    pcie: int,
    source: str,
    aliases: str = "",
    *,
    like: str = "",
) -> Device:
    """Make one row of the catalogue from GiB, TFLOP/s, GB/s and the generation of PCIe."""
    return Device(
        name=name,
        memory_bytes=memory_gib * GIB,
        fp32_flops_per_s=fp32 * 1e12,
        tf32_flops_per_s=tf32 * 1e12 if tf32 else None,
        fp16_flops_per_s=fp16 * 1e12,
        bf16_flops_per_s=fp16 * 1e12 if tf32 else None,  # both came with Ampere
        bandwidth_bytes_per_s=bandwidth_gb * 1e9,
        pcie_bytes_per_s=_PCIE[pcie],
        source=source,
        aliases=tuple(alias.strip() for alias in aliases.split(",") if alias.strip()),
        like=like,
    )


_GA102 = "NVIDIA Ampere GA102 GPU Architecture whitepaper"
_ADA = "NVIDIA Ada GPU Architecture whitepaper"
_V100 = "NVIDIA V100 datasheet"
_A100 = "NVIDIA A100 datasheet"
_H100 = "NVIDIA H100 datasheet"

# fmt: off
CATALOGUE: tuple[Device, ...] = (
    _nvidia("P100 12GB", 12, 9.3, None, 9.3, 549, 3, "NVIDIA Tesla P100 PCIe datasheet",
            "P100, P100-PCIE-12GB"),
    _nvidia("P100 16GB", 16, 9.3, None, 9.3, 732, 3, "NVIDIA Tesla P100 PCIe datasheet",
            "P100x16, P100-PCIE-16GB", like="P100 12GB"),
    _nvidia("P40", 22.5, 11.8, None, 11.8, 346, 3, "NVIDIA Tesla P40 datasheet"),
    _nvidia("GTX 1080 Ti", 11, 11.3, None, 11.3, 484, 3, "NVIDIA GeForce GTX 1080 Ti specification",
            "1080 Ti"),
    _nvidia("V100 16GB", 16, 15.7, None, 125, 900, 3, _V100,
            "V100, V100x16, V100-SXM2-16GB, V100 SXM"),
    _nvidia("V100 32GB", 32, 15.7, None, 125, 900, 3, _V100,
            "V100x32, V100-SXM2-32GB, V100-SXM3-32GB", like="V100 16GB"),
    _nvidia("V100 PCIe 16GB", 16, 14.0, None, 112, 900, 3, _V100,
            "V100-PCIEx16, V100-PCIE-16GB, V100 PCIe"),
    _nvidia("V100 PCIe 32GB", 32, 14.0, None, 112, 900, 3, _V100,
            "V100-PCIEx32, V100-PCIE-32GB", like="V100 PCIe 16GB"),
    _nvidia("T4", 15, 8.1, None, 65, 320, 3, "NVIDIA T4 datasheet"),
    _nvidia("RTX 2080 Ti", 11, 13.4, None, 53.8, 616, 3,
            "NVIDIA Turing GPU Architecture whitepaper", "2080 Ti"),
    _nvidia("Titan RTX", 24, 16.3, None, 130.5, 672, 3,
            "NVIDIA Turing GPU Architecture whitepaper"),
    _nvidia("A10", 22.5, 31.2, 62.5, 125, 600, 4, "NVIDIA A10 datasheet"),
    _nvidia("A10G", 22.49, 35.0, 35.0, 70, 600, 4, "NVIDIA A10G datasheet"),
    _nvidia("A30", 24, 10.3, 82, 165, 933, 4, "NVIDIA A30 datasheet"),
    _nvidia("A40", 45, 37.4, 74.8, 149.7, 696, 4, "NVIDIA A40 datasheet"),
    _nvidia("A6000", 47.99, 38.7, 77.4, 154.8, 768, 4, "NVIDIA RTX A6000 datasheet",
            "RTX A6000"),
    _nvidia("A5000", 24, 27.8, 55.6, 111.1, 768, 4, "NVIDIA RTX A5000 datasheet",
            "RTX A5000"),
    _nvidia("A100 40GB", 39.5, 19.5, 156, 312, 1555, 4, _A100,
            "A100, A100x40, A100-SXM4-40GB, A100-PCIE-40GB"),
    _nvidia("A100 80GB", 79.2, 19.5, 156, 312, 2039, 4, _A100,
            "A100x80, A100-SXM4-80GB", like="A100 40GB"),
    _nvidia("A100 PCIe 80GB", 79.2, 19.5, 156, 312, 1935, 4, _A100,
            "A100 80GB PCIe, A100-PCIE-80GB", like="A100 40GB"),
    _nvidia("RTX 3080", 10, 29.8, 29.8, 59.5, 760, 4, _GA102, "3080"),
    _nvidia("RTX 3090", 24, 35.6, 35.6, 71.2, 936, 4, _GA102, "3090"),
    _nvidia("RTX 3090 Ti", 24, 40.0, 40.0, 80.0, 1008, 4, _ADA, "3090 Ti"),
    _nvidia("RTX 4080", 16, 48.7, 48.7, 97.5, 717, 4, _ADA, "4080"),
    _nvidia("RTX 4090", 24, 82.6, 82.6, 165.2, 1008, 4, _ADA, "4090"),
    _nvidia("RTX 6000 Ada", 48, 91.1, 182.1, 364.2, 960, 4, _ADA, "6000 Ada"),
    _nvidia("L4", 22.5, 30.3, 60, 121, 300, 4, "NVIDIA L4 datasheet"),
    _nvidia("L40", 45, 90.5, 90.5, 181, 864, 4, "NVIDIA L40 datasheet"),
    _nvidia("L40S", 45, 91.6, 183, 362, 864, 4, "NVIDIA L40S datasheet"),
    _nvidia("RTX 5090", 32, 104.8, 104.8, 209.5, 1792, 5,
            "NVIDIA RTX Blackwell GPU Architecture whitepaper", "5090"),
    _nvidia("H100 SXM", 79.6, 66.9, 494.7, 989.4, 3350, 5, _H100,
            "H100, H100 80GB HBM3, H100 SXM5"),
    _nvidia("H100 PCIe", 79.6, 51.2, 378, 756, 2000, 5, _H100, "H100 PCIe 80GB"),
    _nvidia("H100 NVL", 93.6, 60, 417.5, 835.5, 3900, 5, _H100, "NVL, H100-NVL"),
    _nvidia("H200", 140.4, 66.9, 494.7, 989.4, 4800, 5, "NVIDIA H200 datasheet",
            "H200 SXM, H200 141GB HBM3e"),
)
# fmt: on
