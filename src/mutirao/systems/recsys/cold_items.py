"""Vectors for items that nobody rated, predicted from their genres, decade and the words of their titles.

A ridge regression from what a catalogue says of items to the vectors of those that were rated. Items are public, so it
is made where the vectors are, and needs no rating. (Schein, Popescul, Ungar and Pennock, 2002, name the problem.)
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
from mutirao.systems.recsys.ratings import Ratings
from mutirao.systems.recsys.titles import parse_title
from mutirao.systems.recsys.user_split import by_users

COMMON = 3  # items that must share a feature before it counts
TRUST = 10  # an item of n ratings counts n / (n + TRUST)
RIDGES = tuple(10.0**k for k in np.arange(-1, 4.1, 0.25))
KINDS = ("genre", "decade", "word")

Floats = npt.NDArray[np.float64]


def describe(catalogue: Catalogue, kinds: Collection[str] = KINDS) -> list[set[str]]:
    """What is known of each item, as names such as `genre Comedy`, `decade 1990` and `word star`."""
    return [set(features_of(catalogue, row, kinds)) for row in range(len(catalogue))]


def features_of(catalogue: Catalogue, row: int, kinds: Collection[str]) -> Iterator[str]:
    """The names of what is known of one item."""
    year = int(catalogue.years[row])
    if "genre" in kinds and catalogue.genres:
        yield from (f"genre {name}" for name in catalogue.genres[row])
    if "decade" in kinds and year:
        yield f"decade {year // 10 * 10}"
    if "word" in kinds and catalogue.titles[row]:
        names = parse_title(catalogue.titles[row], year).names
        yield from (f"word {word}" for word in (names[0].split() if names else ()))


@dataclass(frozen=True)
class Describer:
    """x = mean + (f - centre) W: a vector from the features `names` that an item has (f_j = 1) or has not (0)."""

    names: tuple[str, ...]
    centre: Floats
    weights: Floats  # features x dimension
    mean: Floats

    @classmethod
    def fit(cls, described: list[set[str]], vectors: npt.NDArray[np.float32], counts: npt.NDArray[Any]) -> "Describer":
        """Learn W from items with vectors: argmin sum_i w_i |x_i - mean - (f_i - centre) W|^2 + ridge |W|^2.

        w_i = n_i / (n_i + 10) for n_i ratings (1 if none are counted). Each column has the ridge with the least error
        when every item in turn is left out, which a linear fit tells without fitting again: r_i / (1 - h_ii).
        """
        seen: dict[str, int] = {}
        for features in described:
            for name in features:
                seen[name] = seen.get(name, 0) + 1
        names = tuple(sorted(name for name, items in seen.items() if items >= COMMON))
        w = counts / (counts + TRUST) if counts.any() else np.ones(len(vectors))
        flags, x = flags_of(described, names), vectors.astype(np.float64)
        centre, mean = w @ flags / w.sum(), w @ x / w.sum()
        root = np.sqrt(w)[:, None]
        f, y = root * (flags - centre), root * (x - mean)
        sizes, axes = np.linalg.eigh(f.T @ f)
        turned, pull = f @ axes, axes.T @ (f.T @ y)  # along the axes every ridge is a division
        best, weights = np.full(x.shape[1], np.inf), np.zeros((len(names), x.shape[1]))
        for ridge in RIDGES:
            shrunk = 1 / (np.maximum(sizes, 0) + ridge)
            gaps = (y - turned @ (shrunk[:, None] * pull)) / (1 - (turned**2 @ shrunk))[:, None]
            errors = (gaps**2).sum(0)
            better = errors < best
            weights[:, better] = axes @ (shrunk[:, None] * pull[:, better])
            best = np.minimum(best, errors)
        return cls(names, centre, weights, mean)

    def predict(self, described: list[set[str]]) -> npt.NDArray[np.float32]:
        """A vector for each item."""
        flags = flags_of(described, self.names)
        return np.asarray(self.mean + (flags - self.centre) @ self.weights, np.float32)


def flags_of(described: list[set[str]], names: tuple[str, ...]) -> Floats:
    """Items x features: 1 where an item has the feature."""
    at = {name: column for column, name in enumerate(names)}
    flags = np.zeros((len(described), len(names)))
    for row, features in enumerate(described):
        flags[row, [at[name] for name in features if name in at]] = 1
    return flags


def add_cold(embeddings: Embeddings, catalogue: Catalogue) -> Embeddings:
    """The vectors with those of the catalogue's other items predicted and put behind them; the card says how many."""
    mine, rows = embeddings.catalogue, catalogue.rows()
    known = [row for row, name in enumerate(mine.ids) if name in rows]
    new = np.array([row for name, row in rows.items() if name not in set(mine.ids)], np.intp)
    if not known:
        raise ConfigError("none of the items with vectors is in the catalogue, so nothing can be learned from it")
    if not len(new):
        raise ConfigError(f"all {len(catalogue):,} items of the catalogue have vectors already")
    of = np.array([rows[mine.ids[row]] for row in known], np.intp)
    describer = Describer.fit(describe(catalogue.take(of)), embeddings.vectors[known], mine.counts[known])
    cold = catalogue.take(new)
    joined = Catalogue(
        mine.ids + cold.ids,
        mine.titles + cold.titles,
        np.concatenate([mine.years, cold.years]),
        np.concatenate([mine.counts, np.zeros(len(cold), np.int64)]),
    )
    vectors = np.concatenate([embeddings.vectors, describer.predict(describe(cold))])
    told = {"items": len(cold), "learned_from": len(known), "features": len(describer.names)}
    return Embeddings(joined, vectors, embeddings.card | {"cold": told})


