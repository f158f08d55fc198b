"""Early stopping: validation data end a run and choose its model, which the test part then judges once."""

from pathlib import Path
from typing import Any

import pytest
from research.settled import settled_task

from mutirao.config import resolve
from mutirao.errors import ConfigError
from mutirao.experiments.task import find
from mutirao.io import load_arrays
from mutirao.report import execute
from mutirao.runs.csv_tables import CsvTable
from mutirao.runs.verify import verify
from mutirao.systems.ranking.recipe import Config

SMALL: dict[str, Any] = {"queries": 60, "clients": 5, "per_round": 5, "rounds": 40, "lr": 0.3, "hidden": 8}
SMALL |= {"metrics": "ndcg@5,map", "partition": "by_query", "aggregate": "fedavg"}


def test_it_ends_by_itself_and_its_best_model_is_judged_by_the_test_part(tmp_path: Path) -> None:
    config = resolve(Config, SMALL | {"patience": 3})
    told = execute("ranking", config, tmp_path / "run", pictures=False)
    history = [float(row["vali_ndcg@5"]) for row in CsvTable(tmp_path / "run/history.csv").read()]
    best = max(range(len(history)), key=history.__getitem__)
    assert told["best_round"] == best + 1
    assert told["rounds"] == best + 1 + 3 == len(history) < 40
    assert told["ended"].startswith(f"after round {told['rounds']}")
    assert "ndcg@5" not in CsvTable(tmp_path / "run/history.csv").read()[0]  # nobody looked at it on the way
    arrays = load_arrays(tmp_path / "run/checkpoints/best.safetensors")[0]
    evaluate = settled_task(resolve(Config, SMALL)).evaluate
    assert evaluate is not None
    by_test = evaluate(arrays)
    assert {name: told["final"][name] for name in ("ndcg@5", "map")} == pytest.approx(by_test)
    assert told["final"]["vali_ndcg@5"] == pytest.approx(history[-1])
    assert told["best"]["vali_ndcg@5"] == pytest.approx(history[best])
    assert told["directions"] == dict.fromkeys(told["final"], "higher")
    assert verify(tmp_path / "run")[1] == []
    again = execute("ranking", config, tmp_path / "run", resume=True, pictures=False)
    assert again["already"]
    assert again["digest"] == told["digest"]


def test_a_run_that_is_resumed_ends_where_it_would_have_ended(tmp_path: Path) -> None:
    whole = execute("ranking", resolve(Config, SMALL | {"patience": 3}), tmp_path / "whole", pictures=False)
    first = resolve(Config, SMALL | {"patience": 3, "rounds": whole["rounds"] - 2})
    execute("ranking", first, tmp_path / "parts", pictures=False)
    last = execute("ranking", resolve(Config, SMALL | {"patience": 3}), tmp_path / "parts", resume=True, pictures=False)
    for key in ("rounds", "best_round", "digest", "final", "ended"):
        assert last[key] == whole[key]


def test_tuning_judges_the_best_model_by_the_validation_part_and_not_by_the_test_part(tmp_path: Path) -> None:
    config = resolve(Config, SMALL | {"patience": 2, "judge_by": "vali", "rounds": 6})
    told = execute("ranking", config, tmp_path / "run", pictures=False)
    assert told["final"]["ndcg@5"] == pytest.approx(told["best"]["vali_ndcg@5"])


@pytest.mark.parametrize("other", [{"personal": "ditto"}, {"cluster": "one"}, {"centralised": "lightgbm"}])
def test_where_there_is_no_one_model_patience_is_refused(other: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="patience: "):
        find("ranking").task(resolve(Config, SMALL | {"patience": 2} | other))
