"""`mutirao drill ratings`: what the server can read from a recommender's updates under each privacy setting.

Clients of the recsys recipe answer as they would in a run. The attack of `rating_attack` reads their updates, knowing
all settings and how people rate in general.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from mutirao.config import resolve
from mutirao.core.arrays import Arrays
from mutirao.core.fleet import Answers, ClientId, Fleet, Request, Site, Wrapper
from mutirao.core.rounds import Run
from mutirao.experiments.task import Task, find
from mutirao.io import write_whole
from mutirao.privacy.accounting import add_releases, epsilon
from mutirao.privacy.secure_aggregation.settings import MASKED
from mutirao.privacy.trials import Trial, align_columns
from mutirao.randomness import rng
from mutirao.report.plots import BRIGHT, INK, add_legend, blank, save, tidy
from mutirao.simulation.local_fleet import LocalFleet
from mutirao.systems.recsys.fedrecon import ITEM_ROWS, ITEMS, FedRecon
from mutirao.systems.recsys.item_aggregation import TOUCHES
from mutirao.systems.recsys.rating_attack import (
    Attacker,
    Exposure,
    Reading,
    average_exposures,
    interaction_prior,
    measure_exposure,
    rating_prior,
    read_sum,
    top_indices,
)
from mutirao.systems.recsys.ratings import Ratings

HONEST_ROUNDS = 5  # of training before the attacked round
MAX_GAIN = 0.05  # how far above guessing a private setting may be read
DELTA = 1e-5
Settings = Mapping[str, Any]
SettingsKey = tuple[tuple[str, Any], ...]


@dataclass(frozen=True)
class RatingDrill:
    """What to attack: the data, how many users one by one, and how many users in each sum."""

    data: str = "generated"
    users: int = 40
    summed: int = 50
    seed: int = 0


@dataclass(frozen=True)
class Rule:
    """Settings of a run and the attack on it. If `private`, nothing above guessing may be read."""

    name: str
    settings: Settings
    read: Callable[["Target", "Rule"], list[Exposure]]
    private: bool = False
    noise: float = 0.0  # standard deviation added to each number of an update
    clip: float = 0.0
    loss: str = "squared"

    @property
    def epsilon(self) -> float | None:
        """Privacy cost of one update, if the user adds enough noise on its own."""
        if self.settings.get("privacy") != "local" or self.noise < 1e-3:
            return None
        return epsilon(add_releases(None, self.noise / 2, 1.0, 1), DELTA)


@dataclass
class RuleResult:
    """What the server read under one rule."""

    rule: Rule
    exposure: Exposure

    def to_json(self) -> dict[str, Any]:
        """The rule and its figures."""
        rule = {"rule": self.rule.name, "loss": self.rule.loss, "private": self.rule.private}
        rule |= {"settings": dict(self.rule.settings), "epsilon": self.rule.epsilon}
        return rule | asdict(self.exposure) | {"gain": self.exposure.gain, "learned": self.exposure.learned}


class Target:
    """The attacked users, the model that they receive, and the server's prior of how people rate."""

    def __init__(self, drill: RatingDrill, loss: str) -> None:
        self.drill = drill
        self.base: dict[str, Any] = {"data": drill.data, "loss": loss, "seed": drill.seed, "rounds": HONEST_ROUNDS}
        if loss != "squared":
            self.base |= {"ridge": 1.0, "lr": 0.4}
        task = self.task({})
        clients = sorted(task.population)
        order = rng(drill.seed, 0, "drilled").permutation(len(clients))
        self.users = [clients[i] for i in order[: max(drill.users, drill.summed)]]
        method: Any = task.handler
        self.method: FedRecon = method
        # The users that the model is evaluated on are not attacked: they stand for public ratings.
        public: Ratings = vars(task.evaluate)["ratings"]
        if self.method.implicit:
            self.levels = np.array((0.0, 1.0))
            self.prior = interaction_prior(public, self.method.negatives)
        else:
            self.levels = np.array(self.method.levels)
            self.prior = rating_prior(public, self.levels)
        recipe = find("recsys")
        config = resolve(recipe.config, {}, list(self.base.items()))
        run = Run(task.initial(), seed=config.seed)
        for _ in recipe.flow(LocalFleet(task.handler, task.population), config, task, run):
            pass
        self.items = run.arrays[ITEMS]

    @cache  # noqa: B019  # a target lives as long as the drill
    def cached_task(self, settings: SettingsKey) -> Task:
        """The recipe's task, built once for each set of settings."""
        recipe = find("recsys")
        return recipe.prepare(resolve(recipe.config, {}, [*self.base.items(), *settings]))

    def task(self, settings: Settings) -> Task:
        """The recipe's task with these settings."""
        return self.cached_task(tuple(sorted(settings.items())))

    def request(self, task: Task, do: str = "train") -> Request:
        """The request of the attacked round."""
        arrays: Arrays = {}
        if do == "train":
            arrays[ITEMS] = self.items
            if TOUCHES in task.initial():
                arrays[TOUCHES] = np.zeros(len(self.items), np.float32)
        return Request(do, arrays, {"seed": self.drill.seed, "round": HONEST_ROUNDS + 1})

    def attacker(self, rule: Rule) -> Attacker:
        """An attacker with the settings of the rule."""
        method = replace(self.method, epochs=int(rule.settings.get("epochs", self.method.epochs)))
        return Attacker(
            method, clip=rule.clip, noise=rule.noise, prior=self.prior.shares, popularity=self.prior.popularity
        )

    def query(self, user: ClientId) -> dict[int, float]:
        """The ratings (or 1 and 0 for implicit feedback) of the items that the user's update trains."""
        data = self.task({}).population[user]
        work = self.method.with_negatives([self.method.examples(data, user, self.drill.seed, HONEST_ROUNDS + 1)])[0]
        truth = dict(zip(work.rows.tolist(), work.y.tolist(), strict=True))
        request = Request("train", {ITEMS: self.items}, {"seed": self.drill.seed, "round": HONEST_ROUNDS + 1})
        rows = self.method(request, Site(user, data)).arrays[ITEM_ROWS].tolist()
        return {i: truth[i] for i in rows if i in truth}

    def evaluate(self, query: Mapping[int, float], values: Mapping[int, float], items: Sequence[int]) -> Exposure:
        """Compare the `values` and `items` that were read with a user's query."""
        return measure_exposure(query, self.private_items(query), values, items, self.prior, self.levels)

    def private_items(self, query: Mapping[int, float]) -> list[int]:
        """The items that the user rated or took. Sampled negatives are not private."""
        return [i for i, value in query.items() if value > 0 or not self.method.implicit]


