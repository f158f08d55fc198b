"""What the parties of each recipe agree on, and what a site's own data are taken for."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from loopgrid import LoopGrid, identity
from mutirao.config import resolve
from mutirao.deploy.flower import FlowerFleet, client_app
from mutirao.deploy.flower.run_tasks import recipe_from, settings_at_site
from mutirao.errors import ConfigError
from mutirao.experiments.party_agreement import require_agreement
from mutirao.experiments.task import Task, find
from mutirao.report import execute
from mutirao.runs.csv_tables import CsvTable
from sets import listed, write_classes, write_table

__all__ = ["identity"]  # a fixture that holds for all tests here, too

SMALL: dict[str, dict[str, Any]] = {
    "images": {"body": "small", "side": 16},
    "ranking": {"queries": 50, "clients": 5},
    "cytology": {"weights": "random"},
}


def at_site(recipe: str, data: Path | str, **settings: Any) -> Any:
    """The task of a site that names its own data."""
    name, config = recipe_from(settings_at_site({"recipe": recipe, **settings}, {"data": str(data)}))
    return require_agreement(find(name).prepare(config))


def digests(task: Task) -> dict[str, str]:
    return {**task.basis(), **task.agreed}


@pytest.mark.parametrize("recipe", ["quickstart", "groups", "ranking"])
def test_parties_to_which_one_set_is_dealt_agree_on_that_set(recipe: str) -> None:
    first, other = (
        digests(find(recipe).prepare(resolve(find(recipe).config, {**SMALL.get(recipe, {}), "seed": seed})))
        for seed in (0, 1)
    )
    assert len(first) == 1
    assert first != other  # documents, or a test set, of another seed


def test_catalogues_of_items_that_differ_are_told_apart(tmp_path: Path) -> None:
    rows = [(user, item, 1 + (user + item) % 5) for user in range(12) for item in range(9) if (user + item) % 3]
    made = []
    for name, last in (("one", "i8"), ("same", "i8"), ("other", "another")):
        lines = [f"u{u},{last if i == 8 else f'i{i}'},{r}" for u, i, r in rows]
        (tmp_path / f"{name}.csv").write_text("user,item,rating\n" + "\n".join(lines) + "\n")
        settings = {"data": str(tmp_path / f"{name}.csv"), "dimension": 4}
        made.append(digests(find("recsys").prepare(resolve(find("recsys").config, settings)))["items"])
    assert made[0] == made[1] != made[2]


@pytest.mark.parametrize("recipe", ["cytology", "images"])
@pytest.mark.parametrize("layout", ["classes", "both", "table"])
def test_pictures_of_a_site_are_not_dealt_again(
    recipe: str, layout: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MUTIRAO_CACHE", str(tmp_path / "cache"))
    home = write_classes(tmp_path / ("Training" if layout == "both" else "own"), count=10)
    if layout == "both":
        write_classes(tmp_path / "Test", count=10, seed=1)
    data = {"classes": home, "both": tmp_path, "table": tmp_path / "own.csv"}[layout]
    if layout == "table":
        write_table(data, [{**row, "file": f"{row['file']}"} for row in listed(home)])
    task = at_site(recipe, data, clients=3, **SMALL[recipe], views=1, set="validation=0.2")
    total = 40 if layout == "both" else 20
    assert sum(task.population.counts("recife").values()) == total
    held = task.population["recife"]
    assert (len(held.train), len(held.test)) == (total * 4 // 5, total // 5)
    assert held.agreed().items() <= digests(task).items()


def test_rows_of_a_site_are_not_dealt_again(tmp_path: Path) -> None:
    lines = [f"{i},{i % 7},{('ill', 'well')[i % 2]}" for i in range(50)]
    (tmp_path / "own.csv").write_text("age,dose,outcome\n" + "\n".join(lines) + "\n")
    held = at_site("tabular", tmp_path / "own.csv", target="outcome", clients=5).population["recife"]
    assert len(held.train) + len(held.test) == 50


def test_a_site_with_a_set_of_its_own_is_refused_where_one_set_is_dealt_to_all(tmp_path: Path) -> None:
    one, other = write_classes(tmp_path / "one", count=30), write_classes(tmp_path / "other", count=30, seed=5)
    shutil.copytree(one, tmp_path / "copy")
    settings = {"clients": 3, "rounds": 1, "epochs": 1, "batch_size": 8}
    grid = LoopGrid(client_app(), recipe="quickstart", **settings)
    for name, data in (("c0", one), ("c1", tmp_path / "copy"), ("c2", other)):
        grid.join(name=name, data=str(data))
    fleet = FlowerFleet(grid, timeout=20, greet=20)
    config = resolve(find("quickstart").config, {**settings, "data": str(one)})
    execute("quickstart", config, tmp_path / "run", fleet=fleet)
    rows = {row["client"]: row for row in CsvTable(tmp_path / "run" / "clients.csv").read()}
    assert [c for c in rows if rows[c]["replied"] == "1"] == ["c0", "c1"]
    assert rows["c2"]["failure"].startswith("refused: agreed.data: data")
    assert "a site with its own data needs cytology, images, ranking or tabular" in rows["c2"]["failure"]


def test_most_sites_with_other_data_end_the_run(tmp_path: Path) -> None:
    one, other = write_classes(tmp_path / "one", count=20), write_classes(tmp_path / "other", count=20, seed=5)
    grid = LoopGrid(client_app(), recipe="quickstart", clients=3)
    for i, data in enumerate((one, other, other)):
        grid.join(name=f"c{i}", data=str(data))
    config = resolve(find("quickstart").config, {"clients": 3, "data": str(one)})
    fleet = FlowerFleet(grid, timeout=20, greet=20)
    with pytest.raises(ConfigError, match="2 of 3 clients do not agree on data: c1: refused"):
        execute("quickstart", config, tmp_path / "run", fleet=fleet)


def test_a_set_is_known_by_its_labels_and_some_of_its_samples() -> None:
    from mutirao.datasets.labelled import digest_of_set

    x, y = np.arange(3000.0).reshape(1000, 3), np.arange(1000)
    known = digest_of_set("ab", x, y)
    assert known == digest_of_set("ab", x.copy(), y.copy())
    others = [("ba", x, y), ("ab", x + 1, y), ("ab", x, y[::-1]), ("ab", x[:, ::-1], y), ("ab", x[:-1], y)]
    assert known not in [digest_of_set(*other) for other in others]
