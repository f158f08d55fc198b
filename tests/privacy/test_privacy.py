"""Clipping, noise and the account of it: what is promised is what happens, in any run that is stopped and resumed."""

import dataclasses
import json
import tomllib
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from iris import iris
from mutirao import privacy as kinds
from mutirao.aggregation import FedAdam, FedAvg, FedAvgM, FedMedian
from mutirao.cli import main
from mutirao.config import resolve
from mutirao.core.arrays import Arrays, digest, flat
from mutirao.core.fleet import Reply, Request, Site
from mutirao.core.roster import Roster
from mutirao.core.rounds import Run, train
from mutirao.errors import BudgetSpent, ConfigError
from mutirao.experiments.task import find
from mutirao.privacy import RELEASES, Central, Local, clip_update
from mutirao.privacy.accounting import add_releases, epsilon
from mutirao.privacy.central_noise import NoisyMean, Poisson
from mutirao.privacy.settings import EPSILON_IF_SECRET
from mutirao.randomness import rng
from mutirao.report import execute
from mutirao.runs.execute import reopen
from mutirao.selection import Uniform, everyone
from mutirao.simulation.local_fleet import LocalFleet
from mutirao.studies.study import is_run_of

START: Arrays = {"w": np.zeros((40, 50)), "b": np.ones(5, np.float32), "seen": np.array(7)}


def reply(scale: float, seed: int = 0, n: int = 10) -> Reply:
    draw = np.random.default_rng(seed)
    moved = {k: (v + scale * draw.normal(size=v.shape)).astype(v.dtype) for k, v in START.items() if k != "seen"}
    return Reply(moved | {"seen": np.array(99)}, n=n)


def noised(noise: float, clip: float, expected: float, rate: float = 1.0, then: Any = None) -> NoisyMean:
    draw = partial(Central(repeatable=True).draw, 3)
    return NoisyMean(then or FedAvg(), noise, clip, rate, expected, draw=draw)


def iris_config(**settings: Any) -> Any:
    return resolve(iris.config, {}, [*{"aggregate": "fedavg", "rounds": 4, "clients": 6, **settings}.items()])


def test_without_noise_and_clip_it_is_the_plain_mean() -> None:
    replies = {"ana": reply(0.01, 1, n=10), "bia": reply(0.01, 2, n=90)}
    out = noised(1e-12, 1e3, expected=2)(START, replies, {}).arrays
    for name in ("w", "b"):
        mean = (replies["ana"].arrays[name] + replies["bia"].arrays[name]) / 2  # whoever has more samples
        np.testing.assert_allclose(out[name], mean, atol=1e-6)
    assert out["seen"] == 7
    assert out["seen"].dtype == START["seen"].dtype
    assert out["b"].dtype == np.float32


def test_no_client_moves_the_model_by_more_than_the_clip_over_the_expected_number() -> None:
    replies = {c: reply(10.0 ** (i - 2), i) for i, c in enumerate(["ana", "bia", "caio", "duda"])}
    replies["eva"] = Reply({k: np.full_like(v, 1e300 if v.dtype == float else 1) for k, v in START.items()}, n=1)
    part = noised(0.5, 2.0, expected=5)
    everybody = flat(part(START, replies, {}).arrays)
    for name in replies:
        others = flat(part(START, {c: r for c, r in replies.items() if c != name}, {}).arrays)
        assert np.linalg.norm(everybody - others) <= 2.0 / 5 * (1 + 1e-6)


def test_the_noise_has_the_deviation_it_should_whoever_came() -> None:
    for replies in ({}, {"ana": reply(0.0), "bia": reply(0.0)}):
        out = noised(3.0, 0.5, expected=10)(START, replies, {}).arrays
        assert np.std(out["w"]) == pytest.approx(3.0 * 0.5 / 10, rel=0.05)  # 2,000 numbers
        assert abs(np.mean(out["w"])) < 0.015


def test_noise_is_never_the_same_unless_it_is_asked_to_be_repeatable() -> None:
    def once(repeatable: bool) -> str:
        privacy = Central(repeatable=repeatable)
        _, part = privacy.at_server(Uniform(5), FedAvg(), 10, iris_config())
        return digest(part(START, {}, {}).arrays)

    assert once(True) == once(True)
    assert once(False) != once(False)
    memory: Arrays = {}
    part = noised(1.0, 1.0, 5)
    assert digest(part(START, {}, memory).arrays) != digest(
        part(START, {}, memory).arrays
    )  # another round, other noise


