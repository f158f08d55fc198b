"""A user that keeps a part of the model: it trains item rows and its own part, and ranks what it has not taken yet.

Its own part lies in the site's state under `user.`; item rows, a count of 1 and a loss leave it. To evaluate
it gets all items, ranks those it has not taken, and reports how high the one came that it took next: HR, nDCG and MRR.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from mutirao.core.arrays import Arrays, is_finite
from mutirao.core.bounds import SIZE_CAP, cap_sizes
from mutirao.core.fleet import ClientId, Failure, Fleet, Reply, Request, Site, failure_of
from mutirao.core.hyperparameters import read_hyperparameters
from mutirao.core.rounds import Round, Run
from mutirao.core.validation import fault_of_extras, sift
from mutirao.errors import Refused
from mutirao.randomness import rng
from mutirao.systems.recsys.evaluation import SAMPLED, UserEvaluation, rank_among, summarise_ranks
from mutirao.systems.recsys.fedrecon import ITEM_ROWS, ITEMS, pick
from mutirao.systems.recsys.partially_local.base import Method, Steps, Trained, Work, with_others
from mutirao.systems.recsys.ratings import Ratings, Taste, Users
from mutirao.training.lr_schedules import Constant, Schedule, factor_of

PREFIX = "user."
AT_ONCE = 200  # users that evaluate at a time: so many states are in memory

Rows = npt.NDArray[np.integer[Any]]
NOTHING = np.zeros(0, np.int32)


@dataclass(frozen=True)
class EvaluatedTaste(Taste):
    """What a user took, and the `targets` it evaluates on: items it took later.

    They rank among all items that are not `hidden`, and among `candidates` that were drawn.
    """

    targets: Rows = field(default_factory=lambda: NOTHING)
    ratings: npt.NDArray[np.float32] = field(default_factory=lambda: np.zeros(0, np.float32))  # of the targets
    hidden: Rows = field(default_factory=lambda: NOTHING)
    candidates: Rows = field(default_factory=lambda: NOTHING)


class EvaluatedUsers(Users):
    """A population of users with what each evaluates on."""

    def __init__(self, ratings: Ratings, evaluation: UserEvaluation) -> None:
        super().__init__(ratings)
        self.sought = evaluation.sought
        self.held_out = evaluation.held_out
        self._at = {name: user for user, name in enumerate(self.sought.users)}

    def __getitem__(self, name: str) -> EvaluatedTaste:
        taste = super().__getitem__(name)
        user = self._at.get(name)
        if user is None:  # it withdrew from evaluation
            return EvaluatedTaste(taste.items, taste.values)
        begin, end = self.sought.offsets[user : user + 2]
        targets, ratings = self.sought.items[begin:end], self.sought.values[begin:end]
        if self.held_out is None:
            return EvaluatedTaste(taste.items, taste.values, targets, ratings)
        first, last = np.searchsorted(self.held_out.owners, [user, user + 1])
        hidden = self.held_out.hidden[first:last]
        return EvaluatedTaste(taste.items, taste.values, targets, ratings, hidden, self.held_out.candidates[user])


@dataclass(frozen=True)
class KeptUsers:
    """A handler that answers for users who keep a part of the model, one by one or for `many`."""

    method: Method
    items: int
    dimension: int = 32
    levels: tuple[float, ...] = (1.0,)  # the ratings there are
    negatives: int = 4
    epochs: int = 1
    samples: int = 0
    schedule: Schedule = Constant()
    _first: dict[int, Arrays] = field(default_factory=dict, init=False, repr=False, compare=False)

    @property
    def provides(self) -> frozenset[str]:
        """What users can tell besides their rows."""
        return frozenset({"metrics:loss"})

    @property
    def implicit(self) -> bool:
        """Whether what counts is that an item was taken, not how it was rated."""
        return self.method.implicit

    @property
    def biases(self) -> bool:
        """Whether column 0 of the items holds their biases."""
        return self.method.biases

    @property
    def centre(self) -> float:
        """The middle of the scale, from which ratings are counted."""
        return 0.0 if self.implicit else (self.levels[0] + self.levels[-1]) / 2

    def initial(self, seed: int) -> Arrays:
        """The first item matrix."""
        return {ITEMS: self.method.initial(self.items, self.dimension, rng(seed, 0, "initial"))}

    def __call__(self, request: Request, site: Site) -> Reply:
        """Answer a request to `train` or `evaluate`, or for the `rows` of the items it works on."""
        read_hyperparameters(request.config, ())
        taste = site.data
        if not isinstance(taste, Taste):
            raise ValueError(f"holds {type(taste).__name__}, not ratings")
        if not len(taste):
            raise ValueError("has no ratings to train on")
        if request.do == "rows":
            rows = self.work(taste, request, site.id).rows
            return Reply({}, {ITEMS: rows}, n=1)
        if request.do == "train":
            return self.train(request, site, taste)
        if request.do == "evaluate":
            return self.evaluate(request, site, taste)
        raise ValueError(f"users who keep a part of the model can train and evaluate, not {request.do!r}")

    def many(self, requests: Mapping[ClientId, Request], sites: Mapping[ClientId, Site]) -> dict[ClientId, Any]:
        """The answers of many users: no user's work depends on another's."""
        outcomes: dict[ClientId, Reply | Failure] = {}
        for client in sorted(requests):
            try:
                outcomes[client] = self(requests[client], sites[client])
            except (ValueError, TypeError, LookupError, ArithmeticError, np.linalg.LinAlgError, Refused) as error:
                outcomes[client] = failure_of(error)  # its own failure alone
        return outcomes

    def work(self, taste: Taste, request: Request, client: ClientId, purpose: str = "others") -> Work:
        """What a user works on in a round: its items and others drawn for them, its ratings, or all items."""
        seed, round = int(request.config["seed"]), int(request.config["round"])
        avoid: list[Rows] = [taste.items]  # also of what is left out of a round
        if self.method.spare and isinstance(taste, EvaluatedTaste):
            avoid += [taste.targets, taste.hidden]
        if 0 < self.samples < len(taste):
            keep = np.sort(rng(seed, round, "samples", client).choice(len(taste), self.samples, replace=False))
            taste = Taste(taste.items[keep], taste.values[keep])
        if self.method.whole:
            y = np.ones(len(taste))
            return Work(np.arange(self.items, dtype=np.int32), taste.items.astype(np.int64), y)
        if not self.implicit:
            return Work(taste.items, np.arange(len(taste)), taste.values.astype(np.float64) - self.centre)
        draw = rng(seed, round, purpose, client)
        return with_others(taste.items, self.items, self.negatives, draw, np.concatenate(avoid))

    def own(self, site: Site, seed: int) -> Arrays | None:
        """The user's part as it is kept; None if there is none yet."""
        if not self.method.keeps:
            return {}
        own = {k.removeprefix(PREFIX): v for k, v in site.state.items() if k.startswith(PREFIX)}
        return own or None

    def begin(self, seed: int) -> Arrays:
        """The user's part at first, the same for all."""
        if seed not in self._first:
            self._first.clear()
            self._first[seed] = self.method.begin(self.items, self.dimension, rng(seed, 0, "own part"))
        return self._first[seed]

    def fit(self, x: npt.NDArray[np.float32], own: Arrays, work: Work, request: Request, client: ClientId) -> Trained:
        """What a round's training makes of these rows and of the user's part."""
        seed, round = int(request.config["seed"]), int(request.config["round"])
        steps = Steps(self.items, self.epochs, factor_of(self.schedule, round), round)
        with np.errstate(over="ignore", invalid="ignore"):  # training that diverges is named by the round
            return self.method.train(x.astype(np.float64), own, work, steps, rng(seed, round, "batches", client))

    def train(self, request: Request, site: Site, taste: Taste) -> Reply:
        """A round: the rows leave, the user's part is kept."""
        seed, work = int(request.config["seed"]), self.work(taste, request, site.id)
        own = self.own(site, seed)
        done = self.fit(
            pick(request.arrays, work.rows), self.begin(seed) if own is None else own, work, request, site.id
        )
        if not is_finite(done.own):
            raise ValueError("what the user keeps holds NaN or infinity; try a smaller rate")
        site.state.update({PREFIX + name: array for name, array in done.own.items()})
        return Reply({ITEMS: done.x.astype(np.float32), ITEM_ROWS: work.rows}, {}, {"loss": done.loss}, n=1)

    def evaluate(self, request: Request, site: Site, taste: Taste) -> Reply:
        """How high the targets come, which were not trained on; who has no part yet, or tunes, fits a copy first."""
        if not isinstance(taste, EvaluatedTaste) or not len(taste.targets):
            raise ValueError("has nothing to evaluate on")
        if ITEM_ROWS in request.arrays or len(request.arrays[ITEMS]) != self.items:
            raise ValueError(f"needs all {self.items} items to rank them")
        x, seed = request.arrays[ITEMS], int(request.config["seed"])
        own = self.own(site, seed)
        if own is None or self.method.tunes:
            work = self.work(taste, request, site.id, "others judged")
            done = self.fit(x[work.rows], self.begin(seed) if own is None else own, work, request, site.id)
            own = done.own
            if self.method.tunes:
                x = x.copy()
                x[work.rows] = done.x
        scores = self.method.score(x.astype(np.float64), own, taste)
        if self.implicit:
            return Reply({}, {}, ranked(scores, taste), n=1)
        wrong = np.clip(scores[taste.targets] + self.centre, self.levels[0], self.levels[-1]) - taste.ratings
        figures = {"rmse": float(np.sqrt(np.mean(wrong**2))), "mae": float(np.abs(wrong).mean())}
        return Reply({}, {}, figures, n=len(wrong))


