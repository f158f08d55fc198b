"""What the server knows of its clients survives newcomers, leavers and a checkpoint."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mutirao.core.arrays import digest
from mutirao.core.roster import COUNTS, MOST_FIGURES, Roster

ids = st.lists(st.text(max_size=5), max_size=12, unique=True)


def test_rows_are_sorted_by_name_whoever_came_first() -> None:
    one, two = Roster(), Roster()
    one.meet(["bia", "ana"])
    one.meet(["bia", "ana", "caio"])
    two.meet(["caio", "ana", "bia"])
    assert one.ids == two.ids == ["ana", "bia", "caio"]
    assert [one.row(c) for c in one.ids] == [0, 1, 2]


def test_newcomers_get_a_row_and_move_nobodys_figures() -> None:
    roster = Roster()
    roster.meet(["mia", "zoe"])
    roster.mark(1, ["mia", "zoe"], {"zoe": 30})
    roster.note("zoe", {"loss": 0.5})
    roster.meet(["ana", "mia", "nina", "zoe"])
    zoe, mia, ana = (roster.row(c) for c in ("zoe", "mia", "ana"))
    assert [getattr(roster, c)[zoe] for c in COUNTS] == [1, 1, 1, 1, 30, 0, 0, 30, 1, 0]
    assert [getattr(roster, c)[mia] for c in COUNTS] == [1, 0, 1, 0, 0, 0, 0, 0, 1, 0]
    assert [getattr(roster, c)[ana] for c in COUNTS] == [0] * 10
    np.testing.assert_array_equal(roster.figure("loss"), [np.nan, np.nan, np.nan, 0.5])


def test_who_leaves_is_absent_but_remembered() -> None:
    roster = Roster()
    roster.meet(["ana", "bia", "caio"])
    roster.mark(1, ["bia"], {"bia": 3})
    roster.meet(["ana", "caio"])
    assert [roster.ids[i] for i in roster.here()] == ["ana", "caio"]
    assert "bia" in roster
    assert not roster.present[roster.row("bia")]
    roster.meet(["bia"])
    assert [roster.ids[i] for i in roster.here()] == ["bia"]
    assert roster.selected[roster.row("bia")] == 1
    roster.meet([])
    assert len(roster.here()) == 0


def test_meeting_the_same_list_again_costs_nothing_and_a_new_list_is_read() -> None:
    names = [f"c{i}" for i in range(5)]
    roster = Roster()
    roster.meet(names)
    assert len(roster.here()) == 5
    roster.meet(names)
    assert len(roster.here()) == 5
    roster.meet(names[:2])
    assert len(roster.here()) == 2


def test_a_stranger_has_no_row() -> None:
    assert "ana" not in Roster()
    with pytest.raises(KeyError):
        Roster().row("ana")


def test_ages_count_from_the_last_selection_or_from_the_start() -> None:
    roster = Roster()
    roster.meet(["ana", "bia"])
    roster.mark(3, ["bia"], {})
    np.testing.assert_array_equal(roster.ages(10), [10, 7])


def test_unknown_figures_take_the_default() -> None:
    roster = Roster()
    roster.meet(["ana", "bia"])
    roster.note("ana", {"entropy": 0.0})
    np.testing.assert_array_equal(roster.figure("entropy", 2.3), [0.0, 2.3])
    np.testing.assert_array_equal(roster.figure("nothing", 1.0), [1.0, 1.0])
    assert np.isnan(roster.figure("nothing")).all()


def test_clients_cannot_grow_the_servers_memory_by_inventing_names() -> None:
    roster = Roster()
    roster.meet(["ana"])
    for i in range(2 * MOST_FIGURES):
        roster.note("ana", {f"m{i}": 1.0})
    assert len(roster.figures) == MOST_FIGURES
    roster.note("ana", {"m0": 5.0})
    assert roster.figure("m0")[0] == 5.0


@given(ids, st.data())
def test_saved_and_restored_it_tells_the_same_of_everyone_it_had_dealt_with(
    names: list[str], data: st.DataObject
) -> None:
    roster = Roster()
    roster.meet(names)
    some = st.lists(st.sampled_from(names), unique=True) if names else st.just([])
    for round in range(1, data.draw(st.integers(1, 4))):
        chosen = data.draw(some)
        roster.mark(round, chosen, {c: data.draw(st.integers(1, 99)) for c in chosen[1:]})
        for c in data.draw(some):
            figure = st.dictionaries(st.sampled_from(["loss", "ndcg@5"]), st.floats(-9, 9))
            roster.note(c, data.draw(figure))
    again = Roster.from_arrays({k: v.copy() for k, v in roster.to_arrays().items()})
    assert set(again.ids) <= set(names)
    assert not again.present.any()
    again.meet(names)
    assert again.ids == roster.ids
    for column in (*COUNTS, "present"):
        np.testing.assert_array_equal(getattr(again, column), getattr(roster, column))
        assert getattr(again, column).dtype == getattr(roster, column).dtype
    for name in roster.figures:
        np.testing.assert_array_equal(again.figure(name), roster.figure(name))


@pytest.mark.parametrize("name", ["", "two\nlines", "tab\t", "日本", "\ud800", "a" * 1000])
def test_any_name_survives_a_checkpoint(name: str) -> None:
    roster = Roster()
    roster.meet([name, "other"])
    roster.mark(1, [name], {name: 4})
    again = Roster.from_arrays(roster.to_arrays())
    assert again.ids == [name]
    assert again.n[0] == 4


def test_a_checkpoint_holds_only_rows_that_differ_from_a_newcomers() -> None:
    roster = Roster()
    roster.meet([f"c{i:06d}" for i in range(100_000)])
    roster.mark(1, ["c000007"], {"c000007": 5})
    saved = roster.to_arrays()
    assert sum(v.nbytes for v in saved.values()) < 1000
    assert Roster.from_arrays(saved).ids == ["c000007"]


def test_an_improvement_is_a_lower_loss_than_the_one_before() -> None:
    roster = Roster()
    roster.meet(["ana", "bia"])
    heard = [(1, 0.9), (2, 0.8), (3, 0.85), (4, 0.85), (5, 0.84)]
    rounds = []
    for t, loss in heard:
        roster.hear(t, "ana", {"loss": loss})
        rounds.append(int(roster.last_improved[0]))
    assert rounds == [1, 2, 2, 2, 5]
    roster.hear(6, "bia", {"entropy": 1.0})  # no loss, no improvement
    assert roster.last_improved.tolist() == [5, 0]


def test_who_was_only_probed_is_kept_in_a_checkpoint_and_old_ones_can_be_read() -> None:
    roster = Roster()
    roster.meet(["ana", "bia"])
    roster.probed(3, {"bia": 40})
    saved = roster.to_arrays()
    again = Roster.from_arrays(saved)
    assert (again.ids, again.last_probed.tolist(), again.n.tolist()) == (["bia"], [3], [40])
    old = Roster.from_arrays({k: v for k, v in saved.items() if k not in ("last_probed", "last_improved")})
    assert old.last_probed.tolist() == [0]


@given(ids, st.data())
def test_what_all_tell_is_heard_as_from_each(names: list[str], data: st.DataObject) -> None:
    one, two = Roster(), Roster()
    figure = st.dictionaries(st.sampled_from(["loss", "entropy"]), st.floats(0, 2), max_size=2)
    for roster in (one, two):
        roster.meet(names)
    for t in (1, 2, 3):
        same = data.draw(figure)
        told = {c: dict.fromkeys(same, float(i)) if data.draw(st.booleans()) else same for i, c in enumerate(names)}
        told |= {c: data.draw(figure) for c in names[:1] if data.draw(st.booleans())}
        two.hear_all(t, told)
        for c, figures in told.items():
            one.hear(t, c, figures)
        assert digest(one.to_arrays()) == digest(two.to_arrays())


@given(ids, st.data())
def test_names_are_saved_as_the_json_of_those_touched(names: list[str], data: st.DataObject) -> None:
    roster = Roster()
    roster.meet(names)
    for t in (1, 2):
        roster.mark(t, data.draw(st.lists(st.sampled_from(names), unique=True)) if names else [], {})
        touched = [c for c in roster.ids if roster.asked[roster.row(c)]]
        assert roster.to_arrays()["ids"].tobytes() == json.dumps(touched).encode()
        roster.meet([*names, "somebody new"])
