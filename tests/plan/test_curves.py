"""Tables of curves: files, the cache, and what is refused."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from lightning_cephalo.plan import PlanError
from lightning_cephalo.plan.curves import Curves, CurveTable, cached_tables, save_measured

CURVES = Curves("A6000", (0.1, 0.2), (0.3, 0.6), (0.01, 0.02), (1e9, 2e9), "measured", "torch 2.13")
TABLE = CurveTable("gpt2", "fp16", 512, (CURVES, Curves("L4", (0.2,), (0.5,))))


@pytest.mark.parametrize("name", ["table.yaml", "table.json"])
def test_a_table_survives_its_file(tmp_path, name):
    TABLE.save(tmp_path / name)
    assert CurveTable.load(tmp_path / name) == TABLE


def test_models_and_devices_are_compared_without_case():
    newer = replace(TABLE, curves=(Curves("a6000", (0.4,), (0.8,)),))
    assert TABLE.merged(newer).curves == (TABLE.curves[1], *newer.curves)
    assert TABLE.matches("GPT2", "fp16", 512)
    assert not TABLE.matches("gpt2", "fp32", 512)


def test_models_of_other_sizes_do_not_match():
    sized = replace(TABLE, parameters=1000)
    assert sized.matches("gpt2", "fp16", 512) and TABLE.matches("gpt2", "fp16", 512, 7)
    assert sized.matches("gpt2", "fp16", 512, 1009) and sized.matches("gpt2", "fp16", 512, 991)
    assert not sized.matches("gpt2", "fp16", 512, 1011)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"forward_s": (0.1, math.nan)}, ["A6000", "forward_s at microbatch size 2", "nan"]),
        ({"backward_s": (-1.0, 0.1)}, ["backward_s at microbatch size 1", "-1.0"]),
        ({"forward_s": (0.1, "fast")}, ["forward_s", "'fast'"]),
        ({"forward_s": ()}, ["forward_s", "at least one number", "none"]),
        ({"tail_s": (0.1,)}, ["forward_s 2", "tail_s 1"]),
        ({"forward_s": 3}, ["forward_s", "a list of numbers", "3"]),
        ({"source": "guess"}, ["source", "'guess'", "measured"]),
        ({"device": " "}, ["Curves.device", "' '"]),
    ],
)
def test_bad_curves_are_refused_by_name(change, words):
    with pytest.raises(PlanError) as caught:
        replace(CURVES, **change)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"curves": ()}, ["CurveTable.curves", "none"]),
        ({"curves": (CURVES, CURVES)}, ["curves[1]", "'A6000'", "again"]),
        ({"curves": ("A6000",)}, ["curves[0]", "'A6000'"]),
        ({"sequence_length": 0}, ["sequence_length", "0"]),
        ({"model": ""}, ["CurveTable.model"]),
    ],
)
def test_bad_tables_are_refused_by_name(change, words):
    with pytest.raises(PlanError) as caught:
        replace(TABLE, **change)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("model: x\nspeed: 3\n", "'speed'"),
        ("model: x\n", "missing 'dtype'"),
        ("- 1\n", "expected a mapping"),
        ("model: [", "not YAML"),
        (
            "{model: x, dtype: fp32, sequence_length: 1,"
            " curves: [{device: T4, forward_s: [1], backward_s: [1], foward: 2}]}",
            "curves[0]: unknown key 'foward'",
        ),
    ],
)
def test_a_bad_file_is_refused_by_name(tmp_path, text, word):
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    with pytest.raises(PlanError) as caught:
        CurveTable.load(path)
    assert str(path) in str(caught.value)
    assert word in str(caught.value)


def test_the_cache_merges_devices_and_names_broken_files(tmp_path):
    measured = replace(TABLE, curves=(CURVES,))
    path = save_measured(measured, tmp_path / "cache")
    newer = replace(CURVES, device="T4")
    faster = replace(CURVES, forward_s=(0.05, 0.1))
    assert save_measured(replace(TABLE, curves=(newer,)), tmp_path / "cache") == path
    save_measured(replace(TABLE, curves=(faster,)), tmp_path / "cache")
    (tmp_path / "cache/torn.json").write_text("{")
    (tmp_path / "cache/notes.txt").write_text("not a table")
    found = cached_tables(tmp_path / "cache")
    assert found.tables == (replace(TABLE, curves=(newer, faster)),)
    assert len(found.broken) == 1
    assert "torn.json" in found.broken[0]
    assert cached_tables(tmp_path / "absent").tables == ()


def test_only_measured_curves_enter_the_cache(tmp_path):
    with pytest.raises(PlanError, match="'measured' in the cache, but got 'table'"):
        save_measured(TABLE, tmp_path)


def test_a_broken_file_is_replaced_by_a_new_measurement(tmp_path):
    measured = replace(TABLE, curves=(CURVES,))
    path = save_measured(measured, tmp_path)
    path.write_text("model: [")
    save_measured(measured, tmp_path)
    assert CurveTable.load(path) == measured


def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(PlanError, match="LIGHTNING_CEPHALO_CACHE"):
        save_measured(replace(TABLE, curves=(CURVES,)), tmp_path / "file")
