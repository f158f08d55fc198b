"""Recommend to any user: rebuild a vector from a few ratings and rank all items by it.

Needs only NumPy and the file of item vectors. The ratings are not stored or sent.
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
from mutirao.systems.recsys.local_training import UserExamples, make_batch
from mutirao.systems.recsys.ratings import Taste
from mutirao.systems.recsys.readers import read_catalogue


class Recommendation(NamedTuple):
    """An item and its predicted rating, clipped to the scale (for implicit feedback, its score)."""

    id: str
    title: str
    score: float


@dataclass(frozen=True)
class Recommender:
    """Ranks the items of `embeddings` for any user. Their card has the settings for rebuilding vectors.

    >>> from mutirao.systems.recsys.catalogues import Catalogue
    >>> films = Catalogue(("a", "b", "c"), ("Ant", "Bee", "Cat"), np.zeros(3, np.int32), np.zeros(3, np.int64))
    >>> vectors = np.array([[1, 0], [0.9, 0.1], [0, 1]], np.float32)
    >>> Recommender(Embeddings(films, vectors, {"ridge": 0.1})).recommend({"a": 5.0}, k=1)[0].title
    'Bee'
    """

    embeddings: Embeddings

    @classmethod
    def of(cls, file: Path | str) -> "Recommender":
        """Load a file of item vectors."""
        return cls(load_embeddings(Path(file)))

    def with_cold(self, catalogue: Path | str) -> "Recommender":
        """Add the catalogue's items without ratings, with vectors predicted from genres, decades and titles."""
        return Recommender(add_cold(self.embeddings, read_catalogue(Path(catalogue).expanduser())))

    @cached_property
    def method(self) -> FedRecon:
        """FedRecon with the settings of the card, or the defaults."""
        card = self.embeddings.card
        serving = {f.name for f in fields(FedRecon)} - {"items", "dimension", "biases", "compiled", "workers", "levels"}
        settings: dict[str, Any] = {k: v for k, v in card.items() if k in serving}
        if levels := levels_of(card):
            settings["levels"] = levels
        items, dimension = self.embeddings.vectors.shape
        return FedRecon(items, dimension, biases=has_biases(card), compiled=False, **settings)

    @cached_property
    def _rows(self) -> dict[str, int]:
        return self.embeddings.catalogue.rows()

    def vector(self, ratings: Mapping[str, float]) -> npt.NDArray[np.float32]:
        """The user's vector, rebuilt from ratings by item id. For implicit feedback the values have no effect."""
        method = self.method
        self._check_known(ratings)
        low = method.levels[0]
        high = method.levels[-1]
        for name, value in ratings.items():
            if not np.isfinite(value) or (not method.implicit and not low <= value <= high):
                raise ConfigError(f"item {name!r}: a rating of {value:g} is not on the scale from {low:g} to {high:g}")
        if not ratings:
            return np.zeros(method.dimension, np.float32)
        rows = np.array([self._rows[i] for i in ratings], np.int32)
        taste = Taste(rows, np.array(list(ratings.values()), np.float32))
        if method.implicit:
            (user,) = method.with_negatives([method.all_support(taste, derive_seed(0, 0, "serve"))])
        else:
            user = UserExamples(taste.items, taste.values, support=np.ones(len(rows), np.bool_))
        batch = make_batch([user], self.embeddings.vectors, method.centre, compiled=False)
        method.train(batch, epochs=0)
        return np.asarray(batch.vectors[0])

    def scores(self, vector: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        """Predicted ratings of all items for a user's vector, not clipped to the scale, which would make ties."""
        first = int(self.method.biases)
        weights = vector.copy()
        weights[:first] = 1
        constant = self.method.centre + float(vector[:first].sum())
        return np.asarray(self.embeddings.vectors @ weights + np.float32(constant))

    def recommend(self, ratings: Mapping[str, float], k: int = 10) -> list[Recommendation]:
        """The `k` items with the highest scores that the user has not rated, best first."""
        scores = self.scores(self.vector(ratings))
        scores[[self._rows[i] for i in ratings]] = -np.inf
        k = min(k, len(scores) - len(ratings))
        if k < 1:
            return []
        best = np.argpartition(-scores, k - 1)[:k]
        catalogue = self.embeddings.catalogue
        ranked = best[np.lexsort((best, -scores[best]))].tolist()
        return [Recommendation(catalogue.ids[i], catalogue.titles[i], self._clip(scores[i])) for i in ranked]

    def predict(self, ratings: Mapping[str, float], items: Iterable[str]) -> dict[str, float]:
        """Predicted ratings of `items` for a user with these ratings, clipped to the scale as in evaluation."""
        scores = self.scores(self.vector(ratings))
        names = list(items)
        self._check_known(names)
        return {name: self._clip(scores[self._rows[name]]) for name in names}

    def _clip(self, score: float) -> float:
        if self.method.implicit:
            return float(score)
        return float(np.clip(score, self.method.levels[0], self.method.levels[-1]))

    def _check_known(self, items: Iterable[str]) -> None:
        for name in items:
            if name not in self._rows:
                raise ConfigError(f"item {name!r} is not in the catalogue of {len(self._rows):,} items")


def levels_of(card: Mapping[str, Any]) -> tuple[float, ...]:
    """The rating scale of the training data. Transferred vectors have that of their source."""
    levels = card.get("levels", ())
    source = card.get("source")
    if not levels:
        if isinstance(source, Mapping):
            return levels_of(source)
        return ()
    scale = tuple(levels) if isinstance(levels, list | tuple) else ()
    is_numeric = all(isinstance(v, int | float) and np.isfinite(v) for v in scale)
    if not scale or not is_numeric or list(scale) != sorted(scale):
        raise ConfigError("the card's levels must be a list of numbers in ascending order")
    return tuple(float(v) for v in scale)
