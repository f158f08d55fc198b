"""A site's states by round: where a request begins, what is kept, what a damaged file costs."""

from pathlib import Path

import numpy as np

from mutirao.deploy.flower.client import ROUNDS, RUNS, States


def test_training_begins_after_an_earlier_round_and_other_requests_see_the_latest(tmp_path: Path) -> None:
    states = States(tmp_path, "a" * 64)
    assert states.before("train", 1) == (0, {})
    for number in (1, 2, 4):
        states.keep(number, {"v": np.array(number)})
    assert [states.before("train", n)[0] for n in (1, 2, 3, 4, 5, 99)] == [0, 1, 2, 2, 4, 4]
    assert [states.before("evaluate", n)[0] for n in (1, 2, 3, 4)] == [1, 2, 2, 4]
    np.testing.assert_array_equal(states.before("train", 3)[1]["v"], 2)
    assert States(tmp_path, "b" * 64).before("train", 3) == (0, {})  # another run


def test_old_rounds_and_runs_are_removed(tmp_path: Path) -> None:
    for run in range(RUNS + 3):
        states = States(tmp_path, f"{run:064x}"[::-1])
        for number in range(1, ROUNDS + 4):
            states.keep(number, {"v": np.array(number)})
        assert sorted(states.rounds()) == list(range(4, ROUNDS + 4))
    assert len(list(tmp_path.iterdir())) == RUNS


def test_a_damaged_state_is_passed_over(tmp_path: Path) -> None:
    states = States(tmp_path, "a" * 64)
    for number in (1, 2):
        states.keep(number, {"v": np.array(number)})
    states.file(2).write_bytes(states.file(2).read_bytes()[:-3])
    assert states.before("train", 3)[0] == 1


def test_work_that_ends_after_newer_work_does_not_undo_it(tmp_path: Path) -> None:
    """A site that was given up as late in round 3 is asked again in round 5, and is done with that first."""
    states = States(tmp_path, "a" * 64)
    states.keep(1, {"v": np.array(1)})
    began = [states.before("train", n)[0] for n in (3, 5)]
    for number in (5, 3):
        states.keep(number, {"v": np.array(number)})
    assert began == [1, 1]
    assert [states.before("train", n)[0] for n in (4, 6, 7)] == [3, 5, 5]
    assert states.before("evaluate", 9)[0] == 5
