"""Trains small copies of many Hugging Face architectures, and compares them with one device.

    python benchmarks/architectures.py [NAME ...]

Each is what a user would write: an unmodified model in a LightningModule, AdamW, gradients clipped
by norm, a shuffled DataLoader, two epochs of three steps of 16 samples, fp32. Two plans are given:
two ranks, and three ranks of which one has no samples and one no rows of the state. Prints the
largest difference of any weight after training from that after training on one device.
"""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from lightning.pytorch import LightningModule, Trainer, seed_everything
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

# ranks are started as in the tests
sys.path.append(str(Path(__file__).resolve().parent.parent / "tests"))
sys.path.append(str(Path(__file__).resolve().parent.parent / "tests" / "distributed"))
sys.path.append(str(Path(__file__).resolve().parent.parent / "tests" / "lightning"))

from common import in_ranks
from launch import RankFailure

from lightning_cephalo import CephaloStrategy, Plan, Planner, RankPlan

SAMPLES, GLOBAL_BATCH, EPOCHS, CLASSES = 48, 16, 2, 4
WORDS, LENGTH, SIDE = 99, 16, 32
PLANS = {
    "2 ranks": Plan([RankPlan((5,), 0.7), RankPlan((7, 4), 0.3)]),
    "3 ranks": Plan([RankPlan((6, 3), 0.0), RankPlan((), 0.4), RankPlan((7,), 0.6)]),
}

Data = Callable[[int, torch.Generator], dict[str, Tensor]]

H = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4}
LM = {"vocab_size": WORDS, "intermediate_size": 64, "pad_token_id": 0, "bos_token_id": 1,
      "eos_token_id": 2, **H}  # fmt: skip
