"""The client of methods with personal parameters: it trains item rows and its own parameters, and evaluates the model.

Personal parameters are in the site's state, with the prefix `user.`. Item rows, a count of 1 and a loss are sent. For
evaluation a client gets all items, ranks those that it has not taken, and reports HR, nDCG and MRR of its targets.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from mutirao.core.arrays import Arrays, is_finite
from mutirao.core.fleet import ClientId, Failure, Fleet, Reply, Request, Site, failure_of
from mutirao.core.hyperparameters import read_hyperparameters
from mutirao.core.needs import Capabilities
from mutirao.core.rounds import Round, Run
from mutirao.core.validation import SIZE_CAP, cap_sizes, fault_of_extras, sift
from mutirao.errors import Refused
from mutirao.randomness import rng
from mutirao.systems.recsys.evaluation import SAMPLED, UserEvaluation, rank_among, summarise_ranks
from mutirao.systems.recsys.fedrecon import ITEM_ROWS, ITEMS, item_vectors
from mutirao.systems.recsys.partially_local.base import Examples, Method, RoundSettings, TrainResult, with_negatives
from mutirao.systems.recsys.ratings import Ratings, Taste, Users
from mutirao.training.lr_schedules import Constant, Schedule, factor_of

PREFIX = "user."
AT_ONCE = 200  # users that evaluate at a time, which bounds the states in memory

Rows = npt.NDArray[np.integer[Any]]
EMPTY = np.zeros(0, np.int32)


@dataclass(frozen=True)
class EvaluatedTaste(Taste):
    """Items that a user took, and the later `targets` that it is evaluated on.

    Targets are ranked among all items that are not `hidden`, and among the sampled `candidates`.
    """

    targets: Rows = field(default_factory=lambda: EMPTY)
    ratings: npt.NDArray[np.float32] = field(default_factory=lambda: np.zeros(0, np.float32))  # of the targets
    hidden: Rows = field(default_factory=lambda: EMPTY)
    candidates: Rows = field(default_factory=lambda: EMPTY)


class EvaluatedUsers(Users):
    """A population of users with their evaluation data."""

    def __init__(self, ratings: Ratings, evaluation: UserEvaluation) -> None:
        super().__init__(ratings)
        self.targets = evaluation.targets
        self.held_out = evaluation.held_out
        self._at = {name: user for user, name in enumerate(self.targets.users)}

    def __getitem__(self, name: str) -> EvaluatedTaste:
        taste = super().__getitem__(name)
        user = self._at.get(name)
        if user is None:  # it withdrew from evaluation
            return EvaluatedTaste(taste.items, taste.values)
        begin, end = self.targets.offsets[user : user + 2]
        targets = self.targets.items[begin:end]
        ratings = self.targets.values[begin:end]
        if self.held_out is None:
            return EvaluatedTaste(taste.items, taste.values, targets, ratings)
        first, last = np.searchsorted(self.held_out.owners, [user, user + 1])
        hidden = self.held_out.hidden[first:last]
        return EvaluatedTaste(taste.items, taste.values, targets, ratings, hidden, self.held_out.candidates[user])


@dataclass(frozen=True)
class PartiallyLocal:
    """A handler for users with personal parameters, one by one or for `many`."""

    method: Method
    items: int
    dimension: int = 32
    levels: tuple[float, ...] = (1.0,)  # the rating scale
    negatives: int = 4
    epochs: int = 1
    samples: int = 0
    schedule: Schedule = Constant()
    _initial: dict[int, Arrays] = field(default_factory=dict, init=False, repr=False, compare=False)

    @property
    def capabilities(self) -> Capabilities:
        """What users can report besides their rows."""
        return Capabilities(metrics={"loss"})

    @property
    def implicit(self) -> bool:
        """Whether the data is implicit feedback: items that a user took, without ratings."""
        return self.method.implicit

    @property
    def biases(self) -> bool:
        """Whether column 0 of the items holds their biases."""
        return self.method.biases

    @property
    def centre(self) -> float:
        """The middle of the scale, to which ratings are relative."""
        if self.implicit:
            return 0.0
        return (self.levels[0] + self.levels[-1]) / 2

    def initial(self, seed: int) -> Arrays:
        """The initial item matrix."""
        return {ITEMS: self.method.initial(self.items, self.dimension, rng(seed, 0, "initial"))}

    def __call__(self, request: Request, site: Site) -> Reply:
        """Answer a request to `train` or `evaluate`, or for the `rows` of the items it trains."""
        read_hyperparameters(request.config, ())
        taste = site.data
        if not isinstance(taste, Taste):
            raise ValueError(f"expected ratings, got {type(taste).__name__}")
        if not len(taste):
            raise ValueError("has no ratings to train on")
        if request.do == "rows":
            rows = self.examples(taste, request, site.id).rows
            return Reply({}, {ITEMS: rows}, n=1)
        if request.do == "train":
            return self.train(request, site, taste)
        if request.do == "evaluate":
            return self.evaluate(request, site, taste)
        raise ValueError(f"users with personal parameters can train and evaluate, not {request.do!r}")

    def many(self, requests: Mapping[ClientId, Request], sites: Mapping[ClientId, Site]) -> dict[ClientId, Any]:
        """The answers of many users: no user's result depends on another's."""
        outcomes: dict[ClientId, Reply | Failure] = {}
        for client in sorted(requests):
            try:
                outcomes[client] = self(requests[client], sites[client])
            except (ValueError, TypeError, LookupError, ArithmeticError, np.linalg.LinAlgError, Refused) as error:
                outcomes[client] = failure_of(error)  # its own failure alone
        return outcomes

    def examples(self, taste: Taste, request: Request, client: ClientId, purpose: str = "others") -> Examples:
        """What a user trains on in a round: positives and sampled negatives, its ratings, or all items."""
        seed = int(request.config["seed"])
        round = int(request.config["round"])
        # Before `samples` leaves some out: an item that the user took is never a negative.
        excluded: list[Rows] = [taste.items]
        if self.method.spare and isinstance(taste, EvaluatedTaste):
            excluded += [taste.targets, taste.hidden]
        if 0 < self.samples < len(taste):
            keep = np.sort(rng(seed, round, "samples", client).choice(len(taste), self.samples, replace=False))
            taste = Taste(taste.items[keep], taste.values[keep])
        if self.method.trains_all_items:
            y = np.ones(len(taste))
            return Examples(np.arange(self.items, dtype=np.int32), taste.items.astype(np.int64), y)
        if not self.implicit:
            return Examples(taste.items, np.arange(len(taste)), taste.values.astype(np.float64) - self.centre)
        draw = rng(seed, round, purpose, client)
        return with_negatives(taste.items, self.items, self.negatives, draw, np.concatenate(excluded))

    def personal(self, site: Site, seed: int) -> Arrays:
        """The user's personal parameters, or the initial ones, which are the same for all users."""
        stored = self.stored_personal(site)
        if stored is not None:
            return stored
        if seed not in self._initial:
            self._initial.clear()
            draw = rng(seed, 0, "own part")
            self._initial[seed] = self.method.initial_personal(self.items, self.dimension, draw)
        return self._initial[seed]

    def stored_personal(self, site: Site) -> Arrays | None:
        """The stored personal parameters; None if the user has not trained yet."""
        if not self.method.keeps_personal:
            return {}
        stored = {k.removeprefix(PREFIX): v for k, v in site.state.items() if k.startswith(PREFIX)}
        return stored or None

    def fit(
        self, x: npt.NDArray[np.float32], personal: Arrays, examples: Examples, request: Request, client: ClientId
    ) -> TrainResult:
        """Train these item rows and personal parameters for one round."""
        seed = int(request.config["seed"])
        round = int(request.config["round"])
        settings = RoundSettings(self.items, self.epochs, factor_of(self.schedule, round), round)
        with np.errstate(over="ignore", invalid="ignore"):  # the server reports replies that diverged
            draw = rng(seed, round, "batches", client)
            return self.method.train(x.astype(np.float64), personal, examples, settings, draw)

    def train(self, request: Request, site: Site, taste: Taste) -> Reply:
        """Train for a round: item rows are sent, personal parameters are stored."""
        examples = self.examples(taste, request, site.id)
        x = item_vectors(request.arrays, examples.rows)
        personal = self.personal(site, int(request.config["seed"]))
        result = self.fit(x, personal, examples, request, site.id)
        # The server checks rows, but never sees these parameters, and the site would keep NaN in all later rounds.
        if not is_finite(result.personal):
            raise ValueError("personal parameters are NaN or infinite; try a smaller learning rate")
        site.state.update({PREFIX + name: array for name, array in result.personal.items()})
        arrays = {ITEMS: result.x.astype(np.float32), ITEM_ROWS: examples.rows}
        return Reply(arrays, {}, {"loss": result.loss}, n=1)

    def evaluate(self, request: Request, site: Site, taste: Taste) -> Reply:
        """Rank the targets. Users without stored parameters, and methods that tune, train a copy first."""
        if not isinstance(taste, EvaluatedTaste) or not len(taste.targets):
            raise ValueError("has nothing to evaluate on")
        if ITEM_ROWS in request.arrays or len(request.arrays[ITEMS]) != self.items:
            raise ValueError(f"needs all {self.items} items to rank them")
        x = request.arrays[ITEMS]
        personal = self.stored_personal(site)
        if personal is None or self.method.tunes:
            examples = self.examples(taste, request, site.id, "others judged")
            initial = self.personal(site, int(request.config["seed"]))
            result = self.fit(x[examples.rows], initial, examples, request, site.id)
            personal = result.personal
            if self.method.tunes:
                x = x.copy()
                x[examples.rows] = result.x
        scores = self.method.score(x.astype(np.float64), personal, taste)
        if self.implicit:
            return Reply({}, {}, rank_metrics(scores, taste), n=1)
        predictions = np.clip(scores[taste.targets] + self.centre, self.levels[0], self.levels[-1])
        errors = predictions - taste.ratings
        metrics = {"rmse": float(np.sqrt(np.mean(errors**2))), "mae": float(np.abs(errors).mean())}
        return Reply({}, {}, metrics, n=len(errors))


