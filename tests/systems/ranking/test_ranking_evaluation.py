"""A ranking evaluated query by query: each number is trec_eval's, and their means are those of the run."""

import csv
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import pytrec_eval

from mutirao.config import resolve
from mutirao.report import execute
from mutirao.runs.verify import verify
from mutirao.systems.ranking.metrics import METRICS, evaluate_queries, evaluate_ranking
from mutirao.systems.ranking.ranking_data import RankingData
from mutirao.systems.ranking.recipe import Config

Floats = npt.NDArray[np.float64]


def some_data(queries: int = 7, documents: int = 60) -> tuple[Floats, RankingData]:
    draw = np.random.default_rng(3)
    owner = draw.integers(0, queries, documents)  # the documents of a query need not stand together
    _, number = np.unique(owner, return_inverse=True)
    grades = np.where(number == 2, 0, draw.integers(0, 4, documents))  # one query has nothing relevant
    ids = np.array([f"q{k}" for k in range(number.max() + 1)])
    return draw.permutation(documents) / 7, RankingData(np.zeros((documents, 1), np.float32), grades, number, ids)


def test_each_query_is_evaluated_as_by_trec_eval() -> None:
    scores, data = some_data()
    run: dict[str, dict[str, float]] = {}
    qrel: dict[str, dict[str, int]] = {}
    for i, (score, grade, query) in enumerate(zip(scores, data.grades, data.queries, strict=True)):
        name = str(data.query_ids[query])
        run.setdefault(name, {})[f"d{i}"] = float(score)
        qrel.setdefault(name, {})[f"d{i}"] = int(2**grade - 1)  # its gain is the grade itself, ours is 2^grade - 1
    truth = pytrec_eval.RelevanceEvaluator(qrel, {"ndcg_cut.1,5,10", "recip_rank"}).evaluate(run)
    rows = evaluate_queries(scores, data)
    assert [row["query"] for row in rows] == list(data.query_ids)
    for row in rows:
        assert row["documents"] == len(run[row["query"]])
        assert row["relevant"] == sum(g > 0 for g in qrel[row["query"]].values())
        for k in (1, 5, 10):
            assert row[f"ndcg@{k}"] == pytest.approx(truth[row["query"]][f"ndcg_cut_{k}"], abs=1e-12)
            first = truth[row["query"]]["recip_rank"]
            assert row[f"mrr@{k}"] == pytest.approx(first if first >= 1 / k else 0.0, abs=1e-12)


def test_the_means_over_queries_are_the_figures_of_the_whole() -> None:
    scores, data = some_data()
    rows, whole = evaluate_queries(scores, data), evaluate_ranking(scores, data)
    assert {name: np.mean([row[name] for row in rows]) for name in METRICS} == pytest.approx(whole, abs=1e-12)


def test_a_run_leaves_its_queries_and_they_are_part_of_its_record(tmp_path: Path) -> None:
    config = resolve(Config, {"queries": 60, "clients": 4, "rounds": 2, "hidden": 4})
    summary = execute("ranking", config, tmp_path / "run", pictures=False)
    file = tmp_path / "run" / "queries.csv"
    rows = list(csv.DictReader(file.open()))
    assert list(rows[0]) == ["query", "documents", "relevant", *summary["final"]]
    for name, value in summary["final"].items():
        assert np.mean([float(row[name]) for row in rows]) == pytest.approx(value, abs=1e-9)
    assert verify(tmp_path / "run")[1] == []
    file.write_text(file.read_text().replace("query,", "question,"))
    assert verify(tmp_path / "run")[1] == ["queries.csv: altered since the run ended"]
