"""The selection laboratory end to end, on the embedded digits and in the paper's setting."""

import json
from pathlib import Path

import numpy as np
import pytest

from mutirao.config import resolve
from mutirao.core.rounds import Run
from mutirao.errors import ConfigError
from mutirao.experiments.task import find
from mutirao.metrics import gini
from mutirao.report import execute
from mutirao.runs.participation import participation_in
from mutirao.runs.reader import Record
from mutirao.simulation.local_fleet import LocalFleet
from mutirao.studies.targets import worst_decile
from mutirao.systems.selection_lab import Config


def test_digits_are_learnt_with_pictures_and_everybody_counts(tmp_path: Path) -> None:
    out = tmp_path / "run"
    summary = execute("selection", resolve(Config, {"rounds": 60}), out)
    assert summary["final"]["accuracy"] > 0.8
    assert 0 < summary["final"]["accuracy_worst_decile"] < summary["final"]["accuracy_own"]
    assert summary["classes"] == 10
    assert (out / "participation.png").read_bytes().startswith(b"\x89PNG")
    record = Record.begun(out)
    assert participation_in(record).times.sum() == 600
    assert all("entropy" in row for row in record.asked)
    assert "probed" not in record.rows[0]  # entropy comes with the update: no message of its own
    assert worst_decile(record) == pytest.approx(summary["final"]["accuracy_worst_decile"])


def test_age_alone_is_exactly_fair_in_a_real_run(tmp_path: Path) -> None:
    settings = {"rounds": 20, "epochs": 1, "select": "aoiu", "select.alpha": 1.0}
    execute("selection", resolve(Config, settings), tmp_path / "run", pictures=False)
    times = participation_in(Record.begun(tmp_path / "run")).times
    assert times.tolist() == [2] * 100
    assert gini(times) == 0.0


@pytest.mark.parametrize("refresh", ["selected", "share", "all"])
def test_what_is_known_of_whom_depends_on_whose_utility_is_renewed(refresh: str) -> None:
    settings = {
        "rounds": 3,
        "epochs": 1,
        "clients": 20,
        "per_round": 4,
        "select.refresh": refresh,
        "select.share": 0.25,
    }
    config = resolve(Config, settings)
    recipe = find("selection")
    task = recipe.task(config)
    run = Run(task.initial(), seed=config.seed)
    rows = [done.row for done in recipe.flow(LocalFleet(task.handler, task.population), config, task, run)]
    known = int((~np.isnan(run.roster.figure("entropy"))).sum())
    assert [row.get("probed", 0) for row in rows] == {"selected": [0] * 3, "share": [5] * 3, "all": [20] * 3}[refresh]
    assert {"selected": known == 12, "share": 12 <= known < 20, "all": known == 20}[refresh]
    fresh = run.roster.last_probed == 3
    assert int(fresh.sum()) == {"selected": 0, "share": 5, "all": 20}[refresh]


def test_every_client_has_equally_many_samples_whatever_the_seed_of_the_run() -> None:
    tasks = [find("selection").task(resolve(Config, {"seed": seed})) for seed in (0, 1)]
    sizes = {len(samples) for samples in tasks[0].population.values()}
    assert sizes == {14}
    for name in ("c00", "c57"):
        one, two = (task.population[name].train.index for task in tasks)
        np.testing.assert_array_equal(one, two)
    other = find("selection").task(resolve(Config, {"partition_seed": 7}))
    assert other.population["c00"].train.index.tolist() != tasks[0].population["c00"].train.index.tolist()
    anew = [
        find("selection").task(resolve(Config, {"seed": s, "partition_seed": -1})).population["c00"] for s in (0, 1)
    ]
    assert anew[0].train.index.tolist() != anew[1].train.index.tolist()
    np.testing.assert_array_equal(anew[0].test.x, anew[1].test.x)  # the part that judges stays
    with pytest.raises(ConfigError, match="100 clients of 15 samples need 1500 samples"):
        find("selection").task(resolve(Config, {"partition.size": 15}))


def test_the_setting_of_the_paper(real_data: Path) -> None:
    import tomllib

    study = tomllib.loads((Path(__file__).parents[2] / "studies/aoiu.toml").read_text())
    table = study["settings"] | study["methods"]["mixed"] | {"data": str(real_data / "cifar-10-batches-bin")}
    config = resolve(Config, table)
    assert (config.rounds, config.clients, config.per_round, config.epochs) == (100, 100, 10, 5)
    assert (config.batch_size, config.lr, config.model, config.optimizer) == (50, 0.01, "cnn", "sgd")
    assert config.select.settings["alpha"] == 0.5
    task = find("selection").task(config)
    sizes = [len(samples) for samples in task.population.values()]
    assert sizes == [500] * 100
    arrays = task.initial()
    assert sum(a.size for a in arrays.values()) == 576_778
    labels = np.stack([np.bincount(s.train.y.numpy()[s.train.index], minlength=10) for s in task.population.values()])
    assert labels.sum(0).tolist() == [5000] * 10
    assert 0.3 < (np.abs(labels / 500 - 0.1).sum(1) / 2).mean() < 0.6  # skewed: half a client's labels elsewhere
    assert set(study["methods"]) == {"random", "entropy", "mixed", "aoi", "powerofchoice", "oort"}


def test_pooled_it_is_one_client(tmp_path: Path) -> None:
    config = resolve(Config, {"centralised": True, "rounds": 2, "select": "everyone"})
    summary = execute("selection", config, tmp_path / "run", pictures=False)
    assert summary["clients"] == 1
    assert len(json.loads((tmp_path / "run/history.json").read_text())) == 2


def test_data_of_another_kind_is_sent_to_its_recipe_by_name(tmp_path: Path) -> None:
    (tmp_path / "letor" / "Fold1").mkdir(parents=True)
    (tmp_path / "films").mkdir()
    (tmp_path / "films" / "u.data").touch()
    for data, recipe in (
        ("wine", "tabular"),
        (str(tmp_path / "letor"), "ranking"),
        (str(tmp_path / "films"), "recsys"),
    ):
        with pytest.raises(ConfigError, match=f"is for the recipe {recipe}, .*: mutirao run {recipe} --set data="):
            find("selection").task(resolve(find("selection").config, {"data": data}))
