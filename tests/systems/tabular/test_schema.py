"""What leaves a client before the first round, and what all make of it: the same for pooled rows, in any order."""

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.preprocessing import OneHotEncoder, StandardScaler

from mutirao.core.agreement import bytes_to_extra
from mutirao.core.fleet import Reply
from mutirao.errors import ConfigError, Refused
from mutirao.systems.tabular.client_tables import HoldOut, stratified_rows
from mutirao.systems.tabular.schema import MOST_CATEGORIES, MOST_CLASSES, Schema, Task, parse_schema
from mutirao.systems.tabular.table import Column, Table
from mutirao.systems.tabular.table_profile import profile_table, schema_from_profiles

CLASSES, NUMBERS = "classification", "regression"


def table(seed: int, n: int, gaps: bool = True) -> tuple[Table, Column]:
    draw = np.random.default_rng(seed)
    dose = draw.normal(1e3, 5, n)
    dose[draw.random(n) < 0.1 * gaps] = np.nan
    ward = draw.choice(["A", "B", "é"], n).astype(object)
    columns = {"ward": Column("category", ward), "dose": Column("number", dose), "day": Column("date", draw.random(n))}
    return Table(columns, n), Column("category", draw.choice(["no", "yes"], n).astype(object))


def replies_of(*clients: tuple[Table, Column], task: Task = CLASSES, least: int = 1) -> dict[str, Reply]:
    return {
        f"c{k}": Reply({}, bytes_to_extra("profile", profile_table(*rows, task, least)), n=9)
        for k, rows in enumerate(clients)
    }


