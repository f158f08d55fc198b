"""FedRecon: the item matrix is everybody's; a user's vector is rebuilt whenever it is needed, and then forgotten.

A client splits its ratings into support and query, fits its vector to the support with the items as they are, then
moves the items of the query with the vector as it is. Only these rows leave it. Singhal, Sidahmed, Garrett, Wu, Rush
and Prakash, 2021: Federated Reconstruction.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from mutirao.core.arrays import Arrays
from mutirao.core.fleet import ClientId, Failure, Reply, Request, Scalar, Site, failure_of
from mutirao.core.hyperparameters import read_hyperparameters
from mutirao.core.sparse_rows import ROWS, concatenate_rows
from mutirao.errors import ConfigError, Refused
from mutirao.randomness import derive_seed, rng
from mutirao.systems.recsys.local_training import (
    Batch,
    Local,
    Rules,
    batch_of,
    draw_others,
    rank_and_train,
    rebuild_and_train,
)
from mutirao.systems.recsys.ratings import Taste
from mutirao.training.lr_schedules import Constant, Schedule, factor_of

ITEMS = "items"
ITEM_ROWS = ITEMS + ROWS
SPREAD = 0.1  # standard deviation of the first vectors
TOLD = frozenset({"entropy", "rms_loss", "gradient_norm"})  # what a server may ask for besides the loss

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class FedRecon:
    """A handler that answers for one user, or for `many` at once; user vectors are in no reply and in no state.

    `loss` is `squared` for ratings. For implicit feedback it is `weighted`: 1 for an item taken, 0, counting
    `negative_weight`, for `negatives` times as many others, drawn anew each round (Hu, Koren and Volinsky, 2008,
    with a sample in place of all others); or `bpr`: -ln sigmoid(p_i - p_j) for an item i taken and another j drawn
    (Rendle, Freudenthaler, Gantner and Schmidt-Thieme, 2009).

    `others=all` rebuilds vectors against all items, each 0 counting `rebuild_weight` (Hu, Koren and Volinsky as they
    have it), for which a client needs the whole matrix; what trains is still drawn. With a `half_life` an item counts
    2^-(later items / half_life) in a vector that is to recommend; in training all count 1.

    `rebuild` is `ridge`: the vector is argmin_v sum_support w (y - p)^2 + ridge |v|^2, solved exactly (`bpr`: by
    Newton's method); or `sgd`: so many `passes` at `rebuild_lr` from v = 0, as in the paper. The query's items then
    make `epochs` steps of SGD at rate `lr`.

    With `biases`, p = centre + v_0 + x_0 + sum_{j>0} v_j x_j: column 0 of the items holds their biases. Else p = v x.

    >>> FedRecon(items=3706).dimension, FedRecon(items=3706, loss="bpr").implicit
    (50, True)
    """

    items: int
    dimension: int = 50
    levels: tuple[float, ...] = (1.0, 2.0, 3.0, 4.0, 5.0)  # the ratings there are
    biases: bool = True
    loss: Literal["squared", "weighted", "bpr"] = "squared"
    support: float = 0.5
    rebuild: Literal["ridge", "sgd"] = "ridge"
    ridge: float = 10.0
    ridge_bias: float = 0.1
    passes: int = 10
    rebuild_lr: float = 0.1
    epochs: int = 1
    lr: float = 0.2
    schedule: Schedule = Constant()
    weight_decay: float = 0.0
    negatives: int = 1
    negative_weight: float = 1.0
    others: Literal["drawn", "all"] = "drawn"
    rebuild_weight: float = 0.0
    half_life: float = 0.0
    samples: int = 0
    compiled: bool = True
    workers: int = field(default=0, repr=False, compare=False)  # 0: one a core; no result depends on it

    def __post_init__(self) -> None:
        given = {"others": self.others != "drawn", "rebuild_weight": self.rebuild_weight, "half_life": self.half_life}
        if self.loss != "weighted" and (first := next((name for name, is_set in given.items() if is_set), "")):
            raise ConfigError(f"{first}: it is for implicit feedback by loss=weighted, not for loss={self.loss}")
        if self.others == "all" and self.rebuild != "ridge":
            raise ConfigError("others=all solves for the vectors: use rebuild=ridge")

    @property
    def provides(self) -> frozenset[str]:
        """What the clients can tell besides their rows."""
        of_ratings = {"metrics:rmse", "extras:squared_errors", *(f"metrics:{name}" for name in TOLD)}
        always = {"metrics:loss", "config:mu", "config:probe_samples"}  # a user's ratings are few: all are looked at
        return frozenset(always | (of_ratings if self.loss != "bpr" else set()))

    @property
    def implicit(self) -> bool:
        """Whether what counts is that an item was taken, not how it was rated."""
        return self.loss != "squared"

    @property
    def centre(self) -> float:
        """The middle of the scale, from which biases are counted: all that is known of an unknown user and item."""
        return (self.levels[0] + self.levels[-1]) / 2 if self.biases and not self.implicit else 0.0

    def initial(self, seed: int) -> Arrays:
        """Item vectors from N(0, 0.1), biases 0."""
        items = rng(seed, 0, "initial").normal(0, SPREAD, (self.items, self.dimension)).astype(np.float32)
        if self.biases:
            items[:, 0] = 0
        return {ITEMS: items}

    def __call__(self, request: Request, site: Site) -> Reply:
        """Answer a request to `train`, `evaluate` or `probe`, or for the `rows` of the items it works on."""
        local = self.local(site.data, site.id, *read_round(request.config), request.do)
        return self._answers([request], [local])[0]

    def many(
        self, requests: Mapping[ClientId, Request], sites: Mapping[ClientId, Site]
    ) -> dict[ClientId, Reply | Failure]:
        """The same answers for many users at once: no user's work depends on another's."""
        failures: dict[ClientId, Reply | Failure] = {}
        ready: dict[ClientId, Local] = {}
        config, seed, round = None, 0, 0
        for client in sorted(requests):
            try:
                request = requests[client]
                if request.config is not config:  # mostly one for all
                    seed, round = read_round(request.config)
                    config = request.config
                ready[client] = self.local(sites[client].data, client, seed, round, request.do)
            except (ValueError, TypeError, Refused) as error:  # its own failure alone
                failures[client] = failure_of(error)
        answers = self._answers([requests[c] for c in ready], list(ready.values()))
        return failures | dict(zip(ready, answers, strict=True))

    def local(self, taste: Taste, client: ClientId, seed: int, round: int, do: str = "train") -> Local:
        """What a user works on in a round: its ratings, or its items and others drawn for them."""
        if not isinstance(taste, Taste):
            raise ValueError(f"holds {type(taste).__name__}, not ratings")
        count = len(taste.items)
        if count < 2:
            raise ValueError(f"has {count} ratings; two are needed, one to rebuild from and one to learn from")
        if 0 < self.samples < count:
            count = max(2, self.samples)
            keep = np.sort(rng(seed, round, "samples", client).choice(len(taste), count, replace=False))
            taste = Taste(taste.items[keep], taste.values[keep])
        if self.implicit:
            return self.taken(taste, derive_seed(seed, round, "others", client), self.share_of(count))
        if do == "rows":
            return Local(taste.items, taste.values)  # no need to draw a support yet
        return Local(taste.items, taste.values, derive_seed(seed, round, "support", client), self.share_of(count))

    def share_of(self, ratings: int) -> int:
        """How many of so many ratings are support: the share, but at least one, and one is left for the query."""
        return min(max(1, round(self.support * ratings)), ratings - 1)

    def taken(self, taste: Taste, seed: int, support: int) -> Local:
        """Items taken, so many of them to be drawn as support, and others to be drawn beside them."""
        if len(taste) >= self.items:
            raise ValueError(f"has taken all {len(taste)} items; there is nothing left to tell them from")
        return Local(taste.items, taste.values, seed, support)

    def known(self, taste: Taste, seed: int) -> Local:
        """Items taken, the oldest first, that a vector is rebuilt from to recommend: all of them are support."""
        return self.taken(taste, seed, len(taste))._replace(ages=np.arange(len(taste))[::-1])

    def drawn(self, works: Sequence[Local]) -> Sequence[Local]:
        """The works with what is drawn for all users at once: for implicit feedback, others beside the items taken."""
        if not self.implicit or not works:
            return works
        alone = self.rebuild_weight or self.negative_weight
        weights = (self.negative_weight, 0.0 if self.others == "all" else alone, self.half_life)
        return draw_others(works, self.items, self.negatives, *weights, fast=self.compiled)

    def work(self, batch: Batch, epochs: int, proximal: float = 0.0, factor: float = 1.0) -> None:
        """Fill in vectors and predictions of a batch, and train the items of its queries in place."""
        (rank_and_train if self.loss == "bpr" else rebuild_and_train)(self.rules(factor), batch, epochs, proximal)

    def rules(self, factor: float = 1.0) -> Rules:
        """The settings that the work depends on, the items' rate times a schedule's factor."""
        passes = self.passes if self.rebuild == "sgd" else 0
        numbers = (self.ridge, self.ridge_bias, passes, self.rebuild_lr, factor * self.lr, self.weight_decay)
        whole = (self.rebuild_weight or self.negative_weight) if self.others == "all" else 0.0
        return Rules(self.biases, *numbers, whole, fast=self.compiled, workers=self.workers)

    def _answers(self, requests: Sequence[Request], works: Sequence[Local]) -> list[Reply]:
        if not requests:
            return []
        if self.others == "all" and any(r.arrays is not requests[0].arrays for r in requests):
            return [self._answers([r], [w])[0] for r, w in zip(requests, works, strict=True)]
        do, config, works = requests[0].do, requests[0].config, self.drawn(works)
        if do == "rows":
            return [Reply({}, {ITEMS: work.rows}, n=len(work.rows)) for work in works]
        if do not in ("train", "evaluate", "probe"):
            raise ValueError(f"FedRecon can train, evaluate and probe, not {do!r}")
        factor = factor_of(self.schedule, int(config["round"]))
        asked, (table, at) = asked_for(config), gather_rows(requests, works)
        batch = batch_of(works, table, self.centre, self.compiled, at)
        with np.errstate(over="ignore", invalid="ignore"):  # training that diverges is named by the round
            self.work(batch, self.epochs if do == "train" else 0, float(config.get("mu", 0.0)), factor)
            return self._replies(batch, do, asked)

    def _replies(self, batch: Batch, do: str, asked: frozenset[str]) -> list[Reply]:
        """What leaves the clients: the rows of the query, trained, and figures of how well it had been predicted."""
        rows, losses, begins = batch.rows[batch.query], self.losses(batch), batch.begins.tolist()
        trains, evaluates, trained = do == "train", do == "evaluate" and self.loss != "bpr", batch.trained
        replies = []
        for user, (loss, (begin, end)) in enumerate(zip(losses, pairwise(begins), strict=True)):
            metrics: dict[str, float] = {"loss": loss}
            extras: Arrays = {}
            if evaluates:
                metrics["rmse"] = loss**0.5
            if asked:
                metrics |= self._figures(batch, user, asked)
                extras = self._errors(batch, user) if "squared_errors" in asked else {}
            arrays = {ITEMS: trained[begin:end], ITEM_ROWS: rows[begin:end]} if trains else {}
            replies.append(Reply(arrays, extras, metrics, end - begin))
        return replies

    def losses(self, batch: Batch) -> list[float]:
        """The mean loss of each user's query, before its items were trained."""
        if self.loss != "bpr":
            weights = batch.weights[batch.query]
            squares = weights * (batch.y[batch.query] - batch.predictions) ** 2
            sums = np.add.reduceat(squares.astype(np.float64), batch.begins[:-1])
            means: list[float] = (sums / np.add.reduceat(weights, batch.begins[:-1])).tolist()
            return means
        place = np.cumsum(~batch.support) - 1  # of a rating among the queries
        drawn = np.flatnonzero((batch.partner >= 0) & ~batch.support)
        user = np.searchsorted(batch.offsets, drawn, side="right") - 1
        scores = batch.predictions.astype(np.float64)
        gaps = scores[place[drawn]] - scores[place[batch.offsets[user] + batch.partner[drawn]]]
        sums, counts = (np.bincount(user, what, len(batch)) for what in (np.logaddexp(0, gaps), None))
        found: list[float] = (sums / np.maximum(counts, 1)).tolist()
        return found

    def _figures(self, batch: Batch, user: int, asked: frozenset[str]) -> dict[str, float]:
        """Figures that selectors ask for: of the errors, of their gradient, and of how undecided predictions are."""
        guesses, truth = self._predicted(batch, user)
        errors, figures = truth - guesses, {}
        if "rms_loss" in asked:
            figures["rms_loss"] = float(np.sqrt(np.mean(errors**4)))
        if "gradient_norm" in asked:  # of the mean squared error: 2 / n |errors| |d p / d x|
            v = batch.vectors[user].astype(np.float64)
            v[: int(self.biases)] = 1
            figures["gradient_norm"] = float(2 / len(errors) * np.linalg.norm(errors) * np.linalg.norm(v))
        if "entropy" in asked:  # of p(level) ~ exp(-(level - prediction)^2 / 2)
            logs = -((self._scale()[None] - guesses[:, None]) ** 2) / 2
            logs -= np.logaddexp.reduce(logs, axis=1, keepdims=True)
            figures["entropy"] = float(-(np.exp(logs) * logs).sum(1).mean())
        return figures

    def _errors(self, batch: Batch, user: int) -> Arrays:
        """Squared errors in levels, (nearest level - level)^2, a byte a rating."""
        scale = self._scale()
        found, true = (np.abs(scale[None] - v[:, None]).argmin(1) for v in self._predicted(batch, user))
        squares = np.minimum((found - true) ** 2, 255).astype(np.uint8)
        return {"squared_errors": squares, "batch_sizes": np.array([len(squares)], np.int32)}

    def _predicted(self, batch: Batch, user: int) -> tuple[Floats, Floats]:
        """Predictions and ratings of a user's query, on the scale of the ratings."""
        mine = slice(batch.begins[user], batch.begins[user + 1])
        guesses, truth = batch.predictions[mine], batch.y[batch.query[mine]]
        return guesses.astype(np.float64) + self.centre, truth.astype(np.float64) + self.centre

    def _scale(self) -> npt.NDArray[np.float64]:
        return np.array((0.0, 1.0) if self.implicit else self.levels)


def read_round(config: Mapping[str, Scalar]) -> tuple[int, int]:
    """Seed and round of a request; Refused is one that tells what nobody knows here."""
    read_hyperparameters(config, ("mu",))
    return int(config["seed"]), int(config["round"])


def gather_rows(
    requests: Sequence[Request], works: Sequence[Local]
) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.integer[Any]] | None]:
    """A table with the vectors of all items worked on, below each other: the slices sent, or else the item matrix.

    And where the vector of each rating stands in it; None: where the item stands in the matrix.
    """
    first = requests[0].arrays
    if ITEM_ROWS not in first and all(r.arrays is first for r in requests):
        return first[ITEMS], None
    table = concatenate_rows([pick(r.arrays, w.rows) for r, w in zip(requests, works, strict=True)])
    return table, np.arange(len(table), dtype=np.int32)  # as rows of the matrix are: one kernel for both


def pick(arrays: Arrays, rows: npt.NDArray[np.int32]) -> npt.NDArray[np.float32]:
    """The item vectors of these rows, from the whole matrix or from the slice that was asked for."""
    sent = arrays.get(ITEM_ROWS)
    if sent is None:
        return arrays[ITEMS].take(rows, axis=0)
    if len(arrays[ITEMS]) != len(rows) or (sent is not rows and not np.array_equal(sent, rows)):
        raise ValueError("was not sent the rows it asked for")
    return arrays[ITEMS]


def asked_for(config: Mapping[str, Scalar]) -> frozenset[str]:
    """What the server asks for besides arrays and loss: its `extras`, separated by commas."""
    names = frozenset(name.strip() for name in str(config.get("extras", "")).split(",") if name.strip())
    if strange := sorted(names - TOLD - {"squared_errors"}):
        raise ValueError(f"there are no extras {', '.join(strange)}")
    return names
