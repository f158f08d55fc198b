"""Whole runs with secure aggregation: what is refused before round 1, groups, central privacy, Flower's messages."""

import csv
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from parties import MODEL, Lossy, lossy, names

from loopgrid import NAMES, LoopGrid, connected, identity, softmax_task
from mutirao import aggregation, selection
from mutirao.config import build, resolve
from mutirao.core.arrays import digest, flat, part_of
from mutirao.core.fleet import Reply, Request
from mutirao.core.parts import as_aggregator
from mutirao.core.rounds import Group, Patience, Run, step, train, wait_for_clients
from mutirao.deploy.flower import FlowerFleet, client_app
from mutirao.errors import ConfigError, TooFewReplies
from mutirao.experiments.task import find
from mutirao.privacy import Central
from mutirao.privacy.secure_aggregation import SecAggPlus
from mutirao.privacy.secure_aggregation.settings import MASKED, SHARES, STAGES, UNMASK
from mutirao.runs.execute import execute
from mutirao.simulation.local_fleet import LocalFleet

_ = identity  # a fixture that every test of Flower's messages needs
STEP = 8.0 / 2**23  # of the default range and bits
SMALL = {"rounds": 2, "clients": 8, "per_round": 5, "epochs": 1}
MEANS = [name for name, part in aggregation.NAMES.items() if as_aggregator(part()).mean_only]
OTHERS = sorted(aggregation.NAMES.keys() - set(MEANS))


def config_of(recipe: str = "quickstart", **settings: Any) -> Any:
    return resolve(find(recipe).config, SMALL | {"secure": "secagg+"}, list(settings.items()))


def model_of(out: Path) -> Any:
    return json.loads((out / "summary.json").read_text())["digest"]


def close(recipe: str, **settings: Any) -> float:
    """The largest difference between the models of a run with and without secure aggregation."""
    models = []
    for kind in ("none", "secagg+"):
        config = config_of(recipe, secure=kind, **settings)
        task = find(recipe).prepare(config)
        run = Run(task.initial(), seed=config.seed)
        fleet = LocalFleet(task.secure.at_client(task.handler), task.population)
        list(find(recipe).flow(fleet, config, task, run))
        models.append(flat(run.arrays))
    return float(np.abs(models[0] - models[1]).max())


@pytest.mark.parametrize("aggregate", MEANS)
def test_methods_of_the_mean_give_the_plain_model_to_the_step(aggregate: str) -> None:
    moments = 100 if aggregate in ("fedadam", "fedyogi", "fedadagrad") else 1  # which divide by small numbers
    assert close("quickstart", aggregate=aggregate) < moments * 20 * STEP


@pytest.mark.parametrize("aggregate", OTHERS)
def test_a_method_that_looks_at_single_updates_is_refused_before_round_1(aggregate: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"aggregate={aggregate} compares single updates"):
        execute("quickstart", config_of(aggregate=aggregate), tmp_path / "run")
    assert not (tmp_path / "run" / "history.csv").exists()


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"screen": "robust"}, "screen=robust compares single updates"),
        ({"select": "aoiu"}, "uses the metric 'entropy'"),
        ({"select": "oort"}, "uses the metric 'rms_loss'"),
        ({"select": "powerofchoice"}, "uses the probed metric 'loss'"),
        ({"select": "mix", "select.scores": "age + samples"}, "uses the figure 'samples'"),
        ({"select": "mix", "select.scores": "since_improvement"}, "uses the figure 'since_improvement'"),
        ({"select": "mix", "select.scores": "update_norm"}, "uses the figure 'update_norm'"),
        ({"clients_every": 1}, "clients_every evaluates single clients"),
        ({"devices": "fedcs"}, "devices: the time that the four stages take is not modelled"),
        ({"privacy": "local"}, "privacy=local has each client report the privacy it spent"),
        ({"privacy": "dpsgd"}, "privacy=dpsgd has each client report the privacy it spent"),
        ({"centralised": True}, "the sum of one is its update"),
        ({"per_round": 2}, "sums at least 3 clients, and 2 take part"),
        ({"secure.threshold": 0.4}, "threshold is 0.4"),
        ({"secure.least": 1}, "least is 1"),
    ],
)
def test_what_needs_single_clients_is_refused_before_round_1(
    settings: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=reason):
        execute("quickstart", config_of(**settings), tmp_path / "run")
    assert not (tmp_path / "run" / "history.csv").exists()


@pytest.mark.parametrize("select", ["uniform", "roundrobin", "everyone", "aoi"])
def test_selection_by_age_and_lot_is_allowed(select: str, tmp_path: Path) -> None:
    assert execute("quickstart", config_of(select=select), tmp_path / "run")["rounds"] == 2


