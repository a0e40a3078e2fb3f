"""Efficiencies fitted to the profiles published with Cephalo (ICS 2025).

The profiles are 279 curves of 14 models on 13 devices; their fp16 is autocast's. Printed by
``python benchmarks/estimates.py`` on 2026-11-21: do not edit, fit again. A device's error is the
error on models left out of the fit. The error of a pool ("") is the error on chips left out.
"""

from __future__ import annotations

from lightning_cephalo.offline.estimate.analytic import Efficiency, Error

FITTED = (
    Efficiency("", "fp32", 0.789, 0.638, Error(0.2, 0.36)),
    Efficiency("A100 40GB", "fp32", 0.957, 0.608, Error(0.03, 0.06)),
    Efficiency("H100 NVL", "fp32", 0.704, 0.642, Error(0.03, 0.07)),
    Efficiency("P100 12GB", "fp32", 0.739, 0.722, Error(0.11, 0.25)),
    Efficiency("P40", "fp32", 0.601, 0.717, Error(0.13, 0.38)),
    Efficiency("T4", "fp32", 0.56, 1.082, Error(0.08, 0.34)),
    Efficiency("V100 16GB", "fp32", 0.897, 0.931, Error(0.04, 0.12)),
    Efficiency("V100 32GB", "fp32", 0.892, 0.901, Error(0.06, 0.12)),
    Efficiency("V100 PCIe 16GB", "fp32", 0.966, 0.652, Error(0.24, 0.25)),
    Efficiency("", "fp32 shared", 0.47, 1.041, Error(0.18, 0.36)),
    Efficiency("A10G", "fp32 shared", 0.542, 1.088, Error(0.07, 0.14)),
    Efficiency("A6000", "fp32 shared", 0.522, 1.222, Error(0.07, 0.16)),
    Efficiency("L4", "fp32 shared", 0.316, 1.536, Error(0.19, 0.34)),
    Efficiency("L40S", "fp32 shared", 0.412, 1.086, Error(0.07, 0.15)),
    Efficiency("", "half", 0.77, 0.478, Error(0.22, 0.38)),
    Efficiency("A100 40GB", "half", 0.951, 0.52, Error(0.04, 0.14)),
    Efficiency("A100 80GB", "half", 0.915, 0.541, Error(0.03, 0.13)),
    Efficiency("A10G", "half", 1.048, 0.541, Error(0.04, 0.13)),
    Efficiency("A6000", "half", 1.01, 0.46, Error(0.11, 0.26)),
    Efficiency("H100 NVL", "half", 0.562, 0.47, Error(0.05, 0.16)),
    Efficiency("L4", "half", 0.757, 0.514, Error(0.14, 0.33)),
    Efficiency("P100 12GB", "half", 0.818, 0.34, Error(0.06, 0.12)),
    Efficiency("P40", "half", 0.582, 0.481, Error(0.13, 0.3)),
    Efficiency("T4", "half", 0.712, 0.259, Error(0.13, 0.37)),
    Efficiency("V100 16GB", "half", 0.841, 0.574, Error(0.09, 0.54)),
    Efficiency("V100 PCIe 16GB", "half", 0.833, 0.444, Error(0.07, 0.1)),
)