# Attacks: on single updates, on masked updates, and on sums


def read_single(target: Target, rule: Rule) -> list[Exposure]:
    """Read single updates as clients send them."""
    task = target.task(rule.settings)
    attacker = target.attacker(rule)
    exposures = []
    for user in target.users[: target.drill.users]:
        site = Site(user, task.population[user])
        requested = None
        if "download" not in rule.settings:
            requested = task.handler(target.request(task, "rows"), site).extras[ITEMS]
        reply = task.handler(target.request(task), site).arrays
        reading = attacker({ITEMS: target.items}, reply, requested)
        query = target.query(user)
        values: dict[int, float] = {}
        if reading.is_sure or rule.noise:
            values = reading.ratings()
        if rule.noise:
            items = guess_items(target, reading, len(target.private_items(query)))
        else:
            items = [i for i, value in values.items() if value > 0 and i in reading.rows]
        exposures.append(target.evaluate(query, values, items))
    return exposures


def guess_items(target: Target, reading: Reading, count: int) -> list[int]:
    """The `count` items that a user most likely rated, when noise moved all rows."""
    score = np.log(target.prior.popularity[reading.rows])
    if reading.strength is not None:
        strength = reading.strength
        # A rating moves its row either way. Of implicit feedback only positives move along the user's vector.
        if not target.method.implicit:
            strength = np.abs(strength)
        score += np.sign(strength) * strength**2 / 2
    return [int(reading.rows[i]) for i in top_indices(score, count)]


