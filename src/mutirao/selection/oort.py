"""Oort: statistical utility by speed, with newcomers."""

# ruff: noqa: D102  # `__call__` is what the class says it is

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from mutirao.core.roster import ClientId, Roster
from mutirao.scores import Floats, scale_to_one, seconds_of
from mutirao.selection.counting import Counted, check_setting, how_many, names_in
from mutirao.selection.drawing import draw_weighted, unknown_as_median
from mutirao.selection.probing import PROBE_SAMPLES, check_probe, limit


@dataclass(frozen=True)
class Oort(Counted):
    """Clients of high statistical utility, some of them new, none too slow.

    Lai, Zhu, Madhyastha and Chowdhury, "Oort: Efficient Federated Learning via Guided Participant Selection", OSDI
    2021: n_i sqrt(mean loss^2), cut at the quantile `clip` and scaled to 0..1 as in the authors' code, plus
    sqrt(0.1 ln R / last round of i), times (duration / t_i)^penalty where a client takes longer (t_i seconds) than the
    preferred `duration` (0: speed does not matter). A share of explore * explore_decay^(R - 1), at least
    `explore_least`, of the places goes to clients never tried, quick ones first. The others are drawn, in proportion to
    their utility, among those with at least `cut` of the utility of the last to be admitted. The losses are those of
    the model received, on at most `samples`. Who was selected more than `most` times as often as the mean of those
    tried (0: no matter) is passed over while there are others, so that a false loss pays no better; the paper does so
    after a fixed number of rounds. Left out is the pacer, which changes the duration.
    """

    explore: float = 0.9
    explore_decay: float = 0.98
    explore_least: float = 0.2
    clip: float = 0.95
    cut: float = 0.95
    duration: float = 0.0
    penalty: float = 2.0
    samples: int = PROBE_SAMPLES
    most: float = 2.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_probe("all", 1.0, self.samples)
        check_setting("most", self.most == 0 or self.most >= 1, self.most, "0 (no limit) or at least 1")
        for name in ("explore", "explore_decay", "explore_least", "clip", "cut"):
            check_setting(name, 0 <= getattr(self, name) <= 1, getattr(self, name), "between 0 and 1")
        for name in ("duration", "penalty"):
            check_setting(name, getattr(self, name) >= 0, getattr(self, name), "at least 0")

    @property
    def needs(self) -> frozenset[str]:
        return frozenset({"metrics:rms_loss", limit(self.samples)})

    def __call__(self, roster: Roster, round: int, rng: np.random.Generator) -> list[ClientId]:
        here = roster.here()
        known = ~np.isnan(roster.figure("rms_loss")[here])
        old, new, wanted = here[known], here[~known], how_many(self.count, len(here))
        share = max(self.explore_least, self.explore * self.explore_decay ** (round - 1))
        exploited = min(len(old), wanted - min(len(new), int(share * wanted)))
        chosen = [new[draw_weighted(self.quickness(roster)[new], wanted - exploited, rng)]]
        if exploited:
            often = roster.selected[old] > self.most * roster.selected[old].mean()
            if self.most and len(old) - np.count_nonzero(often) >= exploited:
                old = old[~often]
            utility = self.utility(roster, round, old)
            admitted = np.flatnonzero(utility >= self.cut * np.partition(utility, -exploited)[-exploited])
            chosen.append(old[admitted[draw_weighted(utility[admitted], exploited, rng)]])
        return names_in(roster, np.concatenate(chosen))

    def utility(self, roster: Roster, round: int, rows: npt.NDArray[np.intp]) -> Floats:
        """The utility of clients that were heard of."""
        raw = np.clip(roster.n[rows] * roster.figure("rms_loss")[rows], 0, 1e300)
        value: Floats = scale_to_one(np.minimum(raw, np.quantile(raw, self.clip, method="lower")))
        value += np.sqrt(0.1 * np.log(max(1, round)) / np.maximum(1, roster.last_replied[rows]))
        if not self.duration:
            return value
        slowness = np.fmax(1.0, seconds_of(roster)[rows] / self.duration)  # one not known is not slow
        return np.asarray(value * slowness**-self.penalty)

    def quickness(self, roster: Roster) -> Floats:
        """How gladly each client is tried: all the same, or the quicker the better if speed matters."""
        if not self.duration:
            return np.ones(len(roster))
        return np.asarray(1 / np.maximum(1e-9, unknown_as_median(seconds_of(roster))))
