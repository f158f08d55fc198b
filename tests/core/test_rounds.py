"""A round goes on whatever its clients do, says who did what, and ends in one clear line if it cannot."""

import dataclasses
import logging
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

import mutirao.core.rounds as core_rounds
from mutirao.aggregation import FedAdam, FedAvg, FedOpt, FedProx
from mutirao.aggregation.fedrisk import FedRisk
from mutirao.core.arrays import Arrays, digest
from mutirao.core.fleet import Answers, Failure, Fleet, Reply, Request, Site, collect
from mutirao.core.needs import Capabilities, Needs
from mutirao.core.parts import AnyAggregator, AnySelector, Merged, as_aggregator, check_needs
from mutirao.core.records import Round
from mutirao.core.roster import Roster
from mutirao.core.rounds import Group, Patience, Run, mean_metrics, train, wait_for_clients
from mutirao.core.rounds import step as step_of
from mutirao.errors import ConfigError, Diverged, TooFewClients, TooFewReplies
from mutirao.robustness.filters import NormFilter
from mutirao.selection import Uniform, everyone
from mutirao.simulation.local_fleet import LocalFleet

PEOPLE = ["ana", "bia", "caio", "dora", "eva", "fabi"]
QUICK = Patience(wait=0.0)


def step(
    run: Run, fleet: Fleet, select: AnySelector, aggregate: AnyAggregator, patience: Patience | None = None, **more: Any
) -> Round:
    """One round of everybody."""
    return step_of(run, fleet, [Group(select, aggregate, **more)], patience=patience)


def model() -> Arrays:
    return {"w": np.zeros((2, 3), np.float32), "steps": np.zeros((), np.int64)}


def trained(request: Request, site: Site) -> Reply:
    """A stand-in for training: where a client moves depends on who it is and on the model it got."""
    step = 1 + sum(map(ord, site.id)) % 7
    arrays = {"w": (request.arrays["w"] * np.float32(0.5) + np.float32(step)), "steps": request.arrays["steps"] + step}
    return Reply(arrays, metrics={"loss": step / 10}, n=10 * step)


Fault = Callable[[Reply], Any]


def changed(**changes: Any) -> Fault:
    return lambda reply: dataclasses.replace(reply, **changes)


def with_w(w: Any) -> Fault:
    return lambda reply: dataclasses.replace(reply, arrays={**reply.arrays, "w": w})


def raises(reply: Reply) -> Reply:
    raise RuntimeError("CUDA out\nof memory")


def sleeps(reply: Reply) -> Reply:
    time.sleep(10)
    return reply


CATALOGUE: dict[str, tuple[Fault, str]] = {
    "raises": (raises, "raised"),
    "late": (sleeps, "late"),
    "nothing": (lambda reply: None, "empty"),
    "no arrays": (changed(arrays={}), "empty"),
    "NaN": (with_w(np.full((2, 3), np.nan, np.float32)), "not_finite"),
    "inf": (with_w(np.full((2, 3), np.inf, np.float32)), "not_finite"),
    "wrong shape": (with_w(np.zeros((3, 2), np.float32)), "shape"),
    "wrong dtype": (with_w(np.zeros((2, 3), np.float64)), "dtype"),
    "huge array": (with_w(np.zeros((2000, 300), np.float32)), "too_large"),
    "unknown key": (lambda r: dataclasses.replace(r, arrays={**r.arrays, "v": np.zeros(1)}), "unknown_key"),
    "missing key": (lambda r: dataclasses.replace(r, arrays={"w": r.arrays["w"]}), "missing_key"),
    "n = 0": (changed(n=0), "count"),
    "NaN metric": (changed(metrics={"loss": float("nan")}), "not_finite"),
    "bad metric name": (changed(metrics={"los s": 1.0}), "unknown_key"),
    "NaN in extras": (changed(extras={"errors": np.array([np.nan])}), "not_finite"),
}


def faulty_fleet(fault: Fault, who: tuple[str, ...], timeout: float | None = None) -> LocalFleet:
    def handler(request: Request, site: Site) -> Any:
        reply = trained(request, site)
        return fault(reply) if site.id in who else reply

    return LocalFleet(handler, dict.fromkeys(PEOPLE), timeout)