def test_server_optimisers_see_nothing_but_the_noised_mean() -> None:
    memory: Arrays = {}
    merged = noised(1e-12, 1e3, 1, then=FedAvgM(momentum=0.5))(START, {"ana": reply(0.1)}, memory)
    assert {"fedavgm.v.w", RELEASES} <= memory.keys()
    np.testing.assert_allclose(merged.arrays["w"], reply(0.1).arrays["w"], atol=1e-7)


def first_round(settings: dict[str, Any]) -> None:
    config = iris_config(privacy="central", **settings)
    task = iris.prepare(config)
    next(iris.flow(LocalFleet(task.handler, task.population), config, task, Run(task.initial())))


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"aggregate": "krum"}, "needs each update by itself"),
        ({"aggregate": "fedmedian"}, "needs each update by itself"),
        ({"select": "aoi"}, "selects by what clients report"),
        ({"min_replies": 2}, "min_replies"),
        ({"privacy.noise": 0.0}, "noise is 0.0, but must be above 0"),
        ({"privacy.delta": 1.5}, "delta is 1.5"),
        ({"privacy.accountant": "guess"}, "not one of rdp, prv"),
    ],
)
def test_what_cannot_be_kept_is_refused_before_the_first_round(settings: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        first_round(settings)


def test_each_client_is_drawn_with_its_probability() -> None:
    roster, select = Roster(), Poisson(0.3, repeatable=True)
    roster.meet([f"c{i}" for i in range(20)])
    drawn = [select(roster, i, np.random.default_rng(i)) for i in range(2000)]
    assert np.mean([len(d) for d in drawn]) == pytest.approx(6.0, abs=0.15)
    assert np.var([len(d) for d in drawn]) == pytest.approx(20 * 0.3 * 0.7, rel=0.1)  # binomial, not a fixed number


def foretold(rounds: list[Any], seed: int, clients: list[str], rate: float, purpose: str = "select") -> int:
    """In how many rounds who was selected follows from the run's seed, which every client is told."""
    hits = 0
    for number, done in enumerate(rounds, 1):
        drawn = rng(seed, number, purpose).random(len(clients)) < rate
        hits += {c for c, here in zip(clients, drawn, strict=True) if here} == {
            row["client"] for row in done.clients if row["try"] and row["client"] in clients
        }
    return hits


@pytest.mark.parametrize("repeatable", [False, True])
def test_who_was_selected_cannot_be_foretold_from_the_seed(repeatable: bool) -> None:
    config = iris_config(privacy="central", clients=30, per_round=15, rounds=40, **{"privacy.repeatable": repeatable})
    task = iris.prepare(config)
    run = Run(task.initial(), seed=config.seed)
    rounds = list(iris.flow(LocalFleet(task.handler, task.population), config, task, run))
    hits = foretold(rounds, config.seed, sorted(task.population), 0.5)
    assert hits == (40 if repeatable else 0)  # by chance, 40 / 2^30 rounds


def test_nor_can_it_in_groups() -> None:
    recipe = find("groups")
    settings = {
        "clients": 20,
        "samples": 40,
        "epochs": 1,
        "rounds": 6,
        "per_round": 0.5,
        "cluster": "one",
        "head": "full",
    }
    settings |= {"signature": {"name": "bias", "epsilon": 200.0}, "privacy": {"name": "central", "noise": 0.5}}
    config = resolve(recipe.config, settings)
    task = recipe.prepare(config)
    run = Run(task.initial(), seed=config.seed)
    rounds = list(recipe.flow(LocalFleet(task.handler, task.population), config, task, run))
    assert foretold(rounds, config.seed, sorted(task.population), 0.5, "select g0") == 0


def test_a_round_in_which_nobody_was_drawn_is_a_round_of_noise() -> None:
    config = iris_config(privacy="central", per_round=1, clients=6, rounds=100)
    task = iris.prepare(config)
    run = Run(task.initial())
    rows = [done.row for done in iris.flow(LocalFleet(task.handler, task.population), config, task, run)]
    assert 0 in [row["selected"] for row in rows]
    assert max(row["selected"] for row in rows) > 1
    expected = [epsilon(add_releases(None, 1.0, 1 / 6, i), 1e-5) for i in range(1, 101)]
    assert [row["epsilon"] for row in rows] == pytest.approx(expected)


@pytest.mark.parametrize("kind", ["central", "local"])
def test_a_run_that_is_interrupted_goes_on_counting_exactly(kind: str, tmp_path: Path) -> None:
    config = iris_config(privacy=kind, **{"privacy.repeatable": True, "privacy.noise": 2.0})
    whole = execute("iris:iris", config, tmp_path / "whole", pictures=False)

    class Stop(Exception):
        pass

    def stop(run: Run, *_: Any) -> None:
        if run.round == 2:
            raise Stop

    with pytest.raises(Stop):
        execute("iris:iris", config, tmp_path / "parts", watch=stop, pictures=False)
    parts = execute("iris:iris", config, tmp_path / "parts", resume=True, pictures=False)
    assert parts["digest"] == whole["digest"]
    rows = [json.loads((tmp_path / name / "history.json").read_text()) for name in ("whole", "parts")]
    assert [r[EPSILON_IF_SECRET] for r in rows[0]] == [r[EPSILON_IF_SECRET] for r in rows[1]]
    assert (
        parts["privacy"][EPSILON_IF_SECRET] == parts["final"][EPSILON_IF_SECRET] == rows[0][-1][EPSILON_IF_SECRET] > 0
    )
    assert parts["privacy"]["kind"] == kind
    assert parts["privacy"]["delta"] == 1e-5


def test_the_budget_ends_a_run_cleanly_and_again_when_resumed(tmp_path: Path) -> None:
    config = iris_config(privacy="central", rounds=50, **{"privacy.noise": 2.0, "privacy.budget": 4.0})
    for _ in range(2):
        with pytest.raises(BudgetSpent, match="ends the run after round") as caught:
            execute("iris:iris", config, tmp_path / "run", resume=True, pictures=False)
    assert caught.value.code == 7
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    spent, rounds = summary["privacy"]["epsilon"], summary["rounds"]
    assert spent <= 4.0 < epsilon(add_releases(None, 2.0, 0.5, rounds + 1), 1e-5)
    assert "another round would make it" in summary["stopped"]
    assert (tmp_path / "run" / "checkpoints" / f"round_{rounds:03d}.safetensors").exists()


def test_the_command_line_says_why_and_exits_with_its_own_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    sets = ["rounds=9", "clients=10", "per_round=5", "privacy=central", "privacy.noise=2", "privacy.budget=3"]
    words = [word for text in sets for word in ("--set", text)]
    result = CliRunner().invoke(main, ["run", "quickstart", *words, "--out", "run"])
    assert result.exit_code == 7
    assert "the privacy budget ends the run after round" in result.stderr
    assert "Traceback" not in result.output
    report = (tmp_path / "run" / "report.html").read_text()
    assert "epsilon" in report


def local_handler(**settings: Any) -> tuple[Any, Local]:
    privacy = Local(**settings)
    return privacy.at_client(lambda request, site: reply(5.0)), privacy


def test_a_client_shields_its_own_update_and_tells_nothing_else() -> None:
    handler, _ = local_handler(noise=0.2, clip=3.0, repeatable=True)
    site = Site("ana")
    out = handler(Request("train", START, {"seed": 1, "round": 2}), site)
    update, scale = clip_update(START, reply(5.0).arrays, 3.0)
    assert scale < 1
    assert np.linalg.norm(np.concatenate([u.ravel() for u in update.values()])) == pytest.approx(3.0)
    assert np.std(out.arrays["w"] - START["w"] - update["w"]) == pytest.approx(0.2 * 3.0, rel=0.05)
    assert out.arrays["seen"] == 7
    assert not out.extras
    assert out.n == 1
    assert out.metrics.keys() == {"epsilon", "epsilon_next"}
    once = epsilon(add_releases(None, 0.1, 1.0, 1), 1e-5)  # two updates may lie 2 clip apart: half the noise
    assert out.metrics["epsilon"] == pytest.approx(once)
    assert site.state[RELEASES].tolist() == [[0.1, 1.0, 1.0]]


def test_a_client_refuses_to_spend_more_than_its_budget_and_to_be_judged() -> None:
    handler, privacy = local_handler(noise=8.0, budget=3.0)
    site, kinds_of_end = Site("ana"), []
    for number in range(1, 30):
        fleet = LocalFleet(handler, {"ana": None})
        fleet.states = {"ana": site.state}
        answers = fleet.ask({"ana": Request("train", START, {"seed": 0, "round": number})})
        if answers.failures:
            kinds_of_end.append(str(answers.failures["ana"]))
            break
        site.state = fleet.states["ana"]
    assert kinds_of_end
    assert kinds_of_end[0].startswith("refused: privacy.budget: epsilon ")
    assert privacy.cost(site.state[RELEASES]) <= 3.0
    judged = LocalFleet(handler, {"ana": None}).ask({"ana": Request("evaluate", START)})
    assert judged.failures["ana"].kind == "refused"


@pytest.mark.parametrize("kind", ["central", "local", "dpsgd"])
def test_any_recipe_of_the_ordinary_flow_can_be_private(kind: str) -> None:
    for name, small in (("quickstart", {"clients": 5}), ("ranking", {"clients": 6, "queries": 50, "moments": False})):
        recipe = find(name)
        config = resolve(
            recipe.config, {**small, "per_round": 3, "rounds": 2, "epochs": 1, "aggregate": "fedavg", "privacy": kind}
        )
        task = recipe.prepare(config)
        run = Run(task.initial())
        rows = [d.row for d in recipe.flow(LocalFleet(task.handler, task.population), config, task, run)]
        assert [row["failed"] for row in rows] == [0, 0]
        assert 0 < rows[0]["epsilon"] <= rows[1]["epsilon"]
        assert "train_epsilon" not in rows[0]


@pytest.mark.parametrize("kind", ["local", "dpsgd"])
@pytest.mark.parametrize("lie", [{"metrics": {"epsilon": 1e9, "epsilon_next": 1e9}}, {"n": 1}])
def test_a_client_that_says_its_budget_is_spent_does_not_end_the_run_of_the_others(
    kind: str, lie: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    recipe = find("quickstart")
    sets = {"clients": 5, "per_round": 5, "rounds": 3, "epochs": 1, "partition": "iid"}
    sets |= {"privacy": {"name": kind, "noise": 8.0, "budget": 4.0}}
    config = resolve(recipe.config, sets)
    task = recipe.prepare(config)

    def rows(liars: tuple[str, ...]) -> list[dict[str, Any]]:
        def handler(request: Request, site: Site) -> Reply:
            reply = task.handler(request, site)
            told = {"metrics": {"epsilon": 1e9, "epsilon_next": 1e9}} if "n" in lie else {}
            return dataclasses.replace(reply, **lie, **told) if site.id in liars else reply

        fleet, run = LocalFleet(handler, task.population), Run(task.initial())
        return [done.row for done in recipe.flow(fleet, config, task, run)]

    honest = [row["epsilon"] for row in rows(())]
    assert "the most it can be" not in caplog.text
    lied = [row["epsilon"] for row in rows((sorted(task.population)[0],))]
    assert len(lied) == 3
    assert "reports epsilon_next=1e+09" in caplog.text
    if "n" not in lie or kind == "local":
        assert lied == pytest.approx(honest)


def test_a_flow_that_does_not_keep_to_privacy_is_refused() -> None:
    from dataclasses import replace

    other = replace(
        iris, flow=lambda fleet, config, task, run: train(run, fleet, rounds=1, select=everyone, aggregate=FedAvg())
    )
    with pytest.raises(ConfigError, match="does not support it"):
        other.prepare(iris_config(privacy="central"))
    assert replace(other, heeds=frozenset({"privacy"})).prepare(iris_config(privacy="central"))


def test_many_clients_at_once_get_what_each_would_get_alone() -> None:
    config = resolve(
        find("quickstart").config, {"clients": 6, "epochs": 1, "privacy": {"name": "local", "repeatable": True}}
    )
    task = find("quickstart").prepare(config)
    requests = {c: Request("train", task.initial(), {"seed": 0, "round": 1}) for c in list(task.population)[:4]}
    together = LocalFleet(task.handler, task.population).ask(requests)
    alone = LocalFleet(lambda request, site: task.handler(request, site), task.population).ask(requests)
    assert {c: digest(r.arrays) for c, r in together.replies.items()} == {
        c: digest(r.arrays) for c, r in alone.replies.items()
    }


def test_parts_by_name() -> None:
    assert kinds.NAMES.keys() == {"none", "central", "local", "dpsgd"}
    select, aggregate = Central().at_server(Uniform(0.5), FedAdam(), 20, iris_config())
    assert select == Poisson(0.5)
    assert isinstance(aggregate, NoisyMean)
    assert aggregate.expected == 10
    with pytest.raises(ConfigError):
        Central().at_server(Uniform(3), FedMedian(), 20, iris_config())


def rows_of(config: Any, run: Run | None = None) -> tuple[list[dict[str, Any]], Run]:
    task = iris.prepare(config)
    run = run or Run(task.initial(), seed=config.seed)
    return [d.row for d in iris.flow(LocalFleet(task.handler, task.population), config, task, run)], run


@pytest.mark.parametrize("kind", ["central", "local"])
@pytest.mark.parametrize("accountant", ["rdp", "prv"])
def test_epsilon_finds_the_noise_for_the_rounds_planned(kind: str, accountant: str) -> None:
    settings = {"privacy.epsilon": 3.0, "privacy.delta": 1e-4, "privacy.accountant": accountant, "per_round": 6}
    rows, _ = rows_of(iris_config(privacy=kind, rounds=4, **settings))
    assert len(rows) == 4  # what it costs is also the budget, and the last round fits in
    assert 0.99 * 3.0 < rows[-1]["epsilon"] <= 3.0


def test_with_dpsgd_every_client_finds_its_own_noise() -> None:
    config = resolve(
        find("quickstart").config,
        {"clients": 4, "per_round": 4, "rounds": 2, "epochs": 1, "privacy": {"name": "dpsgd", "epsilon": 5.0}},
    )
    task = find("quickstart").prepare(config)
    fleet = LocalFleet(task.handler, task.population)
    rows = [d.row for d in find("quickstart").flow(fleet, config, task, Run(task.initial()))]
    assert [row["failed"] for row in rows] == [0, 0]
    noises = {float(fleet.states[c][RELEASES][0, 0]) for c in task.population}
    assert len(noises) == 4  # fewer samples, more noise
    for client in task.population:
        assert 0.98 * 5.0 < epsilon(fleet.states[client][RELEASES], 1e-5) <= 5.0


@pytest.mark.parametrize("kind", ["central", "local", "dpsgd"])
def test_noise_and_epsilon_together_are_refused_by_name(kind: str) -> None:
    config = iris_config(privacy=kind, **{"privacy.epsilon": 3.0, "privacy.noise": 1.0})
    with pytest.raises(ConfigError, match=r"privacy\.noise and privacy\.epsilon are both set"):
        iris.prepare(config)


def test_the_noise_found_is_written_down_and_more_rounds_end_at_the_budget(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = iris_config(privacy="central", rounds=3, **{"privacy.epsilon": 4.0})
    summary = execute("iris:iris", config, tmp_path / "run", pictures=False)
    noise = summary["privacy"]["noise"]
    assert f"privacy.epsilon=4 over 3 rounds: noise {noise:.4g}" in caplog.text
    assert 0.99 * 4.0 < summary["privacy"]["epsilon"] <= summary["privacy"]["target"] == 4.0
    written = tomllib.loads((tmp_path / "run" / "config.toml").read_text())["privacy"]
    assert (written["noise"], written["rounds"], written["epsilon"]) == (noise, 3, 4.0)
    assert summary["privacy"]["budget"] == 4.0
    assert is_run_of(tmp_path / "run", "iris:iris", config)  # a study knows it again
    assert not is_run_of(tmp_path / "run", "iris:iris", iris_config(privacy="central", rounds=3))
    _, again = reopen(None, tmp_path / "run", [("rounds", 5), ("privacy.epsilon", 4.0)])
    with pytest.raises(BudgetSpent, match="ends the run after round 3 of 5"):
        execute("iris:iris", again, tmp_path / "run", resume=True, pictures=False)
    assert tomllib.loads((tmp_path / "run" / "config.toml").read_text())["privacy"] == written
    table = tomllib.loads((tmp_path / "run" / "config.toml").read_text())
    repeated = resolve(iris.config, {k: v for k, v in table.items() if k != "recipe"}, [("rounds", 3)])
    assert execute("iris:iris", repeated, tmp_path / "other", pictures=False)["privacy"]["noise"] == noise


def test_a_repeatable_run_makes_no_promise(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Noise and draws follow from the seed: nowhere may a figure stand that reads as an epsilon."""
    config = iris_config(privacy="central", rounds=2, **{"privacy.repeatable": True})
    summary = execute("iris:iris", config, tmp_path / "run")
    assert "NO client is protected" in caplog.text
    assert "epsilon" not in summary["privacy"]
    assert "epsilon" not in summary["final"]
    assert summary["privacy"]["protects"].startswith("nobody: repeatable=true")
    assert summary["privacy"][EPSILON_IF_SECRET] > 0
    assert "epsilon" not in (tmp_path / "run" / "history.csv").read_text().splitlines()[0].split(",")
    page = (tmp_path / "run" / "report.html").read_text()
    assert "Not private" in page
    assert "NO client" in (tmp_path / "run" / "run.log").read_text()


def test_a_clip_that_follows_the_updates_is_in_the_history_and_goes_on_when_resumed(tmp_path: Path) -> None:
    settings = {"privacy.repeatable": True, "privacy.clip_quantile": 0.5, "privacy.noise": 0.4, "privacy.clip": 5.0}
    config = iris_config(privacy="central", rounds=4, clients=6, per_round=6, **settings)
    whole = execute("iris:iris", config, tmp_path / "whole", pictures=False)
    half = iris_config(privacy="central", rounds=2, clients=6, per_round=6, **settings)
    execute("iris:iris", half, tmp_path / "parts", pictures=False)
    parts = execute("iris:iris", config, tmp_path / "parts", resume=True, pictures=False)
    assert parts["digest"] == whole["digest"]
    clips = [row["clip"] for row in json.loads((tmp_path / "parts" / "history.json").read_text())]
    assert clips[0] == 5.0
    assert len(set(clips)) == 4
    plain = iris_config(
        privacy="central", rounds=4, clients=6, per_round=6, **settings | {"privacy.clip_quantile": 0.0}
    )
    fixed = execute("iris:iris", plain, tmp_path / "fixed", pictures=False)
    assert fixed["privacy"][EPSILON_IF_SECRET] == whole["privacy"][EPSILON_IF_SECRET]  # the count costs nothing besides
    assert "clip" not in json.loads((tmp_path / "fixed" / "history.json").read_text())[0]


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"privacy.clip_quantile": 1.0}, "clip_quantile is 1.0"),
        ({"privacy.clip_quantile": 0.5, "privacy.clip_noise": 0.4}, r"privacy\.clip_noise is 0\.4, but must be above"),
        ({"privacy.epsilon": -1.0}, "epsilon is -1.0"),
        ({"privacy.epsilon": 1e-9, "per_round": 6}, "no noise makes epsilon 1e-09"),
    ],
)
def test_terms_that_cannot_be_kept_are_refused_by_name(settings: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        first_round(settings)


def recsys(**settings: Any) -> tuple[list[dict[str, Any]], Run]:
    recipe = find("recsys")
    config = resolve(recipe.config, {"rounds": 2, "per_round": 100, "evaluate_every": 1, "dimension": 4, **settings})
    task = recipe.prepare(config)
    run = Run(task.initial(), seed=config.seed)
    rows = [d.row for d in recipe.flow(LocalFleet(task.handler, task.population), config, task, run)]
    assert [row["failed"] for row in rows] == [0, 0]
    return rows, run


def test_recommendation_can_be_private_and_every_item_gets_noise() -> None:
    rows, run = recsys(aggregate="fedavg", privacy={"name": "central", "epsilon": 8.0})
    assert 0.99 * 8.0 < rows[-1]["epsilon"] <= 8.0
    assert (run.arrays["items"] != find("recsys").task(find("recsys").config(dimension=4)).initial()["items"]).all()


def test_recommendation_is_refused_what_tells_who_rated_what() -> None:
    with pytest.raises(ConfigError, match="needs each update by itself"):
        recsys(privacy="central", aggregate="fedmedian")
    rows, _ = recsys(privacy="central")  # the mean over those who touched an item, counted with noise
    assert rows[-1]["epsilon"] > 0
    with pytest.raises(ConfigError, match="download=touched reveals which items a user rated"):
        recsys(privacy="local", aggregate="fedavg")
    rows, _ = recsys(privacy="local", aggregate="fedavg", download="all", per_round=5)
    assert rows[-1]["epsilon"] > 0
