"""Finds models by name: a Hugging Face config, or the import path of a class."""

from __future__ import annotations

import difflib
import importlib
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from lightning_cephalo.common import files, records
from lightning_cephalo.common.errors import PlanError
from lightning_cephalo.offline.estimate.work import TORCH_DTYPES, ModelWork, count_work

# Values below 1 are mistakes here, but transformers accepts them.
_AT_LEAST_ONE = ("num_hidden_layers", "hidden_size", "num_attention_heads", "vocab_size")
# Arguments of every config that the config stores under another name.
_OF_EVERY_CONFIG = ("attn_implementation", "num_labels")
_AUTO_CLASSES = {
    "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING": "AutoModelForImageClassification",
    "MODEL_FOR_MASKED_LM_MAPPING": "AutoModelForMaskedLM",
    "MODEL_FOR_CAUSAL_LM_MAPPING": "AutoModelForCausalLM",
}


def work_of(
    model: Any,
    *,
    sequence_length: int | None = None,
    dtype: str = "fp32",
    name: str | None = None,
    **arguments: Any,
) -> ModelWork:
    """Count the work and memory that a model needs.

    ``model`` is a transformers config, the path of one or its type, or ``package.module:Class``.
    ``arguments`` change the config, or are those of the class.
    """
    if sequence_length is not None:
        sequence_length = records.whole("sequence_length", sequence_length, minimum=1)
    if names_class(model):
        length, own = sequence_length or 512, model.partition(":")[2]
        of_class = _class(model, length, dtype, arguments)
        return count_work(*of_class, model=name or own, dtype=dtype, sequence_length=length)
    label, config = _config(model, arguments)
    length = sequence_length or getattr(config, "max_position_embeddings", None) or 512
    size = getattr(config, "image_size", None)
    if size is not None:
        sides = tuple(size) if isinstance(size, (list, tuple)) else (size, size)
        patch = getattr(config, "patch_size", None) or sides[0]
        length = (sides[0] // patch) * (sides[1] // patch) + 1

    def run(module: nn.Module, samples: int) -> Tensor:
        if size is not None:
            shape = (samples, config.num_channels, *sides)
            images = torch.empty(shape, dtype=TORCH_DTYPES[dtype])
            labels = torch.zeros(samples, dtype=torch.long)
            return loss_of(module(pixel_values=images, labels=labels))
        tokens = torch.zeros(samples, length, dtype=torch.long)
        given = {"use_cache": False, "labels": tokens}
        accepted = inspect.signature(module.forward).parameters
        return loss_of(
            module(input_ids=tokens, **{key: given[key] for key in given.keys() & accepted.keys()})
        )

    def build() -> nn.Module:
        try:
            return _auto_class(config).from_config(config)
        except (PlanError, RuntimeError):  # RuntimeError: fake tensors; count_work reports it
            raise
        except Exception as error:
            raise _refused(label, error) from error

    with _quiet():
        return count_work(
            build, run, model=name or config.model_type, dtype=dtype, sequence_length=length
        )


def names_class(model: Any) -> bool:
    """Whether :func:`work_of` reads this as the import path of a class."""
    return isinstance(model, str) and ":" in model and not Path(model).exists()


def loss_of(output: Any) -> Tensor:
    """Return the loss from the output of a model or a training step.

    Without a loss, return the first tensor, or its sum if it is not a scalar.
    """
    loss = getattr(output, "loss", None)
    if loss is None and isinstance(output, dict):
        loss = output.get("loss")
    if isinstance(loss, Tensor):
        return loss
    tensors = [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor)]
    if not tensors:
        raise PlanError(f"expected a tensor from the model, but got {type(output).__name__}.")
    return tensors[0] if tensors[0].ndim == 0 else tensors[0].sum()


def _transformers() -> Any:
    try:
        import transformers
    except ImportError as error:
        raise PlanError(
            "expected the package transformers to read a Hugging Face config, but it is not "
            "installed. Install it (pip install transformers), or name a class as "
            "'package.module:Class'."
        ) from error
    return transformers


