"""Units found in models of many kinds, and the ways to say otherwise."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

from lightning_cephalo.sharding.discovery import UnitKind, UnitMembers, find_units
from lightning_cephalo.sharding.materialise import initialise_members

SMALL = {"hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 24}


def units_of(module: nn.Module, **request) -> dict[str, UnitMembers]:
    units = find_units(module, **request)
    assert units[0].name == ""
    held = [parameter for unit in units for parameter, _ in unit.parameters]
    assert len(held) == len({id(parameter) for parameter in held}), "a parameter in two units"
    assert {id(parameter) for parameter in held} == {id(p) for p in module.parameters()}
    return {unit.name: unit for unit in units}


def names_in(unit: UnitMembers) -> set[str]:
    return {owners[0].name for _, owners in unit.parameters}


def build(make):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # transformers warns of its own deprecations
        return make()


class Block(nn.Module):
    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x):
        return self.linear(x)


class Model(nn.Module):
    def __init__(self, depth: int = 3) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.blocks = nn.ModuleList([Block() for _ in range(depth)])
        self.head = nn.Linear(4, 7, bias=False)


# -- Hugging Face -----------------------------------------------------------------------------


def llama(tied: bool) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=32, num_hidden_layers=3, num_key_value_heads=1, tie_word_embeddings=tied, **SMALL
    )
    return LlamaForCausalLM(config)


@pytest.mark.parametrize("tied", [False, True])
def test_every_llama_layer_is_a_unit_and_tied_embedding_and_norm_are_the_root(tied):
    units = units_of(build(lambda: llama(tied)))
    layers = [f"model.layers.{i}" for i in range(3)]
    own = layers if tied else ["model.embed_tokens", *layers, "lm_head"]
    assert list(units) == ["", *own]
    root = {"model.norm.weight"}
    assert names_in(units[""]) == (root | {"model.embed_tokens.weight"} if tied else root)


def test_a_weight_tied_inside_the_root_is_there_once_with_both_its_owners():
    units = units_of(build(lambda: llama(tied=True)))
    owners = {tuple(owner.name for owner in owners) for _, owners in units[""].parameters}
    assert ("model.embed_tokens.weight", "lm_head.weight") in owners


def test_every_gpt2_block_is_a_unit():
    from transformers import GPT2Config, GPT2LMHeadModel

    units = units_of(
        build(
            lambda: GPT2LMHeadModel(
                GPT2Config(
                    vocab_size=32,
                    n_embd=16,
                    n_layer=3,
                    n_head=2,
                    n_positions=8,
                    bos_token_id=0,
                    eos_token_id=0,
                )
            )
        )
    )
    assert list(units) == ["", *(f"transformer.h.{i}" for i in range(3))]
    assert "transformer.wte.weight" in names_in(units[""])


def test_every_bert_layer_is_a_unit_and_pooler_and_classifier_are_the_root():
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(vocab_size=8, num_hidden_layers=2, max_position_embeddings=8, **SMALL)
    units = units_of(build(lambda: BertForSequenceClassification(config)))
    assert list(units) == ["", *(f"bert.encoder.layer.{i}" for i in range(2))]
    assert {"bert.pooler.dense.weight", "classifier.bias"} <= names_in(units[""])


def test_every_vit_layer_is_a_unit():
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(num_hidden_layers=3, image_size=8, patch_size=4, **SMALL)
    model = build(lambda: ViTForImageClassification(config))
    layers = [name for name, module in model.named_modules() if type(module).__name__ == "ViTLayer"]
    assert len(layers) == 3
    assert list(units_of(model)) == ["", *layers]


def test_encoder_and_decoder_blocks_of_t5_are_units_and_their_inner_lists_are_not():
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=32, d_model=16, d_kv=8, d_ff=24, num_layers=2, num_decoder_layers=3, num_heads=2
    )
    units = units_of(build(lambda: T5ForConditionalGeneration(config)))
    assert list(units) == [
        "",
        *(f"encoder.block.{i}" for i in range(2)),
        *(f"decoder.block.{i}" for i in range(3)),
    ]
    assert "shared.weight" in names_in(units[""])


# -- what counts as a repeated block ----------------------------------------------------------


class MixtureBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(4, 3)
        self.experts = nn.ModuleList([Block() for _ in range(3)])

    def forward(self, x):
        return sum(expert(x) for expert in self.experts)


def test_experts_inside_a_block_are_not_units():
    model = nn.Module()
    model.layers = nn.ModuleList([MixtureBlock() for _ in range(2)])
    assert list(units_of(model)) == ["", "layers.0", "layers.1"]


def test_blocks_in_a_sequential_are_units_and_a_different_neighbour_is_not():
    model = nn.Sequential(nn.Linear(1, 1), Block(), Block(), nn.Linear(1, 1))
    assert list(units_of(model)) == ["", "1", "2"]


def test_parametrised_blocks_of_one_type_are_units_though_each_has_its_own_class():
    model = nn.Sequential(*(nn.utils.parametrizations.weight_norm(nn.Linear(3, 3)) for _ in "ab"))
    assert type(model[0]) is not type(model[1])
    assert list(units_of(model)) == ["", "0", "1"]
    assert list(units_of(model, wanted=["Linear"])) == ["", "0", "1"]


def test_a_run_that_is_tiny_beside_the_largest_one_stays_in_the_root():
    model = Model()
    model.blocks = nn.ModuleList([Block(32) for _ in range(3)])
    model.heads = nn.ModuleList([nn.Linear(2, 2) for _ in range(2)])
    assert list(units_of(model)) == ["", *(f"blocks.{i}" for i in range(3))]


def test_blocks_without_parameters_are_not_units():
    model = Model()
    model.dropouts = nn.ModuleList([nn.Dropout() for _ in range(3)])
    assert list(units_of(model)) == ["", "embed", *(f"blocks.{i}" for i in range(3)), "head"]


def test_without_two_layers_all_is_one_unit_and_a_warning_says_what_is_lost():
    with pytest.warns(UserWarning, match=r"whole module is one unit.*units="):
        units = find_units(Model(depth=0))
    assert [unit.name for unit in units] == [""]
    assert len(units[0].parameters) == 2


class Stage(nn.Module):
    """A block that holds blocks: of a U-Net, or of a network whose stages grow."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([TwoLayers(width) for _ in range(depth)])
        self.down = nn.Linear(width, 2 * width)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.down(x)


