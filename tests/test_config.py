"""A configuration that is written can be read back, and whatever is wrong with one is said in one line."""

import re
import tempfile
import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from mutirao import aggregation, selection
from mutirao import partitioning as partition
from mutirao.config import (
    Common,
    Part,
    build,
    coerce,
    complete_part,
    dump,
    flatten,
    load_name,
    nearest,
    parse_assignment,
    parse_value,
    read_toml,
    resolve,
    setting,
    warn_retired,
)
from mutirao.errors import ConfigError
from mutirao.experiments.task import find


@dataclass(frozen=True, kw_only=True)
class Config(Common):
    """A recipe's configuration with what `Common` lacks: choices, an optional number, a part with settings."""

    mode: Literal["fast", "slow"] = setting("fast", "how")
    fold: int = setting(1, "which", low=1, high=5)
    cap: int | None = setting(None, "at most")
    partition: Part = setting(Part("dirichlet", {"alpha": 0.3}), "how samples are dealt")


@dataclass(frozen=True)
class Odd:
    """A user's part: no hints to speak of, any name."""

    anything: Any = 1
    größe: float = 2.0
    kind: Literal["a", "b"] = "a"

    def __call__(self, current: Any, replies: Any, memory: Any) -> None:
        raise NotImplementedError


def plain_function(current: Any, replies: Any, memory: Any, *, alpha: float = 1.0, **rest: Any) -> None:
    raise NotImplementedError


class Unresolvable:
    def __init__(self, x: "Nowhere" = 1) -> None:  # type: ignore[name-defined]  # noqa: F821
        raise NotImplementedError

    def __call__(self, current: Any, replies: Any, memory: Any) -> None:
        raise NotImplementedError


NOT_CALLABLE = 3
T = TypeVar("T")

text = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
HERE = __name__

parts: dict[str, st.SearchStrategy[dict[str, Any]]] = {
    "partition": st.one_of(
        st.fixed_dictionaries({"partition": st.sampled_from(["iid", "shards", "by_class", "k_classes"])}),
        st.fixed_dictionaries({"partition.alpha": st.floats(0.01, 10), "partition.min_size": st.integers(0, 9)}),
        st.fixed_dictionaries({"partition": st.just("by_class"), "partition.classes": st.integers(1, 9)}),
    ),
    "select": st.one_of(
        st.fixed_dictionaries({"select": st.just("everyone")}),
        st.fixed_dictionaries({"select.count": st.one_of(st.integers(1, 99), st.floats(0.01, 1))}),
    ),
    "aggregate": st.one_of(
        st.fixed_dictionaries({"aggregate": st.sampled_from(sorted(aggregation.NAMES))}),
        st.fixed_dictionaries({"aggregate": st.just("fedprox"), "aggregate.mu": st.floats(0, 9)}),
        st.fixed_dictionaries({"aggregate": st.just("multikrum"), "aggregate.keep": st.integers(1, 9)}),
        st.fixed_dictionaries(
            {"aggregate": st.just(f"{HERE}:Odd"), "aggregate.anything": st.one_of(text, st.booleans())}
        ),
        st.fixed_dictionaries({"aggregate": st.just(f"{HERE}:Odd"), "aggregate.größe": st.floats(allow_nan=False)}),
        st.fixed_dictionaries({"aggregate": st.just(f"{HERE}:plain_function"), "aggregate.alpha": st.floats(0, 1)}),
    ),
}
plain = st.fixed_dictionaries(
    {},
    optional={
        "seed": st.integers(0, 2**63 - 1),
        "rounds": st.integers(1, 10**6),
        "per_round": st.one_of(st.integers(1, 10**6), st.floats(1e-9, 1e6)),
        "lr": st.one_of(st.floats(1e-12, allow_nan=False), st.integers(1, 9)),
        "momentum": st.floats(0, 1),
        "optimizer": st.sampled_from(["sgd", "adam"]),
        "data": text,
        "engine": st.sampled_from(["auto", "stacked", "threads", "plain"]),
        "centralised": st.booleans(),
        "mode": st.sampled_from(["fast", "slow"]),
        "fold": st.integers(1, 5),
        "cap": st.integers(-9, 9),
    },
)
configs = st.tuples(plain, *parts.values()).map(lambda found: {k: v for d in found for k, v in d.items()})


