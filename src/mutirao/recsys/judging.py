"""How well an item matrix serves users: their vectors are rebuilt from what is known of them, the rest is judged."""

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from mutirao.core.arrays import Arrays
from mutirao.errors import ConfigError
from mutirao.randomness import number
from mutirao.recsys.fedrecon import ITEMS, FedRecon
from mutirao.recsys.local import Batch, Local, batch_of
from mutirao.recsys.ratings import Ratings, Taste

RATINGS_AT_ONCE = 250_000  # ratings, or scores, worked on at a time: so much memory, whatever the number of users
CUT = 10


class Judge:
    """Judges by the ratings that are not `known`: RMSE and MAE, or, for implicit feedback, HR@10 and nDCG@10.

    Predictions are cut to the scale of the ratings. Implicit: the items not known rank among all items the user has
    not taken; a user with one of them in the first ten is a hit.
    """

    def __init__(self, method: FedRecon, ratings: Ratings, known: npt.NDArray[np.bool_], seed: int) -> None:
        if known.all():
            raise ConfigError("the users to be judged have too few ratings: nothing is left to judge by")
        self.method, self.ratings, self.known, self.seed = method, ratings, known, seed
        self.metrics = (f"hr@{CUT}", f"ndcg@{CUT}") if method.implicit else ("rmse", "mae")
        self._batches = [(part, self._batch(part)) for part in self._parts()]

    def __call__(self, arrays: Arrays) -> dict[str, float]:
        """The metrics of an item matrix."""
        items = arrays[ITEMS]
        judge = self._ranked if self.method.implicit else self._rated
        parts = []
        for part, batch in self._batches:
            batch.table = items
            self.method.work(batch, epochs=0)
            parts.append(judge(items, part, batch))
        found = np.concatenate(parts)
        if self.method.implicit:
            return {f"hr@{CUT}": float((found[:, 0] <= CUT).mean()), f"ndcg@{CUT}": float(found[:, 1].mean())}
        return {"rmse": float(np.sqrt(np.mean(found**2))), "mae": float(np.abs(found).mean())}

    def _parts(self) -> Iterator[slice]:
        """Users that are judged at a time."""
        cost = (
            self.ratings.counts() if not self.method.implicit else np.full(len(self.ratings.users), self.method.items)
        )
        turn = np.cumsum(cost) // RATINGS_AT_ONCE
        edges = np.flatnonzero(np.diff(turn, prepend=-1))
        for begin, end in zip(edges, [*edges[1:], len(cost)], strict=True):
            yield slice(int(begin), int(end))

    def _batch(self, part: slice) -> Batch:
        """The users' work without item vectors, which come with each model."""
        ends, works = self.ratings.offsets.tolist(), []
        for user in range(part.start, part.stop):
            mine = slice(ends[user], ends[user + 1])
            taste = Taste(self.ratings.items[mine], self.ratings.values[mine])
            known = self.known[mine]
            if self.method.implicit:
                some = Taste(taste.items[known], taste.values[known])
                seed = number(self.seed, 0, "others judged", self.ratings.users[user])
                works.append(self.method.known(some, seed))
            else:
                works.append(Local(taste.items, taste.values, support=known))
        empty = np.zeros((0, self.method.dimension), np.float32)
        return batch_of(self.method.drawn(works), empty, self.method.centre, self.method.compiled)

    def _rated(self, items: npt.NDArray[np.float32], part: slice, batch: Batch) -> npt.NDArray[np.float64]:
        low, high = self.method.levels[0], self.method.levels[-1]
        guesses = np.clip(batch.predictions.astype(np.float64) + self.method.centre, low, high)
        return guesses - (batch.y[batch.query].astype(np.float64) + self.method.centre)

    def _ranked(self, items: npt.NDArray[np.float32], part: slice, batch: Batch) -> npt.NDArray[np.float64]:
        """Rank of the best item not known, and the user's nDCG, a row a user."""
        vectors = batch.vectors.copy()
        vectors[:, : int(self.method.biases)] = 1  # a user's own bias changes no rank
        scores = vectors @ items.T
        owners = self.ratings.owners()
        mine = (owners >= part.start) & (owners < part.stop)
        user, item, known = owners[mine] - part.start, self.ratings.items[mine], self.known[mine]
        scores[user[known], item[known]] = -np.inf
        user, item = user[~known], item[~known]
        theirs = scores[user, item]
        ranks = np.array([(scores[u] >= s).sum() for u, s in zip(user.tolist(), theirs, strict=True)])
        people = len(batch)
        gains = np.bincount(user, np.where(ranks <= CUT, 1 / np.log2(ranks + 1.0), 0.0), people)
        ideal = np.cumsum(1 / np.log2(np.arange(2, CUT + 2)))
        wanted = np.bincount(user, minlength=people)
        best = np.full(people, np.inf)
        np.minimum.at(best, user, ranks)
        return np.stack([best, gains / ideal[np.minimum(np.maximum(wanted, 1), CUT) - 1]], 1)[wanted > 0]