class TwoLayers(nn.Sequential):
    def __init__(self, width: int) -> None:
        super().__init__(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, width))


class Other(Block):
    pass


def holder(**children: nn.Module) -> nn.Module:
    model = nn.Module()
    for name, child in children.items():
        setattr(model, name, child)
    return model


def sequential(width: int = 8) -> nn.Sequential:
    return nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, width))


class ReadsWeights(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(9, 8)
        self.first, self.second, self.code = (nn.Linear(8, 8) for _ in range(3))
        self.coder, self.last = Coder(), nn.Linear(8, 8)
        self.last.weight.data.zero_()

    def forward(self, x):
        x = nn.functional.linear(self.second(self.first(x)), self.code.weight)
        return self.last(self.coder.decode(x))


class Coder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(1, 8), nn.Linear(8, 1)

    def forward(self, x):
        return self.down(x)

    def decode(self, x):
        return self.up(self.down(x))


class WithoutForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def encode(self, x):
        return self.b(self.a(x))


class Attends(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2)
        self.wide = sequential()

    def forward(self, x):
        return self.wide(self.attention(x, x, x)[0])


OTHER_MODELS = {
    "a list of Sequentials": (
        lambda: holder(blocks=nn.ModuleList([sequential() for _ in range(3)])),
        "blocks.0 blocks.1 blocks.2",
    ),
    "stages, one of them of one block": (
        lambda: holder(stages=nn.ModuleList([Stage(4, 1), Stage(8, 3), Stage(16, 2)])),
        "stages.0.blocks.0 stages.1.blocks.0 stages.1.blocks.1 stages.1.blocks.2"
        " stages.2.blocks.0 stages.2.blocks.1 stages.2.down",  # behind all blocks
    ),
    "stages, two of them alike": (
        lambda: holder(stages=nn.ModuleList([Stage(w, 2) for w in (4, 4, 8, 16)])),
        " ".join(f"stages.{stage}.blocks.{block}" for stage in range(4) for block in range(2))
        + " stages.3.down",
    ),
    "stages in a Sequential": (
        lambda: nn.Sequential(
            nn.Sequential(TwoLayers(4), TwoLayers(4)), nn.Sequential(TwoLayers(8), TwoLayers(8))
        ),
        "0.0 0.1 1.0 1.1",
    ),
    "stages of U-Nets of other types, and one between": (
        lambda: holder(
            down=nn.ModuleList([Stage(8, 2), holder(blocks=nn.ModuleList([TwoLayers(8)] * 1))]),
            middle=TwoLayers(8),
            up=nn.ModuleList([Stage(8, 2)]),
        ),
        "down.0.blocks.0 down.0.blocks.1 down.1.blocks.0 middle up.0.blocks.0 up.0.blocks.1"
        " up.0.down",
    ),
    "blocks of two types in turns": (
        lambda: holder(layers=nn.ModuleList([Block(8), Other(8), Block(8), Other(8)])),
        "layers.0 layers.1 layers.2 layers.3",
    ),
    "a block of another type among others, and a small one": (
        lambda: holder(layers=nn.ModuleList([Block(8), Block(8), Other(8), nn.LayerNorm(2)])),
        "layers.0 layers.1 layers.2",
    ),
    "experts in all blocks but the first": (
        lambda: holder(layers=nn.ModuleList([Block(), MixtureBlock(), MixtureBlock()])),
        "layers.0 layers.1 layers.2",
    ),
    "a plain list of layers": (
        lambda: nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8), nn.Linear(8, 4)),
        "2 3",
    ),
    "layers by size": (
        lambda: nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 8), nn.LayerNorm(8)),
        "0 2",
    ),
    "layers whose weights other code reads": (ReadsWeights, "embed first second last"),
    "a part that is called by another name": (
        lambda: holder(part=WithoutForward(), head=nn.Linear(8, 8)),
        "part.a part.b head",
    ),
    "attention of torch": (Attends, "attention wide.0 wide.2"),
}


