"""A client that withdraws leaves nothing behind: the new run is the one that never knew it."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

import iris as shared
from iris import iris
from mutirao.aggregation import FedAvgM
from mutirao.cli import main
from mutirao.config import dump, resolve
from mutirao.core.arrays import digest
from mutirao.core.rounds import Run, train
from mutirao.errors import ConfigError
from mutirao.privacy import RELEASES
from mutirao.privacy.accounting import add_releases
from mutirao.report import execute
from mutirao.runs.csv_tables import CsvTable
from mutirao.runs.run_folder import Folder
from mutirao.runs.unlearning import forget
from mutirao.runs.verify import verify
from mutirao.selection import Uniform
from mutirao.simulation.local_fleet import LocalFleet

SETTINGS = {"clients": 8, "per_round": 2, "rounds": 8, "aggregate": "fedavgm", "seed": 5}
RECIPE = "iris:iris"


def config_of(**more: Any) -> Any:
    return resolve(iris.config, {}, [*{**SETTINGS, **more}.items()])


@pytest.fixture
def source(tmp_path: Path) -> Path:
    execute(RECIPE, config_of(), tmp_path / "run", pictures=False)
    return tmp_path / "run"


def first_rounds(folder: Path) -> dict[str, int]:
    """The first round in which each client contributed."""
    firsts: dict[str, int] = {}
    for row in CsvTable(folder / "clients.csv").read():
        if row["replied"] == "1":
            firsts.setdefault(row["client"], int(row["round"]))
    return firsts


@pytest.mark.parametrize("keep", ["all", "few"])
def test_the_new_run_is_the_one_that_never_knew_the_client_from_the_last_round_kept_on(
    keep: str, tmp_path: Path
) -> None:
    source = tmp_path / "run"
    execute(RECIPE, config_of(keep=keep), source, pictures=False)
    firsts, kept = first_rounds(source), Folder(source).committed()
    assert len(kept) == (9 if keep == "all" else 7)  # rounds 3 and 5 are not there
    leaving = sorted(c for c, r in firsts.items() if r > 1)
    assert keep == "all" or {firsts[c] - 1 for c in leaving} - {*kept}
    for client in leaving:
        record = forget(source, client, tmp_path / client)
        start = max(n for n in kept if n < firsts[client])
        run, _ = Folder(source).load(start)  # by hand: the checkpoint, and everybody but one
        task = iris.task(config_of())
        fleet = LocalFleet(task.handler, {c: d for c, d in task.population.items() if c != client})
        fleet.restore({k: v for k, v in run.sites.items() if json.loads(k)[0] != client})
        list(train(run, fleet, rounds=8, select=Uniform(2), aggregate=FedAvgM(), expect=7))
        assert record["digest_after"] == digest(run.arrays)
        assert (record["rounds_kept"], record["rounds_redone"]) == (start, 8 - start)
        assert record["first_contribution"] == firsts[client]
        rows = CsvTable(tmp_path / client / "clients.csv").read()
        assert client not in {row["client"] for row in rows}
        assert len({row["round"] for row in rows}) == 8
        assert verify(tmp_path / client)[1] == []


def test_one_who_was_there_from_the_first_round_is_left_out_from_the_start(source: Path, tmp_path: Path) -> None:
    client = min(first_rounds(source), key=lambda c: first_rounds(source)[c])
    record = forget(source, client, tmp_path / "without")
    never = execute(RECIPE, config_of(exclude=client), tmp_path / "never", pictures=False)
    assert record["rounds_kept"] == 0
    assert record["digest_after"] == never["digest"] != record["digest_before"]
    assert record["before"].keys() == record["after"].keys() == {"accuracy"}
    names = ("history.csv", "clients.csv")
    for name in names:
        mine, theirs = (CsvTable(tmp_path / run / name).read() for run in ("without", "never"))
        assert [r | {"seconds": ""} for r in mine] == [r | {"seconds": ""} for r in theirs]


def test_the_data_of_the_one_who_left_change_nothing(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = max(first_rounds(source), key=lambda c: first_rounds(source)[c])
    clean = forget(source, client, tmp_path / "clean")

    def poisoned(config: Any) -> Any:
        task = iris.task(config)
        x, y = task.population[client]
        return replace(task, population={**task.population, client: (x * 1e6 + 3, 2 - y)})

    monkeypatch.setattr(shared, "iris", replace(iris, task=poisoned))
    assert forget(source, client, tmp_path / "poisoned")["digest_after"] == clean["digest_after"]


def test_forgetting_goes_on_after_a_stop(source: Path, tmp_path: Path) -> None:
    client = next(c for c, r in first_rounds(source).items() if r > 1)
    whole = forget(source, client, tmp_path / "whole")

    class Stop(Exception):
        pass

    def stop(run: Run, *_: Any) -> None:
        if run.round == 6:
            raise Stop

    with pytest.raises(Stop):
        forget(source, client, tmp_path / "parts", watch=stop)
    parts = forget(source, client, tmp_path / "parts")
    assert parts["digest_after"] == whole["digest_after"]
    assert parts["rounds_redone"] == whole["rounds_redone"]
    assert verify(tmp_path / "parts")[1] == []
    again = execute(
        RECIPE, config_of(exclude=client), tmp_path / "parts", resume=True, pictures=False
    )  # as `mutirao run --resume`
    assert again["digest"] == whole["digest_after"]


def test_nothing_is_left_half_written_if_it_stops_while_it_begins(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = next(c for c, r in first_rounds(source).items() if r > 1)

    def fail(*_: Any, **__: Any) -> None:
        raise OSError("no space left")

    with monkeypatch.context() as broken:
        broken.setattr(Folder, "checkpoint", fail)
        with pytest.raises(OSError, match="no space"):
            forget(source, client, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    assert forget(source, client, tmp_path / "out")["rounds_redone"] > 0


def test_a_client_that_was_only_probed_is_known_too(tmp_path: Path) -> None:
    from mutirao.experiments.task import find

    settings = {"clients": 6, "per_round": 2, "rounds": 3, "epochs": 1, "select": "powerofchoice"}
    config = resolve(find("quickstart").config, settings)
    execute("quickstart", config, tmp_path / "run", pictures=False)
    seen = first_rounds(tmp_path / "run")
    client = next(c for c in ("c0", "c1", "c2", "c3", "c4", "c5") if seen.get(c, 9) > 1)
    record = forget(tmp_path / "run", client, tmp_path / "out")
    roster = Folder(tmp_path / "out").load(3)[0].roster
    assert client not in roster
    probed = Folder(tmp_path / "run").load(record["rounds_kept"])[0].roster
    assert client not in probed or probed.last_probed[probed.row(client)] == 0


def test_what_was_spent_of_the_others_privacy_stays_spent(tmp_path: Path) -> None:
    config = config_of(privacy="central", **{"privacy.noise": 3.0})
    before = execute(RECIPE, config, tmp_path / "run", pictures=False)
    client = next(c for c, r in first_rounds(tmp_path / "run").items() if r > 1)
    record = forget(tmp_path / "run", client, tmp_path / "out")
    table = Folder(tmp_path / "out").load(8)[0].memory[RELEASES]
    assert table[:, 2].sum() == 8 + record["rounds_redone"]
    assert record["after"]["epsilon"] > before["final"]["epsilon"] > 0
    assert add_releases(None, 3.0, 2 / 8, 8)[0].tolist() in table.tolist()


@pytest.mark.parametrize(
    ("client", "out", "said"),
    [
        ("c99", "new", "the task has no client 'c99'"),
        ("c1", "run", "contains something else"),
        ("c1", "full", "contains something else"),
    ],
)
def test_what_cannot_be_is_refused(source: Path, tmp_path: Path, client: str, out: str, said: str) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.txt").write_text("mine")
    with pytest.raises(ConfigError, match=said):
        forget(source, client, tmp_path / out)
    assert not (tmp_path / "new").exists()


def test_one_cannot_leave_twice_but_another_can(source: Path, tmp_path: Path) -> None:
    forget(source, "c1", tmp_path / "one")
    with pytest.raises(ConfigError, match="already is a run without 'c1'"):
        forget(tmp_path / "one", "c1", tmp_path / "two")
    with pytest.raises(ConfigError, match="choose another --out"):
        forget(source, "c2", tmp_path / "one")
    forget(tmp_path / "one", "c2", tmp_path / "two")
    left = CsvTable(tmp_path / "two" / "clients.csv").read()
    assert {"c1", "c2"}.isdisjoint(row["client"] for row in left)
    assert 'exclude = "c1,c2"' in (tmp_path / "two" / "config.toml").read_text()


def test_the_folder_can_be_prepared_for_a_server_that_reaches_the_sites(source: Path, tmp_path: Path) -> None:
    client = next(c for c, r in first_rounds(source).items() if r > 1)
    out = tmp_path / "out"
    result = CliRunner().invoke(main, ["forget", str(source), "--client", client, "--out", str(out), "--prepare"])
    assert result.exit_code == 0, result.output
    assert f"exclude={client}" in result.output
    config = config_of(exclude=client)
    assert (out / "config.toml").read_text() == dump(RECIPE, config)
    task = iris.task(config_of())
    everybody = LocalFleet(task.handler, task.population)  # the one who left is still connected
    summary = execute(RECIPE, config, out, fleet=everybody, resume=True, pictures=False)
    assert summary["digest"] == forget(source, client, tmp_path / "here")["digest_after"]
    assert np.all([row["client"] != client for row in CsvTable(out / "clients.csv").read()])


def test_the_command_shows_before_and_after(source: Path, tmp_path: Path) -> None:
    result = CliRunner().invoke(main, ["forget", str(source), "--client", "c1", "--out", str(tmp_path / "out")])
    assert result.exit_code == 0, result.output
    assert "before" in result.output
    assert "trained again:" in result.output
