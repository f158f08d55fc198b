"""One client takes over, ends or blinds no round, whatever it claims; an honest one is left as it is."""

import dataclasses
import logging
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mutirao.aggregation import FedAdam, FedAvg, FedAvgM, MultiKrum
from mutirao.core.arrays import Arrays, digest, flat, square
from mutirao.core.fleet import Reply, Request, Site
from mutirao.core.records import Round
from mutirao.core.roster import Roster
from mutirao.core.rounds import Group, Patience, Run, step, train
from mutirao.core.sparse_rows import ROWS, to_dense
from mutirao.core.validation import cap_sizes, faults, faults_of_length, unexpected_metrics, update_length
from mutirao.runs.csv_tables import MOST_COLUMNS, CsvTable
from mutirao.selection import everyone
from mutirao.simulation.local_fleet import LocalFleet

PEOPLE = [f"c{i}" for i in range(9)]
LIAR = "liar"
Lie = Callable[[Request, Reply], Any]


def honest(request: Request, site: Site) -> Reply:
    """Everybody moves towards 1, by steps that differ a little."""
    step = 0.4 + 0.02 * (sum(map(ord, site.id)) % 10)
    w = request.arrays["w"]
    return Reply({"w": w + np.float32(step) * (1 - w)}, metrics={"loss": 1 - step, "accuracy": step}, n=20)


def fleet(lie: Lie) -> LocalFleet:
    def handler(request: Request, site: Site) -> Any:
        reply = honest(request, site)
        return lie(request, reply) if site.id == LIAR else reply

    return LocalFleet(handler, dict.fromkeys([*PEOPLE, LIAR]))


def rounds(lie: Lie, number: int = 5, aggregate: Any = None, **more: Any) -> tuple[Run, list[Round]]:
    run = Run({"w": np.zeros((4, 5), np.float32)})
    made = train(
        run,
        fleet(lie),
        rounds=number,
        select=everyone,
        aggregate=aggregate or FedAvg(),
        patience=Patience(wait=0.0),
        **more,
    )
    return run, list(made)


def row_of(done: Round, client: str) -> dict[str, Any]:
    return next(row for row in done.clients if row["client"] == client)


def pushing_away(n: int) -> Lie:
    return lambda request, reply: Reply({"w": request.arrays["w"] - 1}, metrics=reply.metrics, n=n)


# Samples.


@pytest.mark.parametrize(
    ("aggregate", "weight"),
    [(FedAvg(), 200 / 380), (FedAvgM(), 200 / 380), (FedAdam(), 200 / 380), (MultiKrum(keep=10), 0.1)],
)
def test_a_client_that_declares_a_million_million_samples_counts_as_ten(aggregate: Any, weight: float) -> None:
    run, made = rounds(pushing_away(10**12), aggregate=aggregate)
    for done in made:
        row = row_of(done, LIAR)
        assert (row["n"], row["n_declared"]) == (200, 10**12)
        assert row["weight"] == pytest.approx(weight)
        assert done.row["train_accuracy"] < 1
    assert run.roster.n[run.roster.row(LIAR)] == 200
    assert all("n_declared" not in row for done in made for row in done.clients if row["client"] != LIAR)


def test_who_is_cut_is_named_and_nothing_is_cut_where_the_cap_is_off(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "mutirao"):
        rounds(pushing_away(10**12), 1)
    assert "round 1: liar declares 1000000000000 samples, of which 200 count" in caplog.text
    _, (done,) = rounds(pushing_away(10**12), 1, size_cap=0)
    assert row_of(done, LIAR)["weight"] > 0.999


def test_a_client_cannot_grow_beyond_twice_what_it_first_declared_but_up_to_the_median_at_any_time() -> None:
    said = iter([30, 60, 61, 190])
    _, made = rounds(lambda request, reply: dataclasses.replace(reply, n=next(said)), 4)
    assert [row_of(done, LIAR)["n"] for done in made] == [30, 60, 60, 60]
    small = iter([1, 20, 21])
    _, made = rounds(lambda request, reply: dataclasses.replace(reply, n=next(small)), 3)
    assert [row_of(done, LIAR)["n"] for done in made] == [1, 20, 20]


