"""Finds models by name: a Hugging Face config, or the import path of a class."""

from __future__ import annotations

import difflib
import importlib
import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from os import PathLike
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from lightning_cephalo.common import files, records
from lightning_cephalo.common.errors import PlanError
from lightning_cephalo.offline.estimate.work import TORCH_DTYPES, ModelWork, count_work, reason_of

_DEFAULT_LENGTH = 512
# Arguments of every config that the config stores under another name.
_OF_EVERY_CONFIG = ("attn_implementation", "num_labels")
_AUTO_CLASSES = {
    "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING": "AutoModelForImageClassification",
    "MODEL_FOR_MASKED_LM_MAPPING": "AutoModelForMaskedLM",
    "MODEL_FOR_CAUSAL_LM_MAPPING": "AutoModelForCausalLM",
}
_ENCODER_DECODERS = {"MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING": "AutoModelForSeq2SeqLM"}


def work_of(
    model: str | PathLike[str],
    *,
    sequence_length: int | None = None,
    dtype: str = "fp32",
    name: str | None = None,
    **arguments: Any,
) -> ModelWork:
    """Count the work and memory that a model needs.

    ``model`` is the path of a transformers config or its type, or ``package.module:Class``.
    ``arguments`` change the config, or are those of the class.
    """
    if sequence_length is not None:
        sequence_length = records.whole("sequence_length", sequence_length, minimum=1)
    if names_class(model):
        length = sequence_length or _DEFAULT_LENGTH
        return _work_of_class(str(model), length, dtype, name, arguments)
    with _transformers() as transformers:
        config = _config(transformers, model, arguments)
        return _work_of_config(transformers, config, sequence_length, dtype, name)


def names_class(model: str | PathLike[str]) -> bool:
    """Whether :func:`work_of` reads this as the import path of a class."""
    return isinstance(model, str) and ":" in model and not Path(model).exists()


def _work_of_class(
    path: str, length: int, dtype: str, name: str | None, arguments: dict[str, Any]
) -> ModelWork:
    module_name, _, attribute = path.partition(":")
    try:
        found = getattr(importlib.import_module(module_name), attribute)
    except (ImportError, AttributeError, ValueError, TypeError) as error:
        raise PlanError(
            f"model: expected 'package.module:Class', but got {path!r}, which cannot be imported: "
            f"{error}."
        ) from error

    def build() -> nn.Module:
        module: Any = found(**arguments)
        if hasattr(module, "configure_model"):  # Lightning modules make large layers there
            module.configure_model()
        return cast(nn.Module, module)

    def run(module: nn.Module, samples: int) -> Tensor:
        def of_samples(example: Tensor) -> Tensor:
            kind = TORCH_DTYPES[dtype] if example.is_floating_point() else example.dtype
            return torch.zeros((samples, *example.shape[1:]), dtype=kind)

        example = getattr(module, "example_input_array", None)
        if example is None:
            return _loss_of(module(torch.zeros(samples, length, dtype=torch.long)))
        batch = pytree.tree_map_only(Tensor, of_samples, example)
        if isinstance(batch, dict):
            return _loss_of(module(**batch))
        return _loss_of(module(*batch) if isinstance(batch, (tuple, list)) else module(batch))

    return count_work(build, run, model=name or attribute, dtype=dtype, sequence_length=length)


def _work_of_config(
    transformers: Any, config: Any, length: int | None, dtype: str, name: str | None
) -> ModelWork:
    layers = getattr(config, "num_hidden_layers", 1)
    if isinstance(layers, int) and layers < 1:  # transformers accepts it
        raise PlanError(f"model: expected at least 1 layer, but got {layers}. Change its options.")
    auto_class = _auto_class(transformers, config)
    length = length or getattr(config, "max_position_embeddings", None) or _DEFAULT_LENGTH
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
            return _loss_of(module(pixel_values=images, labels=labels))
        tokens = torch.zeros(samples, length, dtype=torch.long)
        accepted = inspect.signature(module.forward).parameters
        given = {"use_cache": False, "labels": tokens}
        given = {key: value for key, value in given.items() if key in accepted}
        return _loss_of(module(input_ids=tokens, **given))

    return count_work(
        lambda: auto_class.from_config(config),
        run,
        model=name or config.model_type,
        dtype=dtype,
        sequence_length=length,
    )