def column(reply: Reply, name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(reply.extras["profile"].tobytes())["columns"][name]
    return found


@given(st.lists(st.integers(5, 40), min_size=1, max_size=6), st.integers(0, 2**32 - 1))
@settings(deadline=None)
def test_the_schema_of_the_parts_scales_and_encodes_as_scikit_learn_does_the_whole(sizes: list[int], seed: int) -> None:
    whole, target = table(seed, sum(sizes) + 20, gaps=False)
    cuts = np.split(np.arange(len(whole)), np.cumsum([20, *sizes])[:-1])
    parts = [(whole.take(rows), target.take(rows)) for rows in cuts if len(rows)]
    replies = replies_of(*parts)
    schema = schema_from_profiles("y", CLASSES, replies)
    assert schema_from_profiles("y", CLASSES, dict(reversed(replies.items()))).content() == schema.content()
    assert parse_schema(schema.content()) == schema
    x, y, lost = schema.encode(whole, target)
    assert lost == 0
    assert [schema.classes[k] for k in y] == target.values.tolist()
    numbers = np.stack([whole.columns[n].numbers for n in ("day", "dose")], axis=1)
    right = StandardScaler().fit_transform(numbers)
    ones = OneHotEncoder(sparse_output=False).fit_transform(np.array(whole.columns["ward"].labels())[:, None])
    assert x == pytest.approx(np.concatenate([right, ones], axis=1), abs=1e-4)


def test_a_missing_number_stands_at_the_mean_and_one_more_input_says_so() -> None:
    rows = table(0, 50)
    schema = schema_from_profiles("y", CLASSES, replies_of(rows))
    feature = next(f for f in schema.features if f.name == "dose")
    inputs = feature.encode(rows[0].columns["dose"])
    gone = rows[0].columns["dose"].missing
    assert gone.any()
    assert np.array_equal(inputs[:, 1], gone)
    assert (inputs[gone, 0] == 0).all()
    assert feature.mean == pytest.approx(np.nanmean(rows[0].columns["dose"].numbers))
    strange = Column("category", np.array(["never seen", ""], object))
    assert not next(f for f in schema.features if f.name == "ward").encode(strange).any()


def test_nothing_is_sent_of_few_values() -> None:
    wards = np.array(["A"] * 5 + ["rare"] * 4, object)
    few = np.array([1.0, 2.0, 3.0, 4.0, *[np.nan] * 5])
    columns = {"ward": Column("category", wards), "few": Column("number", few), "all": Column("number", np.arange(9.0))}
    reply = replies_of((Table(columns, 9), Column("number", np.arange(9.0))), task=NUMBERS, least=5)["c0"]
    assert column(reply, "ward") == {"kind": "category", "count": 9, "missing": 0, "categories": ["A"]}
    assert column(reply, "few") == {"kind": "number", "count": 4, "missing": 5}
    assert column(reply, "all") == {"kind": "number", "count": 9, "missing": 0, "sum": 36.0, "squares": 60.0}
    assert json.loads(reply.extras["profile"].tobytes()).keys() == {"columns", "target"}


def test_clients_with_other_columns_are_left_out_by_name() -> None:
    good = [table(k, 30) for k in range(3)]
    odd = Table({**good[0][0].without(["dose"]).columns, "height": good[0][0].columns["dose"]}, 30)
    schema = schema_from_profiles("y", CLASSES, replies_of(*good, (odd, good[0][1])))
    assert schema == schema_from_profiles("y", CLASSES, replies_of(*good))
    with pytest.raises(Refused, match=r"agreed\.schema: .*missing: 'dose'; too many: 'height'"):
        schema.encode(odd, good[0][1])
    text = Table({**good[0][0].columns, "dose": good[0][0].columns["ward"]}, 30)
    with pytest.raises(Refused, match="'dose' is of the kind category here, but number is agreed on"):
        schema.encode(text, good[0][1])
    empty = Table({**good[0][0].columns, "dose": Column("empty", np.full(30, np.nan))}, 30)
    assert schema.encode(empty, good[0][1])[0].shape == (30, schema.inputs)  # no values are no other kind


def test_what_cannot_be_learnt_is_refused() -> None:
    rows, target = table(0, 20)
    one = Column("category", np.full(20, "yes", object))
    with pytest.raises(ConfigError, match="'y' has only one class, 'yes'"):
        schema_from_profiles("y", CLASSES, replies_of((rows, one)))
    with pytest.raises(ConfigError, match="is constant, or no client has enough"):
        schema_from_profiles("y", NUMBERS, replies_of((rows, Column("number", np.ones(20))), task=NUMBERS))
    constant = Table({"a": Column("number", np.full(20, 0.1)), "b": Column("category", one.values)}, 20)
    with pytest.raises(ConfigError, match="no column can be used"):
        schema_from_profiles("y", CLASSES, replies_of((constant, target)))
    with pytest.raises(ConfigError, match="use task=classification"):
        schema_from_profiles("y", NUMBERS, replies_of((rows, target), task=NUMBERS))


@pytest.mark.parametrize("wrong", [{"sum": 1e140}, {"squares": 1e140}, {"count": 10**12, "sum": 1e15, "squares": 1e13}])
def test_one_client_cannot_bend_the_scale_of_all(wrong: dict[str, float]) -> None:
    honest = replies_of(*(table(k, 40) for k in range(6)))
    profile = json.loads(honest["c5"].extras["profile"].tobytes())
    profile["columns"]["dose"] |= wrong
    bad = Reply({}, bytes_to_extra("profile", json.dumps(profile).encode()), n=9)
    right, bent = (schema_from_profiles("y", CLASSES, replies) for replies in (honest, {**honest, "c5": bad}))
    dose, other = (next(f for f in s.features if f.name == "dose") for s in (right, bent))
    assert abs(other.mean - dose.mean) < 3 * dose.std
    assert 0.3 < other.std / dose.std < 3
    many = json.loads(honest["c5"].extras["profile"].tobytes())
    many["columns"]["ward"]["categories"] = [f"w{i}" for i in range(MOST_CATEGORIES)]
    many["target"]["classes"] = [f"k{i}" for i in range(MOST_CLASSES)]
    bad = Reply({}, bytes_to_extra("profile", json.dumps(many).encode()), n=9)
    swollen = schema_from_profiles("y", CLASSES, {**honest, "c5": bad})  # it goes on, with all that the others sent
    assert len(swollen.classes) == MOST_CLASSES
    assert {"no", "yes"} <= set(swollen.classes)
    assert {"A", "B", "é"} <= set(next(f for f in swollen.features if f.name == "ward").categories)


def test_a_scale_that_makes_infinities_is_refused_by_the_site() -> None:
    rows, target = table(0, 30)
    schema = schema_from_profiles("y", CLASSES, replies_of((rows, target)))
    tiny = replace(schema, features=tuple(replace(f, std=1e-140) for f in schema.features))
    with pytest.raises(Refused, match="overflow on the scale"):
        tiny.encode(rows, target)


LIES = [
    ("[]", "has a field is missing|indices|attribute"),
    ("{", "cannot be read"),
    ('{"columns": {"a": {"kind": "number", "count": -1, "missing": 0}}, "target": {"kind": "number"}}', "negative"),
    ('{"columns": {"a": {"kind": "spell"}}, "target": {}}', "not one of"),
    ('{"columns": {"a": {"kind": "number", "count": 1, "missing": 0, "sum": 1e999, "squares": 0}}}', "finite number"),
    ('{"columns": {"a": {"kind": "number", "count": 0, "missing": 0, "sum": 1, "squares": 1}}}', "of no values"),
    ('{"columns": {"' + "a" * 300 + '": {}}}', "too long"),
    ("[" * 100_000, "cannot be read"),
    ("", "no profile in the reply"),
]


@pytest.mark.parametrize(("content", "says"), LIES)
def test_an_invalid_profile_does_not_affect_other_clients(content: str, says: str) -> None:
    bad = Reply({}, bytes_to_extra("profile", content.encode()), n=9)
    honest = replies_of(table(0, 30), table(1, 30))
    assert schema_from_profiles("y", CLASSES, {**honest, "bad": bad}) == schema_from_profiles("y", CLASSES, honest)
    with pytest.raises(ConfigError, match=says):
        schema_from_profiles("y", CLASSES, {"bad": bad})


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"features": []}, "a column is repeated"),
        ({"classes": ["a"]}, "1 classes"),
        ({"task": "guessing"}, "not one of"),
        ({"mean": float("nan")}, "finite number"),
        ({"target": "dose"}, "a column is repeated"),
        ({"classes": ["a", "a"]}, "no repetition"),
        ({"unused": 3}, "a field is missing"),
    ],
)
def test_a_schema_from_elsewhere_is_read_word_by_word(change: dict[str, Any], says: str) -> None:
    whole = json.loads(schema_from_profiles("y", CLASSES, replies_of(table(0, 30))).content())
    with pytest.raises(ValueError, match=says):
        parse_schema(json.dumps(whole | change).encode())
    whole["features"][0]["std"] = 0.0
    with pytest.raises(ValueError, match="not above 0"):
        parse_schema(json.dumps(whole).encode())


