"""Oort: clients of high statistical utility and speed, with exploration of new ones."""

# ruff: noqa: D102  # `__call__` is what the class says it is

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from mutirao.core.arrays import Arrays
from mutirao.core.needs import Needs
from mutirao.core.roster import ClientId, Roster
from mutirao.errors import ConfigError
from mutirao.selection.base import (
    PROBE_SAMPLES,
    Counted,
    check_probe,
    check_setting,
    how_many,
    names_in,
    pass_over,
    sample_weighted,
    unknown_as_median,
)
from mutirao.selection.scores import Floats, scale_to_one, seconds_of

STATE = "oort.pace"
GAINS = "oort.gains"
# changes of the gains, as shares of those before, up to which and from which the pace changes
FLAT = 0.1
LEAP = 5.0


@dataclass(frozen=True)
class Pacer:
    """The percentile of the clients' durations that is preferred: it begins at `start` and moves in steps of `delta`.

    Lai et al., OSDI 2021, as in the authors' code in FedScale: every `step` selections the gains of the last `step`
    rounds, g, are compared with those of the `step` before, g'. If |g - g'| <= 0.1 g' the percentile grows by `delta`,
    up to 100; if |g - g'| >= 5 g' it falls by `delta`, down to `delta`. Its state is in the run's memory.
    """

    start: float = 30.0
    step: int = 20
    delta: float = 5.0

    def __post_init__(self) -> None:
        check_setting("pace", 0 < self.start <= 100, self.start, "above 0 and at most 100 (0 of Oort: no pacer)")
        check_setting("pace_step", self.step >= 1, self.step, "at least 1")
        check_setting("pace_delta", 0 < self.delta <= 100, self.delta, "above 0 and at most 100")

    def percentile(self, memory: Arrays, round: int, gain: float) -> float:
        """The percentile for this round, from the `gain` of the last; called again for a round it returns the same."""
        start = np.array([self.start, 0.0, 0.0])
        percentile, counted, times = (float(x) for x in memory.get(STATE, start))
        if counted == round:
            return percentile
        gains = np.append(memory.get(GAINS, np.zeros(0)), gain)[-2 * self.step :]
        times += 1
        if times >= 2 * self.step and times % self.step == 0:
            before = float(gains[: -self.step].sum())
            now = float(gains[-self.step :].sum())
            if abs(now - before) <= FLAT * before:
                percentile = min(100.0, percentile + self.delta)
            elif abs(now - before) >= LEAP * before:
                percentile = max(self.delta, percentile - self.delta)
        memory |= {STATE: np.array([percentile, round, times]), GAINS: gains}
        return percentile


def duration_at(percentile: float, seconds: Floats) -> float:
    """The duration that this percentage of the clients with known durations keep to; infinite at 100."""
    known = np.sort(seconds[~np.isnan(seconds)])
    if percentile >= 100 or not len(known):
        return math.inf
    return float(known[min(int(len(known) * percentile / 100), len(known) - 1)])


