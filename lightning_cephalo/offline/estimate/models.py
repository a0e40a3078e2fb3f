"""Finds models by name: a Hugging Face config, or the import path of a class."""

from __future__ import annotations

import difflib
import importlib
import inspect
import json
from collections.abc import Iterator
from contextlib import contextmanager
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lightning_cephalo.common import records
from lightning_cephalo.common.errors import PlanError
from lightning_cephalo.offline.estimate.work import TORCH_DTYPES, ModelWork, count_work, loss_of

# Values below 1 are mistakes here, but transformers accepts them.
_AT_LEAST_ONE = ("num_hidden_layers", "hidden_size", "num_attention_heads", "vocab_size")
# Arguments of every config that the config stores under another name.
_OF_EVERY_CONFIG = ("attn_implementation", "num_labels")


def work_of(
    model: Any,
    *,
    sequence_length: int | None = None,
    dtype: str = "fp32",
    name: str | None = None,
    **arguments: Any,
) -> ModelWork:
    """Count the work and memory that a model needs."""
    if sequence_length is not None:
        sequence_length = records.whole("sequence_length", sequence_length, minimum=1)
    if names_class(model):
        return _work_of_class(model, sequence_length or 512, dtype, name, arguments)
    config = _config(model, arguments)
    return _work_of_config(config, sequence_length, dtype, name, _listed(arguments))


def names_class(model: Any) -> bool:
    """Whether :func:`work_of` reads this as the import path of a class."""
    return isinstance(model, str) and ":" in model and not Path(model).exists()


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


def _config(model: Any, overrides: dict[str, Any]) -> Any:
    transformers = _transformers()
    if isinstance(model, (str, PathLike)):
        path = Path(model)
        path = path / "config.json" if path.is_dir() else path
        if path.exists():
            data = _read_json(path)
            kind = data.pop("model_type", None)
            where = f"{path}: model_type"
        else:
            data, kind, where = {}, str(model), "model"
        if not isinstance(kind, str) or kind not in transformers.CONFIG_MAPPING:
            raise PlanError(
                f"{where}: expected the path of a config.json, a model type that transformers "
                f"{transformers.__version__} knows (such as 'gpt2', 'llama'), or "
                f"'package.module:Class', but got {kind!r}."
            )
        label = str(path) if data else kind
        base = _made(transformers.CONFIG_MAPPING[kind], label, data)
    elif isinstance(model, transformers.PretrainedConfig):
        label, base, data = model.model_type, model, model.to_dict()
    else:
        raise PlanError(
            f"model: expected a transformers config, a path or a name, but got {model!r}."
        )
    if overrides:
        _refuse_unknown(base, overrides, label)
        label = f"{label} with {_listed(overrides)}"
        base = _made(type(base), label, data, overrides)
    _refuse_empty(base, label)
    return base


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


def _refuse_unknown(config: Any, overrides: dict[str, Any], label: str) -> None:
    known = {*config.to_dict(), *config.attribute_map, *_OF_EVERY_CONFIG}
    for key in overrides:
        if key not in known:
            close = difflib.get_close_matches(key, sorted(known), n=3, cutoff=0.5)
            hint = f"Did you mean {', '.join(close)}?" if close else "See its config.json."
            raise PlanError(
                f"{label}: expected an option of the config {type(config).__name__}, but got "
                f"{key!r}, which it does not have. {hint}"
            )


def _refuse_empty(config: Any, label: str) -> None:
    values = config.to_dict()
    for common in _AT_LEAST_ONE:
        key = config.attribute_map.get(common, common)
        value = values.get(key)
        if isinstance(value, int) and value < 1:
            raise PlanError(f"{label}: expected {key} of at least 1, but got {value}. Change it.")


def _listed(arguments: dict[str, Any]) -> str:
    return ", ".join(f"{key}={value!r}" for key, value in arguments.items())


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


