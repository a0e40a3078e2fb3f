"""Fits the efficiencies of lightning_cephalo/offline/estimate to published profiles.

    python benchmarks/estimates.py [folder with model_latencies.json]

Prints the rows of lightning_cephalo/offline/estimate/efficiencies.yaml. Also prints the errors of
estimates on devices and on models that the fit did not see.
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from paper.fits import Measurement, fit, relative_errors
from paper.profiles import read_published

from lightning_cephalo.offline.estimate.analytic import (
    Efficiency,
    Error,
    find_efficiency,
    kind_of,
)
from lightning_cephalo.offline.estimate.devices import find_device
from lightning_cephalo.offline.estimate.models import work_of
from lightning_cephalo.offline.estimate.work import ModelWork
from lightning_cephalo.plan.curves import Curves

DATA = Path(__file__).resolve().parents[2] / "shared/data/cephalo-profiles"
LARGEST = 16  # microbatch size
LINE = 4  # number of sizes that a published line was fitted to, if only the line is published
LONG = {"fp32": "float32", "fp16": "float16"}


def _gpt(hidden: int, heads: int) -> dict:
    return {"n_embd": hidden, "n_head": heads, "n_layer": 2, "attn_implementation": "eager"}


def _wide(hidden: int, heads: int, intermediate: int) -> dict:
    return {
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "intermediate_size": intermediate,
        "num_hidden_layers": 2,
    }


def _eager(*sizes: int) -> dict:
    return _wide(*sizes) | {"attn_implementation": "eager"}


# Shapes of the release's own models (the folder models/ of benson-guo/cephalo).
MODELS = {
    "deepspeedgpt_1.3b": ("gpt2", _gpt(2048, 128)),
    "deepspeedgpt_2.7b": ("gpt2", _gpt(2560, 80)),
    "deepspeedgpt_6.7b": ("gpt2", _gpt(4096, 128)),
    "deepspeedbert_base": ("bert", _eager(768, 12, 3072)),
    "deepspeedbert_large": ("bert", _eager(1024, 16, 4096)),
    "deepspeedbert_xlarge": ("bert", _eager(1536, 24, 6144)),
    "deepspeedvit_g": ("vit", _eager(1664, 16, 8192)),
    "deepspeedvit_e": ("vit", _eager(1792, 16, 15360)),
    "deepspeedllama_tiny": ("llama", _wide(2048, 32, 5632)),
    "deepspeedllama_3b": ("llama", _wide(3200, 32, 8640)),
    "deepspeedllama_7b": ("llama", _wide(4096, 32, 11008)),
    "deepspeedllama_13b": ("llama", _wide(5120, 40, 13824)),
    "deepspeedllama_33b": ("llama", _wide(6656, 52, 17920)),
    "deepspeedllama_65b": ("llama", _wide(8192, 64, 22016)),
}


def measurements(folder: Path, models: Sequence[str] = tuple(MODELS)) -> list[Measurement]:
    """Return every curve of these models: measured points, or lines through measured points."""
    profiles = read_published(folder)
    found = []
    for entry in profiles.entries():
        if entry.model not in models:
            continue
        model, dtype, length = entry.model, entry.dtype, entry.sequence_length
        work = _work(model, *MODELS[model], length, dtype)
        for device in entry.devices:
            sizes = min(LARGEST, profiles.times(model, device, dtype, length, 1).measured_sizes)
            row = profiles.latencies[model][device][str(length)][LONG[dtype]]
            if not sizes and isinstance(row[0], list):
                sizes = LINE  # published: one line for the forward and one for the backward
            if sizes:  # else the only line is that of both together
                times = profiles.times(model, device, dtype, length, sizes)
                curves = Curves(device, times.forward_s, times.backward_s)
                found.append(Measurement(find_device(device), work, curves))
    return found


def _work(model: str, kind: str, shape: dict, length: int, dtype: str) -> ModelWork:
    if kind == "vit":
        shape = shape | {"image_size": 384, "patch_size": 16}
    elif kind == "gpt2":
        shape = shape | {"n_positions": length}
    else:
        shape = shape | {"max_position_embeddings": length}
    return work_of(kind, sequence_length=length, dtype=dtype, name=model, **shape)


def left_out(
    found: Sequence[Measurement], part: Callable[[Measurement], str], *, pooled: bool
) -> dict[tuple[str, str], list[float]]:
    """Fit without each part (a device, a model) in turn; return its errors by (device, kind)."""
    errors: dict[tuple[str, str], list[float]] = {}
    for name in dict.fromkeys(part(entry) for entry in found):
        others = fit([entry for entry in found if part(entry) != name])
        if pooled:
            others = tuple(entry for entry in others if not entry.device)
        for entry in found:
            if part(entry) == name:
                key = (entry.device.name, kind_of(entry.device, entry.work.dtype))
                efficiency = find_efficiency(entry.device, entry.work.dtype, others)
                errors.setdefault(key, []).extend(relative_errors(entry, efficiency))
    return errors


def error_of(errors: Sequence[float]) -> Error:
    """Return the median and the 90 % quantile of the errors."""
    return Error(*(round(float(np.quantile(errors, share)), 2) for share in (0.5, 0.9)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, nargs="?", default=DATA)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = measurements(parser.parse_args().folder)
    points = sum(2 * entry.curves.largest_microbatch_size for entry in found)
    print(f"{len(found)} curves, {points} points, of {len(MODELS)} models")
    # by chip: the curves of a V100 of 32 GB predict those of a V100 of 16 GB
    by_device = left_out(found, lambda entry: entry.device.name.split()[0], pooled=True)
    by_model = left_out(found, lambda entry: entry.work.model, pooled=False)
    rows = []
    for entry in fit(found):
        keys = [key for key in by_device if key[1] == entry.kind and entry.device in ("", key[0])]
        # a device's own fit is judged on models left out, the pool on devices left out
        errors = by_model if entry.device else by_device
        error = error_of([value for key in keys for value in errors[key]])
        rows.append(
            Efficiency(
                entry.device, entry.kind, round(entry.compute, 3), round(entry.bandwidth, 3), error
            )
        )
        unseen = error_of([value for key in keys for value in by_device[key]])
        print(f"{entry.device or 'all devices':15} {entry.kind:11} compute {entry.compute:5.2f} "
              f"bandwidth {entry.bandwidth:5.2f}; unseen device: {unseen}; unseen model: "
              f"{error_of([v for key in keys for v in by_model[key]])}")  # fmt: skip
    print()
    for row in rows:
        print(
            f'- {{device: "{row.device}", kind: {row.kind}, compute: {row.compute}, '
            f"bandwidth: {row.bandwidth}, error: [{row.error.median}, {row.error.most}]}}"
        )


if __name__ == "__main__":
    main()
