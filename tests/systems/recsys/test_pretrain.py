"""Central factorisation learns, PCA is scikit-learn's, and every beginning repeats itself."""

import dataclasses
import logging
from typing import Any

import numpy as np
import pytest
from sklearn.decomposition import TruncatedSVD

from mutirao.core.fleet import Request, Site
from mutirao.errors import ConfigError
from mutirao.systems.recsys import kernels
from mutirao.systems.recsys.pretrain import (
    Factorisation,
    Pooled,
    fold_errors,
    initial_items,
    initial_users,
    pca,
    pretrain,
    train_epoch,
)
from mutirao.systems.recsys.ratings import gather, plant

RATINGS = plant(120, 60, np.random.default_rng(0))
SMALL = Factorisation(dimension=8, epochs=15, lr=0.03, decay=0.05)


def test_sgd_takes_one_step_a_rating() -> None:
    how = dataclasses.replace(SMALL, lr=0.1)
    users, items = initial_users(RATINGS, how, 0), initial_items(RATINGS, how, 0)
    p, q = users.astype(np.float64), items.astype(np.float64)
    train_epoch(RATINGS, how, np.random.default_rng(5), users, items)
    owners = RATINGS.owners()
    for k in np.random.default_rng(5).permutation(len(RATINGS)):
        u, i = owners[k], RATINGS.items[k]
        mine, theirs = p[u].copy(), q[i].copy()
        e = RATINGS.values[k] - 3 - mine[0] - theirs[0] - mine[1:] @ theirs[1:]
        p[u] += how.lr * np.concatenate([[e], e * theirs[1:] - how.decay * mine[1:]])
        q[i] += how.lr * np.concatenate([[e], e * mine[1:] - how.decay * theirs[1:]])
    np.testing.assert_allclose(users, p, atol=1e-3)
    np.testing.assert_allclose(items, q, atol=1e-3)


def test_whitened_components_have_one_variance_and_span_the_same() -> None:
    how = Factorisation(dimension=6, begin="pca", biases=False, whiten=True, spread=1.0)
    found, plain = (initial_items(RATINGS, h, 0) for h in (how, dataclasses.replace(how, whiten=False)))
    np.testing.assert_allclose(found.std(0), 1, rtol=1e-4)
    assert plain.std(0).max() > 1.3 * plain.std(0).min()
    assert plain.std() == pytest.approx(1, rel=1e-4)
    np.testing.assert_allclose(np.corrcoef(found.T, plain.T)[:6, 6:].diagonal(), 1, atol=1e-4)


@pytest.mark.parametrize("wrong", [{"whiten": True}, {"spread": 0.0}, {"decay": float("nan")}])
def test_what_cannot_be_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"whiten|must be above 0"):
        Factorisation(**wrong)


@pytest.mark.parametrize("biases", [True, False])
def test_it_predicts_held_out_ratings_better_than_means(biases: bool) -> None:
    how = dataclasses.replace(SMALL, biases=biases, epochs=30)
    errors = fold_errors(RATINGS, how, seed=0, fold=0, folds=5)
    assert min(errors) < errors[0]
    assert min(errors) < 0.95 * RATINGS.values.std()


def test_without_numba_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "compile_kernel", lambda function: None)
    with pytest.raises(ConfigError, match=r"needs numba: pip install 'mutirao\[recsys\]'"):
        pretrain(RATINGS, SMALL)
    with pytest.raises(ConfigError, match="needs numba"):
        Pooled(SMALL)
    vectors = pretrain(RATINGS, dataclasses.replace(SMALL, begin="pca", epochs=0)).vectors
    assert np.isfinite(vectors).all(), "principal components need no kernel"


def test_pca_spans_what_scikit_learn_finds() -> None:
    found = pca(RATINGS, 5, 5, seed=0)
    matrix = np.zeros((len(RATINGS.users), len(RATINGS.catalogue)))
    means = np.bincount(RATINGS.items, RATINGS.values) / np.bincount(RATINGS.items)
    matrix[RATINGS.owners(), RATINGS.items] = RATINGS.values - means[RATINGS.items]
    theirs = TruncatedSVD(5, algorithm="arpack", random_state=0).fit(matrix)
    np.testing.assert_allclose(np.linalg.norm(found, axis=0), theirs.singular_values_, rtol=1e-6)
    np.testing.assert_allclose(
        np.abs((found / np.linalg.norm(found, axis=0)).T @ theirs.components_.T), np.eye(5), atol=1e-4
    )


