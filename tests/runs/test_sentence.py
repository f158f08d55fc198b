"""One sentence for every run: what it says of each kind, and that it never claims what is not known."""

import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from iris import IrisConfig, iris_task
from mutirao.config import dump, resolve
from mutirao.recipes.task import NAMES, Recipe, find
from mutirao.runs.defaults import own_defaults
from mutirao.runs.execute import execute
from mutirao.runs.reader import Record
from mutirao.runs.sentence import describe, describe_run, differences


def table(recipe: str, **sets: Any) -> dict[str, Any]:
    named = {key.replace("__", "."): value for key, value in sets.items()}
    return tomllib.loads(dump(recipe, resolve(find(recipe).config, {}, named.items())))


@pytest.mark.parametrize("recipe", NAMES)
def test_a_recipe_as_it_is_differs_in_nothing(recipe: str) -> None:
    assert differences(table(recipe)) == {}
    assert describe(table(recipe)).endswith(f"; otherwise the {recipe} recipe's defaults.")


START = "FedAvg on digits, dealt to 50 clients by Dirichlet labels (alpha 0.3), 10 a round for 40 rounds"


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (table("quickstart", lr=0.1), f"{START}; otherwise the quickstart recipe's defaults except lr 0.1."),
        (
            table(
                "quickstart", aggregate="fedyogi", partition__alpha=0.1, momentum=0.9, screen="norm", screen__factor=2.0
            ),
            "FedYogi on digits, dealt to 50 clients by Dirichlet labels (alpha 0.1), 10 a round for 40 rounds; "
            "otherwise the quickstart recipe's defaults except momentum 0.9 and screen norm (factor 2).",
        ),
        (
            table("quickstart", centralised=True),
            "Centralised training on digits, all samples pooled in one place, for 40",
        ),
        (
            table("quickstart", privacy="central", privacy__epsilon=3.0, privacy__clip=0.5, secure="secagg+"),
            f"{START}, with central differential privacy (epsilon 3, clip 0.5), with secure aggregation (secagg+); ",
        ),
        (table("quickstart", personal="ditto", personal__lam=0.5), "FedAvg with personal models by Ditto (lam 0.5) on"),
        (
            table("groups", attack="sign_flip", liars=0.2),
            "FedAvg with a model for each group of clients (found automatically) on digits, dealt to 30 clients by "
            "class (classes 2), 50% of each group a round for 15 rounds, 20% of them lying (SignFlip); otherwise",
        ),
        (
            table("ranking", data="/srv/MQ2008", sites=True, clients=3),
            "FedRisk on MQ2008, 3 sites with data of their own",
        ),
        (
            table("ranking", centralised="lightgbm"),
            "LightGBM on generated data, all samples pooled in one place; otherwise",
        ),
        (table("recsys"), "FedRecon on generated data, all its clients, 50 a round for 300 rounds; otherwise"),
        (table("selection", select__alpha=0.9), "10 a round chosen by AoIU (alpha 0.9) for 100 rounds"),
        (
            table("tabular", client="ward", data="x/a.csv"),
            "FedAvg on a.csv, 5 clients by the column ward, all in every",
        ),
        (table("cytology", data="C:\\slides"), "FedAvg on slides, 3 clients, all in every round for 30 rounds; "),
        ({"recipe": "mine:recipe", "shoes": 3, "lr": 0.1}, "otherwise Mutirão's defaults except shoes 3."),
    ],
)
def test_what_was_run_is_said_in_one_sentence(config: dict[str, Any], said: str) -> None:
    assert said in describe(config)


def test_what_came_dealt_was_not_dealt_by_the_partition() -> None:
    config = table("ranking", data="/srv/sites")
    assert "FedRisk on sites, 7 clients with data of their own, all in" in describe(config, clients=7, dealt=False)
    assert "dealt to 100 clients by Dirichlet labels (alpha 0.5)" in describe(config, dealt=True)
    assert "on sites, 100 clients, 10 a round" in describe(config)  # not known: then nothing is claimed


def test_many_settings_are_counted() -> None:
    own = {f"s{i}": i + 1 for i in range(20)}
    assert describe({"recipe": "mine:recipe", **own}, base={}).endswith(
        "s0 1, s1 2, s2 3, s3 4, s4 5, s5 6, s6 7 and 13 more settings."
    )


def test_the_defaults_of_ones_own_recipe_are_kept_and_told_without_loading_it(tmp_path: Path) -> None:
    execute(Recipe(IrisConfig, iris_task), {"rounds": 2, "lr": 0.03}, tmp_path / "run")
    record = Record.of(tmp_path / "run")
    assert record.events[0]["defaults"] == own_defaults(IrisConfig) != {}
    record.config["recipe"] = "gone:recipe"  # as on a machine without it
    assert describe_run(record).endswith("; otherwise the gone:recipe recipe's defaults except lr 0.03.")


def test_a_run_that_ended_early_says_how_far_it_came(tmp_path: Path) -> None:
    execute("quickstart", {"rounds": 2, "epochs": 1}, tmp_path / "run")
    record = Record.of(tmp_path / "run")
    assert "10 a round for 2 rounds; otherwise the quickstart recipe's defaults except epochs 1." in describe_run(
        record
    )
    record.config["rounds"] = 40
    assert "10 a round for 2 of 40 rounds;" in describe_run(record)


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=80),
    lambda inner: (
        st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from(["name", "epsilon", "x"]), inner, max_size=2)
    ),
    max_leaves=4,
)
keys = st.sampled_from(sorted({*table("groups"), *table("recsys"), "mine"}))


@given(
    st.dictionaries(keys, values, max_size=6), st.sampled_from(["", "quickstart", "groups", "recsys", "a:b", "python"])
)
def test_a_file_that_was_tampered_with_still_gives_one_line(config: dict[str, Any], recipe: str) -> None:
    said = describe({**config, "recipe": recipe})
    assert said.isprintable()
    assert said.endswith(".")
