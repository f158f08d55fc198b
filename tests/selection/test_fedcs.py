"""FedCS: whoever can reply in time."""

import numpy as np

from choosing import rng, roster_of
from mutirao.core.roster import Roster
from mutirao.selection import FedCS


def roster_with_times(ready: list[float], upload: list[float]) -> Roster:
    roster = roster_of([f"c{i}" for i in range(len(ready))])
    roster.figures |= {"ready_seconds": np.array(ready), "upload_seconds": np.array(upload)}
    return roster


def test_fedcs_takes_whoever_can_reply_in_time() -> None:
    roster = roster_with_times([10, 50, 200, 20, 90], [5, 5, 5, 100, 5])
    assert FedCS(5, deadline=100)(roster, 1, rng()) == ["c0", "c1", "c4"]
    assert FedCS(2, deadline=100)(roster, 1, rng()) == ["c0", "c1"]
    assert FedCS(5, deadline=1)(roster, 1, rng()) == ["c0"]  # nobody can, but a round needs someone


def test_fedcs_with_uploads_in_turn_fills_the_round_as_in_the_paper() -> None:
    """By hand: c0 ends at 15, c1 at 25 (ready at 10, waits), c2 at 55 (ready at 50); c3 would end at 105."""
    roster = roster_with_times([10, 10, 50, 5], [5, 10, 5, 50])
    assert FedCS(4, deadline=100, in_turn=True)(roster, 1, rng()) == ["c0", "c1", "c2"]
    assert FedCS(4, deadline=105, in_turn=True)(roster, 1, rng()) == ["c0", "c1", "c2", "c3"]


def test_fedcs_takes_the_unknown_for_middling_and_draws_candidates_by_lot() -> None:
    roster = roster_with_times([10, np.nan, 500], [1, np.nan, 1])
    assert FedCS(3, deadline=300)(roster, 1, rng()) == ["c0", "c1"]
    many = roster_of([f"c{i:02d}" for i in range(50)])
    assert len({tuple(FedCS(5, candidates=10)(many, 1, rng(seed))) for seed in range(20)}) > 15