def rank_metrics(scores: npt.NDArray[np.float64], taste: EvaluatedTaste) -> dict[str, float]:
    """HR, nDCG, MRR and recall of one user's target, among all items that are not hidden and among the candidates."""
    target = scores[taste.targets[0]]
    sampled = {}
    if len(taste.candidates):
        among = summarise_ranks([rank_among(target, scores[taste.candidates])])
        sampled = {SAMPLED + name: value for name, value in among.items()}
    scores[taste.hidden] = -np.inf
    # The target is among the items and ties with itself.
    return summarise_ranks([rank_among(target, scores) - 1]) | sampled


def metrics_of(method: Method, candidates: int) -> tuple[str, ...]:
    """The names of the metrics that users report."""
    if not method.implicit:
        return ("rmse", "mae")
    names = tuple(summarise_ranks([1]))
    return (*names, *(SAMPLED + name for name in names if candidates))


def evaluate_users(fleet: Fleet, run: Run, metrics: tuple[str, ...], size_cap: float = SIZE_CAP) -> dict[str, float]:
    """Averages of the metrics that all users report from their own data.

    Ranking metrics are means over users; values outside of 0 to 1 are ignored. Errors are means over ratings (of
    squares for `rmse`), with the weights of users capped by `size_cap`.
    """
    sizes: dict[ClientId, int] = {}
    reported: dict[ClientId, dict[str, float]] = {}
    config = {"seed": run.seed, "round": run.round}
    names = list(fleet.clients())
    for begin in range(0, len(names), AT_ONCE):
        requests = {c: Request("evaluate", run.arrays, config) for c in names[begin : begin + AT_ONCE]}
        for client, reply in sift(fleet.ask(requests), fault_of_extras).replies.items():
            sizes[client] = reply.n
            reported[client] = reply.metrics
    if "rmse" in metrics:
        sizes |= cap_sizes(sizes, run.roster, size_cap)
    averages = {}
    for name in metrics:
        is_error = name in ("rmse", "mae")
        power = 2 if name == "rmse" else 1
        total = 0.0
        weights = 0
        for client, values in sorted(reported.items()):
            if name in values and (is_error or 0 <= values[name] <= 1):
                weight = 1
                if is_error:
                    weight = sizes[client]
                total += weight * values[name] ** power
                weights += weight
        if weights:
            averages[name] = (total / weights) ** (1 / power)
    return averages


def evaluated_rounds(
    rounds: Iterable[Round], fleet: Fleet, run: Run, config: Any, metrics: tuple[str, ...]
) -> Iterator[Round]:
    """The rounds, with the metrics that users report at the evaluation interval and after the last round."""
    for done in rounds:
        if run.round % config.evaluate_every == 0 or run.round == config.rounds:
            done.row.update(evaluate_users(fleet, run, metrics, config.size_cap))
        yield done


def population_of(clients: Ratings, evaluator: object) -> Users:
    """The users as clients, with evaluation data if they evaluate the model themselves."""
    if isinstance(evaluator, UserEvaluation):
        return EvaluatedUsers(clients, evaluator)
    return Users(clients)
