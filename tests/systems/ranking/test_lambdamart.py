"""The pooled trees are LightGBM's own: compared with LightGBM called directly and with plain loops."""

import math
import random
import sys

import lightgbm
import numpy as np
import pytest

from mutirao.config import resolve
from mutirao.errors import ConfigError
from mutirao.experiments.task import find
from mutirao.report import execute
from mutirao.runs.csv_tables import CsvTable
from mutirao.systems.ranking.lambdamart import (
    LambdaMART,
    empty_forest,
    first_trees,
    forest_from_lightgbm,
    score_by_trees,
)
from mutirao.systems.ranking.recipe import Config


def write_set(folder, seed=3):
    """Three parts of documents whose grades follow two features; their contents, as lists."""
    draw, documents = random.Random(seed), {}
    for part, queries in {"train": 40, "vali": 15, "test": 15}.items():
        rows, lines = [], []
        for query in range(queries):
            for _ in range(draw.randrange(5, 20)):
                x = [round(draw.gauss(0, 1), 4) for _ in range(6)]
                grade = sum(x[0] + x[1] ** 2 + draw.gauss(0, 0.5) > cut for cut in (0.5, 1.5, 3))
                rows.append((grade, query, x))
                lines.append(f"{grade} qid:{part}{query} " + " ".join(f"{i + 1}:{v}" for i, v in enumerate(x)) + "\n")
        (folder / f"{part}.txt").write_text("".join(lines))
        documents[part] = rows
    return documents


def ndcg5(rows, scores):
    """By loops: gain 2^grade - 1, equal scores in the file's order, 0 for a query without relevant documents."""
    total, queries = 0.0, sorted({query for _, query, _ in rows})
    for wanted in queries:
        own = [(score, grade) for (grade, query, _), score in zip(rows, scores, strict=True) if query == wanted]
        ranked = [grade for _, grade in sorted(own, key=lambda pair: -pair[0])]
        ideal = sorted(ranked, reverse=True)
        dcg, best = (sum((2**g - 1) / math.log2(i + 2) for i, g in enumerate(r[:5])) for r in (ranked, ideal))
        total += dcg / best if best else 0.0
    return total / len(queries)


def directly(documents, **settings):
    """LightGBM as its users call it."""
    sets = {}
    for part, rows in documents.items():
        sizes = [sum(q == query for _, q, _ in rows) for query in sorted({q for _, q, _ in rows})]
        x = np.array([x for _, _, x in rows], np.float32)
        sets[part] = lightgbm.Dataset(x, [g for g, _, _ in rows], group=sizes, reference=sets.get("train"))
    given = {
        "objective": "lambdarank",
        "metric": "ndcg",
        "eval_at": [5],
        "verbosity": -1,
        "num_threads": 1,
        "deterministic": True,
    }
    given |= {"force_row_wise": True, "use_missing": False, "seed": 4, "label_gain": [0, 1, 3, 7]} | settings
    stop = lightgbm.early_stopping(10, verbose=False)
    return lightgbm.train(given, sets["train"], 60, valid_sets=[sets["vali"]], callbacks=[stop])


SMALL = {"centralised": "lightgbm", "seed": 4, "rounds": 3}
TREES = {"name": "lambdamart", "trees": 60, "leaves": 7, "rate": 0.1, "least": 5, "patience": 10}


def test_a_run_reaches_what_lightgbm_reaches_by_itself(tmp_path):
    documents = write_set(tmp_path)
    config = resolve(Config, SMALL | {"data": str(tmp_path), "trees": TREES})
    summary = execute("ranking", config, tmp_path / "run", pictures=False)
    model = directly(documents, learning_rate=0.1, num_leaves=7, min_data_in_leaf=5)
    assert 1 < model.best_iteration < 60  # it was stopped
    x = np.array([x for _, _, x in documents["test"]], np.float32)
    scores = model.predict(x, num_iteration=model.best_iteration)
    assert summary["final"]["ndcg@5"] == pytest.approx(ndcg5(documents["test"], scores), abs=1e-12)
    rows = CsvTable(tmp_path / "run/history.csv").read()
    given = [math.ceil(model.best_iteration * r / 3) for r in (1, 2, 3)]
    assert [float(row["train_trees"]) for row in rows[-3:]] == given
    for row, count in zip(rows[-3:], given, strict=True):
        scores = model.predict(x, num_iteration=count)
        assert float(row["ndcg@5"]) == pytest.approx(ndcg5(documents["test"], scores), abs=1e-12)
    by_query = CsvTable(tmp_path / "run/queries.csv").read()
    assert np.mean([float(row["ndcg@5"]) for row in by_query]) == pytest.approx(summary["final"]["ndcg@5"], abs=1e-12)
    again = execute("ranking", config, tmp_path / "again", pictures=False)
    assert again["digest"] == summary["digest"]


