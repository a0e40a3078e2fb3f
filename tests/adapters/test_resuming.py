"""What cannot be resumed exactly is said once, by name."""

import warnings
from types import SimpleNamespace

import pytest
from torch.utils.data import DataLoader

from lightning_cephalo.adapters.resuming import KEY, Resumption
from lightning_cephalo.adapters.view import TrainerView
from lightning_cephalo.data.loaders import dealt_loader
from lightning_cephalo.data.passes import Dealing


def _loader(size=4):
    dealing = Dealing(0, (size,), 1, lambda value: value, lambda numbers: [numbers])
    return dealt_loader(DataLoader(range(20), batch_size=size), dealing)


def _view(trained=3, accumulates=1):
    current = SimpleNamespace(completed=trained, processed=trained)
    progress = SimpleNamespace(current=current, is_last_batch=False)
    loop = SimpleNamespace(restarting=True, epoch_loop=SimpleNamespace(batch_progress=progress))
    return TrainerView(SimpleNamespace(fit_loop=loop, accumulate_grad_batches=accumulates))


def _saved(size=4):
    loader = _loader(size)
    running = iter(loader)
    for _ in range(3):
        next(running)
    position = loader.batch_sampler.passes.position(3, 5, cycles=False, ahead=1)
    return {KEY: {"seed": 1, "ended": False, "loaders": [vars(position)]}}


def _said(checkpoint, loader, view=None):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        Resumption(view or _view(), checkpoint).continue_with(loader)
    return [str(each.message) for each in caught]


def test_nothing_is_said_where_training_goes_on_exactly():
    loader = _loader()
    assert _said(_saved(), loader) == []
    assert [batch.tolist() for batch in loader] == [[12, 13, 14, 15], [16, 17, 18, 19]]


@pytest.mark.parametrize(
    ("checkpoint", "loader", "why"),
    [
        ({}, _loader(), "does not hold the place in the order of samples"),
        (_saved(5), _loader(), "its steps have 5 samples or lists, those of this run 4"),
        ({KEY: {"seed": 1, "ended": False, "loaders": [None]}}, _loader(), "not hold the place"),
        (_saved(), [1, 2, 3], "each rank reads samples of its own"),
    ],
)
def test_samples_that_begin_anew_are_named_once(checkpoint, loader, why):
    (said,) = _said(checkpoint, loader)
    assert "samples of this epoch begin anew" in said and why in said
    assert len(list(loader)) >= 3


def test_gradients_that_the_checkpoint_lacks_are_named():
    (said,) = _said(_saved(), _loader(), _view(accumulates=2))
    assert "does not hold the gradients" in said