@pytest.mark.parametrize(
    ("settings", "reason"), [({}, "discloses the classes"), ({"head": "full", "regroup": 1}, "regroup")]
)
def test_groups_with_reduced_heads_or_regrouping_are_refused(settings: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        find("groups").prepare(resolve(find("groups").config, {"secure": "secagg+"}, list(settings.items())))


GROUPS: dict[str, Any] = {
    "clients": 12,
    "per_round": 4,
    "warm_epochs": 1,
    "head": "full",
    "partition": "by_class",
    "partition.classes": 5,
    "samples": 60,
}


def test_groups_once_formed_are_each_a_sum_of_their_own() -> None:
    assert close("groups", **GROUPS, hold=0.0, references=0) < 40 * STEP


def test_of_groups_the_server_learns_signatures_and_means_alone(tmp_path: Path) -> None:
    config = config_of("groups", **GROUPS)
    task = find("groups").prepare(config)
    fleet = Lossy(LocalFleet(task.secure.at_client(task.handler), task.population))
    execute("groups", config, tmp_path / "run", fleet=fleet)
    asked = {request.do for _, request, _ in fleet.seen}
    assert asked == {"warm", *STAGES}
    warm = [reply for _, request, reply in fleet.seen if request.do == "warm" and reply]
    assert all((list(r.extras), r.arrays, r.metrics, r.n) == (["signature"], {}, {}, 1) for r in warm)
    assert all(r.metrics == {} and r.n == 1 for _, _, r in fleet.seen if r)
    with (tmp_path / "run" / "clients.csv").open(newline="") as lines:
        rows = [row for row in csv.DictReader(lines) if row["try"] == "1" and row["replied"] == "1"]
    told = {(row["round"], row["group"], row["n"], row["loss"], row["accuracy"]) for row in rows}
    assert len(told) == len({(row["round"], row["group"]) for row in rows}) < len(rows)
    assert float(next(csv.DictReader((tmp_path / "run" / "history.csv").open()))["accuracy"]) > 0


def test_a_group_too_small_for_a_sum_keeps_its_model_while_others_learn() -> None:
    _, fleet = lossy(7, SecAggPlus())
    run = Run({f"{g}/{k}": v for g in ("g0", "g1") for k, v in MODEL.items()})
    members = {"g0": names(7)[:2], "g1": names(7)[2:]}
    cohorts = [
        Group(selection.everyone, aggregation.FedAvg(), name=g, members=who) for g, who in sorted(members.items())
    ]
    wait_for_clients(run.roster, fleet, 7, Patience())
    done = step(run, fleet, cohorts)
    assert digest(part_of(run.arrays, "g0")) == digest(MODEL)
    assert digest(part_of(run.arrays, "g1")) != digest(MODEL)
    small = {row["failure"] for row in done.clients if row["group"] == "g0"}
    assert small == {"too_few: 2 clients; a sum has at least 3"}


def test_central_privacy_on_top_is_the_same_noised_mean() -> None:
    settings = {"privacy": "central", "privacy.noise": 0.1, "privacy.clip": 0.5, "privacy.repeatable": True}
    assert close("quickstart", per_round=6, select="everyone", **settings) < 2e-5


def test_with_central_privacy_the_site_itself_clips_and_counts_once() -> None:
    config = config_of("quickstart", **{"privacy": "central", "privacy.clip": 0.25})
    secure = find("quickstart").prepare(config).secure
    assert isinstance(secure, SecAggPlus)
    assert (secure.clip, secure.most_samples) == (0.25, 1)
    assert isinstance(build("privacy", config.privacy), Central)


def test_the_same_configuration_gives_the_same_bytes(tmp_path: Path) -> None:
    for name in ("a", "b"):
        execute("quickstart", config_of(), tmp_path / name)
    assert model_of(tmp_path / "a") == model_of(tmp_path / "b")
    assert (tmp_path / "a" / "clients.csv").read_bytes() == (tmp_path / "b" / "clients.csv").read_bytes()


def test_a_run_that_loses_too_many_in_every_try_ends_with_a_typed_failure(tmp_path: Path) -> None:
    config = config_of()
    task = find("quickstart").prepare(config)
    local = LocalFleet(task.secure.at_client(task.handler), task.population)
    gone = dict.fromkeys(list(task.population)[:7], MASKED)
    with pytest.raises(TooFewReplies, match="round 1 failed 3 times"):
        execute("quickstart", config, tmp_path / "run", fleet=Lossy(local, after=gone))


def test_a_round_tried_again_is_a_new_session_with_new_masks(tmp_path: Path) -> None:
    config = config_of(rounds=1, clients=5)
    task = find("quickstart").prepare(config)
    fleet = Lossy(LocalFleet(task.secure.at_client(task.handler), task.population))

    def twist(client: str, request: Request, reply: Reply) -> Reply:
        first = [r for c, r, _ in fleet.seen if c == client and r.do == UNMASK]
        return Reply({}, {}, {}, 1) if request.do == UNMASK and not first else reply  # the first try fails at its end

    fleet.twist = twist
    execute("quickstart", config, tmp_path / "run", fleet=fleet)
    parts = [reply for c, r, reply in fleet.seen if c == "c0" and r.do == MASKED and reply]
    assert len(parts) == 2
    words = [p.arrays["update"] for p in parts]
    assert np.mean(words[0] == words[1]) < 0.01  # one and the same update, under other masks
    execute("quickstart", config, tmp_path / "calm")
    assert model_of(tmp_path / "run") == model_of(tmp_path / "calm")


def test_a_server_that_dies_in_the_middle_of_a_sum_goes_on_as_if_nothing_had_been(tmp_path: Path) -> None:
    config = config_of(rounds=3)
    execute("quickstart", config, tmp_path / "calm")
    for stage in STAGES[1:]:
        task = find("quickstart").prepare(config)
        fleet = Lossy(LocalFleet(task.secure.at_client(task.handler), task.population))

        def die(client: str, request: Request, stage: str = stage) -> Request:
            if (request.config["round"], request.do) == (2, stage):
                raise KeyboardInterrupt
            return request

        fleet.meddle = die
        with pytest.raises(KeyboardInterrupt):
            execute("quickstart", config, tmp_path / stage, fleet=fleet)
        assert execute("quickstart", config, tmp_path / stage, resume=True)["digest"] == model_of(tmp_path / "calm")


def over_flower(task: Any) -> tuple[LoopGrid, FlowerFleet]:
    grid = LoopGrid(client_app(lambda _: task))
    for name in NAMES:
        grid.join(name=name)
    return grid, FlowerFleet(grid, timeout=2, greet=2)


def rounds_over(fleet: Any, task: Any, secure: SecAggPlus, rounds: int = 3) -> Run:
    run = Run(task.initial(), seed=3)
    select, aggregate = selection.Uniform(5), aggregation.FedAvgM()
    list(train(run, secure.at_server(fleet, {"loss"}), rounds=rounds, select=select, aggregate=aggregate))
    return run


def test_over_flowers_messages_the_model_is_the_one_of_the_local_fleet() -> None:
    secure = SecAggPlus()
    task = replace(softmax_task(), secure=secure)
    local = rounds_over(LocalFleet(secure.at_client(task.handler), task.population), task, secure)
    _, fleet = over_flower(task)
    there = rounds_over(fleet, task, secure)
    assert digest(local.arrays) == digest(there.arrays)
    assert [r["train_loss"] for r in local.history] == [r["train_loss"] for r in there.history]
    assert int(local.arrays["steps"]) == 3


def test_over_flowers_messages_plain_requests_are_refused() -> None:
    task = replace(softmax_task(), secure=SecAggPlus())
    _, fleet = over_flower(task)
    assert fleet.clients() == NAMES
    answers = fleet.ask(dict.fromkeys(NAMES, Request("train", task.initial(), {"seed": 0, "round": 1})))
    assert {f.kind for f in answers.failures.values()} == {"refused"}


@pytest.mark.parametrize("stage", [SHARES, MASKED, UNMASK])
def test_over_flowers_messages_a_node_that_leaves_before_a_stage_costs_only_itself(stage: str) -> None:
    secure = SecAggPlus()
    task = replace(softmax_task(), secure=secure)
    grid, fleet = over_flower(task)
    fleet.timeout = 0.3
    assert fleet.clients() == NAMES
    deliver = grid.deliver

    def leaving(message: Any, node: int) -> None:
        kind = str(message.content["request"]["do"]) if "request" in message.content else ""
        if node == grid.node_of("bia") and kind == stage:
            return  # it is never heard of again
        deliver(message, node)

    grid.deliver = leaving
    request = Request("train", task.initial(), {"seed": 0, "round": 1})
    answers = secure.at_server(fleet, ()).ask(dict.fromkeys(NAMES, request))
    lost = [] if stage == UNMASK else ["bia"]
    assert list(answers.failures) == lost
    plain = connected(softmax_task())[1]
    plain.clients()
    own = plain.ask(dict.fromkeys([c for c in NAMES if c not in lost], request)).replies
    total = sum(r.n for r in own.values())
    mean = sum(r.n / total * r.arrays["w"].astype(np.float64) for r in own.values())
    np.testing.assert_allclose(answers.replies["ana"].arrays["w"], mean, atol=STEP)
