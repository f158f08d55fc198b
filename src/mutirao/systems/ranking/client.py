"""The client of the ranking recipe: it sends its profile, and trains on documents scaled as agreed.

The scale comes with every request and is not stored at the site, so that one that restarts needs no memory.
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
from mutirao.core.needs import Capabilities
from mutirao.core.parts import AnyHandler, as_handler
from mutirao.errors import ConfigError, Refused
from mutirao.personalization import Settings as Personal
from mutirao.personalization.handler import WHOLE_MODEL_ONLY
from mutirao.privacy import DPSGD, SPENT
from mutirao.systems.ranking.client_documents import ClientDocuments
from mutirao.systems.ranking.encoding import EncodedDocuments
from mutirao.systems.ranking.feature_scale import SCALE, FeatureScale, parse_scale, profile_documents
from mutirao.systems.ranking.metrics import Metrics, evaluate_ranking
from mutirao.systems.ranking.ranking_data import RankingData
from mutirao.systems.ranking.scorers import make_trainer, score
from mutirao.training.shared_encoding import agreed_content, answer_many, without_agreement
from mutirao.training.trainer import Trainer


class RankingTrainers:
    """Trainers by feature scale, each made once, because a trainer caches modules and compiled programs."""

    def __init__(self, config: Any, metrics: Callable[[int], Metrics]) -> None:
        self.config = config
        self.build_metrics = metrics
        self.made: dict[tuple[int, int], Trainer] = {}
        self.personal: dict[tuple[int, int], Any] = {}

    def metrics(self, scale: FeatureScale) -> Metrics:
        """The metrics for grades of this scale."""
        return self.build_metrics(scale.highest)

    def __call__(self, scale: FeatureScale) -> Trainer:
        """One trainer for all scales of one shape."""
        shape = (scale.features, scale.highest)
        if shape not in self.made:
            self.made[shape] = make_trainer(self.config, scale.features, scale.highest + 1, self.metrics(scale))
        return self.made[shape]

    def for_each(self, scale: FeatureScale, personal: Personal) -> Any:
        """The same for clients with personal models."""
        shape = (scale.features, scale.highest)
        if shape not in self.personal:
            self.personal[shape] = self(scale).personal_training(personal)
        return self.personal[shape]

    @cached_property
    def example(self) -> Trainer:
        """A trainer of arbitrary shape: its capabilities depend on the settings alone."""
        return make_trainer(self.config, 1, 2, self.build_metrics(1))


@dataclass(frozen=True)
class RankingClient:
    """A handler around a `Trainer`: it answers `profile` and `agree`, and trains with the scale in the request.

    With `own`, a scale given to this party beforehand, every other scale and every request for a profile is refused.
    """

    trainers: RankingTrainers
    encoded: EncodedDocuments
    transform: Transform = "none"
    least: int = 5
    own: bytes = b""
    privacy: DPSGD | None = None
    personal: Personal | None = None

    @property
    def capabilities(self) -> Capabilities:
        """What the trainer does."""
        if self.privacy is not None:
            return Capabilities(metrics=SPENT, config={"mu"})
        capabilities = self.trainers.example.capabilities
        if self.personal is not None and not self.personal.whole:
            return capabilities - WHOLE_MODEL_ONLY
        return capabilities

    @property
    def schedule(self) -> Any:
        """The learning rate schedule of its trainers."""
        return self.trainers.example.schedule

    @property
    def figures(self) -> Any:
        """The metrics of its trainers besides loss and accuracy."""
        return self.trainers.example.figures

    def agreed(self) -> Mapping[str, str]:
        """The digest of the scale given to this party."""
        if self.own:
            return {SCALE: digest_of(self.own)}
        return {}

    def private_training(self, privacy: DPSGD) -> AnyHandler:
        """The same with private gradients."""
        return replace(self, privacy=privacy)

    def personal_training(self, personal: Personal) -> AnyHandler:
        """The same with a model of each client's own."""
        return replace(self, personal=personal)

    def initial(self, scale: FeatureScale, seed: int) -> Arrays:
        """The shared arrays of a new model."""
        arrays: Arrays = self.trainer(scale).initial(seed)
        return arrays

    def shared(self, arrays: Arrays) -> Arrays:
        """The shared arrays of a whole model, if there is one yet."""
        if self.personal is None or not arrays:
            return arrays
        shared: Arrays = self.trainer(parse_scale(self.own)).shared(arrays)
        return shared

    def trainer(self, scale: FeatureScale) -> Any:
        """The trainer, without differential privacy."""
        if self.personal is None:
            return self.trainers(scale)
        return self.trainers.for_each(scale, self.personal)

    def handler(self, scale: FeatureScale) -> AnyHandler:
        """The handler that trains."""
        trainer: AnyHandler = self.trainer(scale)
        if self.privacy is None:
            return trainer
        return as_handler(trainer).private_training(self.privacy)

    def scale_in(self, request: Request) -> FeatureScale:
        """The scale of a request; Refused if it is not the one agreed on."""
        try:
            return parse_scale(agreed_content(request, SCALE, self.own))
        except ValueError as error:
            raise Refused(f"agreed.{SCALE}", str(error)) from error

    def prepare(self, request: Request, site: Site) -> tuple[FeatureScale, Request, Site]:
        """The trainer's request: without the scale, on scaled samples instead of raw documents."""
        scale = self.scale_in(request)
        samples = self.encoded(site.id, site.data, scale)
        return scale, without_agreement(request, SCALE), Site(site.id, samples, site.state)

    def agree(self, request: Request, site: Site) -> None:
        """Refused if documents have other features than the scale, or grades above its highest.

        Where one set is partitioned over parties, they agree on that set first, before there is a scale.
        """
        if self.own or SCALE in request.extras:
            self.prepare(request, site)

    def check(self, arrays: Arrays, population: Mapping[ClientId, Any]) -> None:
        """ConfigError if a client's documents do not fit the scale given beforehand."""
        if not self.own:
            return
        for name in population:
            try:
                self.encoded(name, population[name], parse_scale(self.own))
            except Refused as error:
                raise ConfigError(f"scale: {name}: {error}") from error

    def evaluate(self, arrays: Arrays, data: RankingData, scale: FeatureScale, prefix: str = "") -> dict[str, float]:
        """A model's metrics over queries; `prefix` is put before their names."""
        metrics = evaluate_ranking(self.score(arrays, data, scale), data, self.trainers.metrics(scale))
        return {prefix + name: value for name, value in metrics.items()}

    def score(self, arrays: Arrays, data: RankingData, scale: FeatureScale) -> npt.NDArray[np.float64]:
        """A model's scores of documents."""
        return score(self.trainers(scale).fill(arrays), self.encoded.features(data, scale))

    def evaluates_queries(self, request: Request, site: Site) -> bool:
        """Whether it evaluates whole queries itself; otherwise its trainer evaluates single documents or lists."""
        return request.do == "evaluate" and self.personal is None and site.data.test is not None

    def is_alone(self, request: Request, site: Site) -> bool:
        """Whether it answers a request without a trainer."""
        return request.do in (PROFILE, AGREE) or self.evaluates_queries(request, site)

    def __call__(self, request: Request, site: Site) -> Reply:
        """Answer one request."""
        documents: ClientDocuments = site.data
        if request.do == PROFILE:
            if self.own or self.privacy is not None:
                raise Refused(f"agreed.{SCALE}", "a scale is already agreed on: no profile of the documents is sent")
            profile = profile_documents(documents.x, documents.highest, self.transform, self.least)
            return Reply({}, profile, n=len(documents))
        if self.evaluates_queries(request, site):
            # Here as in a simulation the metrics are over whole queries, so that both report the same numbers.
            own = documents.test
            assert own is not None
            test = own.table
            # The table itself, if it has no other rows: its scaled features are cached under this very object.
            if len(own) != len(test):
                test = test.take(own.rows)
            metrics = self.evaluate(request.arrays, test, self.scale_in(request))
            return Reply({}, metrics=metrics, n=len(test.query_ids))
        scale, request, samples = self.prepare(request, site)
        if request.do == AGREE:
            return Reply({}, n=1)
        return self.handler(scale)(request, samples)

    def many(self, requests: Mapping[ClientId, Request], sites: Mapping[ClientId, Site]) -> dict[ClientId, Any]:
        """The same replies, with all clients of one scale trained at once."""
        return answer_many(self, self.prepare, self.handler, requests, sites, self.is_alone)
