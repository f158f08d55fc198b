"""The field's protocol: one item of each user is kept from training and sought among all items, and among a few drawn.

He, Liao, Zhang, Nie, Hu and Chua, 2017 (NCF); Zhang, Long, Zhou, Yan, Zhang, Zhang and Yang, 2023 (PFedRec).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from mutirao.core.arrays import Arrays
from mutirao.errors import ConfigError
from mutirao.randomness import number, rng
from mutirao.recsys.fedrecon import ITEMS, FedRecon
from mutirao.recsys.local import Batch, batch_of
from mutirao.recsys.ranks import CUTS, coverage, rank_among, sample_negatives, summarise_ranks, top_rows
from mutirao.recsys.ratings import Ratings, Taste
from mutirao.recsys.split import Parts

SCORES_AT_ONCE = 2**20  # so much memory, whatever the number of users
SAMPLED = "sampled_"  # before the name of a metric: among the items drawn

Scores = npt.NDArray[np.floating]


@dataclass(frozen=True)
class HeldOut:
    """Every user's item to be found, the items it ranks among when some are `drawn`, and those `hidden` from the rest.

    Whoever has scores can be judged: `held(score)`, where `score(part)` gives new scores, a row for each user of the
    slice and a column an item. Metrics with the prefix `sampled_` are among the items drawn, the others among all
    items that are not hidden. Ties count against the item.
    """

    users: tuple[str, ...]
    items: int
    targets: npt.NDArray[np.int64]  # an item a user
    drawn: npt.NDArray[np.int64]  # users x items drawn
    owners: npt.NDArray[np.intp]  # of what is hidden, in rising order
    hidden: npt.NDArray[np.int32]

    @property
    def metrics(self) -> tuple[str, ...]:
        """The names of all that is measured."""
        found = tuple(summarise_ranks([1]))
        return (*found, *(f"coverage@{k}" for k in CUTS), *((SAMPLED + name for name in found) if self.count else ()))

    @property
    def count(self) -> int:
        """Items drawn for each user."""
        return int(self.drawn.shape[1])

    @property
    def parts(self) -> list[slice]:
        """The users in slices that are judged at a time."""
        step = max(1, SCORES_AT_ONCE // self.items)
        return [slice(at, min(at + step, len(self.users))) for at in range(0, len(self.users), step)]

    def __call__(self, score: Callable[[slice], Scores]) -> dict[str, float]:
        """The metrics of these scores."""
        ranks, sampled, tops = [], [], []
        for part in self.parts:
            scores, rows = score(part), np.arange(part.stop - part.start)
            theirs = scores[rows, self.targets[part]]
            if self.count:
                sampled.append(rank_among(theirs, np.take_along_axis(scores, self.drawn[part], axis=1)))
            begin, end = np.searchsorted(self.owners, [part.start, part.stop])
            scores[self.owners[begin:end] - part.start, self.hidden[begin:end]] = -np.inf
            ranks.append(rank_among(theirs, scores) - 1)  # it ties with itself
            tops.append(top_rows(scores, CUTS[-1]))
        found = summarise_ranks(np.concatenate(ranks)) | coverage(np.concatenate(tops), self.items)
        if self.count:
            among = summarise_ranks(np.concatenate(sampled))
            found |= {SAMPLED + name: value for name, value in among.items()}
        return found


def hold_out(parts: Parts, judge_by: Literal["vali", "test"], count: int, seed: int) -> HeldOut:
    """What is sought after `leave_one_out`: each user's item of the validation, or of the test.

    Hidden is what the user took before it. The `count` items drawn are among those the user never took, now or later.
    """
    train, vali, test = parts
    sought = vali if judge_by == "vali" else test
    before = [train] if judge_by == "vali" else [train, vali]
    owners, hidden = (
        np.concatenate([part.owners() for part in before]),
        np.concatenate([part.items for part in before]),
    )
    order = np.argsort(owners, kind="stable")
    items, drawn = len(train.catalogue), np.zeros((len(train.users), count), np.int64)
    for user, name in enumerate(train.users if count else ()):
        taken = np.concatenate([p.items[p.offsets[user] : p.offsets[user + 1]] for p in parts])
        try:
            drawn[user] = sample_negatives(taken, items, count, rng(seed, 0, f"candidates {judge_by}", name))
        except ValueError as error:
            raise ConfigError(f"candidates: user {name!r}: {error}; draw fewer") from None
    return HeldOut(train.users, items, sought.items.astype(np.int64), drawn, owners[order], hidden[order])


class HeldOutJudge:
    """Judges an item matrix by what was held out: every user's vector is rebuilt from all that is `known` of it."""

    def __init__(self, method: FedRecon, known: Ratings, held: HeldOut, seed: int) -> None:
        self.method, self.held = method, held
        self.metrics = held.metrics
        self._batches = {part.start: self._batch(known, part, seed) for part in held.parts}

    def __call__(self, arrays: Arrays) -> dict[str, float]:
        """The metrics of an item matrix."""
        items = arrays[ITEMS]
        return self.held(lambda part: self._score(items, part))

    def _score(self, items: npt.NDArray[np.float32], part: slice) -> Scores:
        batch = self._batches[part.start]
        batch.table = items
        self.method.work(batch, epochs=0)
        vectors = batch.vectors.copy()
        vectors[:, : int(self.method.biases)] = 1  # a user's own bias changes no rank
        return np.asarray(vectors @ items.T)

    def _batch(self, known: Ratings, part: slice, seed: int) -> Batch:
        """The users' work without item vectors, which come with each model."""
        ends, works = known.offsets.tolist(), []
        for user in range(part.start, part.stop):
            mine = slice(ends[user], ends[user + 1])
            taste = Taste(known.items[mine], known.values[mine])
            works.append(self.method.known(taste, number(seed, 0, "others judged", known.users[user])))
        empty = np.zeros((0, self.method.dimension), np.float32)
        return batch_of(self.method.drawn(works), empty, self.method.centre, self.method.compiled)
