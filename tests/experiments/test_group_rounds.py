"""Rounds of all groups in one pass: newcomers, absences, liars, swarms, settling, and going on after a kill."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from group_runs import RECIPE, SMALL, Coming, go, start, state_of
from mutirao.config import Part, resolve
from mutirao.core.arrays import part_of
from mutirao.core.fleet import Failure, Reply, Request, Site
from mutirao.core.rounds import Round, Run
from mutirao.errors import BudgetSpent, ConfigError, TooFewReplies
from mutirao.experiments import group_evaluation
from mutirao.experiments.group_client import TAKEN
from mutirao.experiments.group_evaluation import fault_of_evaluation
from mutirao.experiments.task import Task
from mutirao.privacy import tables_in
from mutirao.privacy.settings import EPSILON_IF_SECRET
from mutirao.report import execute
from mutirao.robustness.attacks import Sybils
from mutirao.runs.csv_tables import CsvTable
from mutirao.simulation.local_fleet import LocalFleet


def test_all_groups_train_in_one_question_a_round() -> None:
    rounds, run, fleet, task = go()
    kinds = [sorted({r.do for r in asked.values()}) for asked in fleet.asked]
    assert kinds == [["warm"], *[["train"], ["evaluate"]] * 3]
    assert len(fleet.asked[1]) == 10
    state = state_of(run)
    assert state.groups.count == 5
    assert rounds[-1].row["rand"] == 1.0
    assert rounds[-1].row["accuracy"] > 0.9
    for group, classes in state.classes.items():
        assert len(classes) == 2
        assert part_of(run.arrays, group)["2.bias"].shape == (2,)
        for client in state.groups.members()[group]:
            data = task.population[client].train
            assert set(np.unique(data.y.numpy()[data.index])) == set(classes)
    weights = {g: sum(r["weight"] for r in rounds[-1].clients if r["group"] == g) for g in state.classes}
    assert list(weights.values()) == pytest.approx([1.0] * 5)


def test_a_warm_up_sends_a_signature_and_no_model() -> None:
    _, _, fleet, task = go(rounds=1)
    reply = task.handler.many({"c0": fleet.asked[0]["c0"]}, {"c0": Site("c0", task.population["c0"])})["c0"]
    assert not reply.arrays
    assert set(reply.extras) == {"signature", "holdings"}
    assert reply.extras["signature"].shape == (10,)
    assert reply.metrics == {}


def test_one_client_answers_alone_as_among_many() -> None:
    _, run, fleet, task = go(rounds=1)
    for asked in fleet.asked:
        together = task.handler.many(asked, {c: Site(c, task.population[c]) for c in asked})
        for c in ("c0", "c7"):
            alone = task.handler(asked[c], Site(c, task.population[c]))
            assert alone.n == together[c].n
            for k, v in (alone.arrays | alone.extras).items():
                assert v == pytest.approx((together[c].arrays | together[c].extras)[k], abs=1e-5)
    with pytest.raises(ValueError, match="not 'dance'"):
        task.handler(Request("dance", run.arrays), Site("c0", task.population["c0"]))


def test_a_newcomer_is_admitted_in_mid_run_and_trains() -> None:
    late = {"c03"}
    rounds, run, fleet, _ = go({1: late, 2: late}, rounds=4, clients=20)
    state = state_of(run)
    whole = state_of(go(rounds=1, clients=20)[1]).groups
    friends = [c for c in whole.members()[whole.group_of("c03")] if c != "c03"]
    assert state.groups.group_of("c03") == state.groups.group_of(friends[0]) != ""
    assert "c03" in state.groups.admitted
    row = next(r for r in rounds[2].clients if r["client"] == "c03" and r["try"] == 0)
    assert row["confidence"] > 0.3
    assert row["rejected"] == ""
    assert any(r["client"] == "c03" and r["try"] == 1 and r["weight"] > 0 for r in rounds[2].clients)
    assert [len(a) for a in fleet.asked if next(iter(a.values())).do == "warm"] == [19, 1]


def test_a_newcomer_that_fits_nowhere_is_in_quarantine_and_never_trains() -> None:
    config, task, run, fleet = start({1: {"c3"}}, hidden="skewed", populations=2, rounds=2)
    odd = task.population["c3"]
    twisted = replace(odd, train=type(odd.train)(odd.train.x, (odd.train.y * 0 + 7), odd.train.index))
    fleet.fleet.population = {**task.population, "c3": twisted}
    rounds = list(RECIPE.flow(fleet, config, task, run))
    rows = [r for r in rounds[1].clients if r["client"] == "c3"]
    assert [r["try"] for r in rows] == [0]
    assert rows[0]["rejected"].startswith("quarantine: ")
    assert state_of(run).groups.waiting() == ["c3"]


def test_a_run_ends_when_all_groups_have_settled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group_evaluation, "GAIN", 0.2)
    rounds, run, _, _ = go(rounds=30, stable=1)
    assert len(rounds) < 30
    assert set(state_of(run).settled) == set(state_of(run).groups.names)


def test_a_settled_group_sleeps_and_hands_its_model_over() -> None:
    config, task, run, fleet = start({1: {"c03"}}, rounds=3, clients=20)
    next(RECIPE.flow(fleet, config, task, run))
    state = state_of(run)
    state.settled = {"g0": 1, "g1": 1, "g2": 1, "g3": 1}
    run.memory = run.memory | state.to_memory()
    before = run.arrays
    done = next(RECIPE.flow(fleet, config, task, run))  # as after a resume
    group = state_of(run).groups.group_of("c03")
    assert group in state.settled
    rows = [r for r in done.clients if r["client"] == "c03"]
    assert [r["try"] for r in rows] == [0]  # it was not asked to train
    assert rows[0]["accuracy"] > 0.3
    for name, value in part_of(run.arrays, group).items():
        assert np.array_equal(fleet.fleet.states["c03"][TAKEN + name], value)
        assert np.array_equal(part_of(before, group)[name], value)
    assert {r["group"] for r in done.clients if r["try"]} == {"g4"}


def test_a_group_whose_clients_are_all_away_keeps_its_model_and_wakes_up() -> None:
    first = state_of(go(rounds=1)[1]).groups.members()
    gone = set(first["g1"])
    rounds, run, _, _ = go({2: gone}, rounds=3)
    groups_by_round = [{r["group"] for r in done.clients} for done in rounds]
    assert "g1" in groups_by_round[0]
    assert "g1" not in groups_by_round[1]
    assert "g1" in groups_by_round[2]
    assert state_of(run).groups.members() == first


def test_groups_are_formed_anew_when_data_change_and_models_are_carried_over() -> None:
    config, task, run, fleet = start(rounds=6, clients=20, regroup=3)
    flow = RECIPE.flow(fleet, config, task, run)
    for _ in range(3):
        next(flow)
    before, models = state_of(run).groups, run.arrays
    first, second = before.members()["g0"], before.members()["g1"]
    moved, home = first[0], task.population[second[0]]
    fleet.fleet.population = {**task.population, moved: home}  # one client's data are now like another's
    next(flow)
    after = state_of(run).groups
    assert before.group_of(moved) != before.group_of(second[0])
    assert after.group_of(moved) == after.group_of(second[0])
    assert after.count == before.count
    body = "0.weight"
    group = after.group_of(second[0])
    old = np.linalg.norm(part_of(run.arrays, group)[body] - part_of(models, "g1")[body])
    fresh = np.linalg.norm(part_of(run.arrays, group)[body] - task.initial()[body])
    assert old < fresh  # it went on from the old model
    assert [r.row["round"] for r in flow] == [5, 6]


def test_one_key_is_one_client_however_many_names_it_has() -> None:
    config, task, run, _ = start(rounds=2)
    swarm = Sybils(LocalFleet(task.handler, task.population), "c4", names=30)
    rounds = list(RECIPE.flow(swarm, config, task, run))
    refused = [r for done in rounds for r in done.clients if r["rejected"]]
    assert len(refused) == 30  # once each, not in every round
    assert all(r["rejected"] == "refused: has the same key as c4" for r in refused)
    assert all("~" not in c for c in state_of(run).groups.labelled)
    plain = go(rounds=2)[1]
    assert all(np.array_equal(run.arrays[k], v) for k, v in plain.arrays.items())


@pytest.mark.parametrize(
    ("broken", "kind"),
    [
        (lambda r: replace(r, extras={}), "missing_key"),
        (lambda r: replace(r, extras={**r.extras, "signature": np.zeros(3, np.float32)}), "shape"),
        (lambda r: replace(r, extras={**r.extras, "signature": np.full(10, np.nan, np.float32)}), "not_finite"),
        (lambda r: replace(r, extras={**r.extras, "holdings": np.zeros(4, np.uint8)}), "shape"),
        (lambda r: Failure("raised", "no"), "raised"),
    ],
)
def test_a_broken_warm_up_is_that_clients_alone(broken: Any, kind: str) -> None:
    config, task, run, fleet = start(rounds=4)
    inner = task.handler

    class Broken:
        def __call__(self, request: Request, site: Site) -> Reply:
            return inner(request, site)

        def many(self, requests: Any, sites: Any) -> Any:
            made = inner.many(requests, sites)
            return {c: broken(r) if c == "c5" and requests[c].do == "warm" else r for c, r in made.items()}

    fleet.fleet.handler = Broken()
    rounds = list(RECIPE.flow(fleet, config, task, run))
    assert "c5" not in state_of(run).groups.labelled
    failures = [r["failure"] for done in rounds for r in done.clients if r["client"] == "c5"]
    assert len(failures) == 3  # then it is left alone
    assert all(f.startswith(kind) for f in failures)


def test_a_warm_up_without_any_signature_is_an_error() -> None:
    config, task, run, fleet = start()
    fleet.fleet = LocalFleet(lambda request, site: Reply({}, n=1), task.population)
    with pytest.raises(TooFewReplies, match="no client sent a usable signature"):
        next(iter(RECIPE.flow(fleet, config, task, run)))


def test_a_clusterer_that_finds_nobody_alike_is_named() -> None:
    config, task, run, fleet = start(cluster={"name": "dbscan", "eps": 1e-9}, noise="wait")
    with pytest.raises(ConfigError, match=r"Dbscan\(eps=1e-09, min_samples=2\) leaves all 10 clients out"):
        next(iter(RECIPE.flow(fleet, config, task, run)))


def test_a_run_goes_on_after_a_kill_with_the_same_groups_and_models(tmp_path: Path) -> None:
    settings = {**SMALL, "rounds": 4, "aggregate": "fedadam", "screen": "robust", "stable": 2}

    class Killed(BaseException):
        pass

    def kill(run: Run, done: Round, task: Task) -> None:
        if run.round == 2:
            raise Killed

    config = resolve(RECIPE.config, settings)
    with pytest.raises(Killed):
        execute("groups", config, tmp_path / "a", watch=kill, pictures=False)
    resumed = execute("groups", config, tmp_path / "a", resume=True, pictures=False)
    straight = execute("groups", config, tmp_path / "b", pictures=False)
    assert resumed["digest"] == straight["digest"]
    assert resumed["groups"] == straight["groups"]
    rows = [
        [{k: v for k, v in row.items() if k != "seconds"} for row in CsvTable(tmp_path / side / table).read()]
        for side in "ab"
        for table in ("clients.csv", "history.csv")
    ]
    assert rows[:2] == rows[2:]


def test_the_run_folder_tells_all_of_its_groups(tmp_path: Path) -> None:
    config = resolve(RECIPE.config, {**SMALL, "rounds": 2})
    summary = execute("groups", config, tmp_path / "run")
    assert sorted(c for who in summary["groups"].values() for c in who) == [f"c{i}" for i in range(10)]
    assert summary["other_clusterers"]["auto"] == 5
    assert summary["eps_range"][0] < summary["eps_range"][1]
    assert set(summary["group_accuracy"]) == set(summary["class_maps"]) == {f"g{i}" for i in range(5)}
    assert set(summary["true_groups"]) == set("01234")
    told = json.loads((tmp_path / "run" / "groups.json").read_text())
    assert told["evidence"]["divisions"][0]["holds"]
    assert (tmp_path / "run" / "groups.png").stat().st_size > 1000
    assert (tmp_path / "run" / "eps_scan.png").stat().st_size > 1000
    scan = CsvTable(tmp_path / "run" / "eps_scan.csv").read()
    assert any(int(r["groups"]) == 5 and float(r["to"]) > 3 * float(r["from"]) for r in scan)
    header = (tmp_path / "run" / "clients.csv").read_text().splitlines()[0].split(",")
    assert {"group", "rejected"} <= set(header)


def test_noised_signatures_hide_the_groups_and_say_so_by_finding_one() -> None:
    private = {"signature": "bias", "signature.epsilon": 1.0, "signature.repeatable": True, "head": "full"}
    config = resolve(RECIPE.config, SMALL, [*private.items(), ("rounds", 1)])
    task = RECIPE.task(config)
    run = Run(task.initial(), seed=0)
    done = next(iter(RECIPE.flow(LocalFleet(task.handler, task.population), config, task, run)))
    assert done.row["groups"] == 1
    again = Run(task.initial(), seed=0)
    next(iter(RECIPE.flow(LocalFleet(task.handler, task.population), config, task, again)))
    assert np.array_equal(run.memory["groups.signatures"], again.memory["groups.signatures"])


def test_a_liar_is_rejected_with_a_reason_and_is_told_nothing() -> None:
    rounds, _, fleet, task = go(
        rounds=3, clients=20, partition={"name": "by_class", "classes": 5}, attack="sign_flip", screen="robust"
    )
    liars = task.knows.malicious
    assert len(liars) == 6
    rows = [r for done in rounds for r in done.clients if r["client"] in liars and r["try"]]
    assert len(rows) == 18  # they are asked again in every round, like everybody
    assert all("its direction differs from the others'" in r["rejected"] for r in rows)
    assert all(r["weight"] == 0.0 for r in rows)
    for done in rounds:
        assert done.row["rejected"] == sum(bool(r["rejected"]) for r in done.clients) >= 6
    groups = {r["client"]: r["group"] for r in rounds[0].clients if r["try"]}
    for asked in fleet.asked[1:]:  # after the warm-up
        for liar in liars & asked.keys():
            friend = next(c for c in sorted(asked) if c not in liars and groups[c] == groups[liar])
            assert asked[liar].config == asked[friend].config
            assert asked[liar].arrays is asked[friend].arrays


def test_copied_signatures_put_liars_into_groups_but_split_none() -> None:
    settings: dict[str, Any] = {"hidden": "permuted", "populations": 2, "clients": 20, "signature": "weights"}
    settings |= {"warm_epochs": 20, "head": "full", "rounds": 4, "epochs": 4}
    rounds, run, _, task = go(
        attack="fake_signature", screen="robust", cluster={"name": "auto", "min_samples": 5}, **settings
    )
    groups, truth, liars = state_of(run).groups, task.knows.truth, task.knows.malicious
    assert groups.count == 2
    homes = {(truth[c], groups.group_of(c)) for c in truth if c not in liars}
    assert len(homes) == 2, "the honest are where they belong"
    strangers = {c for c in liars if groups.group_of(c) != dict(homes)[truth[c]]}
    assert strangers
    rejected = {r["client"] for r in rounds[-1].clients if r["rejected"]}
    assert strangers <= rejected, "their updates give them away"
    assert len(rejected - liars) <= 1


def test_few_clients_that_must_be_many_for_a_group_are_one_and_leave_no_scan(tmp_path: Path) -> None:
    settings = {**SMALL, "clients": 3, "founders": 3, "rounds": 1, "partition": "iid"}
    settings["cluster"] = {"name": "auto", "min_samples": 5}
    summary = execute("groups", resolve(RECIPE.config, settings), tmp_path / "run")
    assert list(summary["groups"]) == ["g0"]
    assert summary["eps_range"] is None
    assert not (tmp_path / "run" / "eps_scan.png").exists()
    assert json.loads((tmp_path / "run" / "groups.json").read_text())["evidence"]["min_samples"] == 5


def private_settings(kind: str, **more: Any) -> dict[str, Any]:
    noised = {"name": "bias", "epsilon": 200.0, "repeatable": True}
    privacy = {"name": kind, "noise": 0.5, "repeatable": True}
    return {"privacy": privacy | more, "signature": noised, "head": "full", "rounds": 2, "cluster": "one"}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["central", "local", "dpsgd"])
def test_groups_can_be_private_and_the_warm_up_is_in_the_account(kind: str) -> None:
    config = resolve(RECIPE.config, {**SMALL, **private_settings(kind), "per_round": 0.5})
    task = RECIPE.prepare(config)
    run = Run(task.initial(), seed=0)
    fleet = LocalFleet(task.handler, task.population)
    rows = [done.row for done in RECIPE.flow(fleet, config, task, run)]
    assert 0 < rows[0][EPSILON_IF_SECRET] < rows[1][EPSILON_IF_SECRET]
    if kind == "central":
        assert rows[-1]["accuracy"] > 0  # the server is trusted, and clients tell it how the model does
        sums = {table[:, 2].sum() for table in tables_in(run.memory)}
        assert sums == {3.0}  # the signature and two models
    else:
        assert "accuracy" not in rows[-1]
        assert len(fleet.states) == 10
        most = max(float(s["privacy.releases"][:, 2].sum()) for s in fleet.states.values())
        assert most >= 2  # the signature, and training


def test_a_private_group_knows_only_its_own_releases_and_new_ones_inherit_the_worst() -> None:
    settings = private_settings("central") | {"rounds": 4, "regroup": 2, "cluster": {"name": "kmeans", "groups": 2}}
    config = resolve(RECIPE.config, {**SMALL, **settings, "per_round": 2})
    task = RECIPE.prepare(config)
    run = Run(task.initial(), seed=0)
    rows = [d.row for d in RECIPE.flow(LocalFleet(task.handler, task.population), config, task, run)]
    spent = [row[EPSILON_IF_SECRET] for row in rows]
    assert spent == sorted(spent)
    for table in tables_in(run.memory):
        signatures = table[table[:, 1] == 1.0]
        assert signatures[:, 2].tolist() == [2.0]  # two warm-ups
        assert table[:, 2].sum() >= 2 + 4  # what was spent before the groups were formed anew stays spent


def test_a_budget_ends_a_run_of_groups() -> None:
    config = resolve(RECIPE.config, {**SMALL, **private_settings("central", budget=260.0), "rounds": 50})
    task = RECIPE.prepare(config)
    run = Run(task.initial(), seed=0)
    with pytest.raises(BudgetSpent, match="the privacy budget ends the run after round"):
        list(RECIPE.flow(LocalFleet(task.handler, task.population), config, task, run))
    assert 0 < run.round < 50
    assert 200.0 < run.history[-1][EPSILON_IF_SECRET] <= 260.0
    small = replace(config, privacy=Part("central", {**config.privacy.settings, "budget": 60.0}))
    fresh, fleet = Run(task.initial(), seed=0), Coming(LocalFleet(task.handler, task.population), {}, run)
    with pytest.raises(BudgetSpent, match="ends the run after round 0 of 50"):
        list(RECIPE.flow(fleet, small, task, fresh))
    assert fleet.asked == []  # not even for a signature, which alone would cost more


def test_privacy_that_covers_the_models_alone_is_refused() -> None:
    for changes, text in (
        ({"signature": "bias"}, "signatures of the warm-up have no noise; set signature.epsilon"),
        ({"head": "reduced"}, "signature.epsilon: head=reduced discloses the classes of clients"),
        ({"privacy": {"name": "central", "epsilon": 3.0}}, "set privacy.noise and privacy.budget"),
        ({"privacy": "central"}, "signature.repeatable: the privacy account requires noise that cannot be reproduced"),
    ):
        config = resolve(RECIPE.config, {**SMALL, **private_settings("local"), **changes})
        with pytest.raises(ConfigError, match=text):
            RECIPE.prepare(config)


def test_noise_on_a_signature_is_not_undone_by_a_list_of_classes_beside_it() -> None:
    """Refused where a run is set up, and by each client, whatever the server asks for."""
    noised = {"signature": {"name": "bias", "epsilon": 1.0}, "cluster": "one"}
    with pytest.raises(ConfigError, match=r"^signature\.epsilon: head=reduced .* use head=full$"):
        RECIPE.prepare(resolve(RECIPE.config, {**SMALL, **noised}))
    config = resolve(RECIPE.config, {**SMALL, **noised, "head": "full"})
    task = RECIPE.prepare(config)
    fleet = LocalFleet(task.handler, task.population)
    wanted = {"warm": {"holdings": True}, "train": {"classes": "0"}, "evaluate": {"classes": "0"}}
    for do, more in wanted.items():  # trained on one class, a client tells by its samples how many it has of it
        curious = Request(do, task.initial(), {"seed": 0, "round": 0, **more})
        answers = fleet.ask(dict.fromkeys(task.population, curious))
        assert not answers.replies
        assert {str(f) for f in answers.failures.values()} == {
            "refused: privacy: the classes of a client are not disclosed: use head=full"
        }
    plain = fleet.ask(dict.fromkeys(task.population, Request("warm", task.initial(), {"seed": 0, "round": 0})))
    assert {(tuple(r.extras), r.n, len(r.arrays), len(r.metrics)) for r in plain.replies.values()} == {
        (("signature",), 1, 0, 0)
    }
    assert "holdings" not in RECIPE.disclosure(config, task).extras


def test_every_client_judges_its_own_groups_model() -> None:
    rounds, _, _, _ = go(clients_every=2)
    assert "accuracy_worst" not in rounds[0].row
    row = rounds[1].row
    assert row["accuracy_clients"] == 10
    assert row["accuracy_mean"] == pytest.approx(row["accuracy"])
    assert row["accuracy_worst"] <= row["accuracy_p10"] <= row["accuracy_p50"] <= row["accuracy_p90"]


def test_probes_of_groups_are_in_the_record() -> None:
    rounds, run, fleet, _ = go(select="powerofchoice", per_round=1)
    kinds = [sorted({r.do for r in asked.values()}) for asked in fleet.asked]
    assert kinds[1:3] == [["probe"], ["train"]]
    assert rounds[0].row["probed"] == len(fleet.asked[1]) > 0
    assert rounds[0].row["bytes_up"] + rounds[0].row["bytes_down"] > rounds[0].row["probe_bytes"] > 0
    assert run.roster.last_probed.max() == 3


@pytest.mark.parametrize("told", [{"accuracy": 1e99}, {"accuracy": 0.5, "accuracy_known": -1.0}, {"accuracy": np.nan}])
def test_a_judgement_that_is_no_share_is_its_clients_failure_alone(told: dict[str, float]) -> None:
    assert fault_of_evaluation(Reply({}, metrics=told, n=3)) is not None
    assert fault_of_evaluation(Reply({}, metrics={"accuracy": 1.0, "accuracy_known": 0.0, "loss": 7.0}, n=3)) is None
