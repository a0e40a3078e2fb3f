"""The private functions of Lightning that a loader is created again with still do what we need."""

import inspect

import pytest
import torch
from lightning.fabric.utilities import data as fabric_data
from lightning.pytorch.utilities import data as pytorch_data
from simulated_ranks import Numbers
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler

from lightning_cephalo.data.reinstantiate import reinstantiate

CHANGED = "Lightning changed what lightning_cephalo/data/reinstantiate.py relies on; mend it there."


class Doubling:
    """A collate wrapper that is not put around itself."""

    def __init__(self, collate_fn):
        self.collate_fn = collate_fn

    def __call__(self, samples):
        return 2 * self.collate_fn(samples)


def wrap(collate_fn):
    return collate_fn if isinstance(collate_fn, Doubling) else Doubling(collate_fn)


def lists_of_two():
    return [[0, 1], [2, 3]]


class Passing(DataLoader):
    def __init__(self, dataset, note="none", **kwargs):
        super().__init__(dataset, **kwargs)
        self.note = note


class OwnCollate(DataLoader):
    """Sets its own collate function whatever it is given, as PyTorch Geometric's loader does."""

    def __init__(self, dataset, **kwargs):
        kwargs.pop("collate_fn", None)
        super().__init__(dataset, collate_fn=lambda samples: -torch.stack(samples), **kwargs)


class MakesItsDataset(DataLoader):
    def __init__(self, length, **kwargs):
        self.length = length
        kwargs.pop("dataset", None)
        super().__init__(Numbers(length), **kwargs)


class StartedWhenBuilt(DataLoader):
    """Holds its iterator from the beginning, as some endless loaders do."""

    def __init__(self, dataset, **kwargs):
        super().__init__(dataset, **kwargs)
        self.started = super().__iter__()

    def __iter__(self):
        return self.started


class Closed(DataLoader):
    """Does not say what it was created with."""

    def __init__(self, secret):
        super().__init__(Numbers(secret), batch_size=2)


class ClosedBatchSampler(BatchSampler):
    def __init__(self, secret):
        super().__init__(SequentialSampler(range(secret)), 2, False)


def test_lightnings_functions_have_the_signatures_that_we_call():
    init = inspect.signature(pytorch_data._get_dataloader_init_args_and_kwargs)
    again = inspect.signature(fabric_data._reinstantiate_wrapped_cls)

    assert list(init.parameters)[:2] == ["dataloader", "sampler"], CHANGED
    assert next(iter(again.parameters)) == "orig_object", CHANGED
    loader = DataLoader(Numbers(4), batch_size=2, num_workers=1)
    args, keywords = pytorch_data._get_dataloader_init_args_and_kwargs(loader, loader.sampler)
    assert args == (), CHANGED
    assert keywords["dataset"] is loader.dataset, CHANGED
    assert keywords["num_workers"] == 1, CHANGED
    assert {"sampler", "shuffle", "batch_sampler"} <= set(keywords), CHANGED


def test_lightning_records_arguments_where_we_read_them():
    with fabric_data._replace_dunder_methods(DataLoader, "dataset"):
        loader = DataLoader(Numbers(4), 2, num_workers=1)

    assert loader.__pl_saved_args[1:] == (2,), CHANGED
    assert loader.__pl_saved_arg_names == ("dataset", "batch_size"), CHANGED
    assert loader.__pl_saved_kwargs == {"num_workers": 1}, CHANGED


def test_lightnings_wrapper_for_predict_is_called_what_we_look_for():
    from lightning.pytorch.overrides.distributed import _IndexBatchSamplerWrapper

    wrapper = _IndexBatchSamplerWrapper(BatchSampler(SequentialSampler(range(4)), 2, False))

    assert type(wrapper).__name__ == "_IndexBatchSamplerWrapper", CHANGED
    assert isinstance(wrapper._batch_sampler, BatchSampler), CHANGED
    assert (list(wrapper), wrapper.seen_batch_indices) == ([[0, 1], [2, 3]],) * 2, CHANGED