class RecordingFleet(Wrapper):
    """A fleet that records masked replies, as a curious server could."""

    def __init__(self, fleet: Fleet) -> None:
        super().__init__(fleet)
        self.masked: dict[ClientId, Arrays] = {}

    def ask(self, requests: Mapping[ClientId, Request]) -> Answers:
        """Forward the requests and record the masked replies."""
        answers = self.fleet.ask(requests)
        self.masked |= {c: r.arrays for c, r in answers.replies.items() if requests[c].do == MASKED}
        return answers


@cache
def secure_sum(target: Target, settings: SettingsKey) -> tuple[dict[ClientId, Arrays], npt.NDArray[np.float64]]:
    """What the server receives in secure aggregation: each user's masked update, and the sum of all."""
    task = target.task(dict(settings))
    fleet = RecordingFleet(LocalFleet(task.worker, task.population))
    users = target.users[: target.drill.summed]
    answers = task.secure.at_server(fleet, task.capabilities.metrics).ask(dict.fromkeys(users, target.request(task)))
    mean = next(iter(answers.replies.values())).arrays[ITEMS]
    return fleet.masked, len(answers.replies) * (mean.astype(np.float64) - target.items)


def read_masked(target: Target, rule: Rule) -> list[Exposure]:
    """Read single masked updates as if they were not masked."""
    masked, _ = secure_sum(target, tuple(sorted(rule.settings.items())))
    attacker = target.attacker(rule)
    exposures = []
    for user, arrays in masked.items():
        words = arrays["update"][: target.items.size].astype(np.float64).reshape(target.items.shape)
        reading = attacker({ITEMS: target.items}, {ITEMS: words / float(np.abs(words).max())})
        exposures.append(complete_with_prior(target, user, reading.ratings() if reading.is_sure else {}))
    return exposures


def read_sums(target: Target, rule: Rule) -> list[Exposure]:
    """Read the sum. What was read is credited to the right user, although the sum does not say who that is."""
    masked, change = secure_sum(target, tuple(sorted(rule.settings.items())))
    values: dict[int, float] = {}
    for reading in read_sum(target.attacker(rule), {ITEMS: target.items}, change):
        values |= reading.ratings()
    return [complete_with_prior(target, user, values) for user in masked]


def complete_with_prior(target: Target, user: ClientId, values: Mapping[int, float]) -> Exposure:
    """What was read, completed by the most popular items, each with its most frequent rating."""
    query = target.query(user)
    private = target.private_items(query)
    known = {i: value for i, value in values.items() if i in query}
    popular = [i for i in top_indices(target.prior.popularity, len(target.items)) if i not in known]
    items = [*(i for i in known if i in private), *popular]
    return target.evaluate(query, known, items[: len(private)])


def rules_of(drill: RatingDrill) -> list[Rule]:
    """All rules of the drill."""
    masked = {"secure": "secagg+", "download": "all"}
    noised = {**masked, "privacy": "central", "secure.noise": 1 / drill.summed**0.5}
    local = {"privacy": "local", "download": "all"}
    summed = f"secagg+, sum of {drill.summed}"
    local_noise = [
        Rule(f"privacy=local, noise {z:g}", {**local, "privacy.noise": z}, read_single, z >= 1, z, 1.0)
        for z in (0.03, 0.1, 0.3, 1.0)
    ]
    return [
        Rule("as it is (download=touched)", {}, read_single),
        Rule("download=all", {"download": "all"}, read_single),
        Rule("privacy=central, at the server", {"download": "all", "privacy": "central"}, read_single),
        Rule("epochs=5", {"download": "all", "epochs": 5}, read_single),
        Rule("clipped to 1, hardly any noise", {**local, "privacy.noise": 1e-9}, read_single, clip=1.0),
        *local_noise,
        Rule("secagg+, one masked update", masked, read_masked, private=True),
        Rule(summed, masked, read_sums),
        Rule(f"{summed}, central noise by users", noised, read_sums, private=True),
        Rule("taken: as it is", {}, read_single, loss="weighted"),
        Rule("taken: privacy=local, noise 1", {**local, "privacy.noise": 1.0}, read_single, True, 1.0, 1.0, "weighted"),
        Rule(f"taken: {summed}", masked, read_sums, loss="weighted"),
        Rule(f"taken: {summed}, central noise by users", noised, read_sums, private=True, loss="weighted"),
    ]