@pytest.mark.parametrize("name", OTHER_MODELS)
def test_models_of_other_shapes_have_sensible_units(name):
    make, expected = OTHER_MODELS[name]
    assert list(units_of(make())) == ["", *expected.split()]


def test_blocks_of_hugging_face_stages_are_units():
    from transformers import ResNetConfig, ResNetModel, SwinConfig, SwinModel

    swin = SwinConfig(image_size=16, patch_size=2, embed_dim=4, depths=[2, 1], num_heads=[1, 2])
    names = list(units_of(build(lambda: SwinModel(swin))))
    blocks = ["0.blocks.0", "0.blocks.1", "1.blocks.0"]
    assert names == ["", *(f"encoder.layers.{block}" for block in blocks)]
    resnet = ResNetConfig(embedding_size=4, hidden_sizes=[32, 64], depths=[2, 1])
    names = list(units_of(build(lambda: ResNetModel(resnet))))
    blocks = ["0.layers.0", "0.layers.1", "1.layers.0"]
    assert names == ["", *(f"encoder.stages.{block}" for block in blocks)]


# -- shared parameters ------------------------------------------------------------------------


def test_a_parameter_tied_across_two_units_belongs_to_the_root():
    model = Model()
    model.blocks[2].linear.weight = model.blocks[0].linear.weight
    units = units_of(model)
    assert "blocks.0.linear.weight" in names_in(units[""])
    assert names_in(units["blocks.0"]) == {"blocks.0.linear.bias"}
    assert names_in(units["blocks.2"]) == {"blocks.2.linear.bias"}
    tied = next(o for p, o in units[""].parameters if p is model.blocks[0].linear.weight)
    assert [owner.module for owner in tied] == [model.blocks[0].linear, model.blocks[2].linear]


