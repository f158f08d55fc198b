"""Tables over clients: natural ones, partitions, files; agreed on once, the same bytes whatever happens on the way."""

import json
import logging
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mutirao.config import resolve
from mutirao.core.arrays import digest
from mutirao.core.fleet import Answers, ClientId, Request, Wrapper
from mutirao.core.rounds import Run
from mutirao.deploy.policy.enforcement import SampleCounts as Counted
from mutirao.deploy.policy.pins import model_of
from mutirao.errors import ConfigError, MutiraoError
from mutirao.experiments.task import find
from mutirao.report import execute
from mutirao.runs.unlearning import forget
from mutirao.simulation.local_fleet import LocalFleet
from mutirao.systems.tabular.recipe import Config, recipe
from mutirao.training.engine import threaded

QUICK = {"rounds": 2, "epochs": 1}
HOSPITALS = ("north", "south", "são josé")


def write_patients(path: Path, rows: int = 150, seed: int = 0, only: str = "", target: str = "outcome") -> Path:
    """Patients of three hospitals with gaps, categories and an id; `only` those of one."""
    draw = np.random.default_rng(seed)
    lines = [f"patient_id,hospital,age,dose,sex,{target}"]
    for i in range(rows):
        age, dose, sex = draw.normal(50, 15), draw.gamma(2.0), draw.choice(["f", "m"])
        sick = draw.random() < 1 / (1 + np.exp(-(age - 50) / 5 - (2 if sex == "m" else -2)))
        hospital = HOSPITALS[i % 3]
        value = ("sick" if sick else "well") if target == "outcome" else f"{2 * age + dose:.3f}"
        if not only or only == hospital:
            lines.append(f"{i},{hospital},{'' if i % 11 == 0 else round(age, 2)},{dose:.4f},{sex},{value}")
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def settings(path: Path, **more: Any) -> dict[str, Any]:
    return {**QUICK, "data": str(path), "target": "outcome", "client": "hospital", **more}


def go(config: Any, wrap: Any = lambda fleet: fleet) -> tuple[Run, list[dict[str, Any]]]:
    task = recipe.prepare(config)
    run = Run(task.initial(), seed=config.seed)
    fleet = wrap(LocalFleet(task.secure.at_client(task.handler), task.population))
    return run, [done.row for done in recipe.flow(fleet, config, task, run)]


def test_a_csv_with_hospitals_is_learnt_from_and_leaves_its_schema(tmp_path: Path) -> None:
    path = write_patients(tmp_path / "patients.csv", 600)
    summary = execute("tabular", settings(path, rounds=10, clients_every=10), tmp_path / "run")
    assert summary["clients"] == 3
    final = summary["final"]
    assert {"accuracy", "balanced_accuracy", "auc", "f1", "log_loss", "loss"} <= final.keys()
    assert final["accuracy"] > 0.75
    assert final["balanced_accuracy_worst"] <= final["balanced_accuracy_mean"]
    assert final["log_loss_worst"] >= final["log_loss_mean"]
    schema = json.loads((tmp_path / "run" / "schema.json").read_text(encoding="utf-8"))
    assert [f["name"] for f in schema["features"]] == ["age", "dose", "sex"]  # neither the id nor the hospital
    assert [f["missing"] for f in schema["features"]] == [True, False, False]
    assert schema["classes"] == ["sick", "well"]
    again = execute("tabular", settings(path, rounds=10, schema=str(tmp_path / "run" / "schema.json")), tmp_path / "b")
    assert again["digest"] == summary["digest"]  # no client was asked for a profile, and nothing else is different


def test_a_number_is_predicted_in_its_own_units(tmp_path: Path) -> None:
    path = write_patients(tmp_path / "patients.csv", 600, target="cost")
    _, rows = go(resolve(Config, settings(path, target="cost", rounds=10, model="linear")))
    assert rows[-1]["r2"] > 0.88  # cost = 2 age + dose, and every eleventh row has no age
    assert 0 < rows[-1]["mae"] <= rows[-1]["rmse"] < 12


@pytest.mark.parametrize("data", ["breast_cancer", "wine", "diabetes"])
@pytest.mark.parametrize("model", ["linear", "dense"])
def test_embedded_sets_are_partitioned(data: str, model: str) -> None:
    run, rows = go(resolve(Config, {**QUICK, "data": data, "model": model, "clients": 6, "layers": 2, "hidden": 8}))
    assert len(run.roster) == 6
    assert len(run.arrays) == (2 if model == "linear" else 6)
    assert all(np.isfinite(list(row.values())).all() for row in rows)


