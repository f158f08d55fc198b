"""Who consents stands in a list; who withdraws leaves nothing behind, whatever they had part in."""

import hashlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from mutirao.cli import main
from mutirao.config import parse_assignment, resolve
from mutirao.errors import ConfigError
from mutirao.experiments.task import find
from mutirao.report import execute
from mutirao.runs.run_folder import Folder
from mutirao.runs.unlearning import forget
from mutirao.runs.verify import verify
from mutirao.systems.recsys.consent import EVALUATED, POOLED, read_names
from mutirao.systems.recsys.ratings import Ratings, plant

RECIPE = find("recsys")
RATINGS = plant(42, 24, np.random.default_rng(3))


def write(ratings: Ratings, path: Path, skip: str = "") -> None:
    """The ratings as a CSV file, without one of the users."""
    lines = ["user,item,rating,time"]
    for owner, item, value, time in zip(ratings.owners(), ratings.items, ratings.values, ratings.times, strict=True):
        if ratings.users[owner] != skip:
            lines.append(f"{ratings.users[owner]},{ratings.catalogue.ids[item]},{value:g},{time}")
    path.write_text("\n".join(lines) + "\n")


@pytest.fixture
def data(tmp_path: Path) -> Path:
    write(RATINGS, tmp_path / "ratings.csv")
    return tmp_path / "ratings.csv"


def config_of(data: Path, *sets: str) -> Any:
    small = ["rounds=4", "per_round=6", "dimension=5", "evaluate_every=1", f"data={data}"]
    return resolve(RECIPE.config, {}, [parse_assignment(text) for text in (*small, *sets)])


def made(data: Path, out: Path, *sets: str) -> dict[str, Any]:
    return execute("recsys", config_of(data, *sets), out, pictures=False)


def arrivals() -> list[str]:
    """Users by their first rating."""
    return [RATINGS.users[i] for i in np.argsort(RATINGS.times[RATINGS.offsets[:-1]], kind="stable")]


def by_list(path: Path, names: list[str]) -> tuple[str, ...]:
    path.write_text("".join(f"{name}\n" for name in names))
    return "split=users_by_time", "start=consent", f"start.list={path}", "start.epochs=3"


def test_those_on_the_list_are_pooled_and_the_record_has_their_digest(data: Path, tmp_path: Path) -> None:
    early = arrivals()
    listed = [*early[:9], early[-1]]  # the last of all judges
    sets = by_list(tmp_path / "consent.txt", listed)
    summary = made(data, tmp_path / "run", *sets)
    task = RECIPE.prepare(config_of(data, *sets))
    assert set(task.population) == set(early[9 : round(0.8 * len(early))])
    ordered = "".join(f"{name}\n" for name in sorted(early[:9]))
    assert summary["consent"]["digest"] == hashlib.sha256(ordered.encode()).hexdigest()
    assert (summary["consent"]["pooled"], summary["consent"]["listed"]) == (9, 10)
    assert Folder(tmp_path / "run").audit.began["facts"]["consent"] == summary["consent"]


def test_a_table_may_say_who_consents(data: Path, tmp_path: Path) -> None:
    table = tmp_path / "consent.csv"
    table.write_text("when;who\n2026-01-02;" + "\n2026-01-03;".join(arrivals()[:4]) + "\n")
    task = RECIPE.prepare(config_of(data, "start=consent", f"start.list={table}", "start.column=who", "seed=1"))
    assert task.facts["consent"]["listed"] == 4


@pytest.mark.parametrize(
    ("text", "sets", "says"),
    [
        ("", (), "names no user"),
        ("\n \n", (), "names no user"),
        ("1\n2\n1\n", (), "line 3: '1' is in line 1 already"),
        ("1\nx1\n2\nx2\n", (), "line 2: 'x1' is not a user with enough ratings here, nor are 1 more of the 4"),
        ("1\n\n2\n", ("start.column=who",), "line 1: there is no column 'who'; it has 1"),
        ("who,when\n1,a\n,b\n", ("start.column=who",), "line 3: who is empty"),
        ("\n".join(RATINGS.users), ("start.epochs=1",), "no user is left to train"),
    ],
)
def test_a_list_that_cannot_be_is_refused(
    data: Path, tmp_path: Path, text: str, sets: tuple[str, ...], says: str
) -> None:
    (tmp_path / "consent.txt").write_text(text)
    with pytest.raises(ConfigError, match=says):
        RECIPE.prepare(config_of(data, "start=consent", f"start.list={tmp_path / 'consent.txt'}", *sets))


