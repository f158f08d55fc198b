"""A user that searches: it is shown rankings, clicks, and learns from each click before the next query (PDGD).

A round is `interactions` queries of each user. What leaves is the model that came of them, how many they were, and, as
this is a simulation that knows the grades, how good the rankings were that the user saw.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from mutirao.core.arrays import Arrays, cast_to
from mutirao.core.fleet import ClientId, Failure, Reply, Request, Site, failure_of
from mutirao.core.hyperparameters import read_hyperparameters
from mutirao.errors import Refused
from mutirao.randomness import rng
from mutirao.systems.ranking.online.click_models import click_documents
from mutirao.systems.ranking.online.fpdgd_noise import Shares
from mutirao.systems.ranking.online.pdgd import draw_rankings, weigh_documents
from mutirao.systems.ranking.online.rankers import Linear, Ranker
from mutirao.systems.ranking.online.shown_lists import User, judge_shown
from mutirao.training.lr_schedules import Constant, Schedule, factor_of

Ints = npt.NDArray[np.int64]
NEXT = "online.next"  # where a user stands in its log
AT_ONCE = 256  # users whose lists are in memory at a time


@dataclass(eq=False)
class Turn:
    """A user's part in a round: its model as it goes on, the queries to come, what was found of the rankings shown."""

    user: User
    model: Arrays
    queries: Ints
    rate: float
    draw: np.random.Generator
    ndcg: list[float] = field(default_factory=list)
    lost: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class Searching:
    """A handler that answers for users, one by one or for `many`: the same numbers either way.

    `parties` is how many users a round has, who make up the noise together if there are `shares` of it.
    """

    ranker: Ranker = Linear(1)
    lr: float = 0.1
    interactions: int = 4
    shown: int = 10
    schedule: Schedule = Constant()
    parties: int = 1
    shares: Shares | None = None

    @property
    def provides(self) -> frozenset[str]:
        """nDCG of the rankings shown, and what they lacked where there was something to find; means over the round."""
        return frozenset({"metrics:shown_ndcg", "metrics:shown_loss"})

    @property
    def private(self) -> bool:
        """Whether it adds noise by itself."""
        return self.shares is not None

    def __call__(self, request: Request, site: Site) -> Reply:
        """The answer of one user."""
        turn = self.begin(request, site)
        self.learn([turn])
        return self.end(request, site, turn)

    def many(self, requests: Mapping[ClientId, Request], sites: Mapping[ClientId, Site]) -> dict[ClientId, Any]:
        """The answers of many users, whose steps are made side by side."""
        out: dict[ClientId, Reply | Failure] = {}
        names = sorted(requests)
        for i in range(0, len(names), AT_ONCE):
            turns: dict[ClientId, Turn] = {}
            for client in names[i : i + AT_ONCE]:
                try:
                    turns[client] = self.begin(requests[client], sites[client])
                except (ValueError, TypeError, LookupError, Refused) as error:
                    out[client] = failure_of(error)  # its own failure alone
            self.learn(list(turns.values()))
            out |= {client: self.end(requests[client], sites[client], turn) for client, turn in turns.items()}
        return out

    def begin(self, request: Request, site: Site) -> Turn:
        """What the user will ask: queries drawn from its own, or those that come next in its log."""
        read_hyperparameters(request.config, ())
        user = site.data
        if request.do != "train":
            raise ValueError(f"users who search can train, not {request.do!r}")
        if not isinstance(user, User):
            raise ValueError(f"holds {type(user).__name__}, not lists of documents")
        if not len(user):
            raise ValueError("has no queries to ask")
        seed, round = int(request.config["seed"]), int(request.config["round"])
        draw = rng(seed, round, "interactions", site.id)
        if user.log:
            begin = int(site.state.get(NEXT, np.zeros((), np.int64)))
            which = (begin + np.arange(self.interactions)) % len(user)  # who is through begins anew
            site.state[NEXT] = np.array((begin + self.interactions) % len(user), np.int64)
        else:
            which = draw.integers(len(user), size=self.interactions)
        model = {name: value.astype(np.float64) for name, value in request.arrays.items()}
        return Turn(user, model, user.queries[which], self.lr * factor_of(self.schedule, round), draw)

    def learn(self, turns: Sequence[Turn]) -> None:
        """All interactions of these users, one after the other."""
        with np.errstate(over="ignore", invalid="ignore"):  # training that diverges is named by the round
            for step in range(self.interactions if turns else 0):
                self.interact(turns, step)

    def interact(self, turns: Sequence[Turn], step: int) -> None:
        """One query of each: a ranking is drawn and shown, clicks follow, and the model moves."""
        asked = [(turn.user.lists, int(turn.queries[step])) for turn in turns]
        x = [lists.features(query) for lists, query in asked]
        sizes = np.array([len(rows) for rows in x])
        begins = np.cumsum(sizes) - sizes
        grades = np.concatenate([lists.grades_of(query) for lists, query in asked])
        scores = np.concatenate([self.ranker.score(turn.model, rows) for turn, rows in zip(turns, x, strict=True)])
        draws = [turn.draw.random(len(rows) + 2 * self.shown) for turn, rows in zip(turns, x, strict=True)]
        first = np.concatenate([u[: len(rows)] for u, rows in zip(draws, x, strict=True)])
        later = np.stack([u[-2 * self.shown :].reshape(2, self.shown) for u in draws], axis=1)

        documents, rest = draw_rankings(scores, sizes, first, self.shown)
        there = documents >= 0
        seen = np.where(there, scores[documents], -np.inf)
        found = np.where(there, grades[documents], 0)
        tables = np.array([(turn.user.clicks.click, turn.user.clicks.stop) for turn in turns])
        click, stop = (tables[np.arange(len(turns))[:, None], k, found] for k in (0, 1))
        clicks = click_documents(np.where(there, click, 0.0), stop, later)
        weights = weigh_documents(seen, rest, clicks)

        ndcg, answerable = judge_shown(found, np.stack([lists.best[query] for lists, query in asked]))
        for i, turn in enumerate(turns):
            turn.ndcg.append(float(ndcg[i]))
            turn.lost.append(float(1 - ndcg[i]) if answerable[i] else 0.0)
            if weights[i].any():
                rows = x[i][documents[i, there[i]] - begins[i]]
                pull = self.ranker.gradient(turn.model, rows, weights[i, there[i]])
                turn.model = {name: value + turn.rate * pull[name] for name, value in turn.model.items()}
                if self.shares:
                    turn.model = self.shares.cut(turn.model)

    def end(self, request: Request, site: Site, turn: Turn) -> Reply:
        """The model as it leaves, and how good the rankings were."""
        model = turn.model
        if self.shares:
            seed, round = int(request.config["seed"]), int(request.config["round"])
            model = self.shares.add(self.shares.cut(model), self.parties, seed, round, site.id)
        arrays = {name: cast_to(value, request.arrays[name].dtype) for name, value in model.items()}
        metrics = {"shown_ndcg": float(np.mean(turn.ndcg)), "shown_loss": float(np.mean(turn.lost))}
        return Reply(arrays, {}, metrics, n=self.interactions)