def test_a_parameter_tied_between_a_unit_and_the_root_belongs_to_the_root():
    model = Model()
    model.extra = nn.Linear(4, 4)
    model.extra.weight = model.blocks[1].linear.weight
    units = units_of(model)
    assert names_in(units["blocks.1"]) == {"blocks.1.linear.bias"}


def test_a_parameter_tied_inside_one_unit_stays_there():
    model = Model()
    for block in model.blocks:
        block.twin = nn.Linear(4, 4, bias=False)
        block.twin.weight = block.linear.weight
    assert len(units_of(model)["blocks.0"].parameters) == 2


def test_a_module_that_also_hangs_outside_of_its_unit_is_gathered_with_the_root():
    model = Model()
    model.alias = model.blocks[0].linear
    units = units_of(model)
    assert names_in(units["blocks.0"]) == set()
    assert names_in(units["blocks.1"]) == {"blocks.1.linear.weight", "blocks.1.linear.bias"}


def test_one_block_used_several_times_is_no_repeated_block():
    block = Block()
    model = nn.Module()
    model.layers = nn.ModuleList([block] * 4)
    with pytest.warns(UserWarning, match="No repeated block"):
        assert len(find_units(model)) == 1


# -- overrides --------------------------------------------------------------------------------


@pytest.mark.parametrize("wanted", [Block, "Block"])
def test_units_can_be_chosen_by_class_or_by_the_name_of_a_class(wanted):
    model = Model(1)
    assert list(units_of(model, wanted=[wanted])) == ["", "blocks.0"]


def test_units_can_be_chosen_by_name_and_only_those_count():
    assert list(units_of(Model(), wanted=["head", "blocks.1"])) == ["", "blocks.1", "head"]


def test_types_and_names_together_are_united_in_order_of_definition():
    units = units_of(Model(2), wanted=[nn.Embedding, "blocks.1"])
    assert list(units) == ["", "embed", "blocks.1"]


def test_a_class_without_parameters_can_be_asked_for():
    model = Model(2)
    model.dropout = nn.Dropout()
    units = units_of(model, wanted=[nn.Dropout, Block])
    assert units["dropout"].parameters == ()


@pytest.mark.parametrize("item", ["", "blocks.7", "block", "LlamaDecoderLayer", nn.Conv2d])
def test_what_is_neither_a_name_nor_a_class_is_refused_with_what_there_is(item):
    with pytest.raises(ValueError, match="neither the name of a submodule of Model") as caught:
        find_units(Model(), wanted=[item])
    assert repr(item) in str(caught.value)
    assert "the classes: Block, Embedding, Linear, ModuleList." in str(caught.value)


def test_a_name_of_a_module_precedes_that_of_a_class():
    model = Model(2)
    model.Linear = nn.LayerNorm(3)
    assert list(units_of(model, wanted=["Linear"])) == ["", "Linear"]


def test_units_inside_one_another_are_refused():
    with pytest.raises(ValueError, match=r"'blocks.0.linear' is inside 'blocks.0'"):
        find_units(Model(), wanted=["blocks.0", "blocks.0.linear"])


def test_a_name_that_only_begins_alike_is_not_inside():
    model = Model(11)
    assert len(units_of(model, wanted=["blocks.1", "blocks.10"])) == 3


def test_finding_units_changes_nothing():
    model = Model()
    before = {name: (id(p), p.detach().clone()) for name, p in model.named_parameters()}
    find_units(model)
    for name, parameter in model.named_parameters():
        assert id(parameter) == before[name][0]
        assert torch.equal(parameter, before[name][1])


def test_units_keep_their_kinds_when_they_are_made_from_the_meta_device():
    with torch.device("meta"):
        model = nn.Sequential(nn.Embedding(64, 8), *(nn.Linear(8, 8) for _ in range(3)))
    found = find_units(model)
    kinds = [unit.kind for unit in found]
    assert kinds[:2] == [UnitKind.ROOT, UnitKind.EMBEDDING]
    made = [initialise_members(model, unit, materialise=True) for unit in found]
    assert [unit.kind for unit in made] == kinds
    assert not any(parameter.is_meta for unit in made for parameter, _ in unit.parameters)
