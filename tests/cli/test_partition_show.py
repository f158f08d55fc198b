"""`mutirao partition show`: the figures, the picture, and what cannot be shown."""

import csv
import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from matplotlib.image import imread

from mutirao.cli import main
from mutirao.config import resolve
from mutirao.experiments.task import find
from mutirao.partitioning import describe
from mutirao.systems.classification import partition_labelled


def show(*words: str) -> Result:
    return CliRunner().invoke(main, ["partition", "show", *words])


def sets(**values: object) -> list[str]:
    return [word for key, value in values.items() for word in ("--set", f"{key.replace('__', '.')}={value}")]


def test_the_figures_are_those_of_the_partition_that_a_run_would_have() -> None:
    found = json.loads(show("--json", *sets(partition="quantity", partition__beta=2.0, clients=10, seed=3)).stdout)
    settings = {"partition": {"name": "quantity", "beta": 2.0}, "clients": 10, "seed": 3}
    dealt = partition_labelled(resolve(find("quickstart").config, settings))
    expected = describe(dealt.data.y_train, dealt.parts).figures()
    assert {k: found[k] for k in expected} == pytest.approx(expected)
    assert found["partition"] == {"name": "quantity", "beta": 2.0, "min_size": 1}


def test_the_words_say_the_figures() -> None:
    done = show(*sets(partition="by_class", clients=10))
    assert done.exit_code == 0
    lines = done.stdout.splitlines()
    assert lines[0] == "quickstart: data=digits, partition=by_class (classes=2, order=drawn, sets=0)"
    assert "classes a client: 2 to 2, mean 2.00" in lines
    assert any(line.startswith("earth mover's distance: 1.6") for line in lines)
    assert "noise" not in done.stdout


def test_noise_is_told() -> None:
    assert "standard deviation 0.158 to 0.316" in show(*sets(partition="noise", clients=4)).stdout


@pytest.mark.parametrize("kind", ["bars", "bubbles"])
def test_the_picture_and_its_table(kind: str, tmp_path: Path) -> None:
    out = tmp_path / "p.png"
    done = show("--kind", kind, "--out", str(out), *sets(partition="k_classes", clients=10))
    assert f"written: {out}" in done.stdout
    assert imread(out).std() > 0.01
    with out.with_suffix(".csv").open() as file:
        rows = list(csv.reader(file))
    assert len(rows) == 11
    assert all(sum(int(n) > 0 for n in row[1:]) == 2 for row in rows[1:])


@pytest.mark.parametrize("recipe", ["cifar10", "selection", "groups", "tabular", "ranking"])
def test_of_any_recipe_that_deals_labelled_samples(recipe: str) -> None:
    found = json.loads(show("--recipe", recipe, "--json", *sets(clients=5)).stdout)
    assert found["clients"] == 5
    assert found["recipe"] == recipe


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--recipe", "recsys"], "--recipe: 'recsys' has no partition of labelled samples"),
        (["--recipe", "nowhere"], "no recipe is called 'nowhere'"),
        (
            sets(centralised="true"),
            "--recipe: 'quickstart' has no partition of labelled samples",
        ),
        (sets(partition="quantity", partition__beta=0), "partition.beta: 0.0 is not a number above 0"),
        (sets(partition="natural"), "partition=natural: 'digits' does not name the owners"),
        (["--out", "p.txt"], "right would be a name that ends in .png, .svg, .pdf"),
    ],
)
def test_what_cannot_be_shown_is_one_line(
    words: list[str], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done = show(*words)
    assert done.exit_code == 2
    assert says in done.stderr
    assert done.stderr.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_the_help_has_examples() -> None:
    assert "mutirao partition show --set partition=quantity" in show("--help").stdout