def test_the_validation_part_is_evaluated_if_that_is_set(tmp_path):
    documents = write_set(tmp_path)
    config = resolve(Config, SMALL | {"data": str(tmp_path), "trees": TREES, "judge_by": "vali", "rounds": 1})
    summary = execute("ranking", config, tmp_path / "run", pictures=False)
    model = directly(documents, learning_rate=0.1, num_leaves=7, min_data_in_leaf=5)
    scores = model.predict(np.array([x for _, _, x in documents["vali"]], np.float32))
    assert summary["final"]["ndcg@5"] == pytest.approx(ndcg5(documents["vali"], scores), abs=1e-12)


def test_trees_as_arrays_score_as_lightgbm_does():
    draw = np.random.default_rng(0)
    x = draw.standard_normal((300, 5)).astype(np.float32)
    x[draw.random(x.shape) < 0.3] = 0
    model = lightgbm.train(
        {"objective": "regression", "num_leaves": 9, "verbosity": -1, "use_missing": False, "num_threads": 1},
        lightgbm.Dataset(x, x[:, 0] * x[:, 1] + x[:, 2]),
        25,
    )
    forest = forest_from_lightgbm(model.dump_model()["tree_info"], 30, 9)
    fresh = draw.standard_normal((200, 5)).astype(np.float32)
    for data in (x, fresh, np.zeros((3, 5), np.float32)):
        assert np.array_equal(score_by_trees(forest, data), model.predict(data))
        part = score_by_trees(first_trees(forest, 7), data)
        assert np.array_equal(part, model.predict(data, num_iteration=7))
    assert np.array_equal(score_by_trees(dict(sorted(forest.items())), x), model.predict(x))  # as a file has them
    assert not score_by_trees(empty_forest(4, 9), x).any()


def test_where_nothing_can_be_split_all_documents_score_the_same():
    model = lightgbm.train(
        {"objective": "regression", "verbosity": -1, "num_threads": 1},
        lightgbm.Dataset(np.zeros((50, 2)), np.ones(50)),
        2,
    )
    forest = forest_from_lightgbm(model.dump_model()["tree_info"], 2, 31)
    x = np.ones((3, 2), np.float32)
    assert np.array_equal(score_by_trees(forest, x), model.predict(x))


def test_centralised_is_still_true_or_false_or_a_name():
    assert resolve(Config, {"centralised": True}).centralised is True
    assert len(find("ranking").task(resolve(Config, {"centralised": True, "queries": 60})).population) == 1
    config = resolve(Config, {"centralised": "lightgbm", "aggregate": "krum", "select": "aoiu"})
    assert (config.aggregate.name, config.select.name) == ("fedavg", "uniform")  # which config.toml then says
    with pytest.raises(ConfigError, match="centralised: 'xgboost' is not one of true, false, lightgbm"):
        resolve(Config, {"centralised": "xgboost"})


@pytest.mark.parametrize(
    ("more", "what"),
    [
        ({"privacy": "local"}, "privacy: centralised=lightgbm has no clients; use privacy=none"),
        ({"available": "daily"}, "available: centralised=lightgbm has no clients; use available=always"),
        ({"personal": "fedper"}, "centralised=true has one client"),
        ({"cluster": "auto"}, "groups have no pooled reference"),
        ({"trees": {"leaves": 1}}, "trees=lambdamart: leaves is 1; expected at least 2"),
        ({"trees": {"rate": 0.0}}, "rate is 0.0; expected above 0"),
        ({"trees": {"depth": 3}}, "trees=lambdamart has no setting 'depth'"),
    ],
)
def test_what_trees_cannot_do_is_refused(more, what):
    with pytest.raises(ConfigError, match=what):
        find("ranking").prepare(resolve(Config, {"centralised": "lightgbm", "queries": 60, **more}))


def test_without_lightgbm_it_is_said_how_to_get_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "lightgbm", None)
    with pytest.raises(ConfigError, match=r"pip install 'mutirao\[ranking\]'"):
        find("ranking").prepare(resolve(Config, {"centralised": "lightgbm", "queries": 60}))


def test_the_usual_settings_can_be_made():
    assert LambdaMART().trees == 500
