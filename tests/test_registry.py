"""A dotted name is found wherever it stands, and what it leads to is a part of the right kind or is never called."""

import functools
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mutirao.config import Common, Part, build, load_name, resolve
from mutirao.errors import ConfigError
from mutirao.experiments.task import find
from mutirao.registry import dotted_in, is_dotted
from mutirao.selection.scores import parse_scores

HERE = __name__
BUILT: list[str] = []
borrowed = subprocess.Popen


@dataclass(frozen=True)
class Made:
    """Says when it is made: what is refused never is."""

    args: str = "x"

    def __post_init__(self) -> None:
        BUILT.append(self.args)


@dataclass(frozen=True)
class First:
    """A selector of a user's own."""

    count: int = 2

    def __call__(self, roster: Any, round: int, rng: Any) -> list[str]:
        return list(roster.ids[: self.count])


class Quiet:
    """A tracker of a user's own."""

    def open(self, folder: Any, recipe: Any, config: Any, round: Any) -> Any:
        raise NotImplementedError


def by_size(roster: Any, round: int) -> Any:
    return roster.n


def any_number(*values: Any) -> None:
    raise NotImplementedError


def halves(labels: Any, clients: int, rng: Any, share: float = 0.5) -> Any:
    raise NotImplementedError


quarters = functools.partial(halves, share=0.25)
loose = First()

words = st.from_regex(r"[a-z_][a-z_0-9]{0,5}", fullmatch=True)
dotted = st.builds(lambda a, b: f"{'.'.join(a)}:{b}", st.lists(words, min_size=1, max_size=3), words)


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("select", "subprocess:Popen"),
        ("select", "os:system"),
        ("select", "shutil:rmtree"),
        ("aggregate", "antigravity:fly"),
        ("partition", "subprocess:run"),
        ("track", "webbrowser:BaseBrowser"),
        ("select", f"{HERE}:borrowed"),
        ("select", f"{HERE}:subprocess.Popen"),
        ("select", f"{HERE}:Made"),
        ("aggregate", f"{HERE}:by_size"),
        ("select", f"{HERE}:any_number"),
        ("track", f"{HERE}:First"),
        ("privacy", f"{HERE}:Quiet"),
        ("select", f"{HERE}:HERE"),
        ("select", "numpy:savetxt"),
        ("select", "torch.nn:Linear"),
    ],
)
def test_what_is_not_a_part_of_that_kind_is_refused_before_it_is_made_or_called(kind: str, name: str) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve(Common, {kind: {"name": name, "args": "touch marker"}})
    assert "\n" not in str(caught.value)
    assert str(caught.value).startswith(f"{kind}: {name!r} is ")
    assert not BUILT
    assert "antigravity" not in sys.modules


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("select", f"{HERE}:First"),
        ("select", f"{HERE}:loose"),
        ("select", "mutirao.selection:AoIU"),
        ("aggregate", "mutirao.aggregation:FedAvg"),
        ("partition", f"{HERE}:halves"),
        ("partition", f"{HERE}:quarters"),
        ("track", f"{HERE}:Quiet"),
        ("privacy", "mutirao.privacy:Local"),
        ("screen", "mutirao.robustness:filters.NormFilter"),
    ],
)
def test_a_part_of_the_right_kind_is_taken(kind: str, name: str) -> None:
    config = resolve(Common, {kind: name})
    assert getattr(config, kind).name == name
    build(kind, Part(name), count=3)


def test_a_score_must_be_one_and_a_recipe_too() -> None:
    assert parse_scores(f"age + 0.5 {HERE}:by_size") == {"age": 1.0, f"{HERE}:by_size": 0.5}
    for name in ("os:getenv", f"{HERE}:First", f"{HERE}:borrowed"):
        with pytest.raises(ConfigError, match=r"^scores: "):
            parse_scores(f"age + 0.5 {name}")
    with pytest.raises(ConfigError, match="'this:s' is not a recipe but part of Python itself"):
        find("this:s")
    assert "this" not in sys.modules


@given(st.text(max_size=12))
def test_nothing_but_a_dotted_name_is_ever_imported(text: str) -> None:
    if not is_dotted(text):
        with pytest.raises(ConfigError, match="cannot load"):
            load_name(text)


def test_a_module_whose_name_python_could_not_write_is_not_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my-mod.py").write_text("raise SystemExit('ran')")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match=r"not of the form package\.module:name"):
        load_name("my-mod:part")


@given(dotted, st.sampled_from(["select", "select.name", "cluster", "scores"]), st.booleans())
def test_a_dotted_name_is_found_wherever_a_file_holds_it(name: str, key: str, deep: bool) -> None:
    mixed = f"0.5 age + 0.1 {name}"
    for value in (name, mixed, f" {name}\t", [1, name], {"name": name}):
        table = {"lr": 0.1, "methods": {"mine": {key: value}}} if deep else {key: value}
        assert dotted_in(table) == [name]
    assert dotted_in({"exclude": name, "rounds": 3, "select": "aoiu"}) == []
    assert dotted_in({"data": name}) == [name]
    assert dotted_in({"data": f"/a folder/{name} beside {name}"}) == []
