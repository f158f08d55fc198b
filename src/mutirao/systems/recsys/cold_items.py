"""Cold start: vectors for items without ratings, predicted from genres, decades and words of titles.

A ridge regression maps features of the catalogue to the vectors of rated items. It needs no ratings, so it runs where
the vectors are. (Schein, Popescul, Ungar and Pennock, 2002, describe the cold-start problem.)
"""

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from mutirao.errors import ConfigError
from mutirao.randomness import rng
from mutirao.systems.recsys.catalogues import Catalogue
from mutirao.systems.recsys.embeddings import Embeddings
from mutirao.systems.recsys.evaluation import Evaluator
from mutirao.systems.recsys.fedrecon import ITEMS, FedRecon
from mutirao.systems.recsys.pretrain import Factorisation, pretrain
from mutirao.systems.recsys.ratings import Ratings, by_users
from mutirao.systems.recsys.titles import parse_title

MIN_ITEMS = 3  # with a feature, for it to be used
TRUST = 10  # an item with n ratings has the weight n / (n + TRUST)
RIDGES = tuple(10.0**k for k in np.arange(-1, 4.1, 0.25))
KINDS = ("genre", "decade", "word")

Floats = npt.NDArray[np.float64]


def describe(catalogue: Catalogue, kinds: Collection[str] = KINDS) -> list[set[str]]:
    """The features of each item, such as `genre Comedy`, `decade 1990` and `word star`."""
    return [set(features_of(catalogue, row, kinds)) for row in range(len(catalogue))]


def features_of(catalogue: Catalogue, row: int, kinds: Collection[str]) -> Iterator[str]:
    """The features of one item."""
    year = int(catalogue.years[row])
    if "genre" in kinds and catalogue.genres:
        yield from (f"genre {name}" for name in catalogue.genres[row])
    if "decade" in kinds and year:
        yield f"decade {year // 10 * 10}"
    if "word" in kinds and catalogue.titles[row]:
        names = parse_title(catalogue.titles[row], year).names
        for name in names[:1]:
            yield from (f"word {word}" for word in name.split())


@dataclass(frozen=True)
class FeatureRegression:
    """x = mean + (f - centre) W: a vector from features, f_j = 1 if an item has the feature names[j], otherwise 0."""

    names: tuple[str, ...]
    centre: Floats
    weights: Floats  # features x dimension
    mean: Floats

    @classmethod
    def fit(
        cls, described: list[set[str]], vectors: npt.NDArray[np.float32], counts: npt.NDArray[Any]
    ) -> "FeatureRegression":
        """Fit W to items with vectors: argmin sum_i w_i |x_i - mean - (f_i - centre) W|^2 + ridge |W|^2.

        w_i = n_i / (n_i + 10) for n_i ratings (1 if there are no counts). The ridge of each column has the least
        leave-one-out error, which needs no refitting in a linear model: r_i / (1 - h_ii).
        """
        seen: dict[str, int] = {}
        for features in described:
            for name in features:
                seen[name] = seen.get(name, 0) + 1
        names = tuple(sorted(name for name, items in seen.items() if items >= MIN_ITEMS))
        w = counts / (counts + TRUST) if counts.any() else np.ones(len(vectors))
        indicators = indicator_matrix(described, names)
        x = vectors.astype(np.float64)
        centre = w @ indicators / w.sum()
        mean = w @ x / w.sum()
        root = np.sqrt(w)[:, None]
        f = root * (indicators - centre)
        y = root * (x - mean)
        # In the eigenbasis, solving with another ridge is only a division.
        eigenvalues, axes = np.linalg.eigh(f.T @ f)
        rotated = f @ axes
        pull = axes.T @ (f.T @ y)
        best = np.full(x.shape[1], np.inf)
        weights = np.zeros((len(names), x.shape[1]))
        for ridge in RIDGES:
            shrunk = 1 / (np.maximum(eigenvalues, 0) + ridge)
            gaps = (y - rotated @ (shrunk[:, None] * pull)) / (1 - (rotated**2 @ shrunk))[:, None]
            errors = (gaps**2).sum(0)
            better = errors < best
            weights[:, better] = axes @ (shrunk[:, None] * pull[:, better])
            best = np.minimum(best, errors)
        return cls(names, centre, weights, mean)

    def predict(self, described: list[set[str]]) -> npt.NDArray[np.float32]:
        """A vector for each item."""
        indicators = indicator_matrix(described, self.names)
        return np.asarray(self.mean + (indicators - self.centre) @ self.weights, np.float32)


