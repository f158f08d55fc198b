"""A round is made of the replies that are in: as by an event queue, saved in the middle, refused where it cannot be."""

import heapq
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mutirao.aggregation import FedAvg
from mutirao.aggregation.fedasync import FedAsync
from mutirao.aggregation.fedbuff import FedBuff
from mutirao.config import resolve
from mutirao.core.arrays import Arrays
from mutirao.core.fleet import Reply, Request
from mutirao.core.needs import Needs
from mutirao.core.rounds import Run
from mutirao.errors import ConfigError
from mutirao.experiments.task import find
from mutirao.randomness import rng
from mutirao.report import execute
from mutirao.runs.replay import replay_folder
from mutirao.runs.run_folder import load_run, save_run
from mutirao.selection import Uniform
from mutirao.selection.scores import AGES
from mutirao.simulation.asynchronous import RefillingSelector, rebase
from mutirao.simulation.local_fleet import LocalFleet
from mutirao.systems.quickstart import Config
from staggering import NAMES, Clock, Quadratic, run_staggered, staggered_fleet

ASYNC = {"aggregate": "fedbuff", "devices": "tifl", "clients": 12, "per_round": 6, "epochs": 1}


def event_queue(task: Quadratic, buffer: int, at_once: int, rounds: int, mixing: float | None) -> list[Any]:
    """The algorithm as its authors tell it: whoever is done makes room, and the next begins with the model of then."""
    x, clock, at_work, busy = np.zeros(4), 0.0, list[Any](), set[str]()
    seconds = dict(zip(NAMES, 10 / Clock().speeds(NAMES), strict=True))
    told = []
    for version in range(rounds):
        free = sorted(set(NAMES) - busy)
        count = min(at_once - len(at_work) + buffer - 1, len(free))
        rows = np.sort(
            rng(1, version + 1, "select").choice([NAMES.index(c) for c in free], count, replace=False, shuffle=False)
        )
        coming = [NAMES[rows[i]] for i in rng(1, version + 1, "turns").permutation(count)]
        busy |= set(coming)
        came = []
        while len(came) < buffer:
            while coming and len(at_work) < at_once:
                client = coming.pop(0)
                heapq.heappush(at_work, (clock + seconds[client], client, version, x, task.work(client, x)))
            clock, client, began, start, end = heapq.heappop(at_work)
            came.append((client, version - began, start, end))
            busy.remove(client)
        if mixing is None:
            x = x + sum((end - start) / np.sqrt(1 + age) for _, age, start, end in came) / buffer
        else:
            (_, age, _, end) = came[0]
            x = x + mixing / np.sqrt(1 + age) * (end - x)
        told.append((clock, sorted((client, age) for client, age, *_ in came), x))
    return told


@pytest.mark.parametrize(("buffer", "at_once"), [(1, 5), (3, 5), (5, 5), (4, 9)])
def test_rounds_are_those_of_a_plain_event_queue(buffer: int, at_once: int) -> None:
    task = Quadratic(shared=False)
    parts: list[tuple[Any, float | None]] = [(FedBuff(buffer=buffer), None), *([(FedAsync(), 0.6)] * (buffer == 1))]
    for part, mixing in parts:
        wanted = event_queue(task, buffer, at_once, 40, mixing)
        run, made = run_staggered(task, part, 40, at_once)
        seconds = np.cumsum([run.history[i]["sim_seconds"] for i in range(40)])
        np.testing.assert_allclose(seconds, [clock for clock, *_ in wanted])
        assert [[(r["client"], r["staleness"]) for r in done.clients] for done in made] == [w[1] for w in wanted]
        np.testing.assert_allclose(run.arrays["w"], wanted[-1][2], atol=1e-12)
        assert any(age for _, came, _ in wanted for _, age in came)


@pytest.mark.parametrize("part", [FedBuff(buffer=3), FedAsync()], ids=["fedbuff", "fedasync"])
def test_a_run_saved_in_the_middle_goes_on_bit_for_bit(tmp_path: Path, part: Any) -> None:
    task, clock = Quadratic(shared=False), Clock(dropout=0.2)
    whole, made = run_staggered(task, part, 12, 6, clock)
    half, first = run_staggered(task, part, 5, 6, clock)
    save_run(half, tmp_path / "half")
    again, rest = run_staggered(task, part, 12, 6, clock, load_run(tmp_path / "half"))
    np.testing.assert_array_equal(again.arrays["w"], whole.arrays["w"])
    rows = [r for done in [*first, *rest] for r in done.clients]
    assert rows == [r for done in made for r in done.clients]
    assert any(r["failure"] for r in rows)
    assert any(k.startswith("flights.") for k in again.memory)