def _read_json(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise PlanError(f"{path}: expected a config in JSON, but got: {error}.") from error
    if not isinstance(data, dict):
        raise PlanError(f"{path}: expected a mapping in JSON, but got {type(data).__name__}.")
    return data


def _work_of_config(
    config: Any, sequence_length: int | None, dtype: str, name: str | None, changes: str
) -> ModelWork:
    size = getattr(config, "image_size", None)
    if size is not None:
        sides = size if isinstance(size, (list, tuple)) else (size, size)
        patch = getattr(config, "patch_size", None) or sides[0]
        length = (sides[0] // patch) * (sides[1] // patch) + 1
        shape = (config.num_channels, *sides)
    else:
        length = sequence_length or getattr(config, "max_position_embeddings", None) or 512

    def run(module: nn.Module, samples: int) -> Tensor:
        if size is not None:
            images = torch.empty(samples, *shape, dtype=TORCH_DTYPES[dtype])
            labels = torch.zeros(samples, dtype=torch.long)
            return loss_of(module(pixel_values=images, labels=labels))
        tokens = torch.zeros(samples, length, dtype=torch.long)
        return loss_of(module(input_ids=tokens, **_labels(module, tokens)))

    if config.is_encoder_decoder and getattr(config, "decoder_start_token_id", None) is None:
        config = type(config)(**(config.to_dict() | {"decoder_start_token_id": 0}))

    def build() -> nn.Module:
        try:
            return _auto_class(config).from_config(config)
        except (PlanError, RuntimeError):  # RuntimeError: fake tensors; count_work reports it
            raise
        except Exception as error:
            label = f"{config.model_type} with {changes}" if changes else config.model_type
            raise _refused(label, error) from error

    with _quiet():
        return count_work(
            build, run, model=name or config.model_type, dtype=dtype, sequence_length=length
        )


def _labels(module: nn.Module, tokens: Tensor) -> dict[str, Any]:
    accepted = inspect.signature(module.forward).parameters
    given: dict[str, Any] = {"use_cache": False} if "use_cache" in accepted else {}
    return given | ({"labels": tokens} if "labels" in accepted else {})


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
    for mapping, found in (
        ("MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING", "AutoModelForImageClassification"),
        ("MODEL_FOR_MASKED_LM_MAPPING", "AutoModelForMaskedLM"),
        ("MODEL_FOR_CAUSAL_LM_MAPPING", "AutoModelForCausalLM"),
    ):
        if kind in getattr(transformers, mapping):
            return getattr(transformers, found)
    return transformers.AutoModel


def _work_of_class(
    path: str, sequence_length: int, dtype: str, name: str | None, arguments: dict[str, Any]
) -> ModelWork:
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

    def run(module: nn.Module, samples: int) -> Tensor:
        example = getattr(module, "example_input_array", None)
        if example is None:
            tokens = torch.zeros(samples, sequence_length, dtype=torch.long)
            return loss_of(module(tokens))
        batch = _repeated(example, samples, TORCH_DTYPES[dtype])
        if isinstance(batch, dict):
            return loss_of(module(**batch))
        return loss_of(module(*batch) if isinstance(batch, (tuple, list)) else module(batch))

    def build() -> nn.Module:
        module = found(**arguments)
        if hasattr(module, "configure_model"):  # Lightning modules make large layers there
            module.configure_model()
        return module

    return count_work(
        build, run, model=name or attribute, dtype=dtype, sequence_length=sequence_length
    )


def _repeated(example: Any, samples: int, dtype: torch.dtype) -> Any:
    """Return the example with ``samples`` as its first dimension."""
    if isinstance(example, Tensor):
        kind = dtype if example.is_floating_point() else example.dtype
        return torch.zeros((samples, *example.shape[1:]), dtype=kind)
    if isinstance(example, dict):
        return {key: _repeated(value, samples, dtype) for key, value in example.items()}
    if isinstance(example, (tuple, list)):
        return type(example)(_repeated(value, samples, dtype) for value in example)
    return example
