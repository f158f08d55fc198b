"""Power-of-Choice: of some candidates, those with the highest loss."""

# ruff: noqa: D102  # `__call__` is what the class says it is

from dataclasses import dataclass

import numpy as np

from mutirao.core.needs import Needs
from mutirao.core.roster import ClientId, Roster
from mutirao.selection.base import (
    PROBE_SAMPLES,
    Counted,
    check_probe,
    check_setting,
    how_many,
    names_in,
    sample_weighted,
    sizes,
)
from mutirao.selection.scores import top


@dataclass(frozen=True)
class PowerOfChoice(Counted):
    """Of some candidates, sampled in proportion to their data, those on which the global model's loss is highest.

    Cho, Wang and Joshi, "Towards Understanding Biased Client Selection in Federated Learning", AISTATS 2022. The
    candidates (0: twice as many as are selected) are asked for their loss on at most `samples` before each round.

    >>> roster = Roster()
    >>> roster.meet(["ana", "bia", "caio"])
    >>> roster.probed(2, {"ana": 10, "caio": 10})  # the candidates of round 2 have reported their losses
    >>> roster.figures["loss"] = np.array([0.3, np.nan, 1.2])
    >>> PowerOfChoice(1)(roster, 2, np.random.default_rng(0))
    ['caio']
    """

    candidates: int = 0
    samples: int = PROBE_SAMPLES

    def __post_init__(self) -> None:
        super().__post_init__()
        check_setting("candidates", self.candidates >= 0, self.candidates, "at least 0")
        check_probe("all", 1.0, self.samples)

    @property
    def needs(self) -> Needs:
        return Needs(probes={"loss"}, config={"probe_samples": self.samples})

    def probes(self, roster: Roster, round: int, rng: np.random.Generator) -> list[ClientId]:
        here = roster.here()
        wanted = how_many(self.count, len(here))
        return names_in(
            roster, here[sample_weighted(sizes(roster)[here], max(wanted, self.candidates or 2 * wanted), rng)]
        )

    def __call__(self, roster: Roster, round: int, rng: np.random.Generator) -> list[ClientId]:
        here = roster.here()
        probed = (roster.last_probed[here] == round) & ~np.isnan(roster.figure("loss")[here])
        loss = np.where(probed, roster.figure("loss")[here], -np.inf)  # if too few answered, the others are random
        return names_in(roster, here[top(loss, how_many(self.count, len(here)), rng)])
