"""A search site: it tells its moments, keeps to the scale agreed on, and trains on documents put on it.

The scale comes with every request and nothing is kept at the site, so that one that restarts needs no memory.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from mutirao.core.agreement import AGREE, PROFILE, digest_of
from mutirao.core.arrays import Arrays
from mutirao.core.fleet import ClientId, Reply, Request, Site
from mutirao.core.moments import Transform
from mutirao.core.parts import AnyHandler, as_handler
from mutirao.errors import ConfigError, Refused
from mutirao.personalization import Settings as Personal
from mutirao.personalization.handler import WHOLE_MODEL_ONLY
from mutirao.privacy import DPSGD
from mutirao.systems.ranking.client_documents import Held
from mutirao.systems.ranking.encoding import Encoded
from mutirao.systems.ranking.feature_scale import SCALE, Scale, read_scale, tell_profile
from mutirao.systems.ranking.metrics import Metrics, judge
from mutirao.systems.ranking.ranking_data import RankingData
from mutirao.systems.ranking.scorers import score, trainer_of
from mutirao.training.shared_encoding import agreed_content, answer_many, without_agreement
from mutirao.training.trainer import Trainer


class Trainers:
    """The trainer for a scale, by the recipe's settings: made once, because it keeps modules and programs."""

    def __init__(self, config: Any, measures: Callable[[int], Metrics]) -> None:
        self.config, self.measures = config, measures
        self.made: dict[tuple[int, int], Trainer] = {}
        self.personal: dict[tuple[int, int], Any] = {}

    def metrics(self, scale: Scale) -> Metrics:
        """What judges rankings of documents with such grades."""
        return self.measures(scale.highest)

    def __call__(self, scale: Scale) -> Trainer:
        """One trainer for all scales of one shape."""
        shape = scale.features, scale.highest
        if shape not in self.made:
            self.made[shape] = trainer_of(self.config, scale.features, scale.highest + 1, self.metrics(scale))
        return self.made[shape]

    def for_each(self, scale: Scale, personal: Personal) -> Any:
        """The same for clients with a model of their own."""
        shape = scale.features, scale.highest
        if shape not in self.personal:
            self.personal[shape] = self(scale).personal_training(personal)
        return self.personal[shape]

    @cached_property
    def example(self) -> Trainer:
        """A trainer of no particular shape: what it provides depends on the settings alone."""
        return trainer_of(self.config, 1, 2, self.measures(1))