# The drill and its table and picture


def drill_ratings(folder: Path, trial: Trial, drill: RatingDrill) -> None:
    """Read updates under every rule; write a table, a picture and figures to the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    targets = {loss: Target(drill, loss) for loss in ("squared", "weighted")}
    results = []
    for rule in rules_of(drill):
        results.append(RuleResult(rule, average_exposures(rule.read(targets[rule.loss], rule))))
    trial.facts["table"] = table_of(results)
    plain = results[0].exposure
    worst = max(r.exposure.learned for r in results if r.rule.private)
    trial.good = plain.read == 1.0 and worst <= MAX_GAIN
    trial.happened = (
        f"{plain.read:.1%} of {plain.ratings} ratings read as it is, {plain.guessed:.1%} by guessing the mean; "
        f"where nothing should be, at most {100 * worst:+.1f} points above guesses"
    )
    figures = {"data": drill.data, "users": drill.users, "summed": drill.summed, "told": [r.to_json() for r in results]}
    write_whole(folder / "ratings.json", json.dumps(figures, indent=2) + "\n")
    draw_exposure(results, folder / "ratings.png")


def table_of(results: Sequence[RuleResult]) -> list[str]:
    """One line for each rule."""
    read = ("ratings read", "user's mean", "points above", "usual")
    rows = [["", "epsilon", *read, "items: precision", "recall", "popular"]]
    for result in results:
        e = result.exposure
        cost = result.rule.epsilon
        epsilon_cell = "" if cost is None else f"{cost:.3g}"
        shares = [f"{share:.1%}" for share in (e.read, e.guessed, e.usual, e.precision, e.recall, e.popular)]
        rows.append([result.rule.name, epsilon_cell, *shares[:2], f"{100 * e.gain:+.1f}", *shares[2:]])
    return align_columns(rows)


def draw_exposure(results: Sequence[RuleResult], path: Path) -> None:
    """Bars of the ratings and items that were read, beside guesses. Private rules are in bold."""
    figure, sides = blank(11.0, 0.34 * len(results) + 1.6, 1, 2, sharey=True)
    places = list(range(len(results)))[::-1]
    exposures = [result.exposure for result in results]
    ratings = ([e.read for e in exposures], [e.guessed for e in exposures])
    items = ([e.precision for e in exposures], [e.popular for e in exposures])
    panels = (
        ("ratings stated rightly", *ratings, "the user's mean rating"),
        ("items named rightly", *items, "the most popular"),
    )
    for axes, (title, read, guessed, guess), colour in zip(sides, panels, BRIGHT, strict=False):
        axes.barh(places, read, height=0.62, color=colour, label="read")
        axes.scatter(guessed, places, marker="|", s=170, linewidths=2.2, color=INK, label=f"guessed: {guess}", zorder=3)
        axes.set(xlim=(0, 1.02), title=title)
        axes.set_xticks([0, 0.25, 0.5, 0.75, 1], ["0", "25%", "50%", "75%", "100%"])
        axes.set_yticks(places, [result.rule.name for result in results])
        add_legend(axes, loc="upper center", bbox_to_anchor=(0.5, -0.06), ncols=2)
        tidy(axes, "x")
    for label, result in zip(sides[0].get_yticklabels(), results, strict=True):
        label.set_fontweight("bold" if result.rule.private else "normal")
    save(figure, path)
