"""The clients with the highest weighted sum of scores, and a base for selectors that are such a sum."""

# ruff: noqa: D102  # `__call__` is what the class says it is

from abc import ABC, abstractmethod
from collections.abc import Collection
from dataclasses import dataclass, replace
from functools import reduce
from operator import or_

import numpy as np

from mutirao.config import handed_over
from mutirao.core.needs import Needs
from mutirao.core.roster import ClientId, Roster
from mutirao.selection.base import PROBE_SAMPLES, Counted, Refresh, check_probe, how_many, names_in
from mutirao.selection.scores import mix_scores, needs_of, parse_scores, top


@dataclass(frozen=True)
class Mix(Counted):
    """The clients with the highest weighted sum of scores, each scaled to 0..1 over those present; ties at random.

    `scores` names them with their weights: `0.5 age + 0.3 entropy + 0.2 mine:score`. A utility is renewed whenever its
    client is selected (`refresh="selected"`: it comes with the update and costs no message), or also for a random
    `share` of the clients before each selection, or for `all` of them; `samples` is how many samples it may look at.

    >>> roster = Roster()
    >>> roster.meet(["ana", "bia", "caio"])
    >>> roster.last_selected[:] = [3, 3, 1]
    >>> roster.n[:] = [10, 500, 20]
    >>> [Mix(1, scores)(roster, 4, np.random.default_rng(0)) for scores in ("age", "0.2 age + 0.8 samples")]
    [['caio'], ['bia']]
    """

    scores: str = "0.5 age + 0.5 entropy"
    refresh: Refresh = "selected"
    share: float = 0.1
    samples: int = PROBE_SAMPLES
    classes: int | None = handed_over()

    def __post_init__(self) -> None:
        super().__post_init__()
        check_probe(self.refresh, self.share, self.samples)
        parse_scores(self.scores)

    @property
    def weights(self) -> dict[str, float]:
        """The weight of each score that has one."""
        return {name: weight for name, weight in parse_scores(self.scores).items() if weight}

    @property
    def needs(self) -> Needs:
        """What its scores need: metrics with an update or in a probe, or measures by the server."""
        needs = reduce(or_, (needs_of(score) for score in self.weights), Needs())
        if not needs.metrics:
            return needs
        metrics: Collection[str] = needs.metrics
        probes = set(needs.probes)
        if self.refresh in ("share", "all"):
            probes.update(metrics)
        if self.refresh == "all":
            metrics = ()
        return replace(needs, metrics=metrics, probes=probes) | Needs(config={"probe_samples": self.samples})

    def probes(self, roster: Roster, round: int, rng: np.random.Generator) -> list[ClientId]:
        if not self.needs.probes:
            return []
        here = roster.here()
        if self.refresh == "all":
            return names_in(roster, here)
        return names_in(roster, rng.choice(here, how_many(self.share, len(here)), replace=False, shuffle=False))

    def __call__(self, roster: Roster, round: int, rng: np.random.Generator) -> list[ClientId]:
        here = roster.here()
        values = mix_scores(self.weights, roster, round, here, self.classes)
        return names_in(roster, here[top(values, how_many(self.count, len(here)), rng)])


class AsMix(ABC):
    """A selector that is a `mix` under a name of its own."""

    @property
    @abstractmethod
    def mix(self) -> Mix:
        """What it amounts to."""

    def __post_init__(self) -> None:
        self.mix  # noqa: B018  # wrong settings are refused here

    @property
    def needs(self) -> Needs:
        return self.mix.needs

    def probes(self, roster: Roster, round: int, rng: np.random.Generator) -> list[ClientId]:
        return self.mix.probes(roster, round, rng)

    def __call__(self, roster: Roster, round: int, rng: np.random.Generator) -> list[ClientId]:
        return self.mix(roster, round, rng)


@dataclass(frozen=True, kw_only=True)
class AsMixOfUtilities(AsMix):
    """One whose clients report a utility: how often they are asked, and on how many samples they measure it."""

    refresh: Refresh = "selected"
    share: float = 0.1
    samples: int = PROBE_SAMPLES
    classes: int | None = handed_over()

    def mix_of(self, count: int | float, scores: str) -> Mix:
        """The mix of these scores, with the settings above."""
        return Mix(count, scores, self.refresh, self.share, self.samples, self.classes)