@given(configs)
def test_what_is_dumped_reads_back_as_the_same_configuration(values: dict[str, Any]) -> None:
    config = resolve(Config, {}, values.items())
    text = dump("my recipe", config)
    table = tomllib.loads(text)
    assert table.pop("recipe") == "my recipe"
    again = resolve(Config, table)
    assert again == config
    assert dump("my recipe", again) == text
    for key, value in values.items():
        name, dot, sub = key.partition(".")
        kept = getattr(again, name)
        assert (kept.settings[sub] if dot else kept.name if isinstance(kept, Part) else kept) == value


@given(text)
@example("\x7f")
@example("😀 \\ \" ' \n\t\r\b\f\x00\x1f\x85\u2028\ufeff")
@example("C:\\data\\new")
def test_any_text_survives_the_file(value: str) -> None:
    config = resolve(Config, {"data": value})
    assert tomllib.loads(dump(value, config))["data"] == value
    assert tomllib.loads(dump(value, config))["recipe"] == value


@pytest.mark.parametrize("value", [0.1, 1e-12, 1e300, 5e-324, float("inf"), 1.0, 123456789.0, 1e16])
def test_floats_survive_the_file_and_stay_floats(value: float) -> None:
    again = tomllib.loads(dump("x", resolve(Config, {"lr": max(value, 1e-12)})))["lr"]
    assert again == max(value, 1e-12)
    assert isinstance(again, float)


def test_the_file_says_all_defaults_of_the_parts() -> None:
    config = resolve(Config, {}, [("aggregate", "fedadam"), ("aggregate.tau", 0.5)])
    assert config.aggregate == Part("fedadam", {"lr": 0.1, "beta1": 0.9, "beta2": 0.99, "tau": 0.5})
    assert '[aggregate]\nname = "fedadam"' in dump("x", config)
    assert resolve(Config, {}).partition.settings == {"alpha": 0.3, "min_size": 1, "balance": False}
    assert resolve(Config, {"partition": "shards"}).partition.settings == {"per_client": 2}


# The order of settings.


@given(
    st.permutations(
        [("select", "uniform"), ("select.count", 5), ("rounds", 3), ("aggregate.mu", 0.5), ("aggregate", "fedprox")]
    )
)
def test_the_order_of_single_settings_does_not_matter(sets: list[tuple[str, Any]]) -> None:
    for table in ({}, {"select": "everyone"}, {"select": {"name": "uniform", "count": 9}}, {"aggregate": "fedadam"}):
        config = resolve(Config, table, sets)
        assert config.select == Part("uniform", {"count": 5})
        assert config.aggregate == Part("fedprox", {"mu": 0.5})
        assert config.rounds == 3


def test_single_settings_win_over_the_file_and_later_ones_over_earlier_ones() -> None:
    table = {"rounds": 5, "select": {"count": 7}}
    config = resolve(Config, table, [("rounds", 6), ("rounds", 7), ("select.count", 8)])
    assert config.rounds == 7
    assert config.select.settings == {"count": 8}


def test_another_part_drops_the_settings_of_the_one_before() -> None:
    table = {"aggregate": {"name": "fedadam", "beta1": 0.5}, "select": {"count": 3}}
    assert resolve(Config, table, [("aggregate", "fedprox")]).aggregate == Part("fedprox", {"mu": 0.1})
    assert resolve(Config, table, [("select", "everyone")]).select == Part("everyone")
    assert resolve(Config, {}, [("partition", "iid")]).partition == Part("iid")
    kept = resolve(Config, table, [("aggregate", "fedadam"), ("aggregate.beta2", 0.5)]).aggregate.settings
    assert (kept["beta1"], kept["beta2"]) == (0.5, 0.5)


@pytest.mark.parametrize(
    "table",
    [
        {"select": {"name": "uniform", "count": 3}},
        {"select.count": 3},
        {"select.name": "uniform", "select.count": 3},
        {"select": {"count": 3}, "partition": {}},
    ],
)
def test_a_part_in_a_file_may_be_a_table_or_dotted_keys(table: dict[str, Any]) -> None:
    assert resolve(Config, table).select == Part("uniform", {"count": 3})


# What is refused, and how.

REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"round": 3}, "unknown setting 'round'; did you mean 'rounds'?"),
    ({"qqqq": 3}, "unknown setting 'qqqq' (valid: aggregate, "),
    ({"qqqq": {}}, "unknown setting 'qqqq'"),
    ({"selekt.count": 3}, "unknown setting 'selekt.count'; did you mean 'select'?"),
    ({"lr.x": 3}, "unknown setting 'lr.x': 'lr' has no settings of its own"),
    ({"lr": {}}, "lr: {} is not a number"),
    ({"rounds": 2.5}, "rounds: 2.5 is not a whole number"),
    ({"rounds": "many"}, "rounds: 'many' is not a whole number"),
    ({"rounds": True}, "rounds: True is not a whole number"),
    ({"rounds": [1, 2]}, "rounds: [1, 2] is not a whole number"),
    ({"rounds": 0}, "rounds: 0 is too small, at least 1 is needed"),
    ({"seed": 2**63}, "seed: the number is too large"),
    ({"lr": 10**5000}, "lr: the number is too large"),
    ({"lr": 0}, "lr: 0.0 is too small, it must be above 0"),
    ({"lr": float("nan")}, "lr: must be a finite number, not nan"),
    ({"per_round": 0}, "per_round: 0 is too small, it must be above 0"),
    ({"fold": 6}, "fold: 6 is too large, must be at most 5"),
    ({"centralised": 1}, "centralised: 1 is not true or false"),
    ({"centralised": "yes"}, "centralised: 'yes' is not true or false"),
    ({"data": 3}, "data: 3 is not text"),
    ({"data": "\udcff"}, "data: '\\udcff' is not valid Unicode text"),
    ({"engine": "stakced"}, "engine: 'stakced' is not a choice; did you mean 'stacked'?"),
    ({"mode": "medium"}, "mode: 'medium' is not one of fast, slow"),
    ({"select": 3}, "select: 3 is not text"),
    ({"select": "unifrom"}, "select: no part is called 'unifrom'; did you mean 'uniform'?"),
    ({"select.cuont": 3}, "select=uniform has no setting 'cuont'; did you mean 'count'?"),
    ({"select": "everyone", "select.count": 3}, "select=everyone has no setting 'count'; it has none"),
    ({"select.count": "all"}, "select.count: 'all' is not a whole number or a number"),
    ({"select.rng": 3}, "select=uniform has no setting 'rng'"),
    ({"select.": 3}, "select=uniform has no setting ''"),
    ({"aggregate": "fedavg", "aggregate.lr": 1.0}, "aggregate=fedavg has no setting 'lr'"),
    ({"aggregate": "no.such.module:part"}, "cannot load 'no.such.module:part': No module named 'no'"),
    ({"aggregate": f"{HERE}:nothing"}, f"cannot load '{HERE}:nothing': module '{HERE}' has no attribute 'nothing'"),
    ({"aggregate": f"{HERE}:NOT_CALLABLE"}, f"aggregate: '{HERE}:NOT_CALLABLE' is not an aggregator; right would "),
    ({"aggregate": f"{HERE}:Unresolvable"}, f"aggregate: the settings of '{HERE}:Unresolvable' cannot be read: "),
    ({"aggregate": ":x"}, "cannot load ':x': "),
    ({"aggregate": ".a:x"}, "cannot load '.a:x': "),
    ({"aggregate": "builtins:dict"}, "aggregate: 'builtins:dict' is not an aggregator but part of Python itself"),
    ({"aggregate": f"{HERE}:Odd", "aggregate.kind": "c"}, "aggregate.kind: 'c' is not one of a, b"),
    ({"aggregate": f"{HERE}:Odd", "aggregate.anything": [1]}, "aggregate.anything: [1] is not true or false or "),
    ({"aggregate": f"{HERE}:plain_function", "aggregate.rest": 1}, "has no setting 'rest' (valid: alpha)"),
    ({"partition": "dirichlet", "partition.labels": 1}, "partition=dirichlet has no setting 'labels'"),
]


@pytest.mark.parametrize(("values", "line"), REFUSED, ids=[line[:40].strip() for _, line in REFUSED])
def test_what_is_wrong_is_said_in_one_line(values: dict[str, Any], line: str) -> None:
    for table, sets in ((values, []), ({}, list(values.items()))):
        with pytest.raises(ConfigError) as caught:
            resolve(Config, table, sets)
        assert line in str(caught.value)
        assert "\n" not in str(caught.value)


