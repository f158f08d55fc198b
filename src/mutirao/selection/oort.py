"""Oort: statistical utility by speed, with newcomers."""

# ruff: noqa: D102  # `__call__` is what the class says it is

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from mutirao.core.arrays import Arrays
from mutirao.core.roster import ClientId, Roster
from mutirao.errors import ConfigError
from mutirao.selection.base import Counted, check_setting, how_many, names_in
from mutirao.selection.pacer import Pacer, duration_at
from mutirao.selection.probes import PROBE_SAMPLES, check_probe, limit
from mutirao.selection.scores import Floats, scale_to_one, seconds_of
from mutirao.selection.weighted_sampling import pass_over, sample_weighted, unknown_as_median


@dataclass(frozen=True)
class Oort(Counted):
    """Clients of high statistical utility, some of them new, none too slow.

    Lai, Zhu, Madhyastha and Chowdhury, "Oort: Efficient Federated Learning via Guided Participant Selection", OSDI
    2021: n_i sqrt(mean loss^2), cut at the quantile `clip` and scaled to 0..1 as in the authors' code, plus
    sqrt(0.1 ln R / last round of i), times (duration / t_i)^penalty where a client takes longer (t_i seconds) than the
    preferred `duration` (0: speed does not matter). A share of explore * explore_decay^(R - 1), at least
    `explore_least`, of the places goes to clients never tried, quick ones first. The others are drawn, in proportion to
    their utility, among those with at least `cut` of the utility of the last to be admitted. The losses are those of
    the model received, on at most `samples`.

    With `pace` the duration is that which so many per cent of the clients keep to, and the pacer moves it every
    `pace_step` rounds by `pace_delta` per cent (FedScale: 30, 20, 5); the gain of a round is the mean utility of those
    who were drawn for it and replied, cut at `clip`, too. Who replied more than `blacklist` times (0: no matter) is not
    drawn again, the most frequent first, up to `blacklist_share` of all clients. Ours: who was selected more than
    `most` times as often as the mean of those tried (0: no matter) is passed over while there are others, so that a
    false loss pays no better.

    Ana has the higher loss, but takes ten times as long as a round should, so that bia is preferred:

    >>> roster = Roster()
    >>> roster.meet(["ana", "bia"])
    >>> roster.mark(1, ["ana", "bia"], {"ana": 100, "bia": 100})
    >>> roster.figures["rms_loss"] = np.array([2.0, 1.0])
    >>> roster.figures |= {"ready_seconds": np.array([9.0, 0.9]), "upload_seconds": np.array([1.0, 0.1])}
    >>> [Oort(1, clip=1.0, duration=d)(roster, 2, np.random.default_rng(0)) for d in (0.0, 1.0)]
    [['ana'], ['bia']]
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
    pace: float = 0.0
    pace_step: int = 20
    pace_delta: float = 5.0
    blacklist: int = 0
    blacklist_share: float = 0.3

    def __post_init__(self) -> None:
        super().__post_init__()
        check_probe("all", 1.0, self.samples)
        check_setting("most", self.most == 0 or self.most >= 1, self.most, "0 (no limit) or at least 1")
        for name in ("explore", "explore_decay", "explore_least", "clip", "cut", "blacklist_share"):
            check_setting(name, 0 <= getattr(self, name) <= 1, getattr(self, name), "between 0 and 1")
        for name in ("duration", "penalty", "blacklist"):
            check_setting(name, getattr(self, name) >= 0, getattr(self, name), "at least 0")
        check_setting("duration", not (self.pace and self.duration), self.duration, "0 with pace, which chooses it")
        self.pacer  # noqa: B018  # wrong settings are refused here

    @property
    def pacer(self) -> Pacer | None:
        """What chooses the duration, if anything does."""
        return Pacer(self.pace, self.pace_step, self.pace_delta) if self.pace else None

    @property
    def needs(self) -> frozenset[str]:
        return frozenset({"metrics:rms_loss", limit(self.samples), *({"replies:memory"} if self.pace else ())})

    def __call__(self, roster: Roster, round: int, rng: np.random.Generator, *memory: Arrays) -> list[ClientId]:
        here, duration = roster.here(), self.preferred(roster, round, *memory)
        known = ~np.isnan(roster.figure("rms_loss")[here])
        old, new, wanted = here[known], here[~known], how_many(self.count, len(here))
        share = max(self.explore_least, self.explore * self.explore_decay ** (round - 1))
        wished = wanted - min(len(new), int(share * wanted))
        allowed = old[~self.blacklisted(roster)[old]] if self.blacklist else old
        old = allowed if len(allowed) + len(new) >= wanted else old
        exploited = min(len(old), wished)
        chosen = [new[sample_weighted(self.quickness(roster)[new], wanted - exploited, rng)]]
        if exploited:
            old = pass_over(roster, old, self.most, exploited)
            utility = self.utility(roster, round, old, duration)
            admitted = np.flatnonzero(utility >= self.cut * np.partition(utility, -exploited)[-exploited])
            chosen.append(old[admitted[sample_weighted(utility[admitted], exploited, rng)]])
        return names_in(roster, np.concatenate(chosen))

    def utility(self, roster: Roster, round: int, rows: npt.NDArray[np.intp], duration: float = 0.0) -> Floats:
        """The utility of clients that were heard of."""
        value = scale_to_one(self.gains(roster, rows))
        value += np.sqrt(0.1 * np.log(max(1, round)) / np.maximum(1, roster.last_replied[rows]))
        if not (duration := duration or self.duration):
            return value
        slowness = np.fmax(1.0, seconds_of(roster)[rows] / duration)  # one not known is not slow
        return np.asarray(value * slowness**-self.penalty)

    def gains(self, roster: Roster, rows: npt.NDArray[np.intp]) -> Floats:
        """n_i sqrt(mean loss^2) of clients that were heard of, cut at the quantile `clip`."""
        raw = np.clip(roster.n[rows] * roster.figure("rms_loss")[rows], 0, 1e300)
        return np.minimum(raw, np.quantile(raw, self.clip, method="lower"))

    def preferred(self, roster: Roster, round: int, *memory: Arrays) -> float:
        """How long a round should take (0: it does not matter)."""
        if self.pacer is None:
            return self.duration
        seconds = seconds_of(roster)
        if np.isnan(seconds).all():
            raise ConfigError("select.pace: nobody knows how long clients take; set devices, such as devices=fedcs")
        heard = np.flatnonzero(~np.isnan(roster.figure("rms_loss")))
        drawn = (roster.last_replied[heard] == round - 1) & (roster.replied[heard] > 1)  # the others of it were new
        gains = self.gains(roster, heard)[drawn] if drawn.any() else np.zeros(0)
        percentile = self.pacer.percentile(memory[0], round, float(gains.sum() / (len(gains) + 1e-4)))
        return duration_at(percentile, seconds)

    def blacklisted(self, roster: Roster) -> npt.NDArray[np.bool_]:
        """Who took part too often, at most a share of all."""
        often = np.argsort(-roster.replied, kind="stable")[: int(self.blacklist_share * len(roster))]
        out = np.zeros(len(roster), np.bool_)
        out[often] = roster.replied[often] > self.blacklist
        return out

    def quickness(self, roster: Roster) -> Floats:
        """How gladly each client is tried: all the same, or the quicker the better if speed matters."""
        if not (self.duration or self.pace):
            return np.ones(len(roster))
        return np.asarray(1 / np.maximum(1e-9, unknown_as_median(seconds_of(roster))))