def _loss_of(output: Any) -> Tensor:
    """Return the loss in an output, else its first tensor, or that one's sum."""
    loss = output.get("loss") if isinstance(output, dict) else getattr(output, "loss", None)
    if isinstance(loss, Tensor):
        return loss
    tensors = [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor)]
    if not tensors:
        raise PlanError(f"expected a tensor from the model, but got {type(output).__name__}.")
    return tensors[0] if tensors[0].ndim == 0 else tensors[0].sum()


@contextmanager
def _transformers() -> Iterator[Any]:
    """Yield the package; it does not warn of a config that was cut down for counting."""
    try:
        import transformers
    except ImportError as error:
        raise PlanError(
            "model: a Hugging Face config needs the package transformers, which is not installed. "
            "Install it (pip install transformers), or name a class as 'package.module:Class'."
        ) from error
    before = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    try:
        yield transformers
    finally:
        transformers.logging.set_verbosity(before)


def _config(transformers: Any, model: str | PathLike[str], overrides: dict[str, Any]) -> Any:
    """Return the config of a path or a type, as changed."""
    if not isinstance(model, (str, PathLike)):
        raise PlanError(
            f"model: expected a path or a name, but got {records.shortened(model)}. Save a config "
            f"with its save_pretrained(FOLDER), and give the folder."
        )
    path = Path(model)
    path = path / "config.json" if path.is_dir() else path
    kind, data = _read(path)
    if not isinstance(kind, str) or kind not in transformers.CONFIG_MAPPING:
        raise PlanError(
            f"{path}: model_type: expected the path of a config.json, a model type that "
            f"transformers {transformers.__version__} knows (such as 'gpt2', 'llama'), or "
            f"'package.module:Class', but got {kind!r}."
        )
    make = transformers.CONFIG_MAPPING[kind]
    default = make()
    known = sorted({*default.to_dict(), *data, *make.attribute_map, *_OF_EVERY_CONFIG})
    for key in overrides.keys() - set(known):
        close = difflib.get_close_matches(key, known, n=3, cutoff=0.5)
        hint = f"Did you mean {', '.join(close)}?" if close else "See its config.json."
        raise PlanError(
            f"{path}: expected an option of the config {make.__name__}, but got {key!r}, which it "
            f"does not have. {hint}"
        )
    # by the config's own names: transformers checks only these, and they override aliases
    own = {"decoder_start_token_id": 0} if default.is_encoder_decoder else {}
    for settings in (data, overrides):
        own |= {make.attribute_map.get(key, key): value for key, value in settings.items()}
    try:
        return make(**own)
    except Exception as error:  # transformers has no class of its own for this
        changed = ", ".join(f"{key}={value!r}" for key, value in overrides.items())
        raise PlanError(
            f"{path}{f' with {changed}' if changed else ''}: expected a config that transformers "
            f"takes, but got {reason_of(error)}. Change that value."
        ) from error


def _read(path: Path) -> tuple[Any, dict[str, Any]]:
    """Return the model type and the settings of a config.json, or a type alone."""
    if not path.exists():
        return str(path), {}
    content = files.read_text(path, what="a config")
    data = files.parse_json(content, what="a config", source=str(path))
    if not isinstance(data, dict):
        raise PlanError(f"{path}: expected a mapping in JSON, but got {type(data).__name__}.")
    return data.pop("model_type", None), data


def _auto_class(transformers: Any, config: Any) -> Any:
    """Return the class that trains a config."""
    classes = _ENCODER_DECODERS if config.is_encoder_decoder else _AUTO_CLASSES
    for mapping, found in classes.items():
        if type(config) in getattr(transformers, mapping):
            return getattr(transformers, found)
    if config.is_encoder_decoder:
        raise PlanError(
            f"model: expected tokens or images as input, but {config.model_type!r} takes others. "
            f"Name a class with an example_input_array as 'package.module:Class'."
        )
    return transformers.AutoModel
