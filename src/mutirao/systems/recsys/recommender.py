"""Recommend to a user nobody knows: rebuild a vector from a few ratings, here and now, and rank all items by it.

Needs nothing but NumPy and the file of item vectors; the ratings go nowhere.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from mutirao.errors import ConfigError
from mutirao.randomness import derive_seed
from mutirao.systems.recsys.cold_items import add_cold
from mutirao.systems.recsys.embeddings import Embeddings, has_biases, load_embeddings
from mutirao.systems.recsys.fedrecon import FedRecon
from mutirao.systems.recsys.local_training import Local, batch_of
from mutirao.systems.recsys.ratings import Taste
from mutirao.systems.recsys.readers import read_catalogue


class Recommendation(NamedTuple):
    """An item, and the rating expected of the user, cut to the scale (a plain score for implicit feedback)."""

    id: str
    title: str
    score: float


@dataclass(frozen=True)
class Recommender:
    """Ranks the items of `embeddings` for anyone; the card says how vectors are rebuilt.

    >>> from mutirao.systems.recsys.catalogues import Catalogue
    >>> films = Catalogue(("a", "b", "c"), ("Ant", "Bee", "Cat"), np.zeros(3, np.int32), np.zeros(3, np.int64))
    >>> vectors = np.array([[1, 0], [0.9, 0.1], [0, 1]], np.float32)
    >>> Recommender(Embeddings(films, vectors, {"ridge": 0.1})).recommend({"a": 5.0}, k=1)[0].title
    'Bee'
    """

    embeddings: Embeddings

    @classmethod
    def of(cls, file: Path | str) -> "Recommender":
        """From a file of item vectors."""
        return cls(load_embeddings(Path(file)))

    def with_cold(self, catalogue: Path | str) -> "Recommender":
        """The same with the items of a catalogue that nobody rated: vectors predicted from genres, decades, titles."""
        return Recommender(add_cold(self.embeddings, read_catalogue(Path(catalogue).expanduser())))

    @cached_property
    def method(self) -> FedRecon:
        """How vectors are rebuilt: as the card says, or by default."""
        card = self.embeddings.card
        known = {f.name for f in fields(FedRecon)} - {"items", "dimension", "biases", "compiled", "workers", "levels"}
        settings: dict[str, Any] = {k: v for k, v in card.items() if k in known}
        if levels := levels_of(card):
            settings["levels"] = levels
        items, dimension = self.embeddings.vectors.shape
        return FedRecon(items, dimension, biases=has_biases(card), compiled=False, **settings)

    @cached_property
    def _rows(self) -> dict[str, int]:
        return self.embeddings.catalogue.rows()

    def vector(self, ratings: Mapping[str, float]) -> npt.NDArray[np.float32]:
        """The user's vector, rebuilt from ratings by item id; for implicit feedback the values do not matter."""
        method, items = self.method, self.embeddings.vectors
        self._check_known(ratings)
        low, high = method.levels[0], method.levels[-1]
        for name, value in ratings.items():
            if not np.isfinite(value) or (not method.implicit and not low <= value <= high):
                raise ConfigError(f"item {name!r}: a rating of {value:g} is not on the scale from {low:g} to {high:g}")
        if not ratings:
            return np.zeros(method.dimension, np.float32)
        rows = np.array([self._rows[i] for i in ratings], np.int32)
        taste = Taste(rows, np.array(list(ratings.values()), np.float32))
        if method.implicit:
            (work,) = method.drawn([method.known(taste, derive_seed(0, 0, "serve"))])
        else:
            work = Local(taste.items, taste.values, support=np.ones(len(rows), np.bool_))
        batch = batch_of([work], items, method.centre, fast=False)
        method.work(batch, epochs=0)
        return np.asarray(batch.vectors[0])

    def scores(self, vector: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        """What the user of that vector would rate each item, not cut to the scale, so that no two are made equal."""
        step, first = vector.copy(), int(self.method.biases)
        step[:first] = 1
        constant = self.method.centre + float(vector[:first].sum())
        return np.asarray(self.embeddings.vectors @ step + np.float32(constant))

    def recommend(self, ratings: Mapping[str, float], k: int = 10) -> list[Recommendation]:
        """The `k` items with the highest scores among those the user has not rated, best first."""
        scores = self.scores(self.vector(ratings))
        scores[[self._rows[i] for i in ratings]] = -np.inf
        k = min(k, len(scores) - len(ratings))
        if k < 1:
            return []
        best = np.argpartition(-scores, k - 1)[:k]
        catalogue = self.embeddings.catalogue
        ranked = best[np.lexsort((best, -scores[best]))].tolist()
        return [Recommendation(catalogue.ids[i], catalogue.titles[i], self._cut(scores[i])) for i in ranked]

    def predict(self, ratings: Mapping[str, float], items: Iterable[str]) -> dict[str, float]:
        """What somebody with these ratings would rate each of `items`, cut to the scale as in evaluation."""
        scores, wanted = self.scores(self.vector(ratings)), list(items)
        self._check_known(wanted)
        return {name: self._cut(scores[self._rows[name]]) for name in wanted}

    def _cut(self, score: float) -> float:
        method = self.method
        return float(score if method.implicit else np.clip(score, method.levels[0], method.levels[-1]))

    def _check_known(self, items: Iterable[str]) -> None:
        for name in items:
            if name not in self._rows:
                raise ConfigError(f"item {name!r} is not in the catalogue of {len(self._rows):,} items")


def levels_of(card: Mapping[str, Any]) -> tuple[float, ...]:
    """The scale of the ratings that vectors were trained on; vectors carried over are as their source was."""
    levels, source = card.get("levels", ()), card.get("source")
    if not levels:
        return levels_of(source) if isinstance(source, Mapping) else ()
    scale = tuple(levels) if isinstance(levels, list | tuple) else ()
    numbers = all(isinstance(v, int | float) and np.isfinite(v) for v in scale)
    if not scale or not numbers or list(scale) != sorted(scale):
        raise ConfigError("the card's levels are not a scale of rising numbers")
    return tuple(float(v) for v in scale)