@pytest.mark.parametrize(("fault", "kind"), CATALOGUE.values(), ids=CATALOGUE)
def test_a_client_at_fault_has_the_kind_in_its_row_and_the_round_goes_on_as_if_it_were_not_there(
    fault: Fault, kind: str
) -> None:
    run = Run(model())
    timeout = 1.0 if kind == "late" else None
    done = step(run, faulty_fleet(fault, ("bia",), timeout), everyone, FedAvg(), patience=QUICK)
    rows = {row["client"]: row for row in done.clients}
    assert list(rows) == PEOPLE
    assert rows["bia"]["failure"].startswith(f"{kind}: ")
    assert "\n" not in rows["bia"]["failure"]
    assert (rows["bia"]["replied"], rows["bia"]["n"], rows["bia"]["weight"]) == (0, 0, 0.0)
    others = [row for c, row in rows.items() if c != "bia"]
    assert all(row["replied"] == 1 and not row["failure"] for row in others)
    assert sum(row["weight"] for row in others) == pytest.approx(1.0)
    assert [done.row[k] for k in ("round", "selected", "replied", "failed", "rejected")] == [1, 6, 5, 1, 0]
    without = Run(model())
    honest = LocalFleet(trained, {c: None for c in PEOPLE if c != "bia"})
    step(without, honest, everyone, FedAvg(), patience=QUICK)
    assert digest(run.arrays) == digest(without.arrays)
    assert run.round == 1
    assert run.roster.replied.tolist() == [1, 0, 1, 1, 1, 1]
    assert run.roster.selected.tolist() == [1] * 6


@dataclass
class FakeFleet(Fleet):
    """A fleet whose answers are made by a function, to do what no decent fleet does."""

    events: Callable[[Mapping[str, Request]], list[tuple[str, Reply | Failure]]]
    people: list[str] = field(default_factory=lambda: PEOPLE.copy())
    asked: list[dict[str, Request]] = field(default_factory=list)

    def clients(self) -> list[str]:
        return self.people

    def ask(self, requests: Mapping[str, Request]) -> Answers:
        self.asked.append(dict(requests))
        return collect(requests, self.events(requests))


def honest_events(requests: Mapping[str, Request]) -> list[tuple[str, Reply | Failure]]:
    return [(c, trained(r, Site(c))) for c, r in requests.items()]


def test_a_client_that_answers_twice_counts_for_nothing() -> None:
    def events(requests: Mapping[str, Request]) -> list[tuple[str, Reply | Failure]]:
        return [*honest_events(requests), ("bia", trained(requests["bia"], Site("bia")))]

    done = step(Run(model()), FakeFleet(events), everyone, FedAvg(), patience=QUICK)
    assert done.clients[1]["failure"] == "twice: answered more than once"
    assert (done.row["replied"], done.row["failed"]) == (5, 1)


def test_answers_of_strangers_are_ignored() -> None:
    def events(requests: Mapping[str, Request]) -> list[tuple[str, Reply | Failure]]:
        return [*honest_events(requests), ("mallory", trained(requests["bia"], Site("mallory")))]

    one, two = Run(model()), Run(model())
    step(one, FakeFleet(events), everyone, FedAvg(), patience=QUICK)
    step(two, FakeFleet(honest_events), everyone, FedAvg(), patience=QUICK)
    assert digest(one.arrays) == digest(two.arrays)
    assert "mallory" not in one.roster


def test_a_silent_client_is_late() -> None:
    fleet = FakeFleet(lambda requests: honest_events(requests)[1:])
    done = step(Run(model()), fleet, everyone, FedAvg(), patience=QUICK)
    assert done.clients[0]["failure"] == "late: no answer in time"


def test_order_of_replies_and_of_names_changes_no_bit() -> None:
    def backwards(requests: Mapping[str, Request]) -> list[tuple[str, Reply | Failure]]:
        return [
            (c, dataclasses.replace(r, arrays=dict(reversed(r.arrays.items()))))
            for c, r in reversed(honest_events(requests))
            if isinstance(r, Reply)
        ]

    runs = []
    for fleet in (FakeFleet(honest_events), FakeFleet(backwards, people=PEOPLE[::-1])):
        run = Run(model(), seed=3)
        rounds = list(train(run, fleet, rounds=4, select=Uniform(4), aggregate=FedAdam(), patience=QUICK))
        runs.append((run, rounds))
    (one, first), (two, second) = runs
    assert digest(one.arrays) == digest(two.arrays)
    assert digest(one.memory) == digest(two.memory)
    assert [r.clients for r in first] == [r.clients for r in second]
    assert digest(one.roster.to_arrays()) == digest(two.roster.to_arrays())


# Too few replies: try again with others, and give up in the end.


def test_too_few_replies_lead_to_another_try_with_a_fresh_selection() -> None:
    tries: list[list[str]] = []

    def events(requests: Mapping[str, Request]) -> list[tuple[str, Reply | Failure]]:
        tries.append(list(requests))
        return [] if len(tries) == 1 else honest_events(requests)

    run = Run(model(), seed=1)
    done = step(run, FakeFleet(events), Uniform(3), FedAvg(), patience=QUICK)
    assert len(tries) == 2
    assert set(tries[0]) != set(tries[1])
    assert [row["try"] for row in done.clients] == [1, 1, 1, 2, 2, 2]
    assert [row["failure"] != "" for row in done.clients] == [True] * 3 + [False] * 3
    assert [row["weight"] > 0 for row in done.clients] == [False] * 3 + [True] * 3
    assert (done.row["selected"], done.row["replied"], done.row["failed"]) == (3, 3, 0)
    assert done.row["bytes_down"] == 6 * 32  # both tries were sent
    assert run.round == 1


