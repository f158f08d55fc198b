"""FedRecon: clients share the item matrix; a user's vector is rebuilt when it is needed and then discarded.

A client splits its ratings into a support set and a query set. It fits its vector to the support set with the items
fixed, then trains the items of the query set with the vector fixed. Only these rows leave the client. Singhal,
Sidahmed, Garrett, Wu, Rush and Prakash, 2021: Federated Reconstruction.
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
from mutirao.core.needs import Capabilities
from mutirao.core.sparse_rows import ROWS, concatenate_rows
from mutirao.errors import ConfigError, Refused
from mutirao.randomness import derive_seed, rng
from mutirao.systems.recsys.local_training import (
    Batch,
    SolverSettings,
    UserExamples,
    add_negatives,
    make_batch,
    train_bpr,
    train_squared,
)
from mutirao.systems.recsys.ratings import Taste
from mutirao.training.lr_schedules import Constant, Schedule, factor_of

ITEMS = "items"
ITEM_ROWS = ITEMS + ROWS
SPREAD = 0.1  # standard deviation of the initial vectors
EXTRA_METRICS = frozenset({"entropy", "rms_loss", "gradient_norm"})  # that a server may request

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class FedRecon:
    """A handler for one user, or for `many` at once. User vectors are in no reply and in no state.

    `loss` is `squared` for ratings. For implicit feedback it is `weighted`: 1 for a positive and 0, with the weight
    `negative_weight`, for `negatives` times as many negatives, sampled anew each round (Hu, Koren and Volinsky, 2008,
    with a sample in place of all other items); or `bpr`: -ln sigmoid(p_i - p_j) for a positive i and a negative j
    (Rendle, Freudenthaler, Gantner and Schmidt-Thieme, 2009).

    `others=all` rebuilds vectors against all items, each 0 with the weight `rebuild_weight` (as in Hu, Koren and
    Volinsky), which requires the whole matrix at the client; training still uses sampled negatives. With a `half_life`
    a positive has the weight 2^-(later items / half_life) in a vector for recommendations; in training all have 1.

    `rebuild` is `ridge`: the vector is argmin_v sum_support w (y - p)^2 + ridge |v|^2, solved exactly (`bpr`: by
    Newton's method); or `sgd`: `passes` passes at `rebuild_lr` from v = 0, as in the paper. The items of the query set
    then make `epochs` steps of SGD at rate `lr`.

    With `biases`, p = centre + v_0 + x_0 + sum_{j>0} v_j x_j: column 0 of the items holds their biases. Otherwise
    p = v x.

    >>> FedRecon(items=3706).dimension, FedRecon(items=3706, loss="bpr").implicit
    (50, True)
    """

    items: int
    dimension: int = 50
    levels: tuple[float, ...] = (1.0, 2.0, 3.0, 4.0, 5.0)  # the rating scale
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
    workers: int = field(default=0, repr=False, compare=False)  # 0: one for each core

    def __post_init__(self) -> None:
        weighted_only = {
            "others": self.others != "drawn",
            "rebuild_weight": self.rebuild_weight,
            "half_life": self.half_life,
        }
        if self.loss != "weighted":
            for name, is_set in weighted_only.items():
                if is_set:
                    raise ConfigError(f"{name}: it is for implicit feedback by loss=weighted, not for loss={self.loss}")
        if self.others == "all" and self.rebuild != "ridge":
            raise ConfigError("others=all solves for the vectors: use rebuild=ridge")

    @property
    def capabilities(self) -> Capabilities:
        """What clients can report besides their rows."""
        # A probe uses all ratings, whatever `probe_samples` says: a user has few.
        capabilities = Capabilities(metrics={"loss"}, config={"mu", "probe_samples"})
        if self.loss == "bpr":
            return capabilities
        return capabilities | Capabilities(metrics={"rmse", *EXTRA_METRICS}, extras={"squared_errors"})

    @property
    def implicit(self) -> bool:
        """Whether the data is implicit feedback: items that a user took, without ratings."""
        return self.loss != "squared"

    @property
    def centre(self) -> float:
        """The middle of the scale, to which biases are relative: the prediction for an unknown user and item."""
        if self.biases and not self.implicit:
            return (self.levels[0] + self.levels[-1]) / 2
        return 0.0

    def initial(self, seed: int) -> Arrays:
        """Item vectors from a normal distribution with standard deviation 0.1, biases 0."""
        items = rng(seed, 0, "initial").normal(0, SPREAD, (self.items, self.dimension)).astype(np.float32)
        if self.biases:
            items[:, 0] = 0
        return {ITEMS: items}

    def __call__(self, request: Request, site: Site) -> Reply:
        """Answer a request to `train`, `evaluate` or `probe`, or for the `rows` of the items it trains."""
        seed, round = read_round(request.config)
        return self._answers([request], [self.examples(site.data, site.id, seed, round, request.do)])[0]

    def many(
        self, requests: Mapping[ClientId, Request], sites: Mapping[ClientId, Site]
    ) -> dict[ClientId, Reply | Failure]:
        """The same answers for many users at once: no user's result depends on another's."""
        failures: dict[ClientId, Reply | Failure] = {}
        ready: dict[ClientId, UserExamples] = {}
        config = None
        seed = round = 0
        for client in sorted(requests):
            try:
                request = requests[client]
                if request.config is not config:  # usually one object for all
                    seed, round = read_round(request.config)
                    config = request.config
                ready[client] = self.examples(sites[client].data, client, seed, round, request.do)
            except (ValueError, TypeError, Refused) as error:
                failures[client] = failure_of(error)
        answers = self._answers([requests[c] for c in ready], list(ready.values()))
        return failures | dict(zip(ready, answers, strict=True))

    def examples(self, taste: Taste, client: ClientId, seed: int, round: int, do: str = "train") -> UserExamples:
        """What a user trains on in a round, before negatives are sampled."""
        if not isinstance(taste, Taste):
            raise ValueError(f"expected ratings, got {type(taste).__name__}")
        count = len(taste.items)
        if count < 2:
            raise ValueError(f"has {count} ratings; two are needed, one to rebuild from and one to learn from")
        if 0 < self.samples < count:
            count = max(2, self.samples)
            keep = np.sort(rng(seed, round, "samples", client).choice(len(taste), count, replace=False))
            taste = Taste(taste.items[keep], taste.values[keep])
        if self.implicit:
            return self.positives(taste, derive_seed(seed, round, "others", client), self.support_size(count))
        # No split is sampled for a request for rows: rebuilding uses the support's items, and training the query's.
        if do == "rows":
            return UserExamples(taste.items, taste.values)
        return UserExamples(
            taste.items, taste.values, derive_seed(seed, round, "support", client), self.support_size(count)
        )

    def support_size(self, ratings: int) -> int:
        """The share of the ratings for the support set: at least one, and at least one is left for the query set."""
        return min(max(1, round(self.support * ratings)), ratings - 1)

    def positives(self, taste: Taste, seed: int, support_size: int) -> UserExamples:
        """The items that a user took; negatives and the support set are still to be sampled."""
        if len(taste) >= self.items:
            raise ValueError(f"has taken all {len(taste)} items; no item is left to sample as a negative")
        return UserExamples(taste.items, taste.values, seed, support_size)

    def all_support(self, taste: Taste, seed: int) -> UserExamples:
        """The items that a user took, oldest first, all in the support set, for a vector that recommends."""
        return self.positives(taste, seed, len(taste))._replace(ages=np.arange(len(taste))[::-1])

    def with_negatives(self, users: Sequence[UserExamples]) -> Sequence[UserExamples]:
        """The examples with sampled negatives, for implicit feedback."""
        if not self.implicit or not users:
            return users
        rebuild_weight = self.rebuild_weight or self.negative_weight
        if self.others == "all":
            # The vector is rebuilt against all items, so sampled negatives have no weight there.
            rebuild_weight = 0.0
        weights = (self.negative_weight, rebuild_weight, self.half_life)
        return add_negatives(users, self.items, self.negatives, *weights, compiled=self.compiled)

    def train(self, batch: Batch, epochs: int, proximal: float = 0.0, lr_factor: float = 1.0) -> None:
        """Fill in vectors and predictions of a batch, and train the items of its query sets, in place."""
        train = train_bpr if self.loss == "bpr" else train_squared
        train(self.solver_settings(lr_factor), batch, epochs, proximal)

    def solver_settings(self, lr_factor: float = 1.0) -> SolverSettings:
        """The hyperparameters of local training, with the items' rate times a schedule's factor."""
        passes = 0
        if self.rebuild == "sgd":
            passes = self.passes
        unobserved_weight = 0.0
        if self.others == "all":
            unobserved_weight = self.rebuild_weight or self.negative_weight
        return SolverSettings(
            biases=self.biases,
            ridge=self.ridge,
            ridge_bias=self.ridge_bias,
            passes=passes,
            rebuild_lr=self.rebuild_lr,
            lr=lr_factor * self.lr,
            decay=self.weight_decay,
            unobserved_weight=unobserved_weight,
            compiled=self.compiled,
            workers=self.workers,
        )

    def _answers(self, requests: Sequence[Request], users: Sequence[UserExamples]) -> list[Reply]:
        if not requests:
            return []
        # The sums over all items are computed once for a batch, so users with different models are not in one.
        if self.others == "all" and any(r.arrays is not requests[0].arrays for r in requests):
            return [self._answers([r], [u])[0] for r, u in zip(requests, users, strict=True)]
        do = requests[0].do
        config = requests[0].config
        users = self.with_negatives(users)
        if do == "rows":
            return [Reply({}, {ITEMS: user.rows}, n=len(user.rows)) for user in users]
        if do not in ("train", "evaluate", "probe"):
            raise ValueError(f"FedRecon can train, evaluate and probe, not {do!r}")
        lr_factor = factor_of(self.schedule, int(config["round"]))
        extras = requested_extras(config)
        table, at = gather_rows(requests, users)
        batch = make_batch(users, table, self.centre, self.compiled, at)
        # Without epochs the vectors are rebuilt and the query is predicted, which is all that an evaluation needs.
        epochs = 0
        if do == "train":
            epochs = self.epochs
        with np.errstate(over="ignore", invalid="ignore"):  # the server reports replies that diverged
            self.train(batch, epochs, float(config.get("mu", 0.0)), lr_factor)
            return self._replies(batch, do, extras)

    def _replies(self, batch: Batch, do: str, requested: frozenset[str]) -> list[Reply]:
        """The trained rows of each query set, and metrics of its predictions before training."""
        rows = batch.rows[batch.query]
        losses = self.losses(batch)
        replies = []
        for user, (begin, end) in enumerate(pairwise(batch.query_offsets.tolist())):
            metrics: dict[str, float] = {"loss": losses[user]}
            arrays: Arrays = {}
            extras: Arrays = {}
            if do == "train":
                arrays = {ITEMS: batch.trained[begin:end], ITEM_ROWS: rows[begin:end]}
            if do == "evaluate" and self.loss != "bpr":
                metrics["rmse"] = losses[user] ** 0.5
            if requested:
                metrics |= self._extra_metrics(batch, user, requested)
            if "squared_errors" in requested:
                extras = self._squared_errors(batch, user)
            replies.append(Reply(arrays, extras, metrics, end - begin))
        return replies

    def losses(self, batch: Batch) -> list[float]:
        """The mean loss of each user's query set, before its items were trained."""
        if self.loss == "bpr":
            return self._bpr_losses(batch)
        weights = batch.weights[batch.query]
        # `reduceat` is wrong for an empty slice, but `support_size` leaves an example for the query set of every user.
        squares = weights * (batch.y[batch.query] - batch.predictions) ** 2
        sums = np.add.reduceat(squares.astype(np.float64), batch.query_offsets[:-1])
        means: list[float] = (sums / np.add.reduceat(weights, batch.query_offsets[:-1])).tolist()
        return means

    def _bpr_losses(self, batch: Batch) -> list[float]:
        place = np.cumsum(~batch.support) - 1  # index of an example among those of the query sets
        negatives = np.flatnonzero((batch.partner >= 0) & ~batch.support)
        user = np.searchsorted(batch.offsets, negatives, side="right") - 1
        scores = batch.predictions.astype(np.float64)
        gaps = scores[place[negatives]] - scores[place[batch.offsets[user] + batch.partner[negatives]]]
        sums = np.bincount(user, np.logaddexp(0, gaps), len(batch))
        means: list[float] = (sums / np.maximum(np.bincount(user, minlength=len(batch)), 1)).tolist()
        return means

    def _extra_metrics(self, batch: Batch, user: int, requested: frozenset[str]) -> dict[str, float]:
        """Metrics for selectors: of the errors, of their gradient, and of the uncertainty of predictions."""
        predictions, truth = self._predicted(batch, user)
        errors = truth - predictions
        metrics = {}
        if "rms_loss" in requested:
            metrics["rms_loss"] = float(np.sqrt(np.mean(errors**4)))
        if "gradient_norm" in requested:
            # Of the mean squared error: 2 / n |errors| |dp/dx|.
            v = batch.vectors[user].astype(np.float64)
            v[: int(self.biases)] = 1
            metrics["gradient_norm"] = float(2 / len(errors) * np.linalg.norm(errors) * np.linalg.norm(v))
        if "entropy" in requested:
            # Of p(level) ~ exp(-(level - prediction)^2 / 2).
            logs = -((self._scale()[None] - predictions[:, None]) ** 2) / 2
            logs -= np.logaddexp.reduce(logs, axis=1, keepdims=True)
            metrics["entropy"] = float(-(np.exp(logs) * logs).sum(1).mean())
        return metrics

    def _squared_errors(self, batch: Batch, user: int) -> Arrays:
        """Squared errors in levels, (predicted level - level)^2, one byte for each rating."""
        scale = self._scale()
        predicted, true = (np.abs(scale[None] - v[:, None]).argmin(1) for v in self._predicted(batch, user))
        squares = np.minimum((predicted - true) ** 2, 255).astype(np.uint8)
        return {"squared_errors": squares, "batch_sizes": np.array([len(squares)], np.int32)}

    def _predicted(self, batch: Batch, user: int) -> tuple[Floats, Floats]:
        """Predictions and ratings of a user's query set, on the rating scale."""
        of_user = slice(batch.query_offsets[user], batch.query_offsets[user + 1])
        predictions = batch.predictions[of_user].astype(np.float64)
        truth = batch.y[batch.query[of_user]].astype(np.float64)
        return predictions + self.centre, truth + self.centre

    def _scale(self) -> Floats:
        return np.array((0.0, 1.0) if self.implicit else self.levels)


def read_round(config: Mapping[str, Scalar]) -> tuple[int, int]:
    """Seed and round of a request. Raises Refused for hyperparameters other than mu."""
    read_hyperparameters(config, ("mu",))
    return int(config["seed"]), int(config["round"])


def gather_rows(
    requests: Sequence[Request], users: Sequence[UserExamples]
) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.integer[Any]] | None]:
    """A table of item vectors, and the row of each example in it (None: the item's row in the matrix).

    The table is the item matrix if all users got it, otherwise the slices that they got, one below the other.
    """
    first = requests[0].arrays
    if ITEM_ROWS not in first and all(r.arrays is first for r in requests):
        return first[ITEMS], None
    table = concatenate_rows([item_vectors(r.arrays, u.rows) for r, u in zip(requests, users, strict=True)])
    return table, np.arange(len(table), dtype=np.int32)  # the dtype of rows, so that one compiled kernel serves both


def item_vectors(arrays: Arrays, rows: npt.NDArray[np.int32]) -> npt.NDArray[np.float32]:
    """The vectors of these items, from the whole matrix or from the slice that the client asked for."""
    sent = arrays.get(ITEM_ROWS)
    if sent is None:
        return arrays[ITEMS].take(rows, axis=0)
    # Compiled kernels check no bounds: a slice of another length would be read beyond its end.
    if len(arrays[ITEMS]) != len(rows) or (sent is not rows and not np.array_equal(sent, rows)):
        raise ValueError("was not sent the rows it asked for")
    return arrays[ITEMS]


def requested_extras(config: Mapping[str, Scalar]) -> frozenset[str]:
    """The extra metrics and arrays that a server requests in `extras`, separated by commas."""
    names = frozenset(name.strip() for name in str(config.get("extras", "")).split(",") if name.strip())
    if unknown := sorted(names - EXTRA_METRICS - {"squared_errors"}):
        raise ValueError(f"there are no extras {', '.join(unknown)}")
    return names
