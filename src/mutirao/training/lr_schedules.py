"""Learning rate schedules over rounds: each client computes the factor of its rate from the round number.

A schedule is any function from the round, counted from 1, to a factor above 0. The schedules here never exceed 1, and
their last round still trains: its factor is that of the last step down, not the 0 in which a curve may end.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from mutirao.config import Common, Part, build
from mutirao.errors import ConfigError

Schedule = Callable[[int], float]


@dataclass(frozen=True)
class Constant:
    """The same rate in every round.

    >>> [Constant()(t) for t in (1, 2, 100)]
    [1.0, 1.0, 1.0]
    """

    def __call__(self, round: int) -> float:
        """Always 1."""
        return 1.0


@dataclass(frozen=True)
class Cosine:
    """From 1 down to `final` along half a cosine: final + (1 - final) (1 + cos(pi (t - 1) / T)) / 2 in round t of T.

    Round 1 has the whole rate, and round T is one step before `final`, as in torch's CosineAnnealingLR; so are the
    rounds after T. T is `length`, or the rounds of the run. Loshchilov and Hutter, 2017: SGDR.

    >>> [round(Cosine(length=4)(t), 3) for t in (1, 2, 3, 4, 5)]
    [1.0, 0.854, 0.5, 0.146, 0.146]
    """

    final: float = 0.0
    length: int | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.final <= 1:
            raise ValueError(f"final is {self.final!r}, but must lie between 0 and 1")
        check_length(self.length)

    def __call__(self, round: int) -> float:
        """The factor of a round."""
        return cosine_decay(round, self.length, self.final)


@dataclass(frozen=True)
class Step:
    """Multiplied by `gamma` every `every` rounds: gamma^floor((t - 1) / every), as torch's StepLR.

    >>> [Step(every=2, gamma=0.5)(t) for t in (1, 2, 3, 4, 5)]
    [1.0, 1.0, 0.5, 0.5, 0.25]
    """

    every: int = 10
    gamma: float = 0.5

    def __post_init__(self) -> None:
        if self.every < 1:
            raise ValueError(f"every is {self.every!r}, but must be at least 1")
        if not 0 < self.gamma <= 1:
            raise ValueError(f"gamma is {self.gamma!r}, but must be above 0 and at most 1")

    def __call__(self, round: int) -> float:
        """The factor of a round."""
        return float(self.gamma ** ((max(1, round) - 1) // self.every))


@dataclass(frozen=True)
class Warmup:
    """A linear rise t / rounds to 1 in round `rounds`; then constant, or a cosine down to the last round.

    The cosine begins with 1 in the round after, and has T - rounds rounds. Goyal et al., 2017: Accurate, Large
    Minibatch SGD.

    >>> [Warmup(rounds=2)(t) for t in (1, 2, 3)]
    [0.5, 1.0, 1.0]
    """

    rounds: int = 5
    then: Literal["constant", "cosine"] = "constant"
    length: int | None = None

    def __post_init__(self) -> None:
        if self.rounds < 1:
            raise ValueError(f"rounds is {self.rounds!r}, but must be at least 1")
        check_length(self.length)

    def __call__(self, round: int) -> float:
        """The factor of a round."""
        if round <= self.rounds:
            return max(1, round) / self.rounds
        if self.then == "constant":
            return 1.0
        rest = self.length
        if rest is not None:
            rest -= self.rounds
        return cosine_decay(round - self.rounds, rest, 0.0)


NAMES = {"constant": Constant, "cosine": Cosine, "step": Step, "warmup": Warmup}


def check_length(length: int | None) -> None:
    """ValueError for a length below 1."""
    if length is not None and length < 1:
        raise ValueError(f"length is {length!r}, but must be at least 1")


def cosine_decay(round: int, length: int | None, final: float) -> float:
    """Half a cosine from 1 towards `final`, which it would have in the round after the last."""
    if length is None:
        raise ValueError("length: say over how many rounds the cosine goes")
    done = 0.0
    if length > 0:
        # t - 1 of T steps are done in round t: the last round is one step before `final`, and still trains.
        done = (min(max(1, round), length) - 1) / length
    return final + (1 - final) * (1 + math.cos(math.pi * done)) / 2


def schedule_of(config: Common) -> Schedule:
    """The configured schedule, checked in its first and last round."""
    made: Schedule = build("schedule", config.schedule, length=config.rounds)
    for round in (1, config.rounds):
        try:
            factor_of(made, round)
        except Exception as error:  # a user's own function may raise anything
            raise ConfigError(f"schedule={config.schedule.name}: {error}") from error
    return made


def factor_of(schedule: Schedule, round: int) -> float:
    """The factor of a round; ValueError if a user's schedule returns anything but a number above 0."""
    factor: Any = schedule(round)
    if not isinstance(factor, int | float) or not 0 < factor < math.inf:
        raise ValueError(f"the schedule's factor for round {round} is {factor!r}, but must be a number above 0")
    return float(factor)


def has_same_past(part: Part, before: int, after: int) -> bool:
    """Whether two run lengths, `before` and `after`, give the same factors in the rounds that both have."""
    old, new = (build("schedule", part, length=rounds) for rounds in (before, after))
    return before == after or all(old(round) == new(round) for round in range(1, min(before, after) + 1))