def test_where_one_or_two_reply_all_that_were_ever_heard_of_are_the_measure() -> None:
    roster = Roster()
    roster.meet([*PEOPLE, LIAR])
    roster.mark(1, PEOPLE, dict.fromkeys(PEOPLE, 20))
    assert cap_sizes({LIAR: 10**12}, roster, 10.0) == {LIAR: 200}
    assert cap_sizes({LIAR: 10**12, "c0": 20}, roster, 10.0) == {LIAR: 200}
    fresh = Roster()
    fresh.meet(["ana", "bia"])
    assert cap_sizes({"ana": 10**12, "bia": 5}, fresh, 10.0) == {"ana": 50}  # of two, the lower is the measure
    assert cap_sizes({"ana": 7}, fresh, 10.0) == {}


def test_what_a_site_was_admitted_with_holds_from_the_first_round() -> None:
    roster = Roster()
    roster.meet([*PEOPLE, LIAR])
    roster.first_n[roster.row(LIAR)] = 30
    assert cap_sizes(dict.fromkeys(PEOPLE, 20) | {LIAR: 150}, roster, 10.0) == {LIAR: 60}


counts = st.lists(st.integers(1, 10**6), min_size=3, max_size=15)


@given(counts=counts, cap=st.floats(1, 100), lie=st.integers(1, 10**12))
def test_a_cap_cuts_only_down_never_below_the_median_and_no_minority_moves_it_above_the_honest(
    counts: list[int], cap: float, lie: int
) -> None:
    names = [f"c{i}" for i in range(len(counts))]
    declared = dict(zip(names, counts, strict=True))
    liars = names[: (len(names) - 1) // 2]
    lies = declared | dict.fromkeys(liars, lie)
    roster = Roster()
    roster.meet(names)
    cut = cap_sizes(lies, roster, cap)
    for client, n in cut.items():
        assert n < lies[client]
        assert n >= sorted(lies.values())[(len(lies) - 1) // 2]
        assert n <= cap * max(declared[c] for c in names if c not in liars)
    assert cap_sizes(dict(reversed(lies.items())), roster, cap) == cut
    assert cap_sizes(lies, roster, 0) == {}
    roster.mark(1, names, lies | cut)
    assert cap_sizes(lies | cut, roster, cap) == {}  # what was believed once is believed again


# Updates.


@pytest.mark.parametrize("huge", [3e38, -3e38, 1e30])
def test_one_update_beyond_all_measure_is_the_failure_of_its_client_and_the_run_goes_on(huge: float) -> None:
    def lie(request: Request, reply: Reply) -> Reply:
        return dataclasses.replace(reply, arrays={"w": np.full((4, 5), huge, np.float32)})

    run, made = rounds(lie)
    assert [row_of(done, LIAR)["failure"].partition(":")[0] for done in made] == ["too_long"] * 5
    alone = Run({"w": np.zeros((4, 5), np.float32)})
    list(
        train(alone, LocalFleet(honest, dict.fromkeys(PEOPLE)), rounds=5, select=everyone, aggregate=FedAvg(), expect=9)
    )
    assert digest(run.arrays) == digest(alone.arrays)


def test_one_of_two_replies_is_measured_by_the_model() -> None:
    current: Arrays = {"w": np.ones(100)}
    replies = {"ana": Reply({"w": np.full(100, 2.0)}, n=1), "bia": Reply({"w": np.full(100, 1e9)}, n=1)}
    assert list(faults_of_length(current, replies)) == ["bia"]
    assert faults_of_length(current, {"ana": replies["ana"]}) == {}


def test_honest_updates_are_never_too_long_however_the_round_is_made_up() -> None:
    start: Arrays = {"w": np.zeros(50, np.float32)}  # the model is nothing yet, so that any update is far
    from_nothing = {f"c{i}": Reply({"w": np.full(50, 10.0**i, np.float32)}, n=1) for i in range(3)}
    assert faults_of_length(start, from_nothing) == {}
    settled: Arrays = {"w": np.ones(50)}  # most do not move at all, and one still learns
    late = {f"c{i}": Reply({"w": np.ones(50) + (0.5 if i == 0 else 0.0)}, n=1) for i in range(5)}
    assert faults_of_length(settled, late) == {}
    diverging = {f"c{i}": Reply({"w": np.full(50, 3e38, np.float32)}, n=1) for i in range(5)}
    assert faults_of_length(start, diverging) == {}  # all of them: that is named by the round


def test_replies_cut_from_one_array_are_refused_as_those_of_their_own_are() -> None:
    current: Arrays = {"w": np.ones((4, 5), np.float32)}
    for bad, kind in ((np.nan, "not_finite"), (1e20, "too_long"), (1e9, "too_long")):
        stack = np.ones((6, 4, 5), np.float32)
        stack[2, 1, 1] = bad
        for pieces in (list(stack), [piece.copy() for piece in stack]):
            replies = {f"c{i}": Reply({"w": piece}, n=1) for i, piece in enumerate(pieces)}
            found = faults(current, replies) or faults_of_length(current, replies)
            assert {c: f.kind for c, f in found.items()} == {"c2": kind}


def test_a_row_sent_many_times_is_no_shorter_for_it() -> None:
    current: Arrays = {"w": np.ones((100, 5), np.float32)}
    store = np.zeros((300, 5), np.float32)
    store[0] = 50  # alone it is below the bound, a hundred times above
    replies = {f"c{i}": Reply({"w": store[100:200]}, n=1) for i in range(5)}
    replies["bia"] = Reply({"w": np.broadcast_to(store[0], (100, 5))}, n=1)
    store[100:200] = 1.01
    assert list(faults_of_length(current, replies)) == ["bia"]


@given(st.integers(0, 2**32 - 1), st.sampled_from([np.float16, np.float32, np.float64]))
def test_lengths_are_those_of_the_flat_vectors(seed: int, dtype: Any) -> None:
    draw = np.random.default_rng(seed)
    shape = (int(draw.integers(1, 40)), int(draw.integers(1, 700)))
    current: Arrays = {"w": draw.normal(size=shape).astype(dtype), "n": np.array(3)}
    rows = np.sort(draw.choice(shape[0], int(draw.integers(1, shape[0] + 1)), replace=False)).astype(np.int32)
    sent: Arrays = {"w": draw.normal(size=(len(rows), shape[1])).astype(dtype), "w" + ROWS: rows, "n": np.array(9)}
    away = flat({"w": to_dense(current, sent)["w"]}) - flat({"w": current["w"]})
    assert update_length(current, sent) == pytest.approx(np.linalg.norm(away))
    assert square(current) == pytest.approx(float(np.sum(current["w"].astype(np.float64) ** 2)), rel=1e-3)


# Metrics.


def flooding(request: Request, reply: Reply) -> Reply:
    names = {f"x{request.config['round']}_{i}": 1.0 for i in range(60)}
    return dataclasses.replace(reply, metrics={**names, **reply.metrics})


@pytest.mark.parametrize("known", [{"loss", "accuracy"}, None])
def test_metrics_that_a_client_makes_up_reach_neither_roster_nor_tables(
    known: set[str] | None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "mutirao"):
        run, made = rounds(flooding, 6, metrics=known)
    assert set(run.roster.figures) == {"loss", "accuracy"}
    table = CsvTable(tmp_path / "history.csv")
    for done in made:
        table.append([done.row | {"late": 1.0}])
    assert "late" in table.columns
    assert len(table.columns) < 20 < MOST_COLUMNS
    assert "liar reports metrics that the task does not have, ignored: x1_0, x1_1, x1_10 and 57 more" in caplog.text
    assert caplog.text.count("round 3: liar reports") == 1
    assert all({"loss", "accuracy"} <= row.keys() for done in made for row in done.clients)


def test_a_client_alone_in_its_rounds_cannot_fill_the_tables_either() -> None:
    run = Run({"w": np.zeros((4, 5), np.float32)})
    alone = LocalFleet(lambda request, site: flooding(request, honest(request, site)), {LIAR: None})
    for _ in range(6):
        step(run, alone, [Group(everyone, FedAvg())], patience=Patience(wait=0.0))
    assert len(run.roster.figures) < 150
    assert {"loss", "accuracy"} <= run.roster.figures.keys()


def test_a_task_that_says_nothing_keeps_the_metrics_that_most_clients_tell() -> None:
    replies = [Reply({}, metrics={"own": 1.0}), Reply({}, metrics={"own": 1.0, "rare": 2.0}), Reply({}, metrics={})]
    assert unexpected_metrics(replies, {"loss"}, strict=False) == {"rare"}
    assert unexpected_metrics(replies, {"loss", "rare"}, strict=False) == set()
    assert unexpected_metrics(replies, {"loss"}, strict=True) == {"own", "rare"}


@pytest.mark.parametrize("loss", [1e308, -1e308, 1e99])
def test_a_lying_loss_makes_no_row_infinite_and_does_not_end_the_run(loss: float) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run, made = rounds(lambda request, reply: dataclasses.replace(reply, metrics={"loss": loss, "accuracy": 0.5}))
    assert run.round == 5
    assert all(np.isfinite(done.row["train_loss"]) for done in made)
    assert all((abs(loss) > 1e100) == row_of(done, LIAR)["failure"].startswith("not_finite") for done in made)