@dataclass(frozen=True)
class RankingClient:
    """A handler around a `Trainer`: it answers `profile` and `agree`, and the rest by the scale in the request.

    With `own`, a scale that this party was given beforehand, no other one is taken, and no profile is told.
    """

    trainers: Trainers
    encoded: Encoded
    transform: Transform = "none"
    least: int = 5
    own: bytes = b""
    privacy: DPSGD | None = None
    personal: Personal | None = None

    @property
    def provides(self) -> frozenset[str]:
        """What the trainer does."""
        if self.privacy is not None:
            return frozenset({"metrics:epsilon", "metrics:epsilon_next", "config:mu"})
        plain = self.trainers.example
        whole = self.personal is None or self.personal.whole
        return plain.provides if whole else plain.provides - WHOLE_MODEL_ONLY

    @property
    def schedule(self) -> Any:
        """How the rate of its trainers goes."""
        return self.trainers.example.schedule

    @property
    def figures(self) -> Any:
        """What its trainers judge by besides loss and accuracy."""
        return self.trainers.example.figures

    def agreed(self) -> Mapping[str, str]:
        """The scale this party was given, by its digest."""
        return {SCALE: digest_of(self.own)} if self.own else {}

    def private_training(self, privacy: DPSGD) -> AnyHandler:
        """The same with private gradients."""
        return replace(self, privacy=privacy)

    def personal_training(self, personal: Personal) -> AnyHandler:
        """The same with a model of each client's own."""
        return replace(self, personal=personal)

    def initial(self, scale: Scale, seed: int) -> Arrays:
        """What travels of a fresh model."""
        made: Arrays = self.trainer(scale).initial(seed)
        return made

    def shared(self, arrays: Arrays) -> Arrays:
        """What travels of a whole model, if there is one yet."""
        if self.personal is None or not arrays:
            return arrays
        made: Arrays = self.trainer(read_scale(self.own)).shared(arrays)
        return made

    def trainer(self, scale: Scale) -> Any:
        """Who trains, without privacy."""
        return self.trainers(scale) if self.personal is None else self.trainers.for_each(scale, self.personal)

    def handler(self, scale: Scale) -> AnyHandler:
        """Who trains."""
        trainer: AnyHandler = self.trainer(scale)
        return trainer if self.privacy is None else as_handler(trainer).private_training(self.privacy)

    def scale_in(self, request: Request) -> Scale:
        """The scale that goes with a request, if it is the one agreed on."""
        try:
            return read_scale(agreed_content(request, SCALE, self.own))
        except ValueError as error:
            raise Refused(f"agreed.{SCALE}", str(error)) from error

    def prepare(self, request: Request, site: Site) -> tuple[Scale, Request, Site]:
        """What the trainer is asked: the request without the scale, on samples instead of documents as they are."""
        scale = self.scale_in(request)
        return (
            scale,
            without_agreement(request, SCALE),
            Site(site.id, self.encoded(site.id, site.data, scale), site.state),
        )

    def agree(self, request: Request, site: Site) -> None:
        """Refused if documents have other features than the scale, or grades beyond it.

        Parties to which one set is dealt agree on that set first, before there is a scale.
        """
        if self.own or SCALE in request.extras:
            self.prepare(request, site)

    def check(self, arrays: Arrays, population: Mapping[ClientId, Any]) -> None:
        """ConfigError if somebody cannot keep to a scale given beforehand."""
        for name in population if self.own else ():
            try:
                self.encoded(name, population[name], read_scale(self.own))
            except Refused as error:
                raise ConfigError(f"scale: {name}: {error}") from error

    def judge(self, arrays: Arrays, data: RankingData, scale: Scale, named: str = "") -> dict[str, float]:
        """A model's figures over queries, their names with `named` before them."""
        found = judge(self.score(arrays, data, scale), data, self.trainers.metrics(scale))
        return {named + name: value for name, value in found.items()}

    def score(self, arrays: Arrays, data: RankingData, scale: Scale) -> npt.NDArray[np.float64]:
        """What a model ranks documents by."""
        return score(self.trainers(scale).fill(arrays), self.encoded.features(data, scale))

    def judges_queries(self, request: Request, site: Site) -> bool:
        """Whether it judges by whole queries of its own, rather than its trainer by single documents or lists."""
        return request.do == "evaluate" and self.personal is None and site.data.test is not None

    def is_alone(self, request: Request, site: Site) -> bool:
        """Whether no trainer is asked."""
        return request.do in (PROFILE, AGREE) or self.judges_queries(request, site)

    def __call__(self, request: Request, site: Site) -> Reply:
        """The answer to one request."""
        held: Held = site.data
        if request.do == PROFILE:
            if self.own or self.privacy is not None:
                raise Refused(f"agreed.{SCALE}", "a scale is agreed on already: nothing is told of the documents")
            return Reply({}, tell_profile(held.x, held.highest, self.transform, self.least), n=len(held))
        if self.judges_queries(request, site):
            assert held.test is not None
            test = held.test.table if len(held.test) == len(held.test.table) else held.test.table.take(held.test.rows)
            figures = self.judge(request.arrays, test, self.scale_in(request))
            return Reply({}, metrics=figures, n=len(test.query_ids))
        scale, asked, samples = self.prepare(request, site)
        if request.do == AGREE:
            return Reply({}, n=1)
        return self.handler(scale)(asked, samples)

    def many(self, requests: Mapping[ClientId, Request], sites: Mapping[ClientId, Site]) -> dict[ClientId, Any]:
        """The same answers, all clients of one scale trained at once."""
        return answer_many(self, self.prepare, self.handler, requests, sites, self.is_alone)