def test_a_list_that_is_not_there_and_a_column_without_one_are_refused(data: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not exist"):
        read_names(tmp_path / "none.txt")
    with pytest.raises(ConfigError, match=r"name the file with start\.list"):
        RECIPE.prepare(config_of(data, "start=consent", "start.column=who"))


def test_one_who_was_pooled_is_forgotten_as_if_the_data_never_had_it(data: Path, tmp_path: Path) -> None:
    """Bit for bit the run on a file without that user's lines, and on a list without its name."""
    early = arrivals()
    sets, leaves = by_list(tmp_path / "consent.txt", early[:12]), early[5]
    made(data, tmp_path / "run", *sets)
    record = forget(tmp_path / "run", leaves, tmp_path / "without")
    assert record["had_part_in"] == POOLED
    assert (record["rounds_kept"], record["rounds_redone"]) == (0, 4)
    write(RATINGS, tmp_path / "never.csv", skip=leaves)
    never = by_list(tmp_path / "never.txt", [name for name in early[:12] if name != leaves])
    other = made(tmp_path / "never.csv", tmp_path / "never", *never)
    assert record["digest_after"] == other["digest"] != record["digest_before"]
    assert record["after"] == other["final"]
    new = json.loads((tmp_path / "without" / "summary.json").read_text())
    assert new["consent"] == other["consent"]
    assert not verify(tmp_path / "without")[1]


def test_whoever_leaves_may_be_struck_off_the_list_afterwards_but_nobody_else(data: Path, tmp_path: Path) -> None:
    early, file = arrivals(), tmp_path / "consent.txt"
    sets = by_list(file, early[:12])
    made(data, tmp_path / "run", *sets)
    by_list(file, early[1:12])
    with pytest.raises(ConfigError, match="consent is not what the run began with"):
        forget(tmp_path / "run", early[5], tmp_path / "without")
    assert not (tmp_path / "without").exists()
    by_list(file, early[:12])
    forget(tmp_path / "run", early[5], tmp_path / "without", prepare_only=True)
    by_list(file, [name for name in early[:12] if name != early[5]])
    assert forget(tmp_path / "run", early[5], tmp_path / "without")["rounds_redone"] == 4
    more = config_of(data, *sets, "rounds=6")
    with pytest.raises(ConfigError, match="consent is not what the run began with"):
        execute("recsys", more, tmp_path / "run", resume=True, pictures=False)


@pytest.mark.parametrize("sets", [(), ("download=all",), ("loss=weighted", "taken=4"), ("start=consent",)])
def test_an_ordinary_client_is_forgotten_whatever_it_rated(tmp_path: Path, sets: tuple[str, ...]) -> None:
    """The run that forgets is the one in which that user's ratings were all different."""
    write(RATINGS, tmp_path / "a.csv")
    summary = made(tmp_path / "a.csv", tmp_path / "run", *sets)
    leaves = next(iter(Folder(tmp_path / "run").newest().roster.ids))
    record = forget(tmp_path / "run", leaves, tmp_path / "without")
    assert record["had_part_in"] == "the rounds"
    owners, values = RATINGS.owners(), RATINGS.values.copy()
    mine = owners == RATINGS.users.index(leaves)
    values[mine] = np.where(values[mine] >= 4, 5, 6 - values[mine].clip(3))  # others, and as many are taken
    write(replace(RATINGS, values=values), tmp_path / "b.csv")
    other = made(tmp_path / "b.csv", tmp_path / "other", *sets, f'exclude="{leaves}"')
    assert record["digest_after"] == other["digest"] != summary["digest"]


def test_a_judge_is_forgotten_too_and_one_who_trains_and_judges(data: Path, tmp_path: Path) -> None:
    last = arrivals()[-1]
    made(data, tmp_path / "run", "split=users_by_time")
    record = forget(tmp_path / "run", last, tmp_path / "without")
    assert record["had_part_in"] == EVALUATED
    assert record["digest_after"] == record["digest_before"], "it never trained"
    assert record["after"] != record["before"]
    made(data, tmp_path / "time", "split=time")
    client = next(iter(Folder(tmp_path / "time").newest().roster.ids))
    both = forget(tmp_path / "time", client, tmp_path / "time-without")
    assert (both["had_part_in"], both["rounds_kept"]) == (EVALUATED, 0)
    assert both["digest_after"] != both["digest_before"]


def test_of_the_pooled_reference_a_user_is_forgotten_too(data: Path, tmp_path: Path) -> None:
    made(data, tmp_path / "run", "centralised=true", "split=users_by_time", "per_round=1")
    leaves = arrivals()[3]
    record = forget(tmp_path / "run", leaves, tmp_path / "without")
    write(RATINGS, tmp_path / "never.csv", skip=leaves)
    never = made(tmp_path / "never.csv", tmp_path / "never", "centralised=true", "split=users_by_time", "per_round=1")
    assert record["digest_after"] == never["digest"]


def test_the_command_says_what_was_done(data: Path, tmp_path: Path) -> None:
    early = arrivals()
    made(data, tmp_path / "run", *by_list(tmp_path / "consent.txt", early[:12]))
    words = ["forget", str(tmp_path / "run"), "--client", early[2], "--out", str(tmp_path / "without")]
    done = CliRunner().invoke(main, words)
    assert done.exit_code == 0, done.output
    assert POOLED in done.output