def test_after_all_tries_the_round_fails_and_says_why_and_nothing_has_moved() -> None:
    run = Run(model(), memory={"x": np.ones(1)})
    before = digest(run.arrays), digest(run.memory)
    with pytest.raises(TooFewReplies) as caught:
        step(run, faulty_fleet(raises, ("ana", "bia", "caio", "dora")), everyone, FedAvg(), patience=Patience(tries=2))
    why = r"\(ana raised: RuntimeError: CUDA out of memory; .*; \.\.\.\)"
    assert re.fullmatch(rf"round 1 failed 2 times: 2 usable replies, 3 needed {why}", str(caught.value))
    assert len(caught.value.rows) == 12
    assert (run.round, before) == (0, (digest(run.arrays), digest(run.memory)))


@pytest.mark.parametrize(
    ("min_replies", "faulty", "fails"),
    [
        (None, 3, False),  # half of six is enough
        (None, 4, True),
        (2, 4, False),
        (6, 1, True),
        (6, 0, False),
    ],
)
def test_as_many_replies_as_asked_for_are_enough(min_replies: int | None, faulty: int, fails: bool) -> None:
    fleet = faulty_fleet(changed(n=0), tuple(PEOPLE[:faulty]))
    patience = Patience(min_replies=min_replies, tries=1, wait=0.0)
    if fails:
        with pytest.raises(TooFewReplies, match="round 1 failed 1 times"):
            step(Run(model()), fleet, everyone, FedAvg(), patience=patience)
    else:
        assert step(Run(model()), fleet, everyone, FedAvg(), patience=patience).row["replied"] == 6 - faulty


def test_rejected_replies_are_not_usable_either_and_have_their_reason() -> None:
    def handler(request: Request, site: Site) -> Reply:
        reply = trained(request, site)
        far = {"w": reply.arrays["w"] * 100, "steps": reply.arrays["steps"]}
        return dataclasses.replace(reply, arrays=far) if site.id == "dora" else reply

    fleet = LocalFleet(handler, dict.fromkeys(PEOPLE))
    run = Run(model())
    done = step(run, fleet, everyone, FedAvg(), filters=[NormFilter(20.0)], patience=QUICK)
    dora = done.clients[3]
    assert (dora["client"], dora["replied"], dora["weight"], dora["failure"]) == ("dora", 1, 0.0, "")
    assert "20 times the median" in dora["rejected"]
    assert (done.row["replied"], done.row["rejected"]) == (6, 1)
    with pytest.raises(TooFewReplies, match="dora rejected: update of length"):
        step(run, fleet, everyone, FedAvg(), filters=[NormFilter(20.0)], patience=Patience(min_replies=6, tries=1))


# Too few clients.


