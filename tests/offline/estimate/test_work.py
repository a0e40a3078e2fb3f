"""What a model asks, against closed formulas."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

from lightning_cephalo.offline.estimate.models import work_of
from lightning_cephalo.offline.estimate.work import Linear, count_work
from lightning_cephalo.plan import PlanError

transformers = pytest.importorskip("transformers")

HIDDEN, LENGTH, VOCABULARY, LAYERS = 64, 32, 100, 3
TOKENS = {"vocab_size": VOCABULARY, "bos_token_id": 0, "eos_token_id": 0}
GPT2 = {"n_embd": HIDDEN, "n_head": 4, "n_layer": LAYERS, **TOKENS}
LLAMA = {
    "hidden_size": HIDDEN,
    "intermediate_size": 160,
    "num_attention_heads": 4,
    "num_hidden_layers": LAYERS,
    **TOKENS,
}


@pytest.fixture(scope="module")
def gpt2():
    return work_of("gpt2", sequence_length=LENGTH, **GPT2)


@pytest.fixture(scope="module")
def llama():
    return work_of("llama", sequence_length=LENGTH, **LLAMA)


def test_flops_of_gpt2(gpt2):
    forward = 24 * HIDDEN**2 * LENGTH + 4 * HIDDEN * LENGTH**2
    assert gpt2.forward.flops == Linear(0.0, forward)
    # twice the forward, and the attention scores once more, as fused kernels do
    assert gpt2.backward.flops == Linear(0.0, 2 * forward + 2 * HIDDEN * LENGTH**2)
    assert gpt2.tail.flops.per_sample == pytest.approx(3 * 2 * HIDDEN * VOCABULARY * LENGTH)


def test_flops_of_llama(llama):
    parameters = 4 * HIDDEN**2 + 3 * HIDDEN * 160
    forward = 2 * parameters * LENGTH + 4 * HIDDEN * LENGTH**2
    assert llama.forward.flops == Linear(0.0, forward)


def test_parameters_are_those_of_units_and_root(gpt2, llama):
    for work, kind, shape in ((gpt2, "gpt2", GPT2), (llama, "llama", LLAMA)):
        with torch.device("meta"):
            config = transformers.CONFIG_MAPPING[kind](**shape)
            model = transformers.AutoModelForCausalLM.from_config(config)
        assert work.units == LAYERS
        assert work.parameters == sum(p.numel() for p in model.parameters())
        assert work.largest_unit_parameters == work.unit_parameters


def test_memory_of_gpt2(gpt2):
    activation = 4 * LENGTH * HIDDEN
    assert gpt2.boundary_bytes == activation
    # at least the inputs of the four linear layers, of attention, of the norms and of gelu
    assert 12 * activation < gpt2.kept_bytes < 40 * activation
    assert gpt2.unit_peak_bytes.per_sample > gpt2.kept_bytes
    # logits and their gradient
    assert gpt2.root_peak_bytes.per_sample >= 2 * 4 * LENGTH * VOCABULARY


def test_eager_attention_keeps_its_weights(gpt2):
    eager = work_of("gpt2", sequence_length=LENGTH, attn_implementation="eager", **GPT2)
    assert eager.kept_bytes - gpt2.kept_bytes > 4 * 4 * LENGTH**2


def test_half_precision_moves_and_keeps_half(gpt2):
    half = work_of("gpt2", sequence_length=LENGTH, dtype="bf16", **GPT2)
    assert half.boundary_bytes == gpt2.boundary_bytes / 2
    assert half.forward.flops == gpt2.forward.flops
    assert half.forward.moved_bytes.per_sample == pytest.approx(
        gpt2.forward.moved_bytes.per_sample / 2, rel=0.1
    )


SMALL = {
    "hidden_size": HIDDEN,
    "num_attention_heads": 4,
    "num_hidden_layers": LAYERS,
    "intermediate_size": 128,
}


@pytest.mark.parametrize(
    ("kind", "shape"),
    [
        ("bert", SMALL | {"vocab_size": VOCABULARY}),
        ("vit", SMALL | {"image_size": 32, "patch_size": 8}),
        (
            "opt",
            {
                "hidden_size": HIDDEN,
                "word_embed_proj_dim": HIDDEN,
                "ffn_dim": 128,
                "num_attention_heads": 4,
                "num_hidden_layers": LAYERS,
                "pad_token_id": 0,
                **TOKENS,
            },
        ),
    ],
)
def test_other_kinds_of_models(kind, shape):
    work = work_of(kind, sequence_length=LENGTH, **shape)
    length = 17 if kind == "vit" else LENGTH
    parameters = 4 * HIDDEN**2 + 2 * HIDDEN * 128
    assert work.sequence_length == length
    assert work.units == LAYERS
    assert work.forward.flops.per_sample == pytest.approx(
        2 * parameters * length + 4 * HIDDEN * length**2
    )


def test_only_the_experts_that_a_token_visits_count():
    work = work_of(
        "mixtral",
        sequence_length=LENGTH,
        dtype="bf16",
        num_local_experts=8,
        num_experts_per_tok=2,
        num_key_value_heads=4,
        **LLAMA,
    )
    active = 4 * HIDDEN**2 + 2 * 3 * HIDDEN * 160 + 8 * HIDDEN  # with the router
    forward = 2 * active * LENGTH + 4 * HIDDEN * LENGTH**2
    assert work.forward.flops.per_sample == forward
    assert work.backward.flops.per_sample == pytest.approx(2 * forward, rel=0.1)
    assert work.unit_parameters > 8 * 3 * HIDDEN * 160


def test_units_that_differ_are_averaged():
    work = work_of(
        "t5",
        sequence_length=LENGTH,
        d_model=HIDDEN,
        d_kv=16,
        d_ff=128,
        num_layers=2,
        num_heads=4,
        vocab_size=VOCABULARY,
    )
    assert work.units == 4
    assert work.largest_unit_parameters > work.unit_parameters
    # cross-attention takes the encoder's output too, which all decoder layers share
    assert 4 * LENGTH * HIDDEN < work.boundary_bytes < 2 * 4 * LENGTH * HIDDEN


def test_a_config_is_read_from_a_file_and_a_folder(tmp_path, gpt2):
    config = transformers.GPT2Config(**GPT2)
    config.save_pretrained(tmp_path)
    for model in (tmp_path, tmp_path / "config.json", str(tmp_path)):
        assert work_of(model, sequence_length=LENGTH) == gpt2
    with pytest.raises(PlanError, match=r"(?s)got GPT2Config.* save_pretrained\(FOLDER\)"):
        work_of(config, sequence_length=LENGTH)
    fewer = work_of(tmp_path, sequence_length=LENGTH, n_layer=2, name="mine")
    assert (fewer.units, fewer.model) == (2, "mine")


def test_what_is_no_model_is_refused(tmp_path):
    (tmp_path / "config.json").write_text("[]")
    cases = [
        ("gpt22", "'gpt22'"),
        (tmp_path, "mapping in JSON"),
        (3, "but got 3"),
        ("whisper", "'whisper' takes others"),
        ("resnet", "resnet: expected a model that runs without values"),
        ("no.such.package:Model", "no.such.package"),
        ("torch.nn:Nothing", "Nothing"),
    ]
    for model, words in cases:
        with pytest.raises(PlanError, match=words):
            work_of(model)
    with pytest.raises(PlanError, match="'int8'"):
        work_of("gpt2", dtype="int8", **GPT2)


REFUSED = {
    "no such option": ("gpt2", {"hidden_sise": 8}, "got 'hidden_sise'.* Did you mean hidden_size"),
    "of another": ("llama", {"n_layer": 2}, "LlamaConfig, but got 'n_layer'"),
    "type": ("gpt2", {"n_layer": "abc"}, "gpt2 with n_layer='abc': .* expected int, got str"),
    "type by alias": ("gpt2", {"num_hidden_layers": "abc"}, "gpt2 with num_hidden_layers='abc'"),
    "config's own": ("llama", {"num_attention_heads": 7}, "not a multiple of .* heads .7."),
    "model's own": ("gpt2", {"num_attention_heads": 7}, "must be divisible by num_heads"),
    "unknown value": ("gpt2", {"activation_function": "nope"}, "KeyError: 'nope'"),
    "no layers": ("gpt2", {"n_layer": 0}, "expected at least 1 layer, but got 0"),
    "fewer": ("llama", {"num_hidden_layers": -2}, "expected at least 1 layer, but got -2"),
    "no width": ("gpt2", {"hidden_size": 0}, "gpt2: .* ZeroDivisionError"),
    "no words": ("gpt2", {"vocab_size": -1}, "negative dimension -1"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_a_config_does_not_take_is_refused(case):
    kind, options, words = REFUSED[case]
    with pytest.raises(PlanError, match=words):
        work_of(kind, sequence_length=8, **options)


def test_a_config_file_that_transformers_refuses_is_named(tmp_path):
    path = tmp_path / "config.json"
    for data, words in (
        ({"model_type": "llama", "hidden_size": "x"}, "config.json: .* expected int, got str"),
        ({"model_type": ["gpt2"]}, r"model_type: .* but got \['gpt2'\]"),
    ):
        path.write_text(json.dumps(data))
        with pytest.raises(PlanError, match=words):
            work_of(tmp_path)


def test_an_override_wins_over_a_file_whatever_name_either_uses(tmp_path):
    for data in ({"n_layer": 5}, {"num_hidden_layers": 5}, {"n_layer": 5, "num_hidden_layers": 5}):
        (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2"} | GPT2 | data))
        for option in ("n_layer", "num_hidden_layers"):
            assert work_of(tmp_path, sequence_length=8, **{option: 2}).units == 2


@pytest.mark.parametrize("length", [0, -1, 2.5])
def test_a_sample_has_tokens(length):
    for model in ("gpt2", "torch.nn:Linear"):
        with pytest.raises(PlanError, match="sequence_length: expected a whole number of at least"):
            work_of(model, sequence_length=length)


@pytest.mark.parametrize("path", [":X", "x:", "..x:Y", "a b:C", ":"])
def test_what_is_no_import_path_is_refused(path):
    with pytest.raises(PlanError, match=f"'package.module:Class', but got {path!r}"):
        work_of(path)


class Blocks(nn.Module):
    """A user's module: named by import path below."""

    def __init__(self, width: int = 8, asks: bool = False) -> None:
        super().__init__()
        self.example_input_array = torch.zeros(1, width)
        self.asks = asks
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(3))

    def forward(self, batch):
        if self.asks and batch.sum() > 0:
            return batch
        for block in self.blocks:
            batch = block(batch)
        return batch


def test_a_class_is_named_by_import_path():
    work = work_of(f"{__name__}:Blocks", width=16)
    assert (work.model, work.units) == ("Blocks", 3)
    assert work.forward.flops.per_sample == 2 * 16**2
    # the first block's input is the batch itself, which nothing keeps for it
    assert work.boundary_bytes == pytest.approx(4 * 16 * 2 / 3)


def test_a_model_that_needs_values_is_refused():
    with pytest.raises(PlanError, match="Blocks: expected a model that runs without values"):
        work_of(f"{__name__}:Blocks", asks=True)


def test_a_model_without_repeated_blocks_is_all_root():
    with pytest.warns(UserWarning, match="No repeated block"):
        work = count_work(
            lambda: nn.Linear(8, 8),
            lambda module, samples: module(torch.zeros(samples, 8)).sum(),
            model="linear",
            dtype="fp32",
            sequence_length=1,
        )
    assert (work.units, work.unit_parameters, work.root_parameters) == (1, 0.0, 72.0)
    assert work.tail.flops.per_sample == 2 * 2 * 64  # no gradient of the input
    assert work.forward.flops.at(4) == 0.0