def test_a_run_folder_is_resumed_in_the_middle(tmp_path: Path) -> None:
    settings = {**ASYNC, "aggregate.buffer": 2, "devices.dropout": 0.2, "select": "aoi", "rounds": 8}
    whole = execute("quickstart", resolve(Config, settings), tmp_path / "whole", pictures=False)
    execute("quickstart", resolve(Config, settings | {"rounds": 3}), tmp_path / "parts", pictures=False)
    parts = execute("quickstart", resolve(Config, settings), tmp_path / "parts", resume=True, pictures=False)
    assert parts["digest"] == whole["digest"]
    tables = [(tmp_path / name / "clients.csv").read_text() for name in ("whole", "parts")]
    assert tables[0] == tables[1]
    assert ",staleness," in tables[0].splitlines()[0]
    with pytest.raises(ConfigError, match="aggregate=fedbuff: asynchronous runs cannot be replayed"):
        replay_folder(tmp_path / "whole")


def test_who_drops_out_never_arrives_makes_room_and_is_recorded_once() -> None:
    run, made = run_staggered(Quadratic(shared=True), FedBuff(buffer=2), 30, 4, Clock(dropout=0.5))
    rows = [r for done in made for r in done.clients]
    lost = [r for r in rows if r["failure"]]
    assert {r["failure"] for r in lost} == {"gone: dropped out (simulated)"}
    filled = [done.row["replied"] for done in made]  # but where all who were at work are lost
    assert {*filled} == {1, 2}
    assert filled.count(2) > 20
    assert {(r["replied"], r["weight"]) for r in lost} == {(0, 0.0)}
    assert sum(run.roster.selected) == len(rows)
    assert 0.3 < len(lost) / len(rows) < 0.7


def test_nobody_at_work_is_selected_and_never_more_are_at_work() -> None:
    run = Run({"w": np.zeros(4)}, seed=1)
    fleet = staggered_fleet(Quadratic(shared=True), run, buffer=2, at_once=4)
    for number in range(20):
        run.roster.meet(fleet.clients())
        fleet.declare(run.roster)
        assert fleet.clients() == NAMES
        chosen = RefillingSelector(Uniform, fleet)(run.roster, number + 1, rng(0, number, "select"))
        assert not fleet.awaited() & set(chosen)
        answers = fleet.ask({c: Request("train", run.arrays, {"round": number + 1}) for c in chosen})
        assert len(answers.replies) == 2
        assert len(fleet.awaited()) == 3  # four begin, one follows the first reply
        run.round += 1


def test_other_requests_are_answered_at_once() -> None:
    run = Run({"w": np.zeros(4)}, seed=1)
    fleet = staggered_fleet(Quadratic(shared=True), run, buffer=1, at_once=4)
    run.roster.meet(fleet.clients())
    fleet.ask({c: Request("train", run.arrays, {}) for c in NAMES[:4]})
    answers = fleet.ask({c: Request("probe", run.arrays, {}) for c in NAMES})
    assert list(answers.replies) == NAMES
    assert "staleness" not in answers.replies["c00"].metrics


def test_when_all_are_at_work_a_round_waits_for_the_next_of_them() -> None:
    task = Quadratic(shared=True)
    run, made = run_staggered(task, FedBuff(buffer=1), 30, at_once=len(NAMES))
    assert all(done.row["replied"] == 1 for done in made)
    assert {c for done in made for c in (r["client"] for r in done.clients)} >= set(NAMES[6:])
    assert run.roster.selected[-1] > 3 * run.roster.selected[6]  # the quick ones come far more often


@given(st.integers(-(2**62), 2**62), st.integers(-1000, 1000), st.integers(-1000, 1000))
def test_what_a_client_did_is_carried_over(count: int, more: int, theirs: int) -> None:
    start: Arrays = {"w": np.array([1.0, 2.0], np.float32), "count": np.array(count), "is": np.array([True])}
    end: Arrays = {"w": start["w"] + np.float32(0.5), "count": np.array(count + theirs), "is": np.array([False])}
    now: Arrays = {"w": start["w"] * 2, "count": np.array(count + more), "is": np.array([True])}
    made = rebase(start, end, now)
    assert made["w"].tolist() == [2.5, 4.5]
    assert made["w"].dtype == np.float32
    assert int(made["count"]) == count + more + theirs  # ids and hashes beyond 2**53 as well
    assert made["is"].tolist() == [False]


