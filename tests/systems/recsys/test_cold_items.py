"""Items that nobody rated get a vector from what the catalogue says of them; the fit is scikit-learn's."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from sklearn.linear_model import Ridge

from mutirao.cli import main
from mutirao.errors import ConfigError
from mutirao.systems.recsys.catalogues import Catalogue, read_titles
from mutirao.systems.recsys.cold_items import (
    MIN_ITEMS,
    RIDGES,
    FeatureRegression,
    add_cold,
    describe,
    evaluate_cold,
    indicator_matrix,
)
from mutirao.systems.recsys.embeddings import Embeddings, save_embeddings
from mutirao.systems.recsys.pretrain import Factorisation
from mutirao.systems.recsys.ratings import plant
from mutirao.systems.recsys.recommender import Recommender

DRAW = np.random.default_rng(0)
N = 60
KINDS = ("Comedy", "Drama", "Horror")
GENRES = tuple(tuple(g for g in KINDS if DRAW.random() < 0.5) for _ in range(N))
FILMS = Catalogue(
    tuple(f"f{k}" for k in range(N)),
    tuple(f"{DRAW.choice(['Star', 'Moon', 'Night'])} Number{k}" for k in range(N)),
    DRAW.choice([1987, 1995], N).astype(np.int32),
    DRAW.integers(1, 200, N),
    GENRES,
)
FLAGS = np.array([[g in own for g in KINDS] for own in GENRES], float)
VECTORS = (FLAGS @ DRAW.normal(0, 1, (3, 4)) + DRAW.normal(0, 0.3, (N, 4))).astype(np.float32)


def test_what_is_known_of_an_item_is_named_in_words() -> None:
    films = Catalogue(("1",), ("Star Wars: The Empire (1980)",), np.array([1980]), np.array([3]), (("War", "Sci-Fi"),))
    said = {"genre War", "genre Sci-Fi", "decade 1980", "word star", "word wars", "word the", "word empire"}
    assert describe(films) == [said]
    assert describe(films, ("decade",)) == [{"decade 1980"}]
    assert describe(replace(films, genres=(), years=np.array([0])), ("genre", "decade")) == [set()]


@pytest.mark.slow
def test_the_fit_is_a_weighted_ridge_whose_strength_leaves_each_item_out_in_turn() -> None:
    described = describe(FILMS)
    found = FeatureRegression.fit(described, VECTORS, FILMS.counts)
    flags, w = indicator_matrix(described, found.names), FILMS.counts / (FILMS.counts + 10)
    assert {"genre Comedy", "genre Drama", "genre Horror", "decade 1980", "word star"} <= {*found.names}
    assert all(flags.sum(0) >= MIN_ITEMS)
    centre, mean = np.average(flags, axis=0, weights=w), np.average(VECTORS, axis=0, weights=w)
    f, x = flags - centre, VECTORS - mean
    for column in range(4):
        errors = []
        for ridge in RIDGES:
            gaps = 0.0
            for i in range(N):
                rest = np.arange(N) != i
                model = Ridge(ridge, fit_intercept=False).fit(f[rest], x[rest, column], sample_weight=w[rest])
                gaps += w[i] * float(x[i, column] - model.predict(f[i : i + 1])[0]) ** 2
            errors.append(gaps)
        model = Ridge(RIDGES[int(np.argmin(errors))], fit_intercept=False).fit(f, x[:, column], sample_weight=w)
        np.testing.assert_allclose(found.weights[:, column], model.coef_, atol=1e-6)
        np.testing.assert_allclose(found.predict(described)[:, column], mean[column] + model.predict(f), atol=1e-5)


def test_cold_items_are_predicted_from_their_genres_and_served(tmp_path: Path) -> None:
    rated = FILMS.take(np.arange(45))
    made = Embeddings(rated, VECTORS[:45], {"biases": False, "ridge": 0.1, "levels": [1, 2, 3, 4, 5]})
    full = add_cold(made, FILMS)
    assert full.catalogue.ids == FILMS.ids
    np.testing.assert_array_equal(full.vectors[:45], VECTORS[:45])
    gap = np.linalg.norm(full.vectors[45:] - VECTORS[45:])
    assert gap < 0.7 * np.linalg.norm(VECTORS[:45].mean(0) - VECTORS[45:])
    assert full.card["cold"] == {"items": 15, "learned_from": 45, "features": full.card["cold"]["features"]}
    rows = "".join(
        f"{i},{t},{y},{'|'.join(g)}\n" for i, t, y, g in zip(FILMS.ids, FILMS.titles, FILMS.years, GENRES, strict=True)
    )
    (tmp_path / "films.csv").write_text("id,title,year,genres\n" + rows)
    save_embeddings(made, tmp_path / "items.safetensors")
    served = Recommender.of(tmp_path / "items.safetensors").with_cold(tmp_path / "films.csv")
    np.testing.assert_array_equal(served.embeddings.vectors, full.vectors)
    assert "f50" in {r.id for r in served.recommend({"f0": 5.0, "f46": 1.0}, k=N)}


@pytest.mark.parametrize(
    ("catalogue", "says"),
    [
        (replace(FILMS, ids=tuple(f"x{k}" for k in range(N))), "no item with a vector is in the catalogue"),
        (FILMS, "have vectors already"),
    ],
)
def test_nothing_to_learn_from_and_nothing_to_predict_are_refused(catalogue: Catalogue, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        add_cold(Embeddings(FILMS, VECTORS), catalogue)


def test_hidden_items_are_judged_and_their_ratings_do_not_leak() -> None:
    ratings = plant(80, 50, np.random.default_rng(1))
    how = Factorisation(5, epochs=4)
    found = evaluate_cold(ratings, how, 0.2, seed=0)
    assert list(found) == ["nothing", "mean", "genres", "genres, decades, titles", "ratings"]
    assert found["genres"] == found["mean"], "planted items have no genres"
    assert found["ratings"] < found["mean"] < found["nothing"]
    with pytest.raises(ConfigError, match="hide is 1"):
        evaluate_cold(ratings, how, 1.0, seed=0)


def test_genres_are_read_as_publishers_ship_them(tmp_path: Path) -> None:
    (tmp_path / "movies.dat").write_text("1::Toy Story (1995)::Animation|Comedy\n2::Odd (1990)::\n")
    assert read_titles(tmp_path / "movies.dat").genres == (("Animation", "Comedy"), ())
    (tmp_path / "movies.csv").write_text('movieId,title,genres\n1,"A, B (1995)",War|Drama\n2,C,(no genres listed)\n')
    assert read_titles(tmp_path / "movies.csv").genres == (("War", "Drama"), ())
    (tmp_path / "u.item").write_text("1|Toy Story (1995)|01-Jan-1995||http://x|0|0|1\n2|B (1990)|||y|1|0|0\n")
    assert read_titles(tmp_path / "u.item").genres == (("genre 2",), ("genre 0",))
    (tmp_path / "u.genre").write_text("unknown|0\nAction|1\nComedy|2\n\n")
    assert read_titles(tmp_path / "u.item").genres == (("Comedy",), ())
    (tmp_path / "movie_titles.txt").write_text("1,2003,Dinosaur Planet\n")
    assert read_titles(tmp_path / "movie_titles.txt").genres == ()


def test_the_commands_add_cold_items_and_judge_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    save_embeddings(Embeddings(FILMS.take(np.arange(50)), VECTORS[:50], {"levels": [1, 5]}), Path("items.safetensors"))
    Path("films.csv").write_text(
        "id,title\n" + "".join(f"{i},{t}\n" for i, t in zip(FILMS.ids, FILMS.titles, strict=True))
    )
    shell = CliRunner()
    done = shell.invoke(
        main, ["catalogue", "cold", "items.safetensors", "films.csv", "--out", "all.safetensors", "--json"]
    )
    assert done.exit_code == 0, done.output
    assert json.loads(done.output)["cold"]["items"] == 10
    ratings = plant(60, 40, np.random.default_rng(1))
    lines = zip(ratings.owners(), ratings.items, ratings.values, strict=True)
    Path("r.csv").write_text("user,item,rating\n" + "".join(f"{u},{i},{v:g}\n" for u, i, v in lines))
    done = shell.invoke(main, ["catalogue", "judge-cold", "r.csv", "--hide", "0.2", "--dimension", "4"])
    assert done.exit_code == 0, done.output
    assert [line.rsplit(maxsplit=1)[0] for line in done.output.splitlines()[1:]][:2] == ["nothing", "mean"]
