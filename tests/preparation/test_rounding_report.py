"""The line that says what rounding gradients for their way has changed."""

from types import SimpleNamespace

import pytest
import torch

from lightning_cephalo.preparation.rounding_report import RoundingReport
from lightning_cephalo.sharding.rounding import Rounding


class _Two:
    """The control group of two ranks that measure the same."""

    rank = 0

    def gather(self, own):
        return [own, own]


def test_one_line_tells_of_the_first_step_and_nothing_is_measured_behind_it(capsys):
    rounding = Rounding(torch.bfloat16)
    report = RoundingReport(SimpleNamespace(control=_Two(), rounding=rounding), verbose=True)
    report.between_steps()
    assert report.share is None and rounding.is_measured
    overflown = torch.tensor([1.0, torch.inf])
    rounding.rounded(overflown, 1.0)
    rounding.summed(overflown)
    report.between_steps()
    assert report.share is None and rounding.is_measured
    gradient = torch.tensor([1.0, 1.0 + 2**-9])  # between two numbers of bfloat16
    sent = rounding.rounded(gradient, 0.5)
    assert sent.tolist() == [1.0, 1.0]
    rounding.summed(gradient * 0.5)
    report.between_steps()
    report.between_steps()
    said = " ".join(capsys.readouterr().out.split())
    expected = 2**-9 / gradient.norm().item()
    assert report.share == pytest.approx(expected, rel=1e-6) and not rounding.is_measured
    assert said == (
        "Gradients travel as bfloat16: rounding changed that of the first step by 0.14% of its"
        " norm."
    )


def test_dtypes_that_are_no_narrower_stay():
    rounding = Rounding(torch.bfloat16)
    assert rounding.dtype_of(torch.float64) is torch.bfloat16
    assert rounding.dtype_of(torch.bfloat16) is torch.bfloat16
    assert rounding.dtype_of(torch.int64) is torch.int64
    assert Rounding(torch.float32).dtype_of(torch.float16) is torch.float16
    values = torch.ones(3)
    assert Rounding(torch.float32).rounded(values, 1.0) is values
