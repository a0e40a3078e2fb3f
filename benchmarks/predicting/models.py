"""The tests' model zoo in a size for which emulated devices keep their rates, and the main job.

The models are wide enough that an operator's real time stays below its emulated one.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from byte_gpt import ByteLanguageModel
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

WIDTH, HEADS, DEPTH, VOCABULARY = 192, 4, 4, 256
LENGTH, CLASSES = 64, 3
IMAGE, PATCH = 32, 4
MAIN_JOB_CONTEXT = 128


@dataclass(frozen=True)
class Model:
    """One model, its data, and the emulated ranks that train it.

    Attributes:
        make: Makes the LightningModule, with the same weights every time.
        data: Makes a dataset of the given number of samples.
        speeds: Relative speeds of the ranks.
        global_batch_size: Samples of a step.
        total_flops_per_s: Of all ranks together.
    """

    make: Callable[[], LightningModule]
    data: Callable[[int], Dataset[Any]]
    speeds: tuple[float, ...] = (3, 1)
    global_batch_size: int = 8
    total_flops_per_s: float = 2e10

    def loader(self, steps: int) -> DataLoader[Any]:
        """Return batches for this number of steps."""
        torch.manual_seed(2)
        return DataLoader(self.data(self.global_batch_size * steps), self.global_batch_size)


class HuggingFace(LightningModule):
    """Trains an unmodified model of transformers on its own loss."""

    def __init__(self, make: Callable[[], nn.Module]) -> None:
        super().__init__()
        torch.manual_seed(7)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # transformers' own deprecations
            self.network = make().train()

    def training_step(self, batch: dict[str, Tensor], batch_index: int) -> Tensor:
        return self.network(**batch).loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        learning = [p for p in self.network.parameters() if p.requires_grad]
        return torch.optim.AdamW(learning, lr=1e-4)


class Samples(Dataset[dict[str, Tensor]]):
    """A dataset whose samples are the rows of these tensors."""

    def __init__(self, **columns: Tensor) -> None:
        self._columns = columns

    def __len__(self) -> int:
        return min(len(column) for column in self._columns.values())

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {name: column[index] for name, column in self._columns.items()}


def _tokens(samples: int, length: int = LENGTH) -> Tensor:
    return torch.randint(0, VOCABULARY, (samples, length))


def _language(samples: int) -> Dataset[Any]:
    tokens = _tokens(samples)
    return Samples(input_ids=tokens, labels=tokens)


def _masked_language(samples: int) -> Dataset[Any]:
    tokens = _tokens(samples)
    mask = torch.ones_like(tokens)
    mask[:, -1] = 0
    return Samples(input_ids=tokens, attention_mask=mask, labels=tokens)


def _sequence(samples: int) -> Dataset[Any]:
    return Samples(input_ids=_tokens(samples), labels=_tokens(samples, LENGTH // 2))


def _classified(samples: int) -> Dataset[Any]:
    return Samples(input_ids=_tokens(samples), labels=torch.randint(0, CLASSES, (samples,)))


def _images(samples: int) -> Dataset[Any]:
    pixels = torch.randn(samples, 3, IMAGE, IMAGE)
    return Samples(pixel_values=pixels, labels=torch.randint(0, CLASSES, (samples,)))


def _bytes(samples: int) -> Dataset[Any]:
    tokens = _tokens(samples, MAIN_JOB_CONTEXT + 1)
    return TensorDataset(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())


def _main_job() -> LightningModule:
    torch.manual_seed(7)
    return ByteLanguageModel(context=MAIN_JOB_CONTEXT)


def _llama(tied: bool = False) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=WIDTH,
            intermediate_size=3 * WIDTH,
            num_hidden_layers=DEPTH,
            num_attention_heads=HEADS,
            num_key_value_heads=HEADS // 2,
            tie_word_embeddings=tied,
            use_cache=False,
        )
    )


def _gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=VOCABULARY,
            n_embd=WIDTH,
            n_layer=DEPTH,
            n_head=HEADS,
            n_positions=LENGTH,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            use_cache=False,
        )
    )


def _encoder_sizes() -> dict[str, Any]:
    return {
        "hidden_size": WIDTH,
        "num_hidden_layers": DEPTH,
        "num_attention_heads": HEADS,
        "intermediate_size": 4 * WIDTH,
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
        "num_labels": CLASSES,
    }


def _bert() -> nn.Module:
    from transformers import BertConfig, BertForSequenceClassification

    sizes = _encoder_sizes()
    config = BertConfig(vocab_size=VOCABULARY, max_position_embeddings=LENGTH, **sizes)
    return BertForSequenceClassification(config)


def _vit() -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(image_size=IMAGE, patch_size=PATCH, **_encoder_sizes())
    return ViTForImageClassification(config)


def _t5() -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    config: Any = T5Config(
        vocab_size=VOCABULARY,
        d_model=WIDTH,
        d_kv=WIDTH // HEADS,
        d_ff=4 * WIDTH,
        num_layers=2,
        num_decoder_layers=3,
        num_heads=HEADS,
        dropout_rate=0.0,
        use_cache=False,
    )
    config.decoder_start_token_id = 0
    return T5ForConditionalGeneration(config)


def _frozen_llama() -> nn.Module:
    """Make a Llama in which only the attention outputs learn, as in LoRA."""
    model = _llama()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("o_proj" in name)
    return model


def _half_frozen_gpt2() -> nn.Module:
    """Make a GPT-2 in which no gradient reaches the embedding and the first block."""
    model = _gpt2()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not any(part in name for part in ("wte", "wpe", "h.0.")))
    return model


def _hugging_face(
    make: Callable[[], nn.Module], data: Callable[[int], Dataset[Any]], **options: Any
) -> Model:
    return Model(lambda: HuggingFace(make), data, **options)


MODELS: dict[str, Model] = {
    "main job": Model(_main_job, _bytes, global_batch_size=16, total_flops_per_s=4e10),
    "llama": _hugging_face(_llama, _masked_language),
    "llama tied": _hugging_face(lambda: _llama(tied=True), _masked_language),
    "gpt2": _hugging_face(_gpt2, _language, speeds=(2, 1, 1)),
    "bert": _hugging_face(_bert, _classified),
    "vit": _hugging_face(_vit, _images),
    "t5": _hugging_face(_t5, _sequence, total_flops_per_s=1.5e10),
    "frozen llama": _hugging_face(_frozen_llama, _masked_language),
    "half-frozen gpt2": _hugging_face(_half_frozen_gpt2, _language, speeds=(2, 1, 1)),
}
