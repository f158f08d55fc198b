"""Oort's pacer: how long a round may take, longer when utility no longer changes, shorter when it leaps."""

import math
from dataclasses import dataclass

import numpy as np

from mutirao.core.arrays import Arrays
from mutirao.selection.base import check_setting
from mutirao.selection.scores import Floats

STATE, GAINS = "oort.pace", "oort.gains"
FLAT, LEAP = 0.1, 5.0  # changes of the gains, as shares of those before, up to which and from which the pace changes


@dataclass(frozen=True)
class Pacer:
    """The percentile of the clients' durations that is preferred: it begins at `start` and moves in steps of `delta`.

    Lai et al., OSDI 2021, as in the authors' code in FedScale: every `step` selections the gains of the last `step`
    rounds, g, are held against those of the `step` before, g'. If |g - g'| <= 0.1 g' the percentile grows by `delta`,
    up to 100; if |g - g'| >= 5 g' it falls by `delta`, down to `delta`. What it remembers is in the run's memory.
    """

    start: float = 30.0
    step: int = 20
    delta: float = 5.0

    def __post_init__(self) -> None:
        check_setting("pace", 0 < self.start <= 100, self.start, "above 0 and at most 100 (0 of Oort: no pacer)")
        check_setting("pace_step", self.step >= 1, self.step, "at least 1")
        check_setting("pace_delta", 0 < self.delta <= 100, self.delta, "above 0 and at most 100")

    def percentile(self, memory: Arrays, round: int, gain: float) -> float:
        """The percentile for this round, `gain` being that of the last; asked twice for a round it says the same."""
        start = np.array([self.start, 0.0, 0.0])
        percentile, counted, times = (float(x) for x in memory.get(STATE, start))
        if counted == round:
            return percentile
        gains = np.append(memory.get(GAINS, np.zeros(0)), gain)[-2 * self.step :]
        times += 1
        if times >= 2 * self.step and times % self.step == 0:
            before, now = float(gains[: -self.step].sum()), float(gains[-self.step :].sum())
            if abs(now - before) <= FLAT * before:
                percentile = min(100.0, percentile + self.delta)
            elif abs(now - before) >= LEAP * before:
                percentile = max(self.delta, percentile - self.delta)
        memory |= {STATE: np.array([percentile, round, times]), GAINS: gains}
        return percentile


def duration_at(percentile: float, seconds: Floats) -> float:
    """The duration that so many per cent of the clients whose durations are known keep to; at 100 any."""
    known = np.sort(seconds[~np.isnan(seconds)])
    if percentile >= 100 or not len(known):
        return math.inf
    return float(known[min(int(len(known) * percentile / 100), len(known) - 1)])