def evaluate_cold(ratings: Ratings, how: Factorisation, hide: float, seed: int) -> dict[str, float]:
    """RMSE at unseen users on items whose every rating was hidden from training, by what their vectors are made of.

    `nothing`: zero, so that the user's own mean is all; `mean`: the mean of the other items' vectors; `genres`, and
    `genres, decades, titles`: predicted; `ratings`: trained on what was hidden, which is what nobody has of a new item.
    Users' vectors are rebuilt from the items that were not hidden.
    """
    if not 0 < hide < 1:
        raise ConfigError(f"hide is {hide}, but must be a share between 0 and 1")
    catalogue, train, test = ratings.catalogue, *by_users(ratings, rng(seed, 0, "users"))[::2]
    drawn = rng(seed, 0, "cold").permutation(len(catalogue))[: max(1, round(hide * len(catalogue)))]
    hidden = np.zeros(len(catalogue), np.bool_)
    hidden[drawn] = True
    full = pretrain(train, how, seed)
    warm = pretrain(train.where(~hidden[train.items]), how, seed)
    fitted = np.flatnonzero(warm.catalogue.counts)
    known = ~hidden[test.items]
    owners, users = test.owners(), len(test.users)
    both = (np.bincount(owners[known], minlength=users) > 0) & (np.bincount(owners[~known], minlength=users) > 0)
    unseen = test.of_users(np.flatnonzero(both))
    levels = tuple(float(v) for v in np.unique(ratings.values))
    method = FedRecon(len(catalogue), how.dimension, levels, how.biases)
    evaluate = Evaluator(method, unseen, ~hidden[unseen.items], seed)
    found: dict[str, Any] = {"nothing": np.zeros(how.dimension), "ratings": full.vectors[hidden]}
    some = catalogue.take(fitted), catalogue.take(np.flatnonzero(hidden))
    for name, kinds in (("mean", ()), ("genres", ("genre",)), ("genres, decades, titles", KINDS)):
        described, cold = (describe(part, kinds) for part in some)
        found[name] = Describer.fit(described, warm.vectors[fitted], warm.catalogue.counts[fitted]).predict(cold)
    errors = {}
    for name in ("nothing", "mean", "genres", "genres, decades, titles", "ratings"):
        items = warm.vectors.copy()
        items[hidden] = found[name]
        errors[name] = evaluate({ITEMS: items})["rmse"]
    return errors