class Shuffled(Wrapper):
    """Replies in another order."""

    def ask(self, requests: Mapping[ClientId, Request]) -> Answers:
        answers = self.fleet.ask(dict(reversed(requests.items())))
        return replace(answers, replies=dict(reversed(answers.replies.items())))


def test_the_order_of_replies_changes_no_byte(tmp_path: Path) -> None:
    path = write_patients(tmp_path / "patients.csv")
    config = resolve(Config, settings(path))
    run, _ = go(config)
    other, _ = go(config, Shuffled)
    assert digest(other.arrays) == digest(run.arrays)
    assert digest(other.memory) == digest(run.memory)


@pytest.mark.parametrize("model", ["linear", "dense"])
def test_the_number_of_workers_changes_no_byte(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config = resolve(Config, {**QUICK, "clients": 40, "partition": "iid", "model": model, "least": 1})
    found = []
    for count in (1, 3):
        monkeypatch.setattr(threaded, "core_count", lambda many=count: many)
        found.append(digest(go(config)[0].arrays))
    assert found[0] == found[1]


class Dies(Wrapper):
    """A fleet that is killed when it is asked to train for the second time."""

    asked = 0

    def ask(self, requests: Mapping[ClientId, Request]) -> Answers:
        if any(r.do == "train" for r in requests.values()):
            self.asked += 1
            if self.asked == 2:
                raise MutiraoError("killed")
        return self.fleet.ask(requests)


def test_a_killed_run_goes_on_without_a_second_profile(tmp_path: Path) -> None:
    path = write_patients(tmp_path / "patients.csv")
    config = resolve(Config, settings(path, rounds=3))
    whole = execute("tabular", config, tmp_path / "whole")
    task = recipe.prepare(config)
    with pytest.raises(MutiraoError, match="killed"):
        execute("tabular", config, tmp_path / "run", fleet=Dies(LocalFleet(task.handler, task.population)))
    asked: list[str] = []

    class Listens(Wrapper):
        def ask(self, requests: Mapping[ClientId, Request]) -> Answers:
            asked.extend(r.do for r in requests.values())
            return self.fleet.ask(requests)

    rest = execute(
        "tabular", config, tmp_path / "run", fleet=Listens(LocalFleet(task.handler, task.population)), resume=True
    )
    assert rest["digest"] == whole["digest"]
    assert asked.count("profile") == 0
    assert asked.count("agree") == 3
    before, after = ((tmp_path / name / "schema.json").read_bytes() for name in ("whole", "run"))
    assert before == after


def test_a_folder_of_files_is_a_client_each_and_equals_the_column(tmp_path: Path) -> None:
    whole = write_patients(tmp_path / "patients.csv")
    (tmp_path / "files").mkdir()
    for name in HOSPITALS:
        write_patients(tmp_path / "files" / f"{name}.csv", only=name)
    run, _ = go(resolve(Config, settings(whole)))
    files, _ = go(resolve(Config, settings(tmp_path / "files")))
    assert digest(files.arrays) == digest(run.arrays)


def test_one_site_with_other_columns_is_left_out_and_its_log_names_them(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "files"
    folder.mkdir()
    for name in HOSPITALS:
        write_patients(folder / f"{name}.csv", only=name)
    odd = folder / "odd.csv"
    odd.write_text(write_patients(tmp_path / "x.csv", only="north").read_text().replace(",dose,", ",height,"))
    with caplog.at_level(logging.WARNING, "mutirao"):
        run, rows = go(resolve(Config, settings(folder)))
    assert "odd takes no part: refused: agreed.schema: the columns of this site differ" in caplog.text
    assert "missing: 'dose'; too many: 'height'" in caplog.text
    odd.unlink()
    without, _ = go(resolve(Config, settings(folder)))
    assert digest(run.arrays) == digest(without.arrays)
    assert [row["selected"] for row in rows] == [3, 3]
    for k, name in enumerate(HOSPITALS[:2]):  # more than half of them differ, each in its own way
        file = folder / f"{name}.csv"
        file.write_text(file.read_text().replace(",dose,", f",dose{k},"))
    with pytest.raises(ConfigError, match="2 of 3 clients do not agree on schema"):
        go(resolve(Config, settings(folder)))


def test_privacy_and_sums_need_a_schema_agreed_on_beforehand(tmp_path: Path) -> None:
    path = write_patients(tmp_path / "patients.csv")
    for more in ({"privacy": "local"}, {"privacy": "dpsgd"}, {"privacy": "central"}, {"secure": "secagg+"}):
        with pytest.raises(ConfigError, match="in the clear; name a schema agreed on beforehand"):
            recipe.prepare(resolve(Config, settings(path, **more)))
    plain = execute("tabular", settings(path), tmp_path / "plain")
    known = settings(path, schema=str(tmp_path / "plain" / "schema.json"))
    for more in ({"privacy": "dpsgd"}, {"privacy": "local"}, {"secure": "secagg+"}):
        _, rows = go(resolve(Config, {**known, **more}))
        assert [row["failed"] for row in rows] == [0, 0]
        assert "accuracy" in rows[-1]
        away = {**known, **more, "data": "", "sites": True, "task": "classification", "judge_by": "vali"}
        with pytest.raises(ConfigError, match=r"judge_by=vali: .* may leave them; use (privacy|secure)=none"):
            recipe.prepare(resolve(Config, away))
    summed, _ = go(resolve(Config, {**known, "secure": "secagg+"}))
    straight, _ = go(resolve(Config, known))
    assert digest(straight.arrays) == plain["digest"]
    assert all(summed.arrays[k] == pytest.approx(straight.arrays[k], abs=1e-3) for k in straight.arrays)


def sites(folder: Path, **more: Any) -> Iterator[tuple[str, Any]]:
    """What each site and the server make of one run configuration, each with its own `data`."""
    common = {**QUICK, "target": "outcome", "task": "classification", "client": "hospital", "sites": True, "clients": 3}
    for name in HOSPITALS:
        yield name, resolve(Config, {**common, "data": str(folder / f"{name}.csv"), **more})
    yield "server", resolve(Config, {**common, "data": "", **more})


@pytest.mark.parametrize(("judge_by", "counted"), [("test", (40, 10)), ("vali", (32, 8))])
def test_sites_with_their_own_files_make_the_model_of_the_local_run(
    tmp_path: Path, judge_by: str, counted: tuple[int, int]
) -> None:
    whole = write_patients(tmp_path / "patients.csv")
    for name in HOSPITALS:
        write_patients(tmp_path / f"{name}.csv", only=name)
    local, here = go(resolve(Config, settings(whole, task="classification", judge_by=judge_by)))
    *parties, (_, server) = sites(tmp_path, judge_by=judge_by)
    tasks = {name: recipe.prepare(config) for name, config in parties}
    data = {name: task.population[name] for name, task in tasks.items()}
    task = recipe.prepare(server)
    run = Run(task.initial(), seed=0)
    handler = tasks[HOSPITALS[0]].handler
    rows = [done.row for done in recipe.flow(LocalFleet(handler, data), server, task, run)]
    assert digest(run.arrays) == digest(local.arrays)
    for name in ("accuracy", "log_loss"):  # the sites evaluate, and their metrics combined are those of all test rows
        assert rows[-1][name] == pytest.approx(here[-1][name], rel=1e-6)
    counts = Counted.of(data["north"])
    assert (counts.train, counts.test) == counted


def plain(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What is the same in every run of the same kind."""
    return [{k: v for k, v in row.items() if "seconds" not in k} for row in rows]


@pytest.mark.parametrize("personal", ["none", "ditto"])
def test_evaluated_on_validation_rows_no_test_row_has_any_influence(tmp_path: Path, personal: str) -> None:
    path = write_patients(tmp_path / "patients.csv", target="cost")
    chosen = settings(path, target="cost", clients_every=1, personal=personal)
    found = {by: resolve(Config, {**chosen, "judge_by": by}) for by in ("test", "vali")}
    population = recipe.prepare(found["test"]).population
    tested = {f"{dose:.4f}" for name in HOSPITALS for dose in population[name].test.columns["dose"].numbers}
    seen = {by: go(config) for by, config in found.items()}
    head, *lines = path.read_text(encoding="utf-8").splitlines()
    rows = [line.split(",") for line in lines]
    strange = [[*row[:2], "1e6", "-1e6", "x", "1e6"] if row[3] in tested else row for row in rows]
    assert sum(row[4] == "x" for row in strange) == 30
    path.write_text("\n".join([head, *(",".join(row) for row in strange)]) + "\n", encoding="utf-8")
    again = {by: go(config) for by, config in found.items()}
    assert plain(again["test"][1]) != plain(seen["test"][1])
    assert {"rmse", "rmse_worst", "mae", "r2", "loss"} <= seen["vali"][1][-1].keys()
    assert plain(again["vali"][1]) == plain(seen["vali"][1])
    assert digest(again["vali"][0].arrays) == digest(seen["vali"][0].arrays)
    assert digest(again["vali"][0].memory) == digest(seen["vali"][0].memory)  # the schema: columns, categories, scales


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"target": ""}, "target: name the column that is predicted; .* has patient_id, hospital, age"),
        ({"target": "outcom"}, "target: .* has no column 'outcom'; did you mean 'outcome'"),
        ({"client": "hospitl"}, "client: .* has no column 'hospitl'; did you mean 'hospital'"),
        ({"client": "outcome"}, "client: 'outcome' is the target, too"),
        ({"data": "nobody.csv"}, "cannot read nobody.csv: No such file or directory"),
        ({"data": ""}, "data: name a table, a folder of tables, or one of breast_cancer, wine, diabetes"),
        ({"task": "regression"}, "is text such as '(sick|well)'; task=regression needs numbers"),
        ({"ignore": "age,dose,sex"}, "has no column to predict 'outcome' from"),
        ({"ignore": "outcome"}, "target: .* has no column 'outcome'"),
        ({"columns": "sex=number"}, "column 'sex': '[fm]' is no number"),
        ({"schema": "nobody.json"}, "schema: nobody.json: No such file or directory"),
        ({"sites": True, "data": "", "task": "auto"}, "task: set classification or regression"),
        ({"sites": True, "data": "", "target": ""}, "target: name the column of the sites' files"),
        ({"client": "", "clients": 1000}, "partition=dirichlet: 1000 clients"),
        ({"test": 0.95}, "test: 0.95 is too large"),
        ({"test": 0.0, "judge_by": "vali"}, "judge_by=vali: .* test=0 holds out nothing; use test=0.2"),
        ({"judge_by": "validation"}, "judge_by: 'validation' is not a choice"),
        ({"model": "forest"}, "model: 'forest' is not a choice"),
    ],
)
def test_wrong_input_is_said_in_a_line_before_the_first_round(tmp_path: Path, more: dict[str, Any], says: str) -> None:
    path = write_patients(tmp_path / "patients.csv")
    with pytest.raises(ConfigError, match=says) as refused:
        recipe.prepare(resolve(Config, settings(path, **more)))
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("hospital,age,outcome\n" + "a,1,yes\n" * 3, "has 3 rows with a 'outcome'; expected at least 10"),
        ("hospital,age,outcome\n" + "a,1,yes\nb,2,yes\n" * 9, "'outcome' has only one class, 'yes'"),
        ("hospital,age,outcome\n" + "a,1,yes\n,2,no\n" * 9, "column 'hospital' of .* is empty in row 2"),
        ("hospital,age,outcome\n" + "a,1,yes\nb,1,no\n" * 9, "no column can be used"),
        ("hospital,age,outcome\n" + "a,1,\n" * 20, "column 'outcome' of .* has no values"),
    ],
)
def test_a_table_that_cannot_be_learnt_from_is_refused(tmp_path: Path, text: str, says: str) -> None:
    (tmp_path / "t.csv").write_text(text)
    with pytest.raises(ConfigError, match=says):
        execute("tabular", settings(tmp_path / "t.csv"), tmp_path / "run")
    assert not (tmp_path / "run" / "config.toml").exists()


def test_centralised_is_one_client_with_all_rows(tmp_path: Path) -> None:
    run, rows = go(resolve(Config, settings(write_patients(tmp_path / "patients.csv"), centralised=True)))
    assert len(run.roster) == 1
    assert "accuracy" in rows[-1]


def test_a_site_cannot_pin_a_model_that_is_not_known_yet(tmp_path: Path) -> None:
    path = write_patients(tmp_path / "patients.csv")
    sets = list(settings(path).items())
    with pytest.raises(ConfigError, match="a schema pins it"):
        model_of("tabular", sets)
    execute("tabular", settings(path), tmp_path / "run")
    assert model_of("tabular", [*sets, ("schema", str(tmp_path / "run" / "schema.json"))]).startswith("sha256:")
    assert find("tabular") is recipe


@pytest.mark.slow
def test_who_withdraws_has_no_part_in_the_schema_either(tmp_path: Path) -> None:
    path = write_patients(tmp_path / "patients.csv")
    config = settings(path, rounds=4, per_round=1, select="roundrobin")
    execute("tabular", config, tmp_path / "run")
    last = max(HOSPITALS, key=lambda name: first_round_of(tmp_path / "run", name))
    assert first_round_of(tmp_path / "run", last) > 1  # rounds were made before it was first selected
    record = forget(tmp_path / "run", last, tmp_path / "without")
    assert record["rounds_kept"] == 0
    fresh = execute("tabular", {**config, "exclude": last}, tmp_path / "fresh")
    assert record["digest_after"] == fresh["digest"]


def first_round_of(run: Path, client: str) -> int:
    rows = (run / "clients.csv").read_text(encoding="utf-8").splitlines()
    return min(int(row.split(",")[0]) for row in rows[1:] if row.split(",")[1] == client)
