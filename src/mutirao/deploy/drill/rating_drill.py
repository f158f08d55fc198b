"""`mutirao drill ratings`: what the updates of a recommender's users tell its server, under each setting.

Users of the recipe are asked as a server asks them, by the very code that answers at a site; what comes back is read
by the attacks of `mutirao.systems.recsys`, which know all settings and what people in general rate.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from mutirao.config import resolve
from mutirao.core.arrays import Arrays
from mutirao.core.fleet import Answers, ClientId, Fleet, Request, Site, Wrapper
from mutirao.core.rounds import Run
from mutirao.deploy.drill.trials import Trial, in_columns
from mutirao.experiments.task import Task, find
from mutirao.io import write_whole
from mutirao.privacy.accounting import add_releases, epsilon
from mutirao.privacy.secure_aggregation.settings import MASKED
from mutirao.randomness import rng
from mutirao.simulation.local_fleet import LocalFleet
from mutirao.systems.recsys.attack_plot import draw_exposure
from mutirao.systems.recsys.evaluation import (
    Exposure,
    evaluate_reading,
    join_exposures,
    most_likely,
    usual_ratings,
    usual_takings,
)
from mutirao.systems.recsys.fedrecon import ITEM_ROWS, ITEMS, FedRecon
from mutirao.systems.recsys.item_aggregation import TOUCHES
from mutirao.systems.recsys.rating_attack import Attacker, Reading, read_sum
from mutirao.systems.recsys.ratings import Ratings

HONEST_ROUNDS = 5  # before the update that is looked at
BAR = 0.05  # above guessing: the most that may be read where privacy is promised
DELTA = 1e-5
Sets = Mapping[str, Any]


@dataclass(frozen=True)
class Rated:
    """What to drill: whose ratings, how many users are read one by one, and of how many a sum is made."""

    data: str = "generated"
    users: int = 40
    summed: int = 50
    seed: int = 0


@dataclass(frozen=True)
class Rule:
    """Settings of a run, and what of it the server reads; `private`: nothing is to be read there."""

    name: str
    sets: Sets
    read: Callable[["Target", "Rule"], list[Exposure]]
    private: bool = False
    noise: float = 0.0  # on each number of one user's update
    clip: float = 0.0
    loss: str = "squared"

    @property
    def epsilon(self) -> float | None:
        """What one update costs with that noise, if the user adds it by itself."""
        if self.sets.get("privacy") != "local" or self.noise < 1e-3:
            return None
        return epsilon(add_releases(None, self.noise / 2, 1.0, 1), DELTA)


@dataclass
class Told:
    """What the server learned under one rule."""

    rule: Rule
    exposure: Exposure

    def kept(self) -> dict[str, Any]:
        """For a file."""
        rule = {"rule": self.rule.name, "loss": self.rule.loss, "private": self.rule.private}
        rule |= {"settings": dict(self.rule.sets), "epsilon": self.rule.epsilon}
        return rule | asdict(self.exposure) | {"gain": self.exposure.gain, "learned": self.exposure.learned}


class Target:
    """The users that are asked, the model they are sent, and what the server knows of people in general."""

    def __init__(self, about: Rated, loss: str) -> None:
        self.about, self.loss = about, loss
        own = {"ridge": 1.0, "lr": 0.4} if loss != "squared" else {}
        self.base: Sets = {"data": about.data, "loss": loss, "seed": about.seed, "rounds": HONEST_ROUNDS, **own}
        task = self.task({})
        names = sorted(task.population)
        order = rng(about.seed, 0, "drilled").permutation(len(names))
        self.users = [names[i] for i in order[: max(about.users, about.summed)]]
        method: Any = task.handler
        self.method: FedRecon = method
        known: Ratings = vars(task.evaluate)["ratings"]
        self.levels = np.array((0.0, 1.0) if self.method.implicit else self.method.levels)
        implicit = self.method.implicit
        self.usual = usual_takings(known, self.method.negatives) if implicit else usual_ratings(known, self.levels)
        config = resolve(find("recsys").config, {}, list(self.base.items()))
        run = Run(task.initial(), seed=config.seed)
        for _ in find("recsys").flow(LocalFleet(task.handler, task.population), config, task, run):
            pass
        self.items = run.arrays[ITEMS]  # after a few rounds in which nobody did anything odd

    @cache  # noqa: B019  # it lives as long as the drill
    def task_of(self, sets: tuple[tuple[str, Any], ...]) -> Task:
        """The recipe's task with these settings."""
        found = find("recsys")
        return found.prepare(resolve(found.config, {}, [*self.base.items(), *sets]))

    def task(self, sets: Sets) -> Task:
        """The recipe's task with these settings."""
        return self.task_of(tuple(sorted(sets.items())))

    def request(self, task: Task, do: str = "train") -> Request:
        """What users are asked in the round that is looked at."""
        touches = {TOUCHES: np.zeros(len(self.items), np.float32)} if TOUCHES in task.initial() else {}
        arrays = {ITEMS: self.items, **touches} if do == "train" else {}
        return Request(do, arrays, {"seed": self.about.seed, "round": HONEST_ROUNDS + 1})

    def attacker(self, rule: Rule) -> Attacker:
        """A server that knows the settings."""
        method = replace(self.method, epochs=int(rule.sets.get("epochs", self.method.epochs)))
        return Attacker(
            method, clip=rule.clip, noise=rule.noise, usual=self.usual.shares, popularity=self.usual.popularity
        )

    def query(self, user: ClientId) -> dict[int, float]:
        """What the user's update is about: items and ratings, or whether they were taken."""
        data, number = self.task({}).population[user], HONEST_ROUNDS + 1
        work = self.method.drawn([self.method.local(data, user, self.about.seed, number)])[0]
        truth = dict(zip(work.rows.tolist(), work.y.tolist(), strict=True))
        plain = Request("train", {ITEMS: self.items}, {"seed": self.about.seed, "round": number})
        rows = self.method(plain, Site(user, data)).arrays[ITEM_ROWS].tolist()
        return {i: truth[i] for i in rows if i in truth}

    def judge(self, query: Mapping[int, float], said: Mapping[int, float], named: Sequence[int]) -> Exposure:
        """How much of a user's query was read."""
        return evaluate_reading(query, self.wanted(query), said, named, self.usual, self.levels)

    def wanted(self, query: Mapping[int, float]) -> list[int]:
        """The items that tell of the user: all of its query, or those it has taken."""
        return [i for i, v in query.items() if v > 0 or not self.method.implicit]