def test_options_and_later_attributes_are_kept():
    generator = torch.Generator()
    loader = DataLoader(
        Numbers(4),
        2,
        True,
        num_workers=1,
        persistent_workers=True,
        prefetch_factor=3,
        timeout=9,
        worker_init_fn=print,
        generator=generator,
        multiprocessing_context="fork",
        drop_last=True,
        in_order=False,
    )
    loader.remark = "set later"

    again = reinstantiate(loader, batch_sampler=lists_of_two(), wrap_collate=wrap)

    assert type(again) is DataLoader
    for name in ("num_workers", "persistent_workers", "prefetch_factor", "timeout", "in_order"):
        assert getattr(again, name) == getattr(loader, name)
    assert again.worker_init_fn is print
    assert again.generator is generator
    assert again.multiprocessing_context.get_start_method() == "fork"
    assert again.remark == "set later"
    assert again.dataset is loader.dataset
    assert again.batch_sampler == lists_of_two()
    assert isinstance(again.collate_fn, Doubling)
    assert not isinstance(again.collate_fn.collate_fn, Doubling)


@pytest.mark.parametrize("in_hook", [False, True])
@pytest.mark.parametrize(
    "make",
    [
        lambda: Passing(Numbers(4), note="mine", batch_size=2, shuffle=True),
        lambda: Passing(Numbers(4), "mine", batch_size=2),
        lambda: OwnCollate(Numbers(4), batch_size=2),
        lambda: MakesItsDataset(4, batch_size=2),
        lambda: StartedWhenBuilt(Numbers(4), batch_size=2, collate_fn=torch.stack),
        lambda: DataLoader(Numbers(4), 2, True),
        lambda: DataLoader(Numbers(4), 2, False, None, None, 0),
    ],
)
def test_subclasses_are_created_again_as_themselves(make, in_hook):
    if in_hook:
        with fabric_data._replace_dunder_methods(DataLoader, "dataset"):
            loader = make()
    else:
        loader = make()
    sign = -2 if type(loader) is OwnCollate else 2

    again = reinstantiate(loader, batch_sampler=lists_of_two(), wrap_collate=wrap)

    assert type(again) is type(loader)
    assert getattr(again, "note", "mine") == "mine"
    assert torch.cat(list(again)).tolist() == [sign * i for i in range(4)]


@pytest.mark.parametrize("in_hook", [False, True])
@pytest.mark.parametrize("batch_sampler", [lists_of_two(), ClosedBatchSampler(4)])
def test_batch_samplers_that_lightning_cannot_create_again_are_passed_over(batch_sampler, in_hook):
    if in_hook:
        with (
            fabric_data._replace_dunder_methods(DataLoader, "dataset"),
            fabric_data._replace_dunder_methods(BatchSampler),
        ):
            loader = DataLoader(Numbers(4), batch_sampler=batch_sampler)
    else:
        loader = DataLoader(Numbers(4), batch_sampler=batch_sampler)

    again = reinstantiate(loader, batch_sampler=[[3]])

    assert [batch.tolist() for batch in again] == [[3]]
    assert loader.batch_sampler is batch_sampler


def test_a_collate_function_set_later_is_wrapped_too():
    with fabric_data._replace_dunder_methods(DataLoader, "dataset"):
        loader = DataLoader(Numbers(4), batch_size=2)
        loader.collate_fn = len

    again = reinstantiate(loader, batch_sampler=lists_of_two(), wrap_collate=wrap)

    assert list(again) == [4, 4]


def test_a_loader_that_does_not_tell_its_arguments_is_named_with_the_remedy():
    with pytest.raises(TypeError, match=r"Closed again.*\*\*kwargs.*train_dataloader"):
        reinstantiate(Closed(4), batch_sampler=lists_of_two())


def test_an_error_of_the_users_class_is_not_swallowed():
    class Failing(DataLoader):
        def __init__(self, dataset, **kwargs):
            if kwargs.get("batch_sampler") is not None:
                raise RuntimeError("not with me")
            super().__init__(dataset, **kwargs)

    with pytest.raises(TypeError, match="not with me"):
        reinstantiate(Failing(Numbers(2)), batch_sampler=[[0]])
