"""Trackers, against the real MLflow and the real TensorBoard."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from iris import iris
from mutirao.config import resolve
from mutirao.errors import ConfigError
from mutirao.experiments import task as recipes
from mutirao.report import execute
from mutirao.runs.csv_tables import CsvTable
from mutirao.runs.execute import reopen
from mutirao.runs.trackers import MLflow, SafeSink, TensorBoard, numbers, require_package, spell


@pytest.fixture(autouse=True)
def _iris(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recipes, "NAMES", recipes.NAMES | {"iris": ("iris:iris", "iris")})


def run(out: Path, **settings: Any) -> dict[str, Any]:
    config = resolve(iris.config, {}, list(settings.items()))
    return execute("iris", config, out, pictures=False, resume=True)


def accuracies(out: Path) -> list[tuple[int, float]]:
    return [(int(r["round"]), float(r["accuracy"])) for r in CsvTable(out / "history.csv").read()]


def test_tensorboard_reads_back_every_round_also_after_a_resume(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run(tmp_path, rounds=3, track="tensorboard")
    name, config = reopen(None, tmp_path, [("rounds", 5)])
    execute(name, config, tmp_path, pictures=False, resume=True)
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    told = [(e.step, e.value) for e in events.Scalars("accuracy")]
    assert [s for s, _ in told] == [1, 2, 3, 4, 5]
    assert [v for _, v in told] == pytest.approx([v for _, v in accuracies(tmp_path)])
    assert "train_loss" in events.Tags()["scalars"]


@pytest.mark.slow
def test_mlflow_holds_settings_metrics_and_files_and_a_resumed_run_stays_one(tmp_path: Path) -> None:
    from mlflow import MlflowClient

    uri = f"sqlite:///{tmp_path / 'flow.db'}"
    out = tmp_path / "run"
    client = MlflowClient(tracking_uri=uri)
    client.create_experiment("trial", artifact_location=(tmp_path / "artifacts").as_uri())
    settings = {"track": "mlflow", "track.uri": uri, "track.experiment": "trial"}
    summary = run(out, rounds=3, **settings)
    name, config = reopen(None, out, [("rounds", 4)])
    summary = execute(name, config, out, pictures=False, resume=True)

    experiment = client.get_experiment_by_name("trial")
    assert experiment is not None
    (found,) = client.search_runs([experiment.experiment_id])
    assert found.info.status == "FINISHED"
    assert found.data.params["aggregate.name"] == "fedadam"
    assert found.data.tags["digest"] == summary["digest"]
    told = [(m.step, m.value) for m in client.get_metric_history(found.info.run_id, "accuracy")]
    assert told == accuracies(out)
    names = {f.path for f in client.list_artifacts(found.info.run_id)}
    assert {"config.toml", "summary.json"} <= names


def test_tracking_changes_no_bit_of_the_result(tmp_path: Path) -> None:
    plain, tracked = run(tmp_path / "a"), run(tmp_path / "b", track="tensorboard")
    assert plain["digest"] == tracked["digest"]


def test_a_tracker_that_breaks_ends_the_tracking_and_not_the_run(caplog: pytest.LogCaptureFixture) -> None:
    class Broken:
        calls = 0

        def round(self, row: Any) -> None:
            Broken.calls += 1
            raise OSError("no space\nleft")

        def end(self, summary: Any) -> None:
            raise AssertionError

    sink = SafeSink(Broken())
    with caplog.at_level(logging.WARNING, "mutirao"):
        for number in range(3):
            sink.round({"round": number})
        sink.end({})
    assert Broken.calls == 1
    assert [r.getMessage() for r in caplog.records] == ["tracking ends here, the run goes on: no space left"]


def test_a_missing_package_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"pip install 'mutirao\[mlflow\]'"):
        require_package("mlflow_that_is_not_there", "mlflow")


def test_names_and_numbers() -> None:
    assert spell("ndcg@5") == "ndcg_at_5"
    assert numbers({"round": 1, "a": 2, "b": float("nan"), "c": "x"}) == {"a": 2.0}
    assert repr(MLflow()) == "MLflow(uri='', experiment='mutirao')"
    assert TensorBoard() == TensorBoard()
    assert json.dumps(vars(MLflow("u"))) == '{"uri": "u", "experiment": "mutirao"}'
