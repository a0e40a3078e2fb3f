"""Cutting a collated batch gives what collating the parts would, or says why it cannot."""

import dataclasses
from collections import OrderedDict, UserDict, defaultdict, namedtuple
from types import MappingProxyType

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.utils.rnn import pack_sequence

from lightning_cephalo.common.errors import BatchSplitError
from lightning_cephalo.data.batch_layout import BatchLayout, children_of, is_array

Pair = namedtuple("Pair", "inputs targets")


@dataclasses.dataclass(frozen=True)
class Record:
    inputs: torch.Tensor
    names: list
    temperature: float = 1.0


class Upper(dict):
    """A dict subclass with a constructor of its own."""

    def __init__(self, label):
        super().__init__()
        self.label = label


class TensorBox:
    def __init__(self, count):
        self.tensor = torch.zeros(count)


def rows(count, *shape):
    return torch.arange(count * max(1, int(np.prod(shape)))).reshape(count, *shape)


def nested(count):
    """A batch of ``count`` samples with every kind of container and leaf."""
    upper = Upper("kept")
    upper["x"] = rows(count, 2)
    lists = defaultdict(list)
    lists["names"] = [f"name {i}" for i in range(count)]
    return {
        "pair": Pair(rows(count, 4), rows(count)),
        "tuple": (rows(count, 2, 3), np.arange(count * 2).reshape(count, 2)),
        "record": Record(rows(count, 1), [f"r{i}" for i in range(count)]),
        "ordered": OrderedDict(b=rows(count), a=torch.tensor(3.5)),
        "user": UserDict({"mask": rows(count, 5)}),
        "upper": upper,
        "lists": lists,
        "ragged": [rows(i + 1) for i in range(count)],
        "per_sample": tuple({"box": rows(i + 1, 4)} for i in range(count)),
        "fixed": [rows(7), rows(7, 7)],
        "constants": (None, "a string", 3, torch.tensor(1), np.float32(2), torch.float32),
    }


def same(left, right):
    """Whether two batches agree in types, structure and values."""
    if type(left) is not type(right):
        return False
    if is_array(left):
        return left.shape == right.shape and bool((left == right).all())
    inside, other = children_of(left), children_of(right)
    if inside is None:
        return left == right
    return [key for key, _ in inside] == [key for key, _ in other] and all(
        same(a, b) for (_, a), (_, b) in zip(inside, other, strict=True)
    )


def learned(make):
    return BatchLayout.learn(make(7), make(5))


@given(st.lists(st.integers(0, 4), min_size=1, max_size=4))
def test_a_nested_batch_is_cut_where_the_samples_are(sizes):
    layout = learned(nested)
    batch = nested(sum(sizes))

    parts = layout.split(batch, sizes)

    assert layout.batch_size(batch) == sum(sizes)
    start = 0
    for part, size in zip(parts, sizes, strict=True):
        assert layout.batch_size(part) == size
        assert same(part, layout.take(batch, start, start + size))
        start += size
    assert same(parts[0], nested(sizes[0]))  # whose samples do not depend on their number


def test_parts_are_views_of_the_same_containers():
    batch = nested(5)
    first, second = learned(nested).split(batch, (3, 2))

    first["pair"].inputs[0, 0] = 99
    assert batch["pair"].inputs[0, 0] == 99
    assert second["upper"].label == "kept"
    assert second["lists"].default_factory is list
    assert second["constants"][3] is batch["constants"][3]


def test_constants_with_as_many_rows_by_chance_and_padding_of_the_whole_batch_are_kept():
    def padded(count):
        return {"ids": torch.zeros(count, 10 - count), "classes": rows(4)}

    parts = learned(padded).split({"ids": torch.zeros(4, 17), "classes": rows(4)}, (3, 1))

    assert [tuple(part["ids"].shape) for part in parts] == [(3, 17), (1, 17)]
    assert [tuple(part["classes"].shape) for part in parts] == [(4,), (4,)]


@pytest.mark.parametrize("name", ["BatchEncoding", "BatchFeature"])
def test_hugging_face_encodings_stay_encodings(name):
    kind = getattr(pytest.importorskip("transformers"), name)

    def collate(count):
        return kind({"input_ids": rows(count, 6), "attention_mask": torch.ones(count, 6)})

    batch = collate(5)
    batch._encodings = list("abcde")
    parts = learned(collate).split(batch, (3, 2))

    assert [type(part) for part in parts] == [kind, kind]
    assert torch.equal(parts[1]["input_ids"], batch["input_ids"][3:])
    assert parts[0].input_ids.shape == (3, 6)
    assert parts[1]._encodings == ["d", "e"]
    assert batch["input_ids"].shape == (5, 6)


def test_hugging_face_model_outputs_stay_what_they_are():
    outputs = pytest.importorskip("transformers.modeling_outputs")

    def collate(count):
        return outputs.BaseModelOutput(last_hidden_state=rows(count, 3))

    first, _ = learned(collate).split(collate(4), (1, 3))

    assert type(first) is outputs.BaseModelOutput
    assert first.last_hidden_state.shape == first["last_hidden_state"].shape == (1, 3)


