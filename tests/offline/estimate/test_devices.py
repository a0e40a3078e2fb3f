"""The catalogue of datasheets."""

from __future__ import annotations

import itertools
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from lightning_cephalo.offline.estimate.devices import CATALOGUE, find_device, lookup, same_name
from lightning_cephalo.plan import PlanError


def test_figures_are_of_the_right_order():
    for device in CATALOGUE:
        assert 8 * 2**30 <= device.memory_bytes <= 200 * 2**30, device
        assert 5e12 < device.fp32_flops_per_s < 150e12, device
        assert device.fp32_flops_per_s <= device.fp16_flops_per_s < 1.1e15, device
        assert 200e9 < device.bandwidth_bytes_per_s < 6e12, device
        assert device.source, device
        # tensor cores: fp16 is twice tf32, and bf16 came with it
        tf32 = device.tf32_flops_per_s
        assert (tf32 is None) == (device.bf16_flops_per_s is None), device
        if tf32 is not None:
            assert device.fp16_flops_per_s == pytest.approx(2 * tf32, rel=0.03), device
        assert not device.like or lookup(device.like).name == device.like, device


def test_every_name_means_one_device():
    for one, other in itertools.combinations(CATALOGUE, 2):
        names = {one.name, *one.aliases}
        for name in (other.name, *other.aliases):
            assert not any(same_name(name, known) for known in names), (one.name, name)


@pytest.mark.parametrize(
    ("name", "canonical"),
    [
        ("NVIDIA GeForce RTX 3090", "RTX 3090"),
        ("a10g", "A10G"),
        ("v100x16", "V100 16GB"),
        ("v100x32", "V100 32GB"),
        ("v100-pciex16", "V100 PCIe 16GB"),
        ("t4", "T4"),
        ("Tesla T4", "T4"),
        ("Tesla V100-SXM2-16GB", "V100 16GB"),
        ("NVIDIA A100-SXM4-40GB", "A100 40GB"),
        ("NVIDIA A100-SXM4-80GB", "A100 80GB"),
        ("NVIDIA H100 80GB HBM3", "H100 SXM"),
        ("h100-nvl", "H100 NVL"),
        ("NVIDIA RTX A6000", "A6000"),
        ("NVIDIA RTX 6000 Ada Generation", "RTX 6000 Ada"),
        ("Tesla P100-PCIE-16GB", "P100 16GB"),
        ("NVIDIA H200", "H200"),
        ("rtx4090", "RTX 4090"),
    ],
)
def test_devices_are_known_by_what_drivers_and_people_call_them(name, canonical):
    assert find_device(name).name == canonical


def test_an_unknown_device_brings_the_close_ones():
    with pytest.raises(PlanError, match="got 'A1000G'") as caught:
        find_device("A1000G")
    assert "A10G" in str(caught.value)
    assert lookup("A1000G") is None


def test_a_dtype_that_a_device_lacks_is_refused():
    with pytest.raises(PlanError, match=r"'V100 16GB'.*'bf16'"):
        find_device("V100").peak_flops_per_s("bf16")


def test_the_installed_package_has_its_data_files(tmp_path):
    root = Path(__file__).parents[3]
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(root / name, tmp_path)
    package = shutil.copytree(root / "lightning_cephalo", tmp_path / "lightning_cephalo")
    build = [
        "-c",
        "from setuptools import setup; setup()",
        "-q",
        "build_py",
        "--build-lib",
        "built",
    ]
    subprocess.run([sys.executable, *build], cwd=tmp_path, check=True)
    data = {
        path.relative_to(package)
        for path in package.rglob("*")
        if path.is_file() and path.suffix not in (".py", ".pyc")
    }
    assert {"devices.yaml", "efficiencies.yaml", "page.html"} <= {path.name for path in data}
    installed = tmp_path / "built" / "lightning_cephalo"
    assert all((installed / path).is_file() for path in data)