@given(st.lists(st.sampled_from("abc"), min_size=1, max_size=60), st.integers(0, 59), st.integers(0, 99))
def test_rows_kept_back_have_each_class_in_its_share(classes: list[str], count: int, seed: int) -> None:
    count = min(count, len(classes))
    rows = stratified_rows(classes, count, np.random.default_rng(seed))
    assert len(rows) == len(set(rows.tolist())) == count
    for name in set(classes):
        share = classes.count(name) * count / len(classes)
        assert abs(sum(classes[i] == name for i in rows) - share) < 1


def test_a_client_cuts_its_rows_by_its_name_alone() -> None:
    rows, target = table(0, 40)
    cut = HoldOut(0.2, 0, CLASSES, 3)
    ana, again, bia = (cut(rows, target, name) for name in ("ana", "ana", "bia"))
    assert (len(ana.train), len(ana.test)) == (32, 8)
    assert ana.test.columns["day"].values.tolist() == again.test.columns["day"].values.tolist()
    assert ana.test.columns["day"].values.tolist() != bia.test.columns["day"].values.tolist()
    assert len(HoldOut(0.2, 10, CLASSES, 3)(rows, target, "ana").train) == 10
    assert len(HoldOut(0.0, 0, CLASSES, 3)(rows, target, "ana").test) == 0


def rows_of(keep: HoldOut, n: int = 40) -> tuple[list[int], list[int]]:
    """Which of n rows, two of three of one class, a client trains on and judges by."""
    rows = Table({"row": Column("number", np.arange(float(n)))}, n)
    found = keep(rows, Column("category", np.array(["no", "yes", "no"] * n, object)[:n]), "ana")
    train, test = (part.columns["row"].numbers.astype(int).tolist() for part in (found.train, found.test))
    return train, test


def test_the_held_out_rows_are_those_they_always_were() -> None:
    rows, target = Table({"row": Column("number", np.arange(40.0))}, 40), ["no", "yes"] * 12 + ["no"] * 16
    found = HoldOut(0.2, 10, CLASSES, 3)(rows, Column("category", np.array(target, object)), "ana")
    assert found.test.columns["row"].values.tolist() == [1, 4, 6, 9, 12, 25, 29, 39]
    assert found.train.columns["row"].values.tolist() == [2, 14, 16, 17, 19, 20, 22, 26, 30, 35]


@pytest.mark.parametrize("task", [CLASSES, NUMBERS])
def test_rows_to_validate_on_are_drawn_of_what_the_test_leaves(task: Task) -> None:
    for seed in range(5):
        train, test = rows_of(HoldOut(0.2, 0, task, seed))
        rest, vali = rows_of(HoldOut(0.2, 0, task, seed, vali=True))
        assert (len(test), len(vali), len(rest)) == (8, 6, 26)
        assert sorted(rest + vali) == train  # and so no row of the test is left in either
        if task == CLASSES:
            assert sum(row % 3 == 1 for row in vali) == 2  # of each class alike


@pytest.mark.parametrize("share", [0.2, 0.5, 0.9])
def test_a_small_client_keeps_a_row_to_train_on(share: float) -> None:
    for n in range(1, 12):
        train, test = rows_of(HoldOut(share, 0, CLASSES, 0), n)
        rest, vali = rows_of(HoldOut(share, 0, CLASSES, 0, vali=True), n)
        assert len(rest) >= 1
        assert sorted(rest + vali) == train
        assert not set(test) & {*rest, *vali}


def test_schemas_are_equal_or_not() -> None:
    a, b = (schema_from_profiles("y", CLASSES, replies_of(table(k, 30))) for k in (0, 1))
    assert isinstance(a, Schema)
    assert a != b
    assert hash(a) != hash(b)