def test_rows_alone_are_carried_over_from_the_model_they_were_trained_on() -> None:
    start, now = {"items": np.zeros((3, 2))}, {"items": np.ones((3, 2))}
    end = {"items": np.array([[5.0, 5.0]]), "items@rows": np.array([1])}
    assert rebase(start, end, now)["items"].tolist() == [[1, 1], [6, 6], [1, 1]]


def test_a_reply_that_is_broken_is_a_failure_when_it_arrives_and_a_claimed_staleness_is_not_believed() -> None:
    task = Quadratic(shared=True)

    def liar(request: Request, site: Any) -> Reply:
        reply = task(request, site)
        if site.id == "c11":
            return Reply({"w": np.full(4, np.nan)}, n=10)
        if site.id == "c10":
            return Reply({"w": reply.arrays["w"]}, metrics={"loss": object()}, n=10)  # type: ignore[dict-item]
        return Reply(reply.arrays, metrics={"staleness": -0.9999999}, n=10)

    run, made = run_staggered(liar, FedBuff(buffer=2), 10, 8)
    rows = [r for done in made for r in done.clients]
    assert {r["client"]: r["failure"][:10] for r in rows if r["failure"]} == {"c10": "dtype: met", "c11": "not_finite"}
    assert all(r["staleness"] >= 0 for r in rows if r["replied"])
    assert np.isfinite(run.arrays["w"]).all()


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"devices": "none"}, "aggregate=fedbuff aggregates replies as they arrive"),
        ({"aggregate.buffer": 7}, "aggregate.buffer is 7, but per_round lets only 6 clients train at once"),
        ({"min_replies": 4}, "min_replies is 4, but aggregate=fedbuff aggregates 3 replies"),
        ({"select.count": 3}, "select.count cannot be set with aggregate=fedbuff"),
        ({"secure": "secagg+"}, "aggregate=fedbuff compares single updates"),
        ({"privacy": "central", "privacy.noise": 1.0}, "privacy=central adds noise to the mean update"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_cannot_be_is_refused_by_name_before_the_first_round(
    tmp_path: Path, more: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        execute("quickstart", resolve(Config, ASYNC | more), tmp_path / "run", pictures=False)
    assert not (tmp_path / "run").exists()


def test_groups_wait_for_all() -> None:
    found = find("groups")
    config = resolve(found.config, {"aggregate": "fedasync", "devices": "tifl", "clients": 5, "samples": 20})
    task = found.task(config)
    flow = found.flow(LocalFleet(task.handler, task.population), config, task, Run(task.initial()))
    with pytest.raises(ConfigError, match="aggregate=fedasync does not wait for all clients, but groups do"):
        next(iter(flow))


def test_a_fleet_that_answers_at_once_says_that_it_cannot() -> None:
    with pytest.raises(ConfigError, match="answer at different times; set devices"):
        LocalFleet(Quadratic(shared=True), {"ana": None}).stagger(1, 1)


def test_any_method_that_joins_updates_takes_carried_over_replies() -> None:
    class Buffered(FedAvg):
        needs = Needs(server={"staleness"})

        def buffer_of(self, at_once: int) -> int:
            return 2

    run, _ = run_staggered(Quadratic(shared=True), Buffered(), 200, 5)
    np.testing.assert_allclose(run.arrays["w"], Quadratic(shared=True).optimum, atol=1e-6)


def test_the_version_age_of_a_client_counts_from_the_model_it_was_given_and_its_age_from_its_answer() -> None:
    run, made = run_staggered(Quadratic(shared=True), FedBuff(buffer=2), 30, at_once=6)
    given = {row["client"]: (r.row["round"], r.row["round"] - row["staleness"]) for r in made for row in r.clients}
    age, version = AGES["age"](run.roster, 31), AGES["version_age"](run.roster, 31)
    done = [c for c in given if run.roster.last_sent[run.roster.row(c)] <= run.roster.last_selected[run.roster.row(c)]]
    assert len(done) >= 4  # the others are at work with a later model
    for c in done:
        answered, began = given[c]
        assert (age[run.roster.row(c)], version[run.roster.row(c)]) == (31 - answered, 31 - began)
    assert (version != age).any()