def _config(model: Any, overrides: dict[str, Any]) -> tuple[str, Any]:
    """Return a label for messages, and the config of a path, a type or a config, as changed."""
    transformers = _transformers()
    if isinstance(model, transformers.PretrainedConfig):
        label, base, data = model.model_type, model, model.to_dict()
    elif isinstance(model, (str, PathLike)):
        label, kind, data = _read(Path(model))
        if not isinstance(kind, str) or kind not in transformers.CONFIG_MAPPING:
            raise PlanError(
                f"{label}: model_type: expected the path of a config.json, a model type that "
                f"transformers {transformers.__version__} knows (such as 'gpt2', 'llama'), or "
                f"'package.module:Class', but got {kind!r}."
            )
        base = _made(transformers.CONFIG_MAPPING[kind], label, data)
    else:
        raise PlanError(
            f"model: expected a transformers config, a path or a name, but got {model!r}."
        )
    if overrides:
        known = sorted({*base.to_dict(), *base.attribute_map, *_OF_EVERY_CONFIG})
        for key in overrides.keys() - set(known):
            close = difflib.get_close_matches(key, known, n=3, cutoff=0.5)
            hint = f"Did you mean {', '.join(close)}?" if close else "See its config.json."
            raise PlanError(
                f"{label}: expected an option of the config {type(base).__name__}, but got "
                f"{key!r}, which it does not have. {hint}"
            )
        label += " with " + ", ".join(f"{key}={value!r}" for key, value in overrides.items())
        base = _made(type(base), label, data, overrides)
    for common in _AT_LEAST_ONE:
        key = base.attribute_map.get(common, common)
        value = getattr(base, key, None)
        if isinstance(value, int) and value < 1:
            raise PlanError(f"{label}: expected {key} of at least 1, but got {value}. Change it.")
    if base.is_encoder_decoder and getattr(base, "decoder_start_token_id", None) is None:
        base = type(base)(**(base.to_dict() | {"decoder_start_token_id": 0}))
    return label, base


def _read(path: Path) -> tuple[str, Any, dict[str, Any]]:
    """Return a label, the model type and the settings of a config.json, or of a type alone."""
    path = path / "config.json" if path.is_dir() else path
    if not path.exists():
        return str(path), str(path), {}
    content = files.read_text(path, what="a config")
    data = files.parse_json(content, what="a config", source=str(path))
    if not isinstance(data, dict):
        raise PlanError(f"{path}: expected a mapping in JSON, but got {type(data).__name__}.")
    return str(path), data.pop("model_type", None), data


def _made(kind: Any, label: str, *settings: dict[str, Any]) -> Any:
    """Make a config of this kind; later settings override earlier ones."""
    # by the config's own names: transformers checks only these, and they override aliases
    own = {kind.attribute_map.get(key, key): given[key] for given in settings for key in given}
    try:
        with _quiet():
            return kind(**own)
    except Exception as error:  # transformers has no class of its own for this
        raise _refused(label, error) from error


def _refused(label: str, error: Exception) -> PlanError:
    reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
    return PlanError(
        f"{label}: expected a config that transformers can build a model of, but got "
        f"{reason.rstrip('.')}. Change that value."
    )


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence the warnings of transformers about a config that was cut down for counting."""
    logging = _transformers().logging
    before = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(before)


def _auto_class(config: Any) -> Any:
    transformers = _transformers()
    kind = type(config)
    if config.is_encoder_decoder:
        if kind in transformers.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING:
            return transformers.AutoModelForSeq2SeqLM
        raise PlanError(
            f"model: expected tokens or images as input, but {config.model_type!r} takes others. "
            f"Name a class with an example_input_array as 'package.module:Class'."
        )
    for mapping, found in _AUTO_CLASSES.items():
        if kind in getattr(transformers, mapping):
            return getattr(transformers, found)
    return transformers.AutoModel


def _class(
    path: str, length: int, dtype: str, arguments: dict[str, Any]
) -> tuple[Callable[[], nn.Module], Callable[[nn.Module, int], Tensor]]:
    """Return what builds and what runs the class of an import path."""
    module_name, _, attribute = path.partition(":")
    if not all(part.isidentifier() for part in (*module_name.split("."), attribute)):
        raise PlanError(f"model: expected 'package.module:Class', but got {path!r}.")
    try:
        found = getattr(importlib.import_module(module_name), attribute)
    except (ImportError, AttributeError) as error:
        raise PlanError(
            f"model: expected 'package.module:Class' that can be imported, but got {path!r}: "
            f"{error}."
        ) from error

    def build() -> nn.Module:
        module = found(**arguments)
        if hasattr(module, "configure_model"):  # Lightning modules make large layers there
            module.configure_model()
        return module

    def run(module: nn.Module, samples: int) -> Tensor:
        def of_samples(example: Tensor) -> Tensor:
            kind = TORCH_DTYPES[dtype] if example.is_floating_point() else example.dtype
            return torch.zeros((samples, *example.shape[1:]), dtype=kind)

        example = getattr(module, "example_input_array", None)
        if example is None:
            return loss_of(module(torch.zeros(samples, length, dtype=torch.long)))
        batch = pytree.tree_map_only(Tensor, of_samples, example)
        if isinstance(batch, dict):
            return loss_of(module(**batch))
        return loss_of(module(*batch) if isinstance(batch, (tuple, list)) else module(batch))

    return build, run
