"""A new user gets the items that brute force would find, and nothing of theirs is kept."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from mutirao.cli import main
from mutirao.config import resolve
from mutirao.errors import ConfigError
from mutirao.experiments.task import find
from mutirao.report import execute
from mutirao.systems.recsys.catalogues import Catalogue
from mutirao.systems.recsys.embeddings import Embeddings, save_embeddings
from mutirao.systems.recsys.evaluation import Evaluator
from mutirao.systems.recsys.ratings import Ratings
from mutirao.systems.recsys.recommender import Recommender
from mutirao.systems.recsys.trained import embeddings_of_run

N, D = 300, 7


def made(**card: Any) -> Recommender:
    draw = np.random.default_rng(0)
    catalogue = Catalogue(
        tuple(f"i{k}" for k in range(N)),
        tuple(f"Item {k}" for k in range(N)),
        np.zeros(N, np.int32),
        np.zeros(N, np.int64),
    )
    return Recommender(Embeddings(catalogue, draw.normal(0, 0.5, (N, D)).astype(np.float32), card))


RATED = {"i3": 5.0, "i10": 1.0, "i200": 4.0, "i77": 3.0}


def test_the_best_are_those_of_brute_force() -> None:
    recommender = made(biases=True, ridge=0.5, ridge_bias=0.5)
    x = recommender.embeddings.vectors.astype(np.float64)
    rows, y = [3, 10, 200, 77], np.array([5, 1, 4, 3]) - 3.0
    features = np.column_stack([np.ones(N), x[:, 1:]])
    s = features[rows]
    v = np.linalg.solve(s.T @ s + np.diag([0.5] + [0.5] * 6), s.T @ (y - x[rows, 0]))
    scores = 3 + x[:, 0] + features @ v
    scores[rows] = -np.inf
    found = recommender.recommend(RATED, k=12)
    assert [r.id for r in found] == [f"i{k}" for k in np.argsort(-scores)[:12]]
    best = np.sort(scores)[::-1][:12]
    assert best[0] > 5 > best[-1], "some are beyond the scale: they are cut, and ranked as they were"
    np.testing.assert_allclose([r.score for r in found], best.clip(1, 5), rtol=1e-4)
    assert found[0].title == f"Item {found[0].id[1:]}"


def test_without_ratings_the_best_biases_are_recommended() -> None:
    recommender = made(biases=True)
    best = np.argsort(-recommender.embeddings.vectors[:, 0])[:3]
    assert [r.id for r in recommender.recommend({}, k=3)] == [f"i{k}" for k in best]


def test_what_was_rated_is_never_recommended() -> None:
    assert not {r.id for r in made().recommend(RATED, k=N)} & RATED.keys()
    assert len(made().recommend(RATED, k=N)) == N - 4
    assert made().recommend(RATED, k=0) == []


@pytest.mark.parametrize("loss", ["weighted", "bpr"])
def test_implicit_feedback_is_served_too(loss: str) -> None:
    """Items taken lie in one direction; what lies there too is recommended."""
    recommender = made(loss=loss, ridge=0.1, levels=[1.0], negatives=4)
    x = recommender.embeddings.vectors
    x[:20] = 0.1 * x[:20] + np.eye(D, dtype=np.float32)[2] * 2
    found = recommender.recommend({f"i{k}": 1.0 for k in range(10)}, k=10)
    assert {r.id for r in found} == {f"i{k}" for k in range(10, 20)}


@pytest.mark.parametrize(
    ("ratings", "says"),
    [
        ({"i999": 5.0}, "item 'i999' is not in the catalogue"),
        ({"i1": float("nan")}, "item 'i1': a rating of nan is not on the scale from 1 to 5"),
        ({"i1": 4.0, "i2": 50.0}, "item 'i2': a rating of 50 is not on the scale from 1 to 5"),
        ({"i1": 0.5}, "a rating of 0.5 is not on the scale"),
    ],
)
def test_strange_ratings_are_refused(ratings: dict[str, float], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        made().recommend(ratings)


def test_the_scale_is_that_of_the_ratings_trained_on() -> None:
    half = made(levels=[0.5, 1.0, 5.0])
    assert all(0.5 <= v <= 5 for v in half.predict({"i1": 0.5}, ["i2", "i3"]).values())
    carried = made(how="transfer", source={"levels": [0, 10], "biases": True})
    assert (carried.method.levels, carried.method.centre) == ((0, 10), 5)
    assert carried.recommend({"i1": 10.0}, k=1)[0].score <= 10
    for wrong in ([5, 1], ["a"], 3, [float("inf")]):
        with pytest.raises(ConfigError, match="must be a list of numbers in ascending order"):
            made(levels=wrong).recommend({})
    with pytest.raises(ConfigError, match="'i999' is not in the catalogue"):
        half.predict({}, ["i999"])


@pytest.mark.parametrize("biases", [True, False])
def test_what_is_predicted_is_what_is_evaluated(biases: bool) -> None:
    recommender = made(biases=biases, ridge=0.01, ridge_bias=0.01)
    rows = np.arange(0, 40, dtype=np.int32)
    values = np.random.default_rng(2).integers(1, 6, 40).astype(np.float32)
    user = Ratings(("u",), recommender.embeddings.catalogue, np.array([0, 40]), rows, values, rows.astype(np.int64))
    known = np.arange(40) < 25
    found = Evaluator(recommender.method, user, known, 0)({"items": recommender.embeddings.vectors})
    ids = [f"i{k}" for k in rows]
    given = dict(zip(ids[:25], values[:25].tolist(), strict=True))
    guesses = np.array(list(recommender.predict(given, ids[25:]).values()))
    assert {1.0, 5.0} & set(guesses.tolist()), "some lie beyond the scale"
    assert found["rmse"] == pytest.approx(np.sqrt(np.mean((guesses - values[25:]) ** 2)), rel=1e-5)


def test_a_run_is_exported_and_served(tmp_path: Path) -> None:
    config = resolve(find("recsys").config, {"rounds": 12, "dimension": 8, "evaluate_every": 4, "ridge": 3.5})
    summary = execute("recsys", config, tmp_path / "run", pictures=False)
    for model, number in (("best", summary["best_round"]), ("last", 12)):
        found = embeddings_of_run(tmp_path / "run", model)
        assert found.card["round"] == number
        assert found.vectors.shape == (len(found.catalogue), 8)
    save_embeddings(found, tmp_path / "items.safetensors")
    recommender = Recommender.of(tmp_path / "items.safetensors")
    assert recommender.method.ridge == 3.5
    assert recommender.method.levels == (1, 2, 3, 4, 5)
    assert len(recommender.recommend({found.catalogue.ids[0]: 5.0}, k=5)) == 5


def test_a_folder_without_such_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="holds no run"):
        embeddings_of_run(tmp_path)
    (tmp_path / "config.toml").write_text('recipe = "quickstart"\n')
    with pytest.raises(ConfigError, match="holds a run of 'quickstart', not of 'recsys'"):
        embeddings_of_run(tmp_path)


def test_the_commands_export_and_recommend(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    config = resolve(find("recsys").config, {"rounds": 2, "dimension": 4, "evaluate_every": 1})
    execute("recsys", config, tmp_path / "run", pictures=False)
    shell = CliRunner()
    done = shell.invoke(main, ["catalogue", "export", "run", "--out", "items.safetensors", "--json"])
    assert done.exit_code == 0
    assert json.loads(done.output)["round"] in (1, 2)
    done = shell.invoke(main, ["catalogue", "recommend", "items.safetensors", "3=5", "7=1.5", "-k", "4", "--json"])
    assert done.exit_code == 0
    found = json.loads(done.output)
    assert len(found) == 4
    assert found[0]["score"] >= found[-1]["score"]
    plain = shell.invoke(main, ["catalogue", "recommend", "items.safetensors", "3=5", "7=1.5", "-k", "4"])
    assert [line.split()[1] for line in plain.output.splitlines()] == [row["id"] for row in found]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["recommend", "nowhere.safetensors"], "error: nowhere.safetensors does not exist"),
        (["recommend", "nowhere.safetensors", "3"], "error: '3' is not of the form ID=RATING"),
        (["recommend", "nowhere.safetensors", "3=5", "3=1"], "error: item '3' is rated twice"),
        (["recommend", "nowhere.safetensors", "3=good"], "error: '3=good' is not of the form ID=RATING"),
        (["export", "nowhere"], "error: nowhere holds no run"),
    ],
)
def test_wrong_words_end_in_one_line(words: list[str], says: str) -> None:
    done = CliRunner().invoke(main, ["catalogue", *words])
    assert done.exit_code != 0
    assert says in done.output
    assert done.output.count("\n") == 1
