"""What each group trains by: tables, and candidates that a group's own clients choose among."""

import pytest

from mutirao.clustering.group_hyperparameters import (
    ChosenHyperparameters,
    GivenHyperparameters,
    SharedHyperparameters,
    as_table,
)


def test_a_table_is_read_and_written_back() -> None:
    part = GivenHyperparameters("g0: lr=0.1 epochs=2; g12: batch_size=8")
    assert part.rows() == {"g0": {"lr": 0.1, "epochs": 2}, "g12": {"batch_size": 8}}
    assert GivenHyperparameters(as_table(part.rows())) == GivenHyperparameters("g0: lr=0.1 epochs=2; g12: batch_size=8")
    assert part.names == {"lr", "epochs", "batch_size"}
    assert part.config_for("g1", 1, {}, True) == {}
    assert not SharedHyperparameters().names


@pytest.mark.parametrize("table", ["", "g0", "g0:", "g0: lr", "g0: mu=1", "g0: lr=-1", "g0: epochs=1.5", "0: lr=1"])
def test_what_is_no_table_is_refused(table: str) -> None:
    with pytest.raises(ValueError, match=r"lr|must be a whole number"):
        GivenHyperparameters(table)


def test_candidates_take_turns_and_the_best_goes_on() -> None:
    part = ChosenHyperparameters(lr="0.1,0.2", epochs="1,3", rounds=2)
    assert part.candidates == [
        {"lr": 0.1, "epochs": 1},
        {"lr": 0.1, "epochs": 3},
        {"lr": 0.2, "epochs": 1},
        {"lr": 0.2, "epochs": 3},
    ]
    assert part.trials == 8
    assert [r for r in range(1, 12) if part.restarts(r)] == [3, 5, 7, 9]
    assert [part.config_for("g0", r, {}, True)["lr"] for r in (1, 4, 5, 8)] == [0.1, 0.1, 0.2, 0.2]
    scores = {"g0": [(r, v) for r, v in enumerate([9, 0.5, 9, 0.7, 9, 0.6, 9, 0.7], 1)], "g1": [(2, 0.1)]}
    assert part.config_for("g0", 9, scores, True) == {"lr": 0.1, "epochs": 3}  # by what was said after a last trial
    assert part.config_for("g0", 9, scores, False) == {"lr": 0.1, "epochs": 1}
    assert part.config_for("g2", 9, scores, True) == {"lr": 0.1, "epochs": 1}  # nobody judged


def test_one_candidate_is_none() -> None:
    with pytest.raises(ValueError, match="two candidates"):
        ChosenHyperparameters(lr="0.1")
    with pytest.raises(ValueError, match="rounds is 0"):
        ChosenHyperparameters(lr="0.1,0.2", rounds=0)
