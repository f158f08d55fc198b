"""Clipping and noise on updates, and the server side of central differential privacy.

The server samples clients by secret Poisson sampling and aggregates a noised mean.

The length of updates is not known beforehand. So the clip C moves towards the quantile g of their lengths:
C' = C exp(-lr (b - g)), where b is the share of clients with an update not longer than C, noised as well. Andrew,
Thakkar, McMahan and Ramaswamy, 2021: Differentially Private Learning with Adaptive Clipping.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np

from mutirao.core.arrays import Arrays, cast_to
from mutirao.core.fleet import ClientId, Reply
from mutirao.core.needs import Needs
from mutirao.core.parts import AnyAggregator, Merged, as_aggregator
from mutirao.core.roster import Roster
from mutirao.core.sparse_rows import ROWS
from mutirao.privacy.accounting import add_releases
from mutirao.randomness import Draw, Secret
from mutirao.selection import names_in


def clip_update(current: Arrays, model: Arrays, clip: float) -> tuple[Arrays, float]:
    """The update model - current in float64, scaled to length `clip` if it is longer; and the factor.

    Of a table that came as rows (`items@rows`), these rows.

    >>> update, factor = clip_update({"w": np.zeros(2)}, {"w": np.array([3.0, 4.0])}, clip=1.0)
    >>> update["w"], factor  # from length 5 to length 1
    (array([0.6, 0.8]), 0.2)
    """
    update: Arrays = {}
    for name in (k for k, v in current.items() if v.dtype.kind == "f"):
        rows = model.get(name + ROWS)
        update[name] = model[name].astype(np.float64) - (current[name] if rows is None else current[name][rows])
    # fsum rounds once, so that the clip does not depend on the order of the arrays.
    length = math.sqrt(math.fsum(float(np.vdot(u, u)) for u in update.values()))
    if not math.isfinite(length):
        # An update that cannot be bounded must not count.
        return {k: np.zeros_like(u) for k, u in update.items()}, 0.0
    scale = min(1.0, clip / length) if length else 1.0
    return {k: scale * u for k, u in update.items()}, scale


def add_noise(current: Arrays, update: Arrays, draw: Draw, deviation: float, share: float = 1.0) -> Arrays:
    """current + share (update + Gaussian noise); arrays that are not floating-point stay as they are.

    >>> draw = np.random.default_rng(0)
    >>> noised = add_noise({"w": np.zeros(10_000)}, {"w": np.ones(10_000)}, draw, deviation=2.0)["w"]
    >>> round(float(noised.mean()), 1), round(float(noised.std()), 1)
    (1.0, 2.0)
    """
    out = dict(current)
    for name in sorted(update):
        noise = draw.normal(0.0, deviation, update[name].shape)
        out[name] = cast_to(current[name] + share * (update[name] + noise), current[name].dtype)
    return out


@dataclass(frozen=True)
class AdaptiveClip:
    """A clip that follows the `quantile` of the updates' lengths, at the rate `lr`.

    How many were not longer is released with the updates, with noise of deviation `count_noise`.
    """

    quantile: float
    lr: float
    count_noise: float

    def update_noise(self, noise: float) -> float:
        """The noise z_u of the updates, so that updates and count together cost what `noise` z alone would.

        1 / z^2 = 1 / z_u^2 + 1 / (2 count_noise)^2. A client moves the sum of `halves` by at most 1/2, whence the 2.

        >>> round(AdaptiveClip(0.5, 0.2, 5.0).update_noise(1.0), 4)
        1.005
        """
        return math.sqrt(1 / (1 / noise**2 - 1 / (2 * self.count_noise) ** 2))

    def next(self, clip: float, halves: float, expected: float) -> float:
        """C exp(-lr (b - quantile)), with b = halves / expected + 1/2.

        `halves` is the noised sum, over the clients of the round, of 1/2 (not longer than C) or -1/2 (longer).

        >>> AdaptiveClip(0.5, 0.2, 5.0).next(1.0, 0.0, 10.0)  # as many below as above
        1.0
        """
        return clip * math.exp(-self.lr * (halves / expected + 0.5 - self.quantile))


RELEASES = "privacy.releases"  # where the table lies in the run's memory, or in a site's state
CLIP = "privacy.clip"  # where a clip that moves lies: of the last round, and of the next one


@dataclass(frozen=True)
class Poisson:
    """Each available client with the same probability, independently; sometimes none (Poisson sampling).

    The account assumes that the sample is secret, and every client receives the run's seed. So the seed decides nothing
    here, unless `repeatable` is set.

    >>> roster = Roster()
    >>> roster.meet([f"c{i}" for i in range(100)])
    >>> selector = Poisson(rate=0.1, repeatable=True)
    >>> [len(selector(roster, 1, np.random.default_rng(seed))) for seed in range(5)]  # ten on average
    [10, 8, 11, 8, 7]
    """

    rate: float
    repeatable: bool = False
    may_be_empty = True

    def __call__(self, roster: Roster, round: int, rng: np.random.Generator) -> list[ClientId]:
        """The sampled clients."""
        here = roster.here()
        draw = rng if self.repeatable else Secret()
        return names_in(roster, here[draw.random(len(here)) < self.rate])


@dataclass(frozen=True)
class NoisyMean:
    """An aggregator that sees a single model: the current one moved by the noised mean of clipped updates.

    x' = x + (sum_k d_k + N) / m, each d_k cut to length C, N Gaussian of deviation noise x C, m `expected` clients.
    Arrays that are not floating-point stay as they are: a client's counter would reveal it.
    """

    then: AnyAggregator
    noise: float
    clip: float
    rate: float
    expected: float
    adaptive_clip: AdaptiveClip | None = None
    added: float = 0.0  # noise that each client has added before it was summed: so much less is left to add
    draw: Callable[[int], Draw] = field(default=lambda release: Secret(), repr=False)  # for each release

    @property
    def needs(self) -> Needs:
        """The wrapped aggregator's needs; of long tables, only the received rows."""
        return as_aggregator(self.then).needs | Needs(server={"rows"})

    def __call__(self, current: Arrays, replies: Mapping[ClientId, Reply], memory: Arrays) -> Merged:
        """The next model; the release is added to the run's account."""
        table = add_releases(memory.get(RELEASES), self.noise, self.rate, 1)
        clip = self.clip
        if self.adaptive_clip and CLIP in memory:
            clip = float(memory[CLIP][1])
        longest = clip
        if self.added:
            # Clients clipped their updates before they added noise: to clip them again would cut the noise, too.
            longest = math.inf
        sums: Arrays = {k: np.zeros(v.shape) for k, v in current.items() if v.dtype.kind == "f"}
        scales: dict[ClientId, dict[str, float]] = {}
        for client in sorted(replies):
            arrays = replies[client].arrays
            update, scale = clip_update(current, arrays, longest)
            for name, value in update.items():
                # NumPy adds a repeated row only once here; the checks of replies have refused repeated rows.
                sums[name][arrays.get(name + ROWS, ...)] += value
            scales[client] = {"clip_scale": scale}
        # A generator for each release, so that with `repeatable` no two rounds have the same noise.
        draw = self.draw(int(table[:, 2].sum()))
        noise = self.noise
        if self.adaptive_clip:
            halves = sum(0.5 if found["clip_scale"] == 1.0 else -0.5 for found in scales.values())
            halves += float(draw.normal(0.0, self.adaptive_clip.count_noise, 1)[0])
            memory[CLIP] = np.array([clip, self.adaptive_clip.next(clip, halves, self.expected)])
            noise = self.adaptive_clip.update_noise(noise)
        # Variances add up, so noise that clients added before a secure sum is subtracted.
        noise = math.sqrt(max(0.0, noise**2 - len(replies) * self.added**2))
        moved = add_noise(current, sums, draw, noise * clip, 1 / self.expected)
        merged = self.then(current, {"everybody": Reply(moved, n=max(1, round(self.expected)))}, memory)
        memory[RELEASES] = table
        return Merged(merged.arrays, dict.fromkeys(sorted(replies), 1 / self.expected), scales)