class Clock:
    """A clock that goes on only while somebody sleeps."""

    now = 0.0

    def monotonic(self) -> float:
        return self.now

    perf_counter = monotonic

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def test_too_few_clients_are_waited_for_a_bounded_time_and_then_named(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(core_rounds, "time", clock)
    fleet = LocalFleet(trained, {"ana": 1, "bia": 2})
    with pytest.raises(TooFewClients, match=r"waited 30 s for 3 clients, 2 came: ana, bia; start more"):
        step(Run(model()), fleet, everyone, FedAvg(), patience=Patience(min_replies=3, wait=30))
    assert clock.now == pytest.approx(30)
    with pytest.raises(TooFewClients, match="0 came: none"):
        next(
            train(Run(model()), LocalFleet(trained, {}), rounds=1, select=everyone, aggregate=FedAvg(), patience=QUICK)
        )


def test_clients_that_come_in_time_are_met() -> None:
    class Slow(Fleet):
        calls = 0

        def clients(self) -> list[str]:
            self.calls += 1
            return PEOPLE[: self.calls]

        def ask(self, requests: Mapping[str, Request]) -> Answers:
            raise NotImplementedError

    roster = Roster()
    wait_for_clients(roster, Slow(), 3, Patience(wait=10))
    assert roster.ids == PEOPLE[:3]


def test_newcomers_and_leavers_between_rounds_are_noticed() -> None:
    fleet = FakeFleet(honest_events, people=["bia", "dora"])
    run = Run(model())
    for people in (["bia", "dora"], ["ana", "bia", "dora"], ["ana"]):
        fleet.people = people
        done = step(run, fleet, everyone, FedAvg(), patience=QUICK)
        assert [row["client"] for row in done.clients] == people
    assert run.roster.selected.tolist() == [2, 2, 2]
    assert run.roster.last_selected.tolist() == [3, 2, 2]


# Selectors that ask for what cannot be.


@pytest.mark.parametrize(
    ("choice", "text"),
    [
        ([], "selected no client in round 1"),
        (["ana", "zoe"], "selected unknown client 'zoe'"),
        (["ana", "gone"], "selected 'gone', who is absent"),
        (["ana", "bia", "ana"], "selected 'ana' twice"),
    ],
)
@pytest.mark.parametrize("probing", [False, True])
def test_an_impossible_choice_is_refused_by_name(choice: list[str], text: str, probing: bool) -> None:
    @dataclass(frozen=True)
    class Chooser:
        def __call__(self, roster: Roster, round: int, rng: np.random.Generator) -> list[str]:
            return choice

    @dataclass(frozen=True)
    class Prober(Chooser):
        def probes(self, roster: Roster, round: int, rng: np.random.Generator) -> list[str]:
            return choice

    run = Run(model())
    run.roster.meet([*PEOPLE, "gone"])
    fleet = FakeFleet(honest_events)
    with pytest.raises(ConfigError, match=text):
        step(run, fleet, Prober() if probing else Chooser(), FedAvg(), patience=QUICK)
    assert not any(fleet.asked), "nobody was asked to do anything"


@dataclass(frozen=True)
class LeastLoss:
    """Probes everyone and selects the one with the least loss."""

    def probes(self, roster: Roster, round: int, rng: np.random.Generator) -> list[str]:
        return everyone(roster, round, rng)

    def __call__(self, roster: Roster, round: int, rng: np.random.Generator) -> list[str]:
        return [roster.ids[int(np.argmin(roster.figure("loss", np.inf)))]]


def test_probes_are_asked_first_and_land_in_the_roster(caplog: pytest.LogCaptureFixture) -> None:
    def handler(request: Request, site: Site) -> Reply:
        if request.do == "probe":
            if site.id == "ana":
                raise RuntimeError("no")
            loss = float("nan") if site.id == "bia" else PEOPLE.index(site.id) / 10
            return Reply({}, metrics={"loss": loss}, n=4)
        return dataclasses.replace(trained(request, site), metrics={})

    run = Run(model())
    with caplog.at_level(logging.WARNING, "mutirao"):
        done = step(run, LocalFleet(handler, dict.fromkeys(PEOPLE)), LeastLoss(), FedAvg(), patience=QUICK)
    assert [row["client"] for row in done.clients] == ["caio"]
    np.testing.assert_array_equal(run.roster.figure("loss"), [np.nan, np.nan, 0.2, 0.3, 0.4, 0.5])
    assert "probe of ana raised: RuntimeError: no" in caplog.text
    assert "probe of bia not_finite" in caplog.text
    assert done.row["bytes_down"] == 7 * 32
    assert done.row["bytes_up"] == 4 * 16 + (32 + 8)
    assert run.roster.selected.tolist() == [0, 0, 1, 0, 0, 0]


# What clients are told.


def test_clients_get_model_seed_round_settings_and_what_the_aggregator_tells() -> None:
    fleet = FakeFleet(honest_events)
    run = Run(model(), seed=11, round=4)
    step(run, fleet, everyone, FedProx(mu=0.9), config={"lr": 0.5}, patience=QUICK)
    for request in fleet.asked[0].values():
        assert request.do == "train"
        assert request.config == {"seed": 11, "round": 5, "lr": 0.5, "mu": 0.9}
        assert digest(request.arrays) == digest(model())


@dataclass(frozen=True)
class Telling:
    """Selects everyone, wants their entropy with the update and the length of each update."""

    needs = Needs(metrics={"entropy"}, config={"probe_samples": 7}, server={"update_norm"})

    def __call__(self, roster: Roster, round: int, rng: np.random.Generator) -> list[str]:
        return everyone(roster, round, rng)


def test_the_extras_that_selector_aggregator_and_caller_want_are_joined() -> None:
    fleet = FakeFleet(honest_events)
    step(Run(model()), fleet, Telling(), FedRisk(), config={"extras": "own"}, patience=QUICK)
    for request in fleet.asked[0].values():
        assert request.config == {"seed": 0, "round": 1, "extras": "entropy,own,squared_errors", "probe_samples": 7}


def test_the_server_measures_how_far_each_client_moved_the_model() -> None:
    run = Run(model())
    done = step(run, FakeFleet(honest_events), Telling(), FedAvg(), patience=QUICK)
    for row in done.clients:
        moved = trained(Request("train", model()), Site(row["client"])).arrays
        expected = np.sqrt(np.sum(moved["w"].astype(float) ** 2) + float(moved["steps"]) ** 2)
        assert row["update_norm"] == pytest.approx(expected)
        assert run.roster.figure_of(row["client"], "update_norm") == row["update_norm"]


def test_what_probes_cost_is_in_the_record_of_the_round_and_only_if_there_were_any() -> None:
    @dataclass(frozen=True)
    class AskTwo(Telling):
        needs = Needs(metrics={"entropy"}, probes={"loss", "rms_loss"}, config={"probe_samples": 3})

        def probes(self, roster: Roster, round: int, rng: np.random.Generator) -> list[str]:
            return ["ana", "bia"] if round == 1 else []

    fleet, run = FakeFleet(honest_events), Run(model())
    first, second = (step(run, fleet, AskTwo(), FedAvg(), patience=QUICK) for _ in range(2))
    assert (first.row["probed"], first.row["probe_seconds"] > 0) == (2, True)
    assert first.row["bytes_down"] + first.row["bytes_up"] > first.row["probe_bytes"] > 2 * 32
    assert "probed" not in second.row
    probes = fleet.asked[0]
    assert sorted(probes) == ["ana", "bia"]
    assert probes["ana"].do == "probe"
    # What is told with an update is not asked for here, and a loss comes with every answer.
    assert probes["ana"].config == {"seed": 0, "round": 1, "probe_samples": 3, "extras": "rms_loss"}
    assert len(fleet.asked) == 3
    assert run.roster.last_probed.tolist() == [1, 1, 0, 0, 0, 0]


@dataclass(frozen=True)
class Needy(FedAvg):
    needs = Needs(metrics={"entropy", "loss"})


def test_what_the_clients_do_not_provide_is_refused_before_the_first_round() -> None:
    needy, plain = as_aggregator(Needy()), as_aggregator(FedAvg())
    check_needs(Capabilities(metrics={"entropy", "loss"}), needy, plain)
    with pytest.raises(ConfigError, match=r"needs the metric 'entropy', which .* \(they support metrics loss\)"):
        check_needs(Capabilities(metrics={"loss"}), plain, needy)
    with pytest.raises(ConfigError, match=r"\(they support nothing\)"):
        check_needs(Capabilities(), needy)


# What is recorded.


def test_a_clients_metric_never_overwrites_our_columns() -> None:
    names = ("weight", "round", "client", "replied", "n", "failure", "rejected", "age", "try")

    def handler(request: Request, site: Site) -> Reply:
        return dataclasses.replace(trained(request, site), metrics={**dict.fromkeys(names, 99.0), "loss": 0.5})

    fleet = LocalFleet(handler, dict.fromkeys(PEOPLE))
    done = step(Run(model()), fleet, everyone, FedAvg(), patience=QUICK)
    plain = step(Run(model()), LocalFleet(trained, dict.fromkeys(PEOPLE)), everyone, FedAvg(), patience=QUICK)
    for mine, clean in zip(done.clients, plain.clients, strict=True):
        assert [mine[k] for k in names] == [clean[k] for k in names]
        assert mine["loss"] == 0.5
    assert done.row["round"] == 1
    assert done.row["train_round"] == 99.0


def test_weights_metrics_figures_and_ages_stand_in_the_rows() -> None:
    @dataclass(frozen=True)
    class Risky:
        def __call__(self, current: Arrays, replies: Mapping[str, Reply], memory: Arrays) -> Merged:
            merged = FedAvg()(current, replies, memory)
            return Merged(merged.arrays, merged.weights, {c: {"risk": r.n / 1000} for c, r in replies.items()})

    run = Run(model())
    fleet = LocalFleet(trained, dict.fromkeys(PEOPLE))
    for _ in range(2):
        done = step(run, fleet, everyone, Risky(), patience=QUICK)
    total = sum(row["n"] for row in done.clients)
    for row in done.clients:
        assert row["weight"] == row["n"] / total
        assert row["risk"] == row["n"] / 1000
        assert row["loss"] == row["n"] / 100
        assert row["age"] == 1
    assert done.row["train_loss"] == pytest.approx(sum(r["weight"] * r["loss"] for r in done.clients))
    np.testing.assert_array_equal(run.roster.figure("risk"), [row["risk"] for row in done.clients])
    assert done.row["bytes_down"] == 6 * 32
    assert done.row["bytes_up"] == 6 * (32 + 16)
    assert done.row["seconds"] > 0


def test_metrics_are_averaged_over_those_who_sent_them_and_do_not_overflow() -> None:
    replies = {
        "ana": Reply({}, metrics={"loss": 1.0, "huge": 1.7e308}, n=3),
        "bia": Reply({}, metrics={"loss": 5.0, "huge": 1.7e308}, n=1),
        "caio": Reply({}, metrics={"other": 7.0}, n=100),
    }
    means = mean_metrics(replies)
    assert list(means) == ["huge", "loss", "other"]
    assert means["loss"] == 2.0
    assert means["other"] == 7.0
    assert means["huge"] == pytest.approx(1.7e308)


# Divergence.


@dataclass(frozen=True)
class Counting:
    """A filter that remembers how many rounds it saw, and drops a client in the first."""

    needs = Needs(server={"memory"})

    def __call__(self, current: Arrays, replies: Mapping[str, Reply], memory: Arrays) -> Any:
        seen = int(memory.get("counting.seen", 0))
        memory["counting.seen"] = np.array(seen + 1)
        dropped = {} if seen else {"ana": "first"}
        return {c: r for c, r in replies.items() if c not in dropped}, dropped


def test_what_a_filter_remembers_holds_if_the_round_does() -> None:
    run, fleet = Run(model()), LocalFleet(trained, dict.fromkeys(PEOPLE))
    strict = Patience(min_replies=6, tries=2, wait=0.0)
    with pytest.raises(TooFewReplies):
        step(run, fleet, everyone, FedAdam(), filters=[Counting()], patience=strict)  # each try is the first
    assert not run.memory
    done = [step(run, fleet, everyone, FedAdam(), filters=[Counting()], patience=QUICK) for _ in range(2)]
    assert [row.row["rejected"] for row in done] == [1, 0]
    assert run.memory["counting.seen"] == 2
    assert run.memory["fedadam.step"] == 2
    groups = [Group(everyone, FedAvg(), filters=[Counting()], name=g, members=PEOPLE[i::2]) for i, g in enumerate("gh")]
    run = Run({f"{g}/{k}": v for g in "gh" for k, v in model().items()})
    for _ in range(3):
        step_of(run, fleet, groups, patience=QUICK)
    assert {k: int(v) for k, v in run.memory.items()} == {"g/counting.seen": 3, "h/counting.seen": 3}


def test_divergence_names_the_round_and_leaves_model_and_memory_as_they_were() -> None:
    def handler(request: Request, site: Site) -> Reply:
        w = np.full((2, 3), 3e38 if request.config["round"] == 3 else 1.0, np.float32)
        return Reply({"w": w, "steps": request.arrays["steps"]}, n=1)

    @dataclass(frozen=True)
    class Doubling:
        def __call__(self, current: Arrays, replies: Mapping[str, Reply], memory: Arrays) -> Merged:
            memory["calls"] = memory.get("calls", np.zeros(())) + 1
            return FedOpt(lr=10.0)(current, replies, memory)

    run = Run(model())
    fleet = LocalFleet(handler, dict.fromkeys(PEOPLE))
    rounds = train(run, fleet, rounds=9, select=everyone, aggregate=Doubling(), patience=QUICK)
    with pytest.raises(Diverged, match="diverged at round 3: the global model holds NaN or infinity"):
        list(rounds)
    assert run.round == 2
    assert len(run.history) == 2
    assert np.isfinite(run.arrays["w"]).all()
    assert run.memory["calls"] == 2


# Whole runs.


def test_train_makes_the_rounds_that_are_left_and_evaluates_when_asked() -> None:
    seen: list[int] = []

    def evaluate(arrays: Arrays) -> dict[str, float]:
        seen.append(int(arrays["steps"]))
        return {"accuracy": float(len(seen))}

    run = Run(model())
    fleet = LocalFleet(trained, dict.fromkeys(PEOPLE))
    options: dict[str, Any] = {"select": Uniform(2), "aggregate": FedAvg(), "evaluate": evaluate, "evaluate_every": 3}
    rounds = list(train(run, fleet, rounds=4, **options))
    assert [r.row["round"] for r in rounds] == [1, 2, 3, 4]
    assert [r.row.get("accuracy") for r in rounds] == [None, None, 1.0, 2.0]  # every third, and the last
    assert run.history == [r.row for r in rounds]
    assert list(train(run, fleet, rounds=4, **options)) == []
    assert [r.row["round"] for r in train(run, fleet, rounds=6, **options)] == [5, 6]


def test_a_run_that_goes_on_gives_the_same_bits_as_one_that_never_stopped() -> None:
    fleet = LocalFleet(trained, dict.fromkeys(PEOPLE))
    options: dict[str, Any] = {"select": Uniform(3), "aggregate": FedAdam()}
    whole = Run(model(), seed=5)
    list(train(whole, fleet, rounds=6, **options))
    part = Run(model(), seed=5)
    list(train(part, fleet, rounds=3, **options))
    again = Run(
        {k: v.copy() for k, v in part.arrays.items()},
        seed=5,
        round=3,
        roster=Roster.from_arrays(part.roster.to_arrays()),
        memory={k: v.copy() for k, v in part.memory.items()},
    )
    list(train(again, fleet, rounds=6, **options))
    assert digest(again.arrays) == digest(whole.arrays)
    assert digest(again.memory) == digest(whole.memory)
    assert digest(again.roster.to_arrays()) == digest(whole.roster.to_arrays())


def test_seeds_decide_who_is_selected() -> None:
    def chosen(seed: int) -> list[list[str]]:
        fleet = FakeFleet(honest_events)
        list(train(Run(model(), seed=seed), fleet, rounds=5, select=Uniform(2), aggregate=FedAvg(), patience=QUICK))
        return [sorted(asked) for asked in fleet.asked]

    assert chosen(1) == chosen(1)
    assert chosen(1) != chosen(2)
    assert len({tuple(c) for c in chosen(1)}) > 1


def test_many_clients_at_fault_in_every_way_at_once() -> None:
    """Every kind of trouble in one round, and the honest ones still move the model."""
    faults = {f"bad {name}": fault for name, (fault, kind) in CATALOGUE.items() if kind != "late"}
    honest = [f"good {i:02d}" for i in range(len(faults))]

    def handler(request: Request, site: Site) -> Any:
        reply = trained(request, site)
        return faults[site.id](reply) if site.id in faults else reply

    run = Run(model())
    done = step(run, LocalFleet(handler, dict.fromkeys([*faults, *honest])), everyone, FedAvg(), patience=QUICK)
    assert {row["client"] for row in done.clients if row["failure"]} == set(faults)
    without = Run(model())
    step(without, LocalFleet(trained, dict.fromkeys(honest)), everyone, FedAvg(), patience=QUICK)
    assert digest(run.arrays) == digest(without.arrays)


# What an aggregator gives.


def test_an_aggregator_that_gives_what_cannot_be_the_model_is_named_and_nothing_has_moved() -> None:
    def wide(current: Arrays, replies: Mapping[str, Reply], memory: Arrays) -> Merged:
        return Merged({k: v.astype(np.float64) for k, v in current.items()}, {})

    def short(current: Arrays, replies: Mapping[str, Reply], memory: Arrays) -> Merged:
        return Merged({"w": current["w"]}, {})

    def more(current: Arrays, replies: Mapping[str, Reply], memory: Arrays) -> Merged:
        return Merged(current | {"x": np.zeros(1)}, {})

    def turned(current: Arrays, replies: Mapping[str, Reply], memory: Arrays) -> Merged:
        return Merged({**current, "w": current["w"].T}, {})

    def bare(current: Arrays, replies: Mapping[str, Reply], memory: Arrays) -> Any:
        return current

    fleet = LocalFleet(trained, dict.fromkeys(PEOPLE))
    for part, text in (
        (wide, "wide.* gave 'w' as float64, expected float32"),
        (short, "short.* gave other arrays than the model's, which has 'steps'"),
        (more, "more.* gave other arrays than the model's, which does not have 'x'"),
        (turned, r"turned.* gave 'w' of shape \(3, 2\), expected \(2, 3\)"),
        (bare, r"bare.* gave dict, not Merged\(arrays, weights\)"),
    ):
        run = Run(model())
        with pytest.raises(ConfigError, match=text):
            step(run, fleet, everyone, part, patience=QUICK)
        assert (run.round, digest(run.arrays)) == (0, digest(model()))


# Several cohorts.


def two_groups() -> Run:
    return Run({f"{g}/{k}": v for g in ("g0", "g1") for k, v in model().items()}, seed=2)


def test_cohorts_are_asked_at_once_and_each_has_a_model_and_a_memory_of_its_own() -> None:
    fleet, run = FakeFleet(honest_events), two_groups()
    cohorts = [
        Group(everyone, FedAdam(), name="g0", members=PEOPLE[:2], config={"classes": "0,3"}),
        Group(Uniform(2), FedAvg(), name="g1", members=[*PEOPLE[2:], "not here yet"]),
    ]
    done = step_of(run, fleet, cohorts, patience=QUICK)
    assert len(fleet.asked) == 1
    assert len(fleet.asked[0]) == 4
    assert fleet.asked[0]["ana"].config == {"seed": 2, "round": 1, "classes": "0,3"}
    groups = {row["client"]: row["group"] for row in done.clients}
    assert {c: g for c, g in groups.items() if g == "g0"} == {"ana": "g0", "bia": "g0"}
    alone = Run(model(), seed=2)
    step(alone, FakeFleet(honest_events, PEOPLE[:2]), everyone, FedAdam(), patience=QUICK)
    assert digest({k: run.arrays[f"g0/{k}"] for k in model()}) == digest(alone.arrays)
    assert {f"g0/{k}" for k in alone.memory} == run.memory.keys()
    for group in ("g0", "g1"):
        assert sum(row["weight"] for row in done.clients if row["group"] == group) == pytest.approx(1.0)
    assert done.row["selected"] == done.row["replied"] == 4
    assert done.row["bytes_down"] == 4 * 32


def test_a_cohort_with_too_few_replies_keeps_its_model_and_is_tried_again_alone() -> None:
    def events(requests: Mapping[str, Request]) -> list[tuple[str, Reply | Failure]]:
        return [(c, r) for c, r in honest_events(requests) if c not in PEOPLE[2:]]

    fleet, run = FakeFleet(events), two_groups()
    cohorts = [
        Group(everyone, FedAvg(), name="g0", members=PEOPLE[:2]),
        Group(everyone, FedAvg(), name="g1", members=PEOPLE[2:]),
    ]
    done = step_of(run, fleet, cohorts, patience=QUICK)
    assert [sorted(asked) for asked in fleet.asked] == [PEOPLE, PEOPLE[2:], PEOPLE[2:]]
    assert not np.array_equal(run.arrays["g0/w"], model()["w"])
    assert np.array_equal(run.arrays["g1/w"], model()["w"])
    assert [done.row[k] for k in ("selected", "replied", "failed")] == [6, 2, 4]
    with pytest.raises(TooFewReplies, match=r"round 2 failed 3 times in every group: 0 usable replies, 3 needed"):
        step_of(run, FakeFleet(lambda requests: []), cohorts, patience=QUICK)


def test_a_cohort_whose_members_have_all_left_keeps_its_model_and_is_not_asked() -> None:
    fleet, run = FakeFleet(honest_events, PEOPLE[:2]), two_groups()
    run.roster.meet(PEOPLE)
    cohorts = [
        Group(everyone, FedAvg(), name="g0", members=PEOPLE[:2]),
        Group(everyone, FedAvg(), name="g1", members=PEOPLE[2:]),
    ]
    done = step_of(run, fleet, cohorts, patience=QUICK)
    assert [sorted(asked) for asked in fleet.asked] == [PEOPLE[:2]]
    assert np.array_equal(run.arrays["g1/w"], model()["w"])
    assert not np.array_equal(run.arrays["g0/w"], model()["w"])
    assert done.row["selected"] == 2
    with pytest.raises(TooFewReplies, match="round 2 failed 3 times"):
        step_of(run, fleet, cohorts[1:], patience=QUICK)


def test_in_groups_updates_are_measured_and_probes_are_counted() -> None:
    @dataclass(frozen=True)
    class Asking(Telling):
        def probes(self, roster: Roster, round: int, rng: np.random.Generator) -> list[str]:
            return everyone(roster, round, rng)[:1]

    fleet, run = FakeFleet(honest_events), two_groups()
    cohorts = [
        Group(Asking(), FedAvg(), name="g0", members=PEOPLE[:2]),
        Group(Asking(), FedAvg(), name="g1", members=PEOPLE[2:]),
    ]
    done = step_of(run, fleet, cohorts, patience=QUICK)
    assert sorted(fleet.asked[0]) == ["ana", "caio"]
    assert done.row["probed"] == 2
    assert done.row["bytes_down"] == (2 + 6) * 32
    assert done.row["probe_bytes"] == 2 * 32 + 2 * (32 + 16)
    assert all(row["update_norm"] > 0 for row in done.clients)
    assert run.roster.last_probed.tolist() == [1, 0, 1, 0, 0, 0]


def test_a_cohort_may_send_each_client_a_request_of_its_own() -> None:
    def address(client: str, common: Request) -> Request:
        return dataclasses.replace(common, extras={"control": np.full(2, len(client), np.float32)})

    fleet, run = FakeFleet(honest_events), Run(model())
    done = step(run, fleet, everyone, FedAvg(), address=address, patience=QUICK)
    assert {c: int(r.extras["control"][0]) for c, r in fleet.asked[0].items()} == {c: len(c) for c in PEOPLE}
    assert done.row["bytes_down"] == 6 * (32 + 8)


def test_extras_reach_a_local_client_as_its_own() -> None:
    def handler(request: Request, site: Site) -> Reply:
        request.extras["control"] += 1  # what a client does with its copy is its own business
        return dataclasses.replace(trained(request, site), metrics={"control": float(request.extras["control"][0])})

    extras = {"control": np.zeros(2, np.float32)}
    fleet = LocalFleet(handler, dict.fromkeys(PEOPLE))
    done = step(
        Run(model()),
        fleet,
        everyone,
        FedAvg(),
        address=lambda c, r: dataclasses.replace(r, extras=extras),
        patience=QUICK,
    )
    assert [row["control"] for row in done.clients] == [1.0] * 6
    assert extras["control"].tolist() == [0.0, 0.0]


# The sites' states are part of a run.


def test_a_run_holds_the_states_of_simulated_sites_and_gives_them_back() -> None:
    def counting(request: Request, site: Site) -> Reply:
        visits = site.state.get("visits", np.zeros((), np.int64)) + 1
        site.state["visits"] = np.asarray(visits)
        return dataclasses.replace(trained(request, site), metrics={"visits": float(visits)})

    options: dict[str, Any] = {"select": everyone, "aggregate": FedAvg(), "patience": QUICK}
    run = Run(model())
    list(train(run, LocalFleet(counting, dict.fromkeys(PEOPLE)), rounds=2, **options))
    assert len(run.sites) == 6
    rounds = list(train(run, LocalFleet(counting, dict.fromkeys(PEOPLE)), rounds=4, **options))
    assert [[row["visits"] for row in r.clients] for r in rounds] == [[3.0] * 6, [4.0] * 6]