RETIRED = [  # a recipe, the settings of an old run, and the one that is a constant now
    ("groups", {"stable": 5}, "tolerance", 0.002),
    ("quickstart", {"devices": "fedcs"}, "devices.slowest", 10.0),
    ("quickstart", {"select": "fedcor"}, "select.steps", 100),
    ("recsys", {"start": "consent"}, "start.whiten", False),
]


@pytest.mark.parametrize(("recipe", "others", "key", "constant"), RETIRED, ids=[key for _, _, key, _ in RETIRED])
def test_a_setting_that_became_a_constant_is_ignored_at_that_value_and_refused_at_others(
    recipe: str, others: dict[str, Any], key: str, constant: Any, caplog: pytest.LogCaptureFixture
) -> None:
    warn_retired.cache_clear()
    kind = find(recipe).config
    for table, sets in (({**others, key: constant}, []), (others, [(key, constant)])):
        assert resolve(kind, nested(table), sets) == resolve(kind, others)
    assert [record.getMessage() for record in caplog.records] == [
        f"{key}: ignored, no longer a setting; the value is the constant that is used now"
    ]
    line = f"^{re.escape(key)}: .* cannot be set any more, it is always {constant}; remove it$"
    with pytest.raises(ConfigError, match=line):
        resolve(kind, others, [(key, 7 if constant is not False else True)])
    with pytest.raises(ConfigError, match=r"unknown setting|has no setting"):
        resolve(find("cifar10").config, {}, [(key.replace("devices", "aggregate"), constant)])


def nested(pairs: dict[str, Any]) -> dict[str, Any]:
    """Settings as a TOML file holds them: a part is a table."""
    table: dict[str, Any] = {}
    for key, value in pairs.items():
        name, dot, sub = key.partition(".")
        if dot:
            table[name] = {"name": table[name], sub: value}
        else:
            table[name] = value
    return table


@pytest.mark.parametrize("key", ["select.classes", "aggregate.population", "privacy.batch_size"])
def test_what_the_run_fills_in_cannot_be_set(key: str) -> None:
    parts = {"select": "aoiu", "aggregate": "scaffold", "privacy": "dpsgd"}
    with pytest.raises(ConfigError, match=f"^{re.escape(key)} is not a setting of .*: the run fills it in"):
        resolve(Common, {"select": "aoiu", "aggregate": "scaffold", "privacy": "dpsgd"}, [(key, 10)])
    kind = key.partition(".")[0]
    made = build(kind, Part(parts[kind]), count=3, classes=10, population=10, batch_size=10)
    assert getattr(made, key.partition(".")[2]) == 10


def test_a_table_for_what_is_no_part_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"unknown setting 'lr\.name': 'lr' has no settings of its own"):
        resolve(Config, {"lr": {"name": 0.5}})


def test_a_part_out_of_range_is_refused_when_it_is_built() -> None:
    config = resolve(Config, {}, [("aggregate", "fedtrimmedavg"), ("aggregate.beta", 0.7)])
    with pytest.raises(
        ConfigError, match=r"^aggregate=fedtrimmedavg: beta is 0\.7, but must be at least 0 and below 0\.5$"
    ):
        build("aggregate", config.aggregate)
    with pytest.raises(ConfigError, match=r"select=uniform: .*missing .* 'count'"):
        build("select", Part("uniform"))


def test_every_part_of_every_kind_can_be_completed_and_built() -> None:
    for kind, names in (("aggregate", aggregation.NAMES), ("select", selection.NAMES), ("partition", partition.NAMES)):
        for name in names:
            part = complete_part(kind, Part(name))
            assert complete_part(kind, part) == part
            assert callable(build(kind, part, count=3))


# Nothing but ConfigError, whatever comes in.


def refused_in_one_line(make: Callable[[], T]) -> T | None:
    """What `make` gives, or None if it refuses as it should; anything else it raises fails the test."""
    try:
        return make()
    except ConfigError as error:
        problem = str(error)
    assert problem
    assert "\n" not in problem
    return None


fragments = st.sampled_from(
    [
        "select",
        "select.",
        ".count",
        "name",
        "=",
        "rounds",
        "aggregate",
        "fedadam",
        "os:",
        "1",
        "e9",
        "0x",
        '"',
        "[",
        "{",
        "\n",
        "#",
        "nan",
        "-",
        ":",
        "'",
        "\\u",
    ]
)
scraps = st.one_of(st.text(max_size=20), st.lists(st.one_of(fragments, st.text(max_size=3)), max_size=8).map("".join))