GQA = {**LM, "num_key_value_heads": 2}
MOE = {**GQA, "moe_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2}
N = {"vocab_size": WORDS, "n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 32}
GPT = {**N, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
BERT = {"vocab_size": WORDS, "intermediate_size": 64, **H, "attention_probs_dropout_prob": 0.0,
        "hidden_dropout_prob": 0.0}  # fmt: skip
VIT = {"image_size": SIDE, "patch_size": 8, "intermediate_size": 64, **H}
BART = {"vocab_size": WORDS, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2,
        "encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 64,
        "decoder_ffn_dim": 64, "max_position_embeddings": 32, "dropout": 0.0}  # fmt: skip
STAGES = {"depths": [2, 2], "drop_path_rate": 0.0}

# by kind of task: the class of the model, that of its configuration, and what that says
CAUSAL: list[tuple[str, str, dict[str, Any]]] = [
    ("FalconForCausalLM", "FalconConfig", {"vocab_size": WORDS, **H}),
    ("StableLmForCausalLM", "StableLmConfig", {**LM, "num_key_value_heads": 4}),
    ("GPTJForCausalLM", "GPTJConfig", {**N, "rotary_dim": 4}),
    ("GPTNeoForCausalLM", "GPTNeoConfig", {
        "vocab_size": WORDS, "hidden_size": 32, "num_layers": 2, "num_heads": 4,
        "attention_types": [[["global", "local"], 1]], "max_position_embeddings": 32,
        "resid_dropout": 0.0, "embed_dropout": 0.0, "attention_dropout": 0.0}),
    ("CodeGenForCausalLM", "CodeGenConfig", {**N, "rotary_dim": 4, "n_ctx": 32}),
    ("Phi3ForCausalLM", "Phi3Config", GQA),
    ("CohereForCausalLM", "CohereConfig", GQA),
    ("Starcoder2ForCausalLM", "Starcoder2Config", {
        **GQA, "residual_dropout": 0.0, "embedding_dropout": 0.0}),
    ("Gemma3ForCausalLM", "Gemma3TextConfig", {**GQA, "head_dim": 8, "sliding_window": 8}),
    ("Qwen2MoeForCausalLM", "Qwen2MoeConfig", {**MOE, "shared_expert_intermediate_size": 32}),
    ("Qwen3MoeForCausalLM", "Qwen3MoeConfig", {**MOE, "head_dim": 8}),
    ("DeepseekV3ForCausalLM", "DeepseekV3Config", {
        **LM, "num_key_value_heads": 4, "moe_intermediate_size": 32, "n_routed_experts": 4,
        "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1, "q_lora_rank": 16,
        "kv_lora_rank": 16, "qk_rope_head_dim": 8, "v_head_dim": 8, "qk_nope_head_dim": 8,
        "first_k_dense_replace": 1}),
    ("JetMoeForCausalLM", "JetMoeConfig", {
        "vocab_size": WORDS, "hidden_size": 32, "num_hidden_layers": 2, "num_key_value_heads": 2,
        "kv_channels": 8, "intermediate_size": 64, "num_local_experts": 4,
        "num_experts_per_tok": 2}),
    ("OlmoeForCausalLM", "OlmoeConfig", {**LM, "num_experts": 4, "num_experts_per_tok": 2}),
    ("GPTBigCodeForCausalLM", "GPTBigCodeConfig", GPT),
    ("XGLMForCausalLM", "XGLMConfig", {
        "vocab_size": WORDS, "d_model": 32, "ffn_dim": 64, "num_layers": 3, "attention_heads": 4,
        "max_position_embeddings": 32, "dropout": 0.0, "attention_dropout": 0.0,
        "activation_dropout": 0.0}),
    ("CTRLLMHeadModel", "CTRLConfig", {**N, "dff": 64, "resid_pdrop": 0.0, "embd_pdrop": 0.0}),
    ("XLNetLMHeadModel", "XLNetConfig", {
        "vocab_size": WORDS, "d_model": 32, "n_layer": 3, "n_head": 4, "d_inner": 64,
        "dropout": 0.0}),
    ("RwkvForCausalLM", "RwkvConfig", {
        "vocab_size": WORDS, "hidden_size": 32, "num_hidden_layers": 3,
        "attention_hidden_size": 32, "context_length": 32}),
    ("Mamba2ForCausalLM", "Mamba2Config", {
        "vocab_size": WORDS, "hidden_size": 32, "num_hidden_layers": 3, "num_heads": 8,
        "head_dim": 8, "state_size": 8, "n_groups": 1, "expand": 2, "chunk_size": 8}),
    ("BambaForCausalLM", "BambaConfig", {
        **GQA, "attn_layer_indices": [1], "mamba_n_heads": 8, "mamba_d_head": 8,
        "mamba_d_state": 8, "mamba_n_groups": 1, "mamba_expand": 2, "mamba_chunk_size": 8}),
    ("RecurrentGemmaForCausalLM", "RecurrentGemmaConfig", {
        **LM, "num_key_value_heads": 1, "lru_width": 32, "attention_window_size": 8,
        "conv1d_width": 2}),
    ("SmolLM3ForCausalLM", "SmolLM3Config", GQA),
    ("Glm4ForCausalLM", "Glm4Config", {**GQA, "head_dim": 8}),
    ("GptOssForCausalLM", "GptOssConfig", {
        **GQA, "intermediate_size": 32, "head_dim": 8, "num_local_experts": 4,
        "num_experts_per_tok": 2}),
]  # fmt: skip
MASKED: list[tuple[str, str, dict[str, Any]]] = [
    ("RobertaForMaskedLM", "RobertaConfig", BERT),
    ("DistilBertForMaskedLM", "DistilBertConfig", {
        "vocab_size": WORDS, "dim": 32, "n_layers": 3, "n_heads": 4, "hidden_dim": 64,
        "dropout": 0.0, "attention_dropout": 0.0}),
    ("AlbertForMaskedLM", "AlbertConfig", {**BERT, "embedding_size": 16}),
    ("MPNetForMaskedLM", "MPNetConfig", BERT),
    ("FNetForMaskedLM", "FNetConfig", {
        "vocab_size": WORDS, "hidden_size": 32, "num_hidden_layers": 3, "intermediate_size": 64,
        "hidden_dropout_prob": 0.0}),
    ("BigBirdForMaskedLM", "BigBirdConfig", {**BERT, "attention_type": "original_full"}),
    ("LongformerForMaskedLM", "LongformerConfig", {
        **BERT, "attention_window": 8, "pad_token_id": 1}),
    ("FunnelForMaskedLM", "FunnelConfig", {
        "vocab_size": WORDS, "block_sizes": [2, 2], "d_model": 32, "n_head": 4, "d_head": 8,
        "d_inner": 64, "hidden_dropout": 0.0, "attention_dropout": 0.0,
        "activation_dropout": 0.0}),
]  # fmt: skip
TEXTS: list[tuple[str, str, dict[str, Any]]] = [
    ("ConvBertForSequenceClassification", "ConvBertConfig", {**BERT, "embedding_size": 32}),
    ("SqueezeBertForSequenceClassification", "SqueezeBertConfig", {**BERT, "embedding_size": 32}),
    ("CanineForSequenceClassification", "CanineConfig", {
        "intermediate_size": 64, **H, "attention_probs_dropout_prob": 0.0,
        "hidden_dropout_prob": 0.0, "num_hash_buckets": 64, "local_transformer_stride": 8,
        "downsampling_rate": 4, "upsampling_kernel_size": 4}),
]  # fmt: skip
TRANSLATIONS: list[tuple[str, str, dict[str, Any]]] = [
    ("BartForConditionalGeneration", "BartConfig", {
        **BART, "pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2,
        "decoder_start_token_id": 2}),
    ("PegasusForConditionalGeneration", "PegasusConfig", BART),
    ("M2M100ForConditionalGeneration", "M2M100Config", {
        **BART, "activation_dropout": 0.0, "attention_dropout": 0.0, "encoder_layerdrop": 0.0,
        "decoder_layerdrop": 0.0}),
    ("LongT5ForConditionalGeneration", "LongT5Config", {
        "vocab_size": WORDS, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2,
        "num_heads": 4, "local_radius": 4, "dropout_rate": 0.0, "decoder_start_token_id": 0}),
]  # fmt: skip
IMAGES: list[tuple[str, str, dict[str, Any]]] = [
    ("SwinForImageClassification", "SwinConfig", {
        "image_size": SIDE, "patch_size": 4, "embed_dim": 16, "num_heads": [2, 4],
        "window_size": 4, **STAGES}),
    ("ConvNextForImageClassification", "ConvNextConfig", {
        "hidden_sizes": [16, 32], "num_stages": 2, **STAGES}),
    ("ConvNextV2ForImageClassification", "ConvNextV2Config", {
        "hidden_sizes": [16, 32], "num_stages": 2, **STAGES}),
    ("BeitForImageClassification", "BeitConfig", {
        **VIT, "drop_path_rate": 0.0, "hidden_dropout_prob": 0.0}),
    ("DeiTForImageClassification", "DeiTConfig", VIT),
    ("ViTMSNForImageClassification", "ViTMSNConfig", VIT),
    ("PoolFormerForImageClassification", "PoolFormerConfig", {
        "num_encoder_blocks": 2, "hidden_sizes": [16, 32], "patch_sizes": [7, 3],
        "strides": [4, 2], "padding": [2, 1], **STAGES}),
    ("FocalNetForImageClassification", "FocalNetConfig", {
        "image_size": SIDE, "patch_size": 4, "embed_dim": 16, "focal_levels": [2, 2],
        "focal_windows": [3, 3], **STAGES}),
    ("PvtForImageClassification", "PvtConfig", {
        "image_size": SIDE, "num_encoder_blocks": 2, "depths": [1, 1], "hidden_sizes": [16, 32],
        "patch_sizes": [4, 2], "strides": [4, 2], "num_attention_heads": [1, 2],
        "mlp_ratios": [2, 2], "sequence_reduction_ratios": [2, 1], "drop_path_rate": 0.0}),
    ("HieraForImageClassification", "HieraConfig", {
        "image_size": [SIDE, SIDE], "embed_dim": 16, "depths": [1, 1, 1], "num_heads": [1, 2, 4],
        "patch_stride": [4, 4], "query_stride": [2, 2], "num_query_pool": 2,
        "masked_unit_size": [4, 4], "masked_unit_attention": [True, True, False],
        "drop_path_rate": 0.0}),
]  # fmt: skip
SIGNALS: list[tuple[str, str, dict[str, Any], str, tuple[int, ...]]] = [
    ("Wav2Vec2ForSequenceClassification", "Wav2Vec2Config", {
        **H, "intermediate_size": 64, "conv_dim": (16, 16), "conv_stride": (5, 4),
        "conv_kernel": (10, 8), "num_conv_pos_embeddings": 8,
        "num_conv_pos_embedding_groups": 2, "layerdrop": 0.0, "hidden_dropout": 0.0,
        "attention_dropout": 0.0, "activation_dropout": 0.0, "feat_proj_dropout": 0.0,
        "mask_time_prob": 0.0, "apply_spec_augment": False, "classifier_proj_size": 16},
     "input_values", (800,)),
    ("VideoMAEForVideoClassification", "VideoMAEConfig", {
        **VIT, "patch_size": 16, "num_frames": 4, "tubelet_size": 2},
     "pixel_values", (4, 3, SIDE, SIDE)),
    ("ASTForAudioClassification", "ASTConfig", {
        **H, "intermediate_size": 64, "patch_size": 8, "frequency_stride": 8, "time_stride": 8,
        "max_length": SIDE, "num_mel_bins": SIDE}, "input_values", (SIDE, SIDE)),
]  # fmt: skip


def _words(count: int, generator: torch.Generator, length: int = LENGTH) -> Tensor:
    return torch.randint(5, WORDS, (count, length), generator=generator)


def _classes(count: int, generator: torch.Generator) -> Tensor:
    return torch.randint(0, CLASSES, (count,), generator=generator)


def _causal(count: int, generator: torch.Generator) -> dict[str, Tensor]:
    words = _words(count, generator)
    return {"input_ids": words, "labels": words.clone()}


def _masked(count: int, generator: torch.Generator) -> dict[str, Tensor]:
    found = _causal(count, generator)
    return {**found, "attention_mask": torch.ones_like(found["input_ids"])}


def _texts(count: int, generator: torch.Generator) -> dict[str, Tensor]:
    return {**_masked(count, generator), "labels": _classes(count, generator)}


def _translations(count: int, generator: torch.Generator) -> dict[str, Tensor]:
    return {**_masked(count, generator), "labels": _words(count, generator, LENGTH // 2)}


def _signals(name: str, shape: tuple[int, ...]) -> Data:
    def data(count: int, generator: torch.Generator) -> dict[str, Tensor]:
        values = torch.randn(count, *shape, generator=generator)
        return {name: values, "labels": _classes(count, generator)}

    return data


def architectures() -> dict[str, tuple[Callable[[], nn.Module], Data]]:
    """Return what makes each model, and what makes its samples, by the model's class."""

    def maker(model: str, config: str, known: dict[str, Any]) -> Callable[[], nn.Module]:
        return lambda: getattr(transformers, model)(getattr(transformers, config)(**known))

    found: dict[str, tuple[Callable[[], nn.Module], Data]] = {}
    words = (CAUSAL, _causal), (MASKED, _masked), (TRANSLATIONS, _translations)
    classes = (TEXTS, _texts), (IMAGES, _signals("pixel_values", (3, SIDE, SIDE)))
    for kinds, known in ((words, {}), (classes, {"num_labels": CLASSES})):
        for models, data in kinds:
            for model, config, own in models:
                found[model] = maker(model, config, {**own, **known}), data
    for model, config, own, name, shape in SIGNALS:
        found[model] = maker(model, config, {**own, "num_labels": CLASSES}), _signals(name, shape)
    return found


class _Samples(Dataset):
    def __init__(self, data: Data) -> None:
        self.columns = data(SAMPLES, torch.Generator().manual_seed(3))

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {name: column[index] for name, column in self.columns.items()}


class _Task(LightningModule):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def training_step(self, batch: dict[str, Tensor], _: int) -> Tensor:
        return self.model(**batch).loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3, eps=1e-5)


def trained(name: str, plan: str | None) -> dict[str, Tensor]:
    """Train an architecture in this rank; returns its weights on rank 0."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # of Lightning and transformers: they would hide the figures
    make, data = architectures()[name]
    seed_everything(1, verbose=False)
    task = _Task(make())
    ranks = 1 if plan is None else len(PLANS[plan].ranks)
    strategy = "auto" if plan is None else CephaloStrategy(
        plan=PLANS[plan], global_batch_size=GLOBAL_BATCH, planner=Planner(verbose=False)
    )  # fmt: skip
    trainer = Trainer(
        accelerator="cpu",
        devices=ranks,
        strategy=strategy,
        max_epochs=EPOCHS,
        gradient_clip_val=0.5,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    order = torch.Generator().manual_seed(7)
    loader = DataLoader(_Samples(data), GLOBAL_BATCH, shuffle=True, generator=order)
    trainer.fit(task, loader)
    return trainer.strategy.lightning_module_state_dict()


def _difference(own: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    if set(own) != set(expected):
        raise AssertionError(f"other names: {sorted(set(own) ^ set(expected))[:5]}")
    return max(float((own[name] - expected[name]).abs().max()) for name in expected
               if expected[name].is_floating_point())  # fmt: skip


def main() -> None:
    table = Table(title="Largest difference of a weight from one device's after 6 steps, fp32")
    table.add_column("architecture")
    for plan in PLANS:
        table.add_column(plan, justify="right")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    transformers.utils.logging.set_verbosity_error()
    console, worst = Console(width=100), 0.0
    for name in sys.argv[1:] or architectures():
        expected = in_ranks(1, trained, name, None)[0]
        cells = []
        for plan, given in PLANS.items():
            try:
                found = in_ranks(len(given.ranks), trained, name, plan)[0]
            except RankFailure as failure:
                cells.append(str(failure).strip().splitlines()[-1])
                worst = float("inf")
                continue
            difference = _difference(found, expected)
            worst = max(worst, difference)
            cells.append(f"{difference:.1e}")
        print(name, *cells, flush=True)
        table.add_row(name, *cells)
    table.add_row("worst", f"{worst:.1e}", style="bold")
    console.print(table)


if __name__ == "__main__":
    main()
