"""Simulated users that search, see rankings, click, and update the ranker after each click (PDGD).

A round is `interactions` queries of each user. A user sends its updated model, the number of interactions, and, as the
simulation has the grades, how good the rankings were that it saw.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mutirao.core.arrays import Arrays, cast_to
from mutirao.core.fleet import ClientId, Failure, Reply, Request, Site, failure_of
from mutirao.core.hyperparameters import read_hyperparameters
from mutirao.core.needs import Capabilities
from mutirao.errors import Refused
from mutirao.randomness import rng
from mutirao.systems.ranking.online.click_models import Ints, click_documents
from mutirao.systems.ranking.online.fpdgd_noise import Shares
from mutirao.systems.ranking.online.pdgd import Linear, Ranker, document_weights, sample_rankings
from mutirao.systems.ranking.online.shown_lists import User, shown_ndcg
from mutirao.training.lr_schedules import Constant, Schedule, factor_of

NEXT = "online.next"  # a user's position in its log
AT_ONCE = 256  # users with lists in memory at a time


@dataclass(eq=False)
class UserSession:
    """A user in one round: its model as it is updated, its queries, and nDCG and loss of the rankings shown so far."""

    user: User
    model: Arrays
    queries: Ints
    lr: float
    draw: np.random.Generator
    ndcg: list[float] = field(default_factory=list)
    loss: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class SearchHandler:
    """A handler that answers for one user, or for `many` with the same numbers.

    `parties` is the number of users in a round; their `shares` of noise add up to Laplace noise.
    """

    ranker: Ranker = Linear(1)
    lr: float = 0.1
    interactions: int = 4
    shown: int = 10
    schedule: Schedule = Constant()
    parties: int = 1
    shares: Shares | None = None

    @property
    def capabilities(self) -> Capabilities:
        """Mean nDCG of the rankings shown, and mean 1 - nDCG where there were relevant documents."""
        return Capabilities(metrics={"shown_ndcg", "shown_loss"})

    @property
    def private(self) -> bool:
        """Whether it adds noise itself."""
        return self.shares is not None

    def __call__(self, request: Request, site: Site) -> Reply:
        """The reply of one user."""
        session = self.begin(request, site)
        self.learn([session])
        return self.end(request, site, session)

    def many(self, requests: Mapping[ClientId, Request], sites: Mapping[ClientId, Site]) -> dict[ClientId, Any]:
        """The replies of many users, with their steps computed together."""
        out: dict[ClientId, Reply | Failure] = {}
        names = sorted(requests)
        for i in range(0, len(names), AT_ONCE):
            sessions: dict[ClientId, UserSession] = {}
            for client in names[i : i + AT_ONCE]:
                try:
                    sessions[client] = self.begin(requests[client], sites[client])
                except (ValueError, TypeError, LookupError, Refused) as error:
                    out[client] = failure_of(error)  # the other users continue
            self.learn(list(sessions.values()))
            out |= {client: self.end(requests[client], sites[client], own) for client, own in sessions.items()}
        return out

    def begin(self, request: Request, site: Site) -> UserSession:
        """Choose the user's queries: sampled from its own, or those that come next in its log."""
        read_hyperparameters(request.config, ())
        user = site.data
        if request.do != "train":
            raise ValueError(f"users can only answer 'train', not {request.do!r}")
        if not isinstance(user, User):
            raise ValueError(f"expected a user with lists of documents, got {type(user).__name__}")
        if not len(user):
            raise ValueError("the user has no queries")
        seed = int(request.config["seed"])
        round = int(request.config["round"])
        draw = rng(seed, round, "interactions", site.id)
        if user.is_log:
            begin = int(site.state.get(NEXT, np.zeros((), np.int64)))
            which = (begin + np.arange(self.interactions)) % len(user)  # at its end the log starts again
            site.state[NEXT] = np.array((begin + self.interactions) % len(user), np.int64)
        else:
            which = draw.integers(len(user), size=self.interactions)
        model = {name: value.astype(np.float64) for name, value in request.arrays.items()}
        return UserSession(user, model, user.queries[which], self.lr * factor_of(self.schedule, round), draw)

    def learn(self, sessions: Sequence[UserSession]) -> None:
        """All interactions of these users, one after the other."""
        if not sessions:
            return
        with np.errstate(over="ignore", invalid="ignore"):  # the round reports training that diverges
            for step in range(self.interactions):
                self.interact(sessions, step)

    def interact(self, sessions: Sequence[UserSession], step: int) -> None:
        """One query of each user: sample and show a ranking, sample clicks, update the model."""
        asked = [(session.user.lists, int(session.queries[step])) for session in sessions]
        x = [lists.features(query) for lists, query in asked]
        sizes = np.array([len(rows) for rows in x])
        begins = np.cumsum(sizes) - sizes
        grades = np.concatenate([lists.grades_of(query) for lists, query in asked])
        scores = np.concatenate([self.ranker.score(s.model, rows) for s, rows in zip(sessions, x, strict=True)])
        # Each user's numbers come from its own generator, so that they do not depend on who else is computed with it.
        draws = [s.draw.random(len(rows) + 2 * self.shown) for s, rows in zip(sessions, x, strict=True)]
        ranking_draws = np.concatenate([u[: len(rows)] for u, rows in zip(draws, x, strict=True)])
        click_draws = np.stack([u[-2 * self.shown :].reshape(2, self.shown) for u in draws], axis=1)

        documents, rest = sample_rankings(scores, sizes, ranking_draws, self.shown)
        there = documents >= 0
        shown_scores = np.where(there, scores[documents], -np.inf)
        shown_grades = np.where(there, grades[documents], 0)
        tables = np.array([(session.user.clicks.click, session.user.clicks.stop) for session in sessions])
        rows_of_tables = np.arange(len(sessions))[:, None]
        click = tables[rows_of_tables, 0, shown_grades]
        stop = tables[rows_of_tables, 1, shown_grades]
        clicks = click_documents(np.where(there, click, 0.0), stop, click_draws)
        weights = document_weights(shown_scores, rest, clicks)

        ndcg, has_relevant = shown_ndcg(shown_grades, np.stack([lists.best[query] for lists, query in asked]))
        for i, session in enumerate(sessions):
            session.ndcg.append(float(ndcg[i]))
            session.loss.append(float(1 - ndcg[i]) if has_relevant[i] else 0.0)
            if weights[i].any():
                rows = x[i][documents[i, there[i]] - begins[i]]
                gradient = self.ranker.gradient(session.model, rows, weights[i, there[i]])
                session.model = {name: value + session.lr * gradient[name] for name, value in session.model.items()}
                if self.shares:
                    session.model = self.shares.clip(session.model)

    def end(self, request: Request, site: Site, session: UserSession) -> Reply:
        """The reply: the model, with noise if that is set, and how good the rankings were."""
        model = session.model
        if self.shares:
            seed = int(request.config["seed"])
            round = int(request.config["round"])
            # Clipped once more: without a click the model is still that of the server, which can be longer.
            model = self.shares.add(self.shares.clip(model), self.parties, seed, round, site.id)
        arrays = {name: cast_to(value, request.arrays[name].dtype) for name, value in model.items()}
        metrics = {"shown_ndcg": float(np.mean(session.ndcg)), "shown_loss": float(np.mean(session.loss))}
        return Reply(arrays, {}, metrics, n=self.interactions)
