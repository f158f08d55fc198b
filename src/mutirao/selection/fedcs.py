"""FedCS: as many clients as can reply before a deadline."""

# ruff: noqa: D102  # `__call__` is what the class says it is

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from mutirao.core.roster import ClientId, Roster
from mutirao.selection.base import Counted, check_count, check_setting, how_many, names_in, unknown_as_median
from mutirao.selection.scores import Floats, top


@dataclass(frozen=True)
class FedCS(Counted):
    """As many clients as can reply before a deadline, at most `count`, the quickest first.

    Nishio and Yonetani, "Client Selection for Federated Learning with Heterogeneous Resources in Mobile Edge", ICC
    2019: random candidates (0: all) declare how long they need to get ready (download and train) and to upload; the
    client that adds least to the length of the round is added while the round ends within `deadline` seconds. With
    `in_turn` uploads are sequential, as in the paper; otherwise parallel. What the roster does not know
    (`ready_seconds`, `upload_seconds`, from the system model) counts as the median of what it does.

    >>> roster = Roster()
    >>> roster.meet(["ana", "bia", "caio"])
    >>> roster.figures |= {"ready_seconds": np.array([20.0, 200.0, 60.0]), "upload_seconds": np.array([5.0, 5.0, 5.0])}
    >>> FedCS(3, deadline=90)(roster, 1, np.random.default_rng(0))  # bia would be too late
    ['ana', 'caio']
    """

    deadline: float = 180.0
    candidates: int | float = 0
    in_turn: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_setting("deadline", self.deadline > 0, self.deadline, "above 0")
        if self.candidates:
            check_count(self.candidates)

    def __call__(self, roster: Roster, round: int, rng: np.random.Generator) -> list[ClientId]:
        here = roster.here()
        count = how_many(self.candidates or 1.0, len(here))
        rows = rng.choice(here, count, replace=False)  # in random order, which decides among equals
        ready = unknown_as_median(roster.figure("ready_seconds"))[rows]
        upload = unknown_as_median(roster.figure("upload_seconds"))[rows]
        most = min(how_many(self.count, len(here)), count)
        if self.in_turn:
            return names_in(roster, rows[self.schedule(ready, upload, most)])
        seconds = ready + upload
        quickest = top(-seconds, most, rng)
        # If no client can reply in time, the quickest is taken: a round needs one.
        in_time = seconds[quickest] <= max(self.deadline, seconds.min())
        return names_in(roster, rows[quickest[in_time]])

    def schedule(self, ready: Floats, upload: Floats, most: int) -> npt.NDArray[np.intp]:
        """The greedy choice of the paper: the client that makes the round end soonest, while it ends in time."""
        clock = 0.0
        chosen: list[int] = []
        while len(chosen) < most:
            end = np.maximum(clock, ready) + upload
            end[chosen] = np.inf
            quickest = int(end.argmin())
            if end[quickest] > self.deadline and chosen:
                break  # no other is quicker; the first is taken in any case
            chosen.append(quickest)
            clock = float(end[quickest])
        return np.array(chosen, np.intp)