def read_single(target: Target, rule: Rule) -> list[Exposure]:
    """Single updates, as they leave."""
    task, attacker, found = target.task(rule.sets), target.attacker(rule), []
    for user in target.users[: target.about.users]:
        site = Site(user, task.population[user])
        asked = task.handler(target.request(task, "rows"), site).extras[ITEMS] if "download" not in rule.sets else None
        reply = task.handler(target.request(task), site).arrays
        reading = attacker({ITEMS: target.items}, reply, asked)
        query = target.query(user)
        said = reading.ratings() if reading.is_sure or rule.noise else {}
        named = [i for i, v in said.items() if v > 0 and i in reading.rows]
        if rule.noise:
            named = name_items(target, reading, len(target.wanted(query)))
        found.append(target.judge(query, said, named))
    return found


def name_items(target: Target, reading: Reading, count: int) -> list[int]:
    """The likeliest items of a user that rated so many of them, where not all rows are."""
    score = np.log(target.usual.popularity[reading.rows])
    if reading.strength is not None:  # rows that moved far, in deviations of the noise
        along = reading.strength if target.method.implicit else np.abs(reading.strength)
        score += np.sign(along) * along**2 / 2
    return [int(reading.rows[i]) for i in most_likely(score, count)]


class Listening(Wrapper):
    """A fleet that keeps what clients sent under masks, as a curious server does."""

    def __init__(self, fleet: Fleet) -> None:
        super().__init__(fleet)
        self.masked: dict[ClientId, Arrays] = {}

    def ask(self, requests: Mapping[ClientId, Request]) -> Answers:
        """Pass on, and keep."""
        answers = self.fleet.ask(requests)
        self.masked |= {c: r.arrays for c, r in answers.replies.items() if requests[c].do == MASKED}
        return answers


@cache
def sum_up(target: Target, sets: tuple[tuple[str, Any], ...]) -> tuple[dict[ClientId, Arrays], np.ndarray[Any, Any]]:
    """What the server gets of a secure sum: the masked update of each user, and the sum of all."""
    task = target.task(dict(sets))
    fleet = Listening(LocalFleet(task.worker, task.population))
    users, request = target.users[: target.about.summed], target.request(task)
    answers = task.secure.at_server(fleet, task.provides).ask(dict.fromkeys(users, request))
    mean = next(iter(answers.replies.values())).arrays[ITEMS]
    return fleet.masked, len(answers.replies) * (mean.astype(np.float64) - target.items)


def read_masked(target: Target, rule: Rule) -> list[Exposure]:
    """Single updates under masks, as if they were none."""
    masked, _ = sum_up(target, tuple(sorted(rule.sets.items())))
    found, attacker = [], target.attacker(rule)
    for user, arrays in masked.items():
        words = arrays["update"][: target.items.size].astype(np.float64).reshape(target.items.shape)
        reading = attacker({ITEMS: target.items}, {ITEMS: words / float(np.abs(words).max())})
        found.append(fall_back(target, user, reading.ratings() if reading.is_sure else {}))
    return found