def indicator_matrix(described: list[set[str]], names: tuple[str, ...]) -> Floats:
    """Items x features: 1 where an item has the feature."""
    at = {name: column for column, name in enumerate(names)}
    indicators = np.zeros((len(described), len(names)))
    for row, features in enumerate(described):
        indicators[row, [at[name] for name in features if name in at]] = 1
    return indicators


def add_cold(embeddings: Embeddings, catalogue: Catalogue) -> Embeddings:
    """Append predicted vectors of the catalogue's other items. The card records how many."""
    mine = embeddings.catalogue
    rows = catalogue.rows()
    known = [row for row, name in enumerate(mine.ids) if name in rows]
    new = np.array([row for name, row in rows.items() if name not in set(mine.ids)], np.intp)
    if not known:
        raise ConfigError("no item with a vector is in the catalogue, so there is nothing to learn from")
    if not len(new):
        raise ConfigError(f"all {len(catalogue):,} items of the catalogue have vectors already")
    of = np.array([rows[mine.ids[row]] for row in known], np.intp)
    regression = FeatureRegression.fit(describe(catalogue.take(of)), embeddings.vectors[known], mine.counts[known])
    cold = catalogue.take(new)
    joined = Catalogue(
        mine.ids + cold.ids,
        mine.titles + cold.titles,
        np.concatenate([mine.years, cold.years]),
        np.concatenate([mine.counts, np.zeros(len(cold), np.int64)]),
    )
    vectors = np.concatenate([embeddings.vectors, regression.predict(describe(cold))])
    facts = {"items": len(cold), "learned_from": len(known), "features": len(regression.names)}
    return Embeddings(joined, vectors, embeddings.card | {"cold": facts})


def evaluate_cold(ratings: Ratings, how: Factorisation, hide: float, seed: int) -> dict[str, float]:
    """RMSE for unseen users on items without training ratings, by the origin of the items' vectors.

    `nothing`: zero, which predicts the user's own mean; `mean`: the mean of the other items' vectors; `genres` and
    `genres, decades, titles`: predicted; `ratings`: trained on the hidden ratings, which a new item does not have.
    Users' vectors are rebuilt from the items that were not hidden.
    """
    if not 0 < hide < 1:
        raise ConfigError(f"hide is {hide}, but must be a share between 0 and 1")
    catalogue = ratings.catalogue
    train, _, test = by_users(ratings, rng(seed, 0, "users"))
    hidden = np.zeros(len(catalogue), np.bool_)
    hidden[rng(seed, 0, "cold").permutation(len(catalogue))[: max(1, round(hide * len(catalogue)))]] = True
    full = pretrain(train, how, seed)
    warm = pretrain(train.where(~hidden[train.items]), how, seed)
    # Items without training ratings have random vectors, from which nothing can be learned.
    fitted = np.flatnonzero(warm.catalogue.counts)
    known = ~hidden[test.items]
    owners = test.owners()
    known_counts = np.bincount(owners[known], minlength=len(test.users))
    hidden_counts = np.bincount(owners[~known], minlength=len(test.users))
    # A user needs known ratings to rebuild its vector from, and hidden ones to predict.
    unseen = test.of_users(np.flatnonzero((known_counts > 0) & (hidden_counts > 0)))
    levels = tuple(float(v) for v in np.unique(ratings.values))
    method = FedRecon(len(catalogue), how.dimension, levels, how.biases)
    evaluate = Evaluator(method, unseen, ~hidden[unseen.items], seed)
    found: dict[str, Any] = {"nothing": np.zeros(how.dimension), "ratings": full.vectors[hidden]}
    warm_items = catalogue.take(fitted)
    cold_items = catalogue.take(np.flatnonzero(hidden))
    for name, kinds in (("mean", ()), ("genres", ("genre",)), ("genres, decades, titles", KINDS)):
        counts = warm.catalogue.counts[fitted]
        regression = FeatureRegression.fit(describe(warm_items, kinds), warm.vectors[fitted], counts)
        found[name] = regression.predict(describe(cold_items, kinds))
    errors = {}
    for name in ("nothing", "mean", "genres", "genres, decades, titles", "ratings"):
        items = warm.vectors.copy()
        items[hidden] = found[name]
        errors[name] = evaluate({ITEMS: items})["rmse"]
    return errors
