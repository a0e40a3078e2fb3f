"""Checked records: what a field's annotation says holds, in code, mappings, text and files."""

from __future__ import annotations

import math
from dataclasses import KW_ONLY, FrozenInstanceError, dataclass, fields, replace
from typing import Annotated, ClassVar

import numpy as np
import pytest

from lightning_cephalo.common.errors import PlanError
from lightning_cephalo.common.records import (
    Amount,
    Checked,
    Count,
    FileRecord,
    ListOf,
    OneOf,
    PositiveOrInfinite,
    Record,
    Text,
    YesOrNo,
)
from lightning_cephalo.plan import Plan, Problem, RankPlan, RankProfile
from lightning_cephalo.plan.curves import Curves, CurveTable


@dataclass(frozen=True)
class Dish(Record):
    kind = "dish"
    named_by = "name"

    name: Text
    grams: PositiveOrInfinite = math.inf
    is_hot: YesOrNo | None = None

    def _where(self) -> str:
        return f"dish {self.name!r}: "


@dataclass(frozen=True)
class Meal(FileRecord):
    kind = "meal"
    removed: ClassVar = {"music": "Bring a radio.", "weather": ""}
    renamed: ClassVar = {
        "minutes_s": "duration_s",
        "tip": "note",
        "drink_name": "drink.name",
        "drink_grams": "drink.grams",
    }

    dishes: Annotated[tuple[Dish, ...], ListOf(Dish, "a Dish", "dishes")]
    _: KW_ONLY
    guests: Count
    duration_s: Amount = 0.0
    place: Annotated[str, OneOf(("in", "out"), "in or out")] = "in"
    note: str | None = None
    drink: Dish | None = None


SOUP = Dish("soup", 250, True)
MEAL = Meal([SOUP, Dish("bread")], guests=np.int64(4))


def test_what_is_stored_are_tuples_and_python_numbers():
    assert MEAL.dishes == (SOUP, Dish("bread"))
    assert type(MEAL.guests) is int
    assert type(SOUP.grams) is float
    with pytest.raises(FrozenInstanceError):
        MEAL.guests = 2  # type: ignore[misc]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Dish(3), r"^Dish.name: expected text, but got 3"),
        (lambda: Dish("\x1b[31m"), r"^Dish.name: expected text without control characters, .*x1b"),
        (lambda: Dish("soup", 0), r"^dish 'soup': grams: .*greater than 0, but got 0"),
        (lambda: Dish("soup", is_hot=1), r"^dish 'soup': is_hot: expected true or false.* got 1"),
        (lambda: Meal((), guests=1), r"^Meal.dishes: expected at least one Dish, but got none"),
        (lambda: Meal(("soup",), guests=1), r"^Meal.dishes\[0\]: expected a Dish, but got 'soup'"),
        (lambda: Meal((SOUP,), guests=0), r"^Meal.guests: .* at least 1, but got 0"),
        (lambda: Meal((SOUP,), guests=1, duration_s=math.nan), r"^Meal.duration_s: .* got nan"),
        (lambda: Meal((SOUP,), guests=1, place="up"), r"^Meal.place: expected in or out, .*'up'"),
    ],
)
def test_a_wrong_field_is_named(make, message):
    with pytest.raises(PlanError, match=message):
        make()


def test_a_mapping_lacks_defaults_and_has_lists_last():
    meal = replace(MEAL, drink=Dish("tea"))
    assert list(meal.to_dict().items()) == [
        ("guests", 4),
        ("drink", {"name": "tea"}),
        ("dishes", [{"name": "soup", "grams": 250.0, "is_hot": True}, {"name": "bread"}]),
    ]
    assert Meal.from_dict(meal.to_dict()) == meal
    assert "drink" not in MEAL.to_dict() and Meal.from_dict(MEAL.to_dict()) == MEAL


def test_fields_of_earlier_versions_are_read_under_their_names_of_today():
    data = MEAL.to_dict()
    earlier = {**data, "minutes_s": 60.0, "drink_name": "tea", "drink_grams": 200, "tip": None}
    assert Meal.from_dict(earlier) == replace(MEAL, duration_s=60.0, drink=Dish("tea", 200))
    with pytest.raises(PlanError, match=r"^meal: drink: missing 'name'"):
        Meal.from_dict({**data, "drink_grams": 200})
    message = r"^meal: got both 'drink' and 'drink_name', its name in earlier versions\. Leave out"
    with pytest.raises(PlanError, match=message):
        Meal.from_dict({**data, "drink": {"name": "tea"}, "drink_name": "tea"})


@pytest.mark.parametrize("suffix", [".yaml", ".json"])
def test_text_and_files_hold_the_same(tmp_path, suffix):
    assert Meal.from_yaml(MEAL.to_yaml()) == Meal.from_json(MEAL.to_json()) == MEAL
    MEAL.save(tmp_path / f"meal{suffix}")
    assert Meal.load(tmp_path / f"meal{suffix}") == MEAL


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("dishes: [", r"^meal: expected a meal in YAML, but the text is not YAML"),
        ("guest: 1", r"^meal: meal: unknown key 'guest'.* Did you mean 'guests'\?"),
        ("guests: 1", r"^meal: meal: missing 'dishes'"),
        ("{guests: 1, dishes: soup}", r"^meal: meal: dishes: expected a list of dishes, .*'soup'"),
        ("{guests: 1, dishes: [{gram: 1}]}", r"^meal: meal: dishes\[0\]: unknown key 'gram'"),
        (
            "{guests: 1, dishes: [{name: soup, grams: -1}]}",
            r"^meal: meal: dishes\[0\]: dish 'soup': grams: .* got -1",
        ),
        ("{guests: 0, dishes: [{name: soup}]}", r"^meal: Meal.guests: .* got 0"),
    ],
)
def test_a_message_begins_with_the_source(content, message):
    with pytest.raises(PlanError, match=message):
        Meal.from_yaml(content, source="meal")


def test_fields_that_only_earlier_versions_had_are_left_out_or_refused():
    data = {**MEAL.to_dict(), "weather": 3.5}
    for nothing in (False, None):
        assert Meal.from_dict({**data, "music": nothing}) == MEAL
    message = r"^meal: music: True asks for what only earlier versions did\. Bring a radio\.$"
    with pytest.raises(PlanError, match=message):
        Meal.from_dict({**data, "music": True})


@pytest.mark.parametrize(
    ("record", "unchecked"),
    [
        (RankProfile, set()),
        (Problem, set()),
        (RankPlan, set()),
        (Plan, set()),
        (Curves, set()),
        (CurveTable, set()),
        # these two check what they hold together
    ],
)
def test_every_field_of_the_packages_records_has_a_check(record: type[Checked], unchecked):
    assert {field.name for field in fields(record)} - set(record.field_checks()) == unchecked
