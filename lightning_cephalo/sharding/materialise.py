"""Initialises parameters on the meta device one unit at a time, on rank 0 only."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from lightning_cephalo.sharding.discovery import UnitMembers
from lightning_cephalo.sharding.placement import like_parameter


def initialise_members(top: nn.Module, members: UnitMembers, *, materialise: bool) -> UnitMembers:
    """Initialise the meta parameters of one unit by their modules' own initialisation.

    Args:
        top: The whole model (Hugging Face models initialise through their top module).
        materialise: Whether this rank's values count; other ranks only need shapes.

    Returns:
        The unit, with real parameters if ``materialise``.

    Raises:
        RuntimeError: If a module has meta parameters or buffers and no ``reset_parameters``, and no
            enclosing Hugging Face model initialises it.
    """
    modules = {
        id(owner.module): owner.module
        for parameter, owners in members.parameters
        if parameter.is_meta
        for owner in owners[:1]
    }
    for module in modules.values():
        # every rank needs the buffers; only ranks that materialise need the parameters
        _initialise(top, module, buffers_only=not materialise)
    parameters = tuple(
        (owners[0].module._parameters[owners[0].attribute], owners)
        for _, owners in members.parameters
    )
    for parameter, owners in parameters:
        for owner in owners[1:]:
            owner.module._parameters[owner.attribute] = parameter
    if not members.name:  # the root unit, which is the first one
        for module in top.modules():
            if _has_meta_buffers(module):
                _initialise(top, module, buffers_only=True)
    return replace(members, parameters=parameters)  # type: ignore[arg-type]


def _has_meta_buffers(module: nn.Module) -> bool:
    return any(buffer is not None and buffer.is_meta for buffer in module._buffers.values())


def _initialise(top: nn.Module, module: nn.Module, buffers_only: bool) -> None:
    reset = getattr(module, "reset_parameters", None)
    hugging_face = getattr(_hugging_face_model(top, module), "_init_weights", None)
    if not callable(reset) and hugging_face is None:
        raise RuntimeError(
            f"{type(module).__name__} has parameters or buffers on the meta device and no"
            " reset_parameters() to initialise them with. Add one, or create the module on a real"
            " device, or load its values from a checkpoint (ckpt_path=)."
        )
    if buffers_only and not _has_meta_buffers(module):
        return
    parameters = dict(module._parameters)
    with _kept(module), torch.no_grad():
        if hugging_face is not None:
            hugging_face(module)
        elif callable(reset):
            reset()
    if buffers_only:
        module._parameters.update(parameters)


@contextmanager
def _kept(module: nn.Module) -> Iterator[None]:
    """Move meta tensors to the CPU, and preserve other values (of a checkpoint)."""
    tables: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
    real = [
        (value, value.detach().clone())
        for table in tables
        for value in table.values()
        if value is not None and not value.is_meta
    ]
    for table in tables:
        for name, value in table.items():
            if value is not None and value.is_meta:
                table[name] = on_cpu(value)
    yield
    with torch.no_grad():
        for value, kept in real:
            value.copy_(kept)


def on_cpu(value: torch.Tensor) -> torch.Tensor:
    """Return an empty CPU tensor for a meta tensor; a parameter keeps its tags."""
    empty = torch.empty_like(value, device="cpu", requires_grad=False)
    return like_parameter(empty, value) if isinstance(value, nn.Parameter) else empty


def _hugging_face_model(top: nn.Module, module: nn.Module) -> nn.Module | None:
    """Return the innermost enclosing model that can initialise ``module``."""
    found = None
    for candidate in top.modules():
        if hasattr(candidate, "_init_weights") and any(m is module for m in candidate.modules()):
            found = candidate
    return found