def jagged(count):
    parts = [torch.zeros(i + 1) for i in range(count)]
    return torch.nested.as_nested_tensor(parts, layout=torch.jagged)


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda n: {"x": torch.zeros(9, n, 4)}, r"batch\['x'\] is Tensor\[9, 7, 4\] for 7 samples"),
        (lambda n: {"x": rows(n), "s": torch.zeros(n, n)}, r"batch\['s'\] is Tensor\[7, 7\]"),
        (lambda n: (torch.zeros(5 * n, 4), rows(n)), r"Tensor\[25, 4\] for 5"),
        (lambda n: pack_sequence([torch.zeros(n - i) for i in range(n)]), "PackedSequence"),
        (lambda n: {"x": rows(n).to_sparse()}, "Tensor without rows"),
        (jagged, "Tensor without rows"),
        (lambda n: {str(i): torch.zeros(2) for i in range(n)}, "for 7 samples"),
        (lambda n: (rows(n), TensorBox(n)), r"batch\[1\] is TensorBox"),
        (lambda n: TensorBox(n), "TensorBox"),
        (lambda n: MappingProxyType({"x": rows(n)}), "mappingproxy"),
        (lambda n: object(), "no tensor or list"),
        (lambda n: torch.tensor(1.0), "no tensor or list"),
        (lambda n: {"x": rows(n) if n == 7 else [1.0] * n}, "for 5"),
        (lambda n: torch.zeros(n, *(1,) * n), "for 5"),
    ],
)
def test_what_cannot_be_cut_says_why_and_names_the_remedy(make, reason):
    with pytest.raises(BatchSplitError, match=reason) as caught:
        learned(make)

    assert "split_batch=" in str(caught.value)


def test_the_users_function_replaces_cutting_and_its_mistakes_are_named():
    def parts(batch, sizes):
        return [("part", size) for size in sizes]

    layout = BatchLayout.learn(TensorBox(7), TensorBox(5), splitter=parts)

    assert layout.split(TensorBox(5), (4, 1)) == [("part", 4), ("part", 1)]
    assert BatchLayout(splitter=parts).take(rows(5), 3, 5) == ("part", 2)
    with pytest.raises(BatchSplitError, match="returned 0 parts for the 1 sizes"):
        BatchLayout(splitter=lambda batch, sizes: []).split(rows(2), (2,))


@pytest.mark.parametrize(
    "make",
    [
        lambda n: {"nodes": rows(3 * n + 1), "labels": rows(n)},
        lambda n: (torch.zeros(1, n), torch.zeros(6, n)),
        lambda n: {"nodes": rows(3 * n), "names": [str(i) for i in range(n)]},
    ],
)
def test_samples_are_counted_where_only_the_users_function_can_cut(make):
    layout = BatchLayout.learn(make(7), make(5), splitter=lambda batch, sizes: list(sizes))

    assert layout.batch_size(make(9)) == 9
    with pytest.raises(BatchSplitError, match="showed the number of samples, but is missing"):
        layout.batch_size(5)


def test_a_batch_of_which_nothing_is_learned_is_guessed_from_its_first_tensor():
    batch = [torch.tensor(2.0), rows(4, 3), {"y": rows(4), "names": list("abcd"), "w": rows(3)}]
    pair = [rows(2, 3), rows(2)]
    layout = BatchLayout()

    assert layout.batch_size(batch) == 4
    first, second = layout.split(batch, (1, 3))
    assert first[2]["names"] == ["a"]
    assert second[1].shape == (3, 3)
    assert second[2]["w"].shape == (3,)
    # two tensors in a list are not taken for two samples
    assert [[len(each) for each in part] for part in layout.split(pair, (1, 1))] == [[1, 1]] * 2
    with pytest.raises(BatchSplitError, match=r"batch\[1\] is TensorBox"):
        layout.split([rows(2), TensorBox(2)], (1, 1))


@pytest.mark.parametrize("batch", [["a", "b", "c"], (["a", "b", "c"], ["d", "e", "f"])])
def test_batches_of_strings_are_guessed_by_their_lists(batch):
    assert BatchLayout().batch_size(batch) == 3
    assert BatchLayout().batch_size(BatchLayout().take(batch, 1, 3)) == 2


@pytest.mark.parametrize("changed", [{"x": rows(5, 2), "y": rows(5)}, (rows(5, 2), 1, rows(5))])
def test_a_batch_that_a_hook_changed_is_guessed(changed):
    layout = learned(lambda count: (rows(count, 2), rows(count)))

    parts = [
        list(part.values() if isinstance(part, dict) else part)
        for part in layout.split(changed, (2, 3))
    ]

    assert [part[-1].tolist() for part in parts] == [[0, 1], [2, 3, 4]]


def test_leaves_and_sizes_that_disagree_are_an_error():
    layout = learned(lambda count: {"x": rows(count), "y": rows(count)})

    with pytest.raises(BatchSplitError, match=r"need 3 samples.*batch\['y'\]\": 2"):
        layout.split({"x": rows(3), "y": rows(2)}, (2, 1))
    with pytest.raises(BatchSplitError, match="need 5 samples"):
        BatchLayout().split(rows(4), (3, 2))
    with pytest.raises(BatchSplitError, match="no tensor or list"):
        BatchLayout().batch_size(3.0)


def test_a_part_without_rows_keeps_everything_but_the_samples():
    layout = learned(nested)
    empty = layout.take(nested(1), 0, 0)

    assert layout.batch_size(empty) == 0
    assert empty["pair"].inputs.shape == (0, 4)
    assert empty["ragged"] == []
    assert empty["per_sample"] == ()
    assert BatchLayout().take({"x": rows(3, 2)}, 0, 0)["x"].shape == (0, 2)


def test_graph_batches_tell_their_size():
    class Graphs:
        num_graphs = 6

    assert BatchLayout(splitter=len).batch_size(Graphs()) == 6
