"""Settings of differential privacy: noise, clip, delta and budget."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mutirao.config import Scalar
from mutirao.core.arrays import Arrays
from mutirao.core.fleet import ClientId
from mutirao.core.parts import AnyAggregator, AnyHandler, AnySelector
from mutirao.core.rounds import Run
from mutirao.errors import ConfigError
from mutirao.privacy.accounting import Accountant, Releases, add_releases, epsilon, find_noise, worst_case
from mutirao.privacy.central_noise import RELEASES
from mutirao.randomness import Draw, Secret, rng
from mutirao.selection import check_setting

NextRound = Sequence[tuple[Arrays, AnyAggregator]]  # of each model of the round to come: its memory, its aggregator
AtServer = tuple[AnySelector, AnyAggregator]
# Metrics of a client's own account: spent, and after one more round.
EPSILON = "epsilon"
NEXT = "epsilon_next"
NOISE = 1.0  # unless it is said or found
EPSILON_IF_SECRET = "epsilon_if_secret"  # under `repeatable` noise, so that it is not mistaken for epsilon


class Privacy:
    """The interface of all privacy methods; the base class guarantees nothing."""

    budget: float = 0.0
    repeatable: bool = False
    protects = "nobody"

    def at_client(self, handler: AnyHandler) -> AnyHandler:
        """The handler for the client side."""
        return handler

    def at_server(self, select: AnySelector, aggregate: AnyAggregator, clients: int, config: Any) -> AtServer:
        """The selector and the aggregator for the server side."""
        return select, aggregate

    def spent(self, run: Run) -> float | None:
        """Epsilon so far, of the client that spent most; None without privacy."""
        return None

    def spent_after_round(self, run: Run, outlook: NextRound) -> float:
        """Epsilon if one more round is made: of the single model, or of each group's."""
        return 0.0

    def found(self, config: Any, clients: int) -> dict[str, Scalar]:
        """The settings derived from the others, to be written down with a run."""
        return {}

    def figures(self, run: Run) -> dict[str, float]:
        """The privacy columns of a round's row in the history."""
        spent = self.spent(run)
        if spent is None:
            return {}
        return {self.column: spent}

    @property
    def column(self) -> str:
        """The history's column of the privacy spent."""
        if self.repeatable:
            return EPSILON_IF_SECRET
        return EPSILON


@dataclass(frozen=True)
class Settings(Privacy):
    """Settings of all methods: noise (a multiple of the clip), clip, delta, and the budget of epsilon (0: none).

    Instead of the noise, `epsilon` can be set: what `rounds` rounds shall cost together, which is then the budget too.
    """

    noise: float | None = None  # None: what `epsilon` requires, or else 1
    clip: float = 1.0
    delta: float = 1e-5
    budget: float = 0.0
    accountant: Accountant = "rdp"
    repeatable: bool = False
    epsilon: float = 0.0
    rounds: int | None = None  # those that `epsilon` is to last for: all of the run

    def __post_init__(self) -> None:
        check_setting("epsilon", 0 <= self.epsilon < math.inf, self.epsilon, "0 (not set) or above")
        if self.noise is None and not self.epsilon:
            object.__setattr__(self, "noise", NOISE)
        if self.epsilon and not self.budget:
            object.__setattr__(self, "budget", self.epsilon)
        check_setting("noise", self.noise is None or 0 < self.noise < math.inf, self.noise, "above 0")
        check_setting("clip", 0 < self.clip < math.inf, self.clip, "above 0")
        check_setting("delta", 0 < self.delta < 1, self.delta, "above 0 and below 1")
        check_setting("rounds", self.rounds is None or self.rounds > 0, self.rounds, "above 0")
        check_setting("budget", 0 <= self.budget < math.inf, self.budget, "0 (none) or above")

    def cost(self, table: Releases | None) -> float:
        """The epsilon of these releases."""
        return epsilon(table, self.delta, self.accountant)

    def noise_for(self, rate: float, times: int, sensitivity: float = 1.0) -> float:
        """The noise as set, or as `epsilon` needs it for this many releases a round at this rate."""
        if self.noise is not None:
            return self.noise
        if self.rounds is None:
            raise ConfigError("privacy.epsilon finds the noise for the rounds planned: set privacy.rounds")
        return sensitivity * find_noise(self.epsilon, self.delta, self.accountant, rate, times * self.rounds)

    def found(self, config: Any, clients: int) -> dict[str, Scalar]:
        """The noise, if it is the same for all."""
        return self.written(self.noise)

    def written(self, noise: float | None) -> dict[str, Scalar]:
        """The derived noise as settings; if `epsilon` determined it, with its number of rounds."""
        written: dict[str, Scalar] = {}
        if noise is not None:
            written["noise"] = noise
        if self.epsilon and self.rounds:
            written["rounds"] = self.rounds
        return written

    def inherit(self, before: Sequence[Arrays], noise: float) -> Arrays:
        """The memory of a new group: the most expensive account of the earlier groups, and a noised signature."""
        worst = worst_case([memory[RELEASES] for memory in before if RELEASES in memory])
        return {RELEASES: add_releases(worst, noise, 1.0, 1)}

    def draw(self, seed: int, round: int, client: ClientId = "") -> Draw:
        """The random source for the noise of one release and for all else that must stay secret."""
        if self.repeatable:
            return rng(seed, round, "privacy", client)
        return Secret()
