"""Every error of the package has one base, and stays the built-in error that it was."""

from __future__ import annotations

import ast
import importlib
import pickle
from pathlib import Path

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException

from lightning_cephalo.common import errors
from lightning_cephalo.data.cutting import StepResultError
from lightning_cephalo.execution.memory_errors import OutOfMemoryInStepError
from lightning_cephalo.ranks.refusals import RefusedError
from lightning_cephalo.recovery.peers import VoidPieceError

PACKAGE = Path(__file__).resolve().parents[2] / "lightning_cephalo"
BUILT_IN = {
    errors.PlanError: ValueError,
    errors.UnwritableError: (ValueError, OSError),
    errors.InfeasibleError: errors.PlanError,
    errors.ProgramError: errors.PlanError,
    errors.SolverError: RuntimeError,
    errors.ProfilingError: RuntimeError,
    errors.TooLittleMemoryError: errors.ProfilingError,
    errors.UnsupportedError: RuntimeError,
    errors.UnitUseError: RuntimeError,
    errors.BatchSplitError: ValueError,
    errors.HostMemoryError: RuntimeError,
    errors.RemoteRankError: RuntimeError,
    errors.RecoveryError: RuntimeError,
    errors.KeptForAnotherError: RuntimeError,
    OutOfMemoryInStepError: torch.OutOfMemoryError,
    StepResultError: (TypeError, MisconfigurationException),
    VoidPieceError: RuntimeError,
    RefusedError: RuntimeError,
}


def _error_classes() -> set[type]:
    found = set()
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef) and node.name.endswith(("Error", "Exception")):
                parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
                found.add(getattr(importlib.import_module(".".join(parts)), node.name))
    return {kind for kind in found if issubclass(kind, BaseException)}


def test_every_error_of_the_package_is_a_cephalo_error():
    assert _error_classes() == {errors.CephaloError, *BUILT_IN}


@pytest.mark.parametrize("kind", BUILT_IN, ids=lambda kind: kind.__name__)
def test_an_error_is_caught_by_the_base_class_and_by_its_built_in_base(kind):
    bases = BUILT_IN[kind]
    for base in (errors.CephaloError, *(bases if isinstance(bases, tuple) else (bases,))):
        with pytest.raises(base, match="the reason"):
            raise kind("the reason")


@pytest.mark.parametrize("kind", BUILT_IN, ids=lambda kind: kind.__name__)
def test_an_error_keeps_its_text_on_the_way_to_another_process(kind):
    copy = pickle.loads(pickle.dumps(kind("the reason")))
    assert type(copy) is kind
    assert str(copy) == "the reason"
