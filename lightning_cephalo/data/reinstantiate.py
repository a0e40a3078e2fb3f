"""Creates a user's DataLoader a second time with different arguments, by Lightning's private way.

``tests/data/test_reinstantiate.py`` fails when Lightning's private functions change.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from lightning.fabric.utilities.data import _reinstantiate_wrapped_cls
from lightning.pytorch.utilities.data import _get_dataloader_init_args_and_kwargs
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler


def reinstantiate(
    loader: DataLoader[Any],
    *,
    wrap_collate: Callable[[Any], Any] | None = None,
    **changes: Any,
) -> DataLoader[Any]:
    """Returns a loader of the same class with the same options, except for ``changes``."""
    keywords = _init_keywords(loader)
    if "batch_sampler" in changes:
        # torch rejects these next to a batch sampler unless they have their defaults
        keywords.update(batch_size=1, shuffle=False, sampler=None, drop_last=False)
    keywords.update(changes)
    if wrap_collate is not None and keywords.get("collate_fn") is not None:
        # Before construction, because some classes start their iterator in it.
        keywords["collate_fn"] = wrap_collate(keywords["collate_fn"])
    args = keywords.pop("*", ())
    try:
        rebuilt: DataLoader[Any] = _reinstantiate_wrapped_cls(loader, *args, **keywords)
    except Exception as error:
        raise _cannot(loader, error) from error
    if wrap_collate is not None:
        # A class may set its own and ignore the argument (PyTorch Geometric's does).
        rebuilt.collate_fn = wrap_collate(rebuilt.collate_fn)
    for name, value in vars(loader).items():
        if not name.startswith("_") and not hasattr(rebuilt, name):
            setattr(rebuilt, name, value)
    return rebuilt


def _init_keywords(loader: DataLoader[Any]) -> dict[str, Any]:
    """Returns the loader's arguments by name; positional ones without a name under "*"."""
    stand_in = copy.copy(loader)
    # Lightning would create the user's batch sampler again around a new sampler, and fail if it
    # cannot. Ours replaces it anyway, so Lightning gets torch's own, which it ignores.
    object.__setattr__(stand_in, "batch_sampler", BatchSampler(SequentialSampler(()), 1, False))
    try:
        args, keywords = _get_dataloader_init_args_and_kwargs(stand_in, loader.sampler)
    except Exception as error:
        raise _cannot(loader, error) from error
    # Lightning passes saved positional arguments on as positional. A changed argument of the same
    # name would then be given twice: DataLoader(dataset, 4, True).
    names = getattr(loader, "__pl_saved_arg_names", ())
    if len(names) == len(args):
        return {**dict(zip(names, args, strict=True)), **keywords}
    return {"*": args, **keywords}


def _cannot(loader: DataLoader[Any], error: Exception) -> TypeError:
    name = type(loader).__name__
    return TypeError(
        f"Expects a DataLoader that can be created again with another batch sampler, but creating "
        f"{name} again raised {type(error).__name__}: {error} Let {name}.__init__ take **kwargs "
        "and pass them to DataLoader.__init__, and keep its own arguments as attributes of the "
        "same names (or create it inside train_dataloader(), where Lightning records them)."
    )
