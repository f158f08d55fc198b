"""Settings of secure aggregation, which server and sites have independently and each enforces."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from mutirao.core.fleet import Request, Scalar
from mutirao.selection import check_setting

Sizes = Literal["masked", "public"]
SUMMED = ("train", "evaluate")  # the requests whose answers are summed
# The four stages of a sum, as requests.
PREFIX = "secagg."  # under which the settings and extras of a stage travel
KEYS, SHARES, MASKED, UNMASK = STAGES = ("secagg.keys", "secagg.shares", "secagg.masked", "secagg.unmask")


def without_session(config: Mapping[str, Scalar]) -> dict[str, Scalar]:
    """The configuration of a request without the entries of its secure session."""
    return {k: v for k, v in config.items() if not k.startswith(PREFIX)}


def effective_request(request: Request) -> str:
    """The kind of request that a stage answers: for a masked answer, that of the inner request."""
    if request.do == MASKED:
        return str(request.config.get("secagg.do", ""))
    return request.do


@dataclass(frozen=True)
class Settings:
    """Settings of a secure sum; `SecAggPlus` documents each."""

    threshold: float = 0.6
    neighbours: int = 24
    least: int = 3
    clip: float = 0.0
    range: float = 8.0
    bits: int = 24
    most_samples: int = 10_000
    sizes: Sizes = "masked"
    noise: float = 0.0

    def __post_init__(self) -> None:
        check_setting("threshold", 0.5 <= self.threshold <= 1, self.threshold, "from 0.5 to 1: a majority must agree")
        check_setting("neighbours", self.neighbours >= 2, self.neighbours, "at least 2")
        check_setting("least", self.least >= 2, self.least, "at least 2: the sum of one is its update")
        check_setting("clip", 0 <= self.clip < math.inf, self.clip, "0 (any length) or above")
        check_setting("range", 0 < self.range < math.inf, self.range, "above 0")
        check_setting("bits", 2 <= self.bits <= 40, self.bits, "from 2 to 40")
        check_setting("most_samples", 1 <= self.most_samples <= 10**6, self.most_samples, "from 1 to a million")
        check_setting("noise", 0 <= self.noise < math.inf, self.noise, "0 (none) or above")
        check_setting("sizes", self.sizes in ("masked", "public"), self.sizes, "masked or public")

    def needed(self, party: int) -> int:
        """How many of a client and its neighbours must stay: a majority, so that no two disjoint sets can unmask."""
        return max(party // 2 + 1, math.ceil(self.threshold * party - 1e-9))