@given(scraps)
@example("seed=" + "9" * 5000)
@example("seed=0x" + "f" * 6000)
@example("rounds=" + "[" * 10_000)
@example("rounds=1\nlr = 2")
@example("=")
@example("aggregate=tests.nowhere:x")
def test_no_assignment_raises_anything_but_a_config_error_of_one_line(assignment: str) -> None:
    config = refused_in_one_line(lambda: resolve(Config, {}, [parse_assignment(assignment)]))
    if config is not None:
        tomllib.loads(dump("x", config))


values = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5), st.dates()),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=5), inner, max_size=3)),
    max_leaves=5,
)
keys = st.one_of(scraps, st.sampled_from(["rounds", "lr", "select", "aggregate", "partition", "data", "mode", "cap"]))


@given(st.dictionaries(keys, values, max_size=4))
def test_no_table_raises_anything_but_a_config_error_of_one_line(table: dict[str, Any]) -> None:
    config = refused_in_one_line(lambda: resolve(Config, table))
    if config is not None:
        tomllib.loads(dump("x", config))


@given(st.binary(max_size=40))
@example(b"a = " + b"9" * 5000)
@example(b"a = " + b"[" * 10_000)
@example(b"\xff")
@example(b"a\x00")
@settings(max_examples=50)
def test_no_file_raises_anything_but_a_config_error_of_one_line(content: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.toml"
        path.write_bytes(content)
        table = refused_in_one_line(lambda: read_toml(path))
        assert table is None or isinstance(table, dict)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read .*none\.toml: No such file or directory"):
        read_toml(tmp_path / "none.toml")
    with pytest.raises(ConfigError, match=r"cannot read .*: Is a directory"):
        read_toml(tmp_path)


# The pieces.


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("5", 5),
        ("5.0", 5.0),
        ("1e-3", 1e-3),
        ("true", True),
        ("fedavg", "fedavg"),
        ('"5"', "5"),
        ("'a b'", "a b"),
        ("", ""),
        ("a=b", "a=b"),
        ("data/set one", "data/set one"),
        ("[1, 2]", "[1, 2]"),
        ("{a = 1}", "{a = 1}"),
        ("1979-05-27", "1979-05-27"),
        ("1\nw = 2", "1\nw = 2"),
        ("inf", float("inf")),
    ],
)
def test_values_are_toml_scalars_or_else_text(text: str, value: Any) -> None:
    found = parse_value(text)
    assert found == value
    assert type(found) is type(value)


def test_assignments_are_taken_apart_at_the_first_equals_sign() -> None:
    assert parse_assignment(" select.count = 5 ") == ("select.count", 5)
    assert parse_assignment("data=a=b") == ("data", "a=b")
    for wrong in ("rounds", "=5", " = 5", ""):
        with pytest.raises(ConfigError, match="is not of the form key=value"):
            parse_assignment(wrong)


def test_whole_numbers_become_floats_only_where_a_float_is_asked_for() -> None:
    assert (type(coerce("k", 1, float)), type(coerce("k", 1, int | float)), type(coerce("k", 1, int))) == (
        float,
        int,
        int,
    )
    assert coerce("k", None, int | None) is None
    assert coerce("k", "x", str | None) == "x"


def test_nearest_lists_the_valid_names_if_they_are_few_or_none_is_close() -> None:
    assert nearest("unifrom", ["uniform", "everyone"]) == "; did you mean 'uniform'? (valid: everyone, uniform)"
    many = [f"name{i}" for i in range(30)]
    assert nearest("name1x", many).startswith("; did you mean 'name1")
    assert "valid" not in nearest("name1x", many)
    assert "valid: name0, " in nearest("qqq", many)


def test_load_name_finds_nested_names_and_flattening_keeps_every_key() -> None:
    assert load_name("mutirao.config:Part.__init__") is Part.__init__
    assert flatten({"a": 1, "b": {"c": 2, "name": "x"}, "d": {}}) == [
        ("a", 1),
        ("b.c", 2),
        ("b.name", "x"),
        ("d", {}),
    ]