@dataclass(frozen=True)
class Oort(Counted):
    """Clients of high statistical utility, some of them new, none too slow.

    Lai, Zhu, Madhyastha and Chowdhury, "Oort: Efficient Federated Learning via Guided Participant Selection", OSDI
    2021: n_i sqrt(mean loss^2), cut at the quantile `clip` and scaled to 0..1 as in the authors' code, plus
    sqrt(0.1 ln R / last round of i), times (duration / t_i)^penalty where a client takes longer (t_i seconds) than the
    preferred `duration` (0: speed is ignored). A share of explore * explore_decay^(R - 1), at least
    `explore_least`, of the places goes to new clients, quick ones first. The others are sampled in proportion to
    their utility, among those with at least `cut` of the utility of the last to be admitted. The losses are those of
    the model received, on at most `samples`.

    With `pace` the duration is that which so many per cent of the clients keep to, and the pacer moves it every
    `pace_step` rounds by `pace_delta` per cent (FedScale: 30, 20, 5); the gain of a round is the mean utility of those
    who were sampled for it and replied, cut at `clip`, too. Clients that replied more than `blacklist` times (0: no
    limit) are not selected again, the most frequent first, up to `blacklist_share` of all clients. Ours: clients
    selected more than `most` times as often as the mean of those tried (0: no limit) are skipped while there are
    others, so that a false loss gains little.

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
        """The pacer that chooses the duration; None without `pace`."""
        if self.pace:
            return Pacer(self.pace, self.pace_step, self.pace_delta)
        return None

    @property
    def needs(self) -> Needs:
        needs = Needs(metrics={"rms_loss"}, config={"probe_samples": self.samples})
        if self.pace:
            return needs | Needs(server={"memory"})
        return needs

    def __call__(self, roster: Roster, round: int, rng: np.random.Generator, *memory: Arrays) -> list[ClientId]:
        here = roster.here()
        duration = self.preferred(roster, round, *memory)
        known = ~np.isnan(roster.figure("rms_loss")[here])
        old = here[known]
        new = here[~known]
        wanted = how_many(self.count, len(here))
        share = max(self.explore_least, self.explore * self.explore_decay ** (round - 1))
        wished = wanted - min(len(new), int(share * wanted))
        if self.blacklist:
            allowed = old[~self.blacklisted(roster)[old]]
            # The blacklist gives way where it would leave too few clients for a round.
            if len(allowed) + len(new) >= wanted:
                old = allowed
        exploited = min(len(old), wished)
        chosen = [new[sample_weighted(self.quickness(roster)[new], wanted - exploited, rng)]]
        if exploited:
            old = pass_over(roster, old, self.most, exploited)
            utility = self.utility(roster, round, old, duration)
            admitted = np.flatnonzero(utility >= self.cut * np.partition(utility, -exploited)[-exploited])
            chosen.append(old[admitted[sample_weighted(utility[admitted], exploited, rng)]])
        return names_in(roster, np.concatenate(chosen))

    def utility(self, roster: Roster, round: int, rows: npt.NDArray[np.intp], duration: float = 0.0) -> Floats:
        """The utility of clients with a known loss."""
        value = scale_to_one(self.gains(roster, rows))
        value += np.sqrt(0.1 * np.log(max(1, round)) / np.maximum(1, roster.last_replied[rows]))
        if not (duration := duration or self.duration):
            return value
        # fmax ignores NaN, so that a client of unknown speed is not slow.
        slowness = np.fmax(1.0, seconds_of(roster)[rows] / duration)
        return np.asarray(value * slowness**-self.penalty)

    def gains(self, roster: Roster, rows: npt.NDArray[np.intp]) -> Floats:
        """n_i sqrt(mean loss^2) of clients with a known loss, cut at the quantile `clip`."""
        raw = np.clip(roster.n[rows] * roster.figure("rms_loss")[rows], 0, 1e300)
        return np.minimum(raw, np.quantile(raw, self.clip, method="lower"))

    def preferred(self, roster: Roster, round: int, *memory: Arrays) -> float:
        """The preferred seconds of a round (0: speed is ignored)."""
        if self.pacer is None:
            return self.duration
        seconds = seconds_of(roster)
        if np.isnan(seconds).all():
            raise ConfigError("select.pace: the clients' durations are unknown; set devices, such as devices=fedcs")
        heard = np.flatnonzero(~np.isnan(roster.figure("rms_loss")))
        # Clients of the last round that were not new in it.
        exploited = (roster.last_replied[heard] == round - 1) & (roster.replied[heard] > 1)
        gains = self.gains(roster, heard)[exploited] if exploited.any() else np.zeros(0)
        percentile = self.pacer.percentile(memory[0], round, float(gains.sum() / (len(gains) + 1e-4)))
        return duration_at(percentile, seconds)

    def blacklisted(self, roster: Roster) -> npt.NDArray[np.bool_]:
        """The clients that took part too often, at most a share of all."""
        often = np.argsort(-roster.replied, kind="stable")[: int(self.blacklist_share * len(roster))]
        out = np.zeros(len(roster), np.bool_)
        out[often] = roster.replied[often] > self.blacklist
        return out

    def quickness(self, roster: Roster) -> Floats:
        """The weights for exploring clients: equal, or higher for quick ones if speed matters."""
        if not (self.duration or self.pace):
            return np.ones(len(roster))
        return np.asarray(1 / np.maximum(1e-9, unknown_as_median(seconds_of(roster))))