def read_sums(target: Target, rule: Rule) -> list[Exposure]:
    """The sum: what is read there is held to be of the right user, though the sum does not say whose it is."""
    masked, change = sum_up(target, tuple(sorted(rule.sets.items())))
    read: dict[int, float] = {}
    for reading in read_sum(target.attacker(rule), {ITEMS: target.items}, change):
        read |= reading.ratings()
    return [fall_back(target, user, read) for user in masked]


def fall_back(target: Target, user: ClientId, read: Mapping[int, float]) -> Exposure:
    """What was read, and for the rest what is usual: the most popular items, each with its most usual rating."""
    query = target.query(user)
    wanted = target.wanted(query)
    said = {i: v for i, v in read.items() if i in query}
    rest = [i for i in most_likely(target.usual.popularity, len(target.items)) if i not in said]
    return target.judge(query, said, [*(i for i in said if i in wanted), *rest][: len(wanted)])


def rules_of(about: Rated) -> list[Rule]:
    """All that is tried."""
    covered = {"secure": "secagg+", "download": "all"}
    noised = {**covered, "privacy": "central", "secure.noise": 1 / about.summed**0.5}
    local = {"privacy": "local", "download": "all"}
    many = f"secagg+, sum of {about.summed}"
    return [
        Rule("as it is (download=touched)", {}, read_single),
        Rule("download=all", {"download": "all"}, read_single),
        Rule("privacy=central, at the server", {"download": "all", "privacy": "central"}, read_single),
        Rule("epochs=5", {"download": "all", "epochs": 5}, read_single),
        Rule("clipped to 1, hardly any noise", {**local, "privacy.noise": 1e-9}, read_single, clip=1.0),
        *(
            Rule(f"privacy=local, noise {z:g}", {**local, "privacy.noise": z}, read_single, z >= 1, z, 1.0)
            for z in (0.03, 0.1, 0.3, 1.0)
        ),
        Rule("secagg+, one masked update", covered, read_masked, private=True),
        Rule(many, covered, read_sums),
        Rule(f"{many}, central noise by users", noised, read_sums, private=True),
        Rule("taken: as it is", {}, read_single, loss="weighted"),
        Rule("taken: privacy=local, noise 1", {**local, "privacy.noise": 1.0}, read_single, True, 1.0, 1.0, "weighted"),
        Rule(f"taken: {many}", covered, read_sums, loss="weighted"),
        Rule(f"taken: {many}, central noise by users", noised, read_sums, private=True, loss="weighted"),
    ]


def ratings(folder: Path, trial: Trial, about: Rated) -> None:
    """Read what users send under each rule; leave a table, a picture and figures in the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    targets = {loss: Target(about, loss) for loss in ("squared", "weighted")}
    told = [Told(rule, join_exposures(rule.read(targets[rule.loss], rule))) for rule in rules_of(about)]
    trial.facts["table"] = table_of(told)
    plain, worst = told[0].exposure, max((t for t in told if t.rule.private), key=lambda t: t.exposure.learned)
    trial.good = plain.read == 1.0 and worst.exposure.learned <= BAR
    trial.happened = (
        f"{plain.read:.1%} of {plain.ratings} ratings read as it is, {plain.guessed:.1%} by guessing the mean; "
    )
    trial.happened += f"where nothing should be, at most {100 * worst.exposure.learned:+.1f} points above guesses"
    facts = {"data": about.data, "users": about.users, "summed": about.summed, "told": [t.kept() for t in told]}
    write_whole(folder / "ratings.json", json.dumps(facts, indent=2) + "\n")
    draw_exposure([(t.rule.name, t.exposure, t.rule.private) for t in told], folder / "ratings.png")


def table_of(told: Sequence[Told]) -> list[str]:
    """A line a rule."""
    heads = [
        "",
        "epsilon",
        "ratings read",
        "user's mean",
        "points above",
        "usual",
        "items: precision",
        "recall",
        "popular",
    ]
    rows = [heads]
    for one in told:
        e, cost = one.exposure, one.rule.epsilon
        shares = (e.read, e.guessed, e.gain, e.usual, e.precision, e.recall, e.popular)
        words = [f"{100 * share:+.1f}" if i == 2 else f"{share:.1%}" for i, share in enumerate(shares)]
        rows.append([one.rule.name, "" if cost is None else f"{cost:.3g}", *words])
    return in_columns(rows)