def ranked(scores: npt.NDArray[np.float64], taste: EvaluatedTaste) -> dict[str, float]:
    """HR, nDCG, MRR and recall of one user by its target, among all that are not hidden, and among the candidates."""
    target = scores[taste.targets[0]]
    found = {}
    if len(taste.candidates):
        among = summarise_ranks([rank_among(target, scores[taste.candidates])])
        found = {SAMPLED + name: value for name, value in among.items()}
    scores[taste.hidden] = -np.inf
    return summarise_ranks([rank_among(target, scores) - 1]) | found  # it ties with itself


def metrics_of(method: Method, candidates: int) -> tuple[str, ...]:
    """The names of the metrics that users report."""
    if not method.implicit:
        return ("rmse", "mae")
    names = tuple(summarise_ranks([1]))
    return (*names, *(SAMPLED + name for name in names if candidates))


def evaluate_users(fleet: Fleet, run: Run, metrics: tuple[str, ...], size_cap: float = SIZE_CAP) -> dict[str, float]:
    """The metrics that all users report, each evaluating on its own data.

    Ranks: a mean over users; what is no share is left out. Errors: over all ratings, of squares for `rmse`, nobody
    counting for more than `size_cap` allows.
    """
    sizes: dict[ClientId, int] = {}
    told: dict[ClientId, dict[str, float]] = {}
    config, names = {"seed": run.seed, "round": run.round}, list(fleet.clients())
    for begin in range(0, len(names), AT_ONCE):
        asked = {c: Request("evaluate", run.arrays, config) for c in names[begin : begin + AT_ONCE]}
        for client, reply in sift(fleet.ask(asked), fault_of_extras).replies.items():
            sizes[client], told[client] = reply.n, reply.metrics
    if "rmse" in metrics:
        sizes |= cap_sizes(sizes, run.roster, size_cap)
    found = {}
    for name in metrics:
        errors, power = name in ("rmse", "mae"), 2 if name == "rmse" else 1
        said = [(sizes[c] if errors else 1, m[name]) for c, m in sorted(told.items()) if name in m]
        said = [(n, value) for n, value in said if errors or 0 <= value <= 1]
        if said:
            found[name] = (sum(n * value**power for n, value in said) / sum(n for n, _ in said)) ** (1 / power)
    return found


def evaluated_rounds(
    rounds: Iterable[Round], fleet: Fleet, run: Run, config: Any, metrics: tuple[str, ...]
) -> Iterator[Round]:
    """The rounds, with the metrics that users report every so many, and after the last."""
    for done in rounds:
        if run.round % config.evaluate_every == 0 or run.round == config.rounds:
            done.row.update(evaluate_users(fleet, run, metrics, config.size_cap))
        yield done


def population_of(clients: Ratings, evaluator: object) -> Users:
    """The users as clients, with what they evaluate on if they do it by themselves."""
    if isinstance(evaluator, UserEvaluation):
        return EvaluatedUsers(clients, evaluator)
    return Users(clients)
