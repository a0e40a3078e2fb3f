"""Small models of many kinds, unmodified from transformers, with a batch and a mean loss."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

VOCABULARY = 61


def _tokens(samples: int, length: int = 6) -> Tensor:
    return torch.randint(0, VOCABULARY, (samples, length))


def _language(samples: int) -> dict[str, Tensor]:
    tokens = _tokens(samples)
    mask = torch.ones_like(tokens)
    mask[:, -1] = 0
    return {"input_ids": tokens, "attention_mask": mask, "labels": tokens}


def _sequence(samples: int) -> dict[str, Tensor]:
    return {"input_ids": _tokens(samples), "labels": _tokens(samples, 5)}


def _classified(samples: int) -> dict[str, Tensor]:
    return {"input_ids": _tokens(samples), "labels": torch.randint(0, 3, (samples,))}


def _images(samples: int) -> dict[str, Tensor]:
    return {
        "pixel_values": torch.randn(samples, 3, 8, 8),
        "labels": torch.randint(0, 3, (samples,)),
    }


def llama(tied: bool = False, **kwargs: Any) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=24,
            intermediate_size=40,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=2,
            tie_word_embeddings=tied,
            use_cache=False,
            **kwargs,
        )
    )


def gpt2(dropout: float = 0.0) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=VOCABULARY,
            n_embd=24,
            n_layer=3,
            n_head=4,
            n_positions=16,
            resid_pdrop=dropout,
            embd_pdrop=dropout,
            attn_pdrop=dropout,
            use_cache=False,
        )
    )


def bert() -> nn.Module:
    from transformers import BertConfig, BertForSequenceClassification

    return BertForSequenceClassification(
        BertConfig(
            vocab_size=VOCABULARY,
            hidden_size=24,
            num_hidden_layers=3,
            num_attention_heads=4,
            intermediate_size=40,
            max_position_embeddings=16,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
            num_labels=3,
        )
    )


def vit() -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    return ViTForImageClassification(
        ViTConfig(
            hidden_size=24,
            num_hidden_layers=3,
            num_attention_heads=4,
            intermediate_size=40,
            image_size=8,
            patch_size=4,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
            num_labels=3,
        )
    )


def t5() -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    return T5ForConditionalGeneration(
        T5Config(
            vocab_size=VOCABULARY,
            d_model=24,
            d_kv=6,
            d_ff=40,
            num_layers=2,
            num_decoder_layers=3,
            num_heads=4,
            dropout_rate=0.0,
            decoder_start_token_id=0,
            use_cache=False,
        )
    )


def frozen_llama() -> nn.Module:
    """Only the attention outputs learn, as in LoRA: everything else is frozen."""
    model = llama()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("o_proj" in name)
    return model


def half_frozen_gpt2() -> nn.Module:
    """Embedding and first block frozen: no gradient reaches them."""
    model = gpt2()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not any(part in name for part in ("wte", "wpe", "h.0.")))
    return model


def hugging_face_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return model(**batch).loss


ZOO: dict[str, tuple[Callable[[], nn.Module], Callable[[int], dict[str, Tensor]]]] = {
    "llama": (llama, _language),
    "llama tied": (lambda: llama(tied=True), _language),
    "gpt2": (gpt2, _language),
    "bert": (bert, _classified),
    "vit": (vit, _images),
    "t5": (t5, _sequence),
    "frozen llama": (frozen_llama, _language),
    "half-frozen gpt2": (half_frozen_gpt2, _language),
}


def build(name: str, samples: int) -> tuple[nn.Module, dict[str, Tensor]]:
    """Return the model, in training mode, and a batch; the same on every rank."""
    torch.manual_seed(7)
    make_model, make_batch = ZOO[name]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # transformers warns of its own deprecations
        model = make_model().train()
    return model, make_batch(samples)