def test_word2vec_puts_items_taken_together_side_by_side() -> None:
    """Two groups of items that never meet: each item's nearest is of its own group."""
    draw = np.random.default_rng(0)
    users = np.repeat(np.arange(200), 8)
    items = np.concatenate([draw.choice(10, 8, replace=False) + 10 * (u % 2) for u in range(200)])
    ratings = gather(users, items, np.ones(len(users)), np.arange(len(users), dtype=np.int64))
    vectors = initial_items(ratings, Factorisation(8, "word2vec", biases=False, window=3), seed=0)
    unit = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    alike = unit @ unit.T - 2 * np.eye(20)
    groups = np.array([int(i) // 10 for i in ratings.catalogue.ids])
    assert (groups[alike.argmax(1)] == groups).mean() > 0.9


@pytest.mark.parametrize("where", ["random", "pca", "word2vec"])
def test_a_seed_repeats_itself_and_another_does_not(where: Any) -> None:
    how = dataclasses.replace(SMALL, begin=where, epochs=2)
    one, same, other = (pretrain(RATINGS, how, seed) for seed in (1, 1, 2))
    np.testing.assert_array_equal(one.vectors, same.vectors)
    assert not np.array_equal(one.vectors, other.vectors)
    assert one.card["begin"] == where
    assert one.card["levels"] == [1, 2, 3, 4, 5]
    assert one.catalogue.counts.sum() == len(RATINGS)


@pytest.mark.parametrize("where", ["random", "pca", "word2vec"])
def test_every_beginning_has_the_same_spread_and_no_biases_yet(where: Any) -> None:
    vectors = initial_items(RATINGS, dataclasses.replace(SMALL, begin=where), 0)
    assert vectors[:, 1:].std() == pytest.approx(0.1, rel=0.1)
    assert not vectors[:, 0].any()


def test_folds_find_how_long_to_train() -> None:
    made = pretrain(RATINGS, dataclasses.replace(SMALL, epochs=60, lr=0.1, decay=0.0), folds=3)
    assert 1 <= made.card["epochs"] < 60, "it would overfit"
    assert made.card["rmse"] == pytest.approx(np.mean(made.card["rmse_folds"]))


def test_implicit_feedback_is_not_factorised(caplog: pytest.LogCaptureFixture) -> None:
    implicit = RATINGS.implicit()
    with caplog.at_level(logging.WARNING, "mutirao"):
        made = pretrain(implicit, dataclasses.replace(SMALL, begin="pca"))
    assert "not factorised" in caplog.text
    assert made.card["epochs"] == 0
    assert made.card["loss"] == "weighted"
    np.testing.assert_array_equal(made.vectors, initial_items(implicit, dataclasses.replace(SMALL, begin="pca"), 0))


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"lr": 1e6}, "diverged"),
        ({"begin": "pca", "dimension": 61}, "has no 60 components"),
    ],
)
def test_what_cannot_be_is_said(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        pretrain(RATINGS, dataclasses.replace(SMALL, **settings))


@pytest.mark.parametrize("settings", [{"dimension": 1}, {"epochs": -1}, {"lr": 0.0}, {"window": 0}, {"decay": -1.0}])
def test_settings_out_of_range_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="must be above 0"):
        dataclasses.replace(SMALL, **settings)


def test_too_many_folds_are_refused() -> None:
    with pytest.raises(ConfigError, match="cannot be split into 1 folds"):
        fold_errors(RATINGS, SMALL, 0, 0, 1)


def test_pooled_rounds_are_epochs_of_the_same_factorisation() -> None:
    site, arrays = Site("pooled", RATINGS), {"items": initial_items(RATINGS, SMALL, 3)}
    for t in (1, 2):
        reply = Pooled(SMALL)(Request("train", arrays, {"seed": 3, "round": t}), site)
        arrays = reply.arrays
    expected = pretrain(RATINGS, dataclasses.replace(SMALL, epochs=2), seed=3).vectors
    np.testing.assert_array_equal(arrays["items"], expected)
    assert reply.n == len(RATINGS)
