"""Data that change while training goes on: whose, when, and what does not change with them."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mutirao.config import Part, build, resolve
from mutirao.core.fleet import Answers, Reply, Request, Site, Wrapper
from mutirao.core.needs import Capabilities
from mutirao.core.rounds import Run
from mutirao.errors import ConfigError
from mutirao.experiments.task import find
from mutirao.runs.execute import execute
from mutirao.simulation.drift import (
    NAMES,
    NOW,
    DriftContext,
    DriftFleet,
    DriftHandler,
    Rename,
    Swap,
    check_drift,
    groups_after,
    none,
)
from mutirao.simulation.local_fleet import LocalFleet
from mutirao.training.samples import ClientData, Samples

NAMED = [f"c{i}" for i in range(10)]
SMALL = {"clients": 8, "per_round": 4, "epochs": 1, "rounds": 4}
GROUPS = {"clients": 10, "per_round": 1.0, "epochs": 1, "warm_epochs": 3}


def around(population: dict[str, Any] | None = None, seed: int = 0, classes: int | None = None) -> DriftContext:
    return DriftContext(population or {c: f"data of {c}" for c in NAMED}, seed, classes)


def told(drift: Any, round: int, about: DriftContext) -> dict[str, Any]:
    return {c: drift(c, about.population[c], round, about) for c in about.names}


def test_half_of_the_clients_change_places_at_the_round_and_stay() -> None:
    about, drift = around(), Swap(at=5)
    before = dict(about.population)
    assert told(drift, 4, about) == before
    after = told(drift, 5, about)
    moved = [c for c in NAMED if after[c] != before[c]]
    assert len(moved) == 5
    assert sorted(after.values()) == sorted(before.values())  # nobody's data are lost, nobody's are doubled
    assert told(drift, 50, about) == after
    assert told(drift, 5, around(seed=1)) != after
    assert told(drift, 5, around()) == after


def test_one_by_one_over_some_rounds() -> None:
    about, drift = around(), Swap(at=3, share=1.0, over=5)
    moved = [sum(told(drift, r, about)[c] != about.population[c] for c in NAMED) for r in range(1, 10)]
    assert moved == [0, 0, 2, 4, 6, 8, 10, 10, 10]
    assert told(drift, 7, about) == told(Swap(at=1, share=1.0), 7, about)  # they end where those end who hurry


def test_no_drift_is_none() -> None:
    about = around()
    assert build("drift", Part("none")) is none
    assert told(none, 99, about) == dict(about.population)
    assert set(NAMES) == {"none", "swap", "rename"}


def samples(labels: Any, index: Any = None) -> Samples:
    y = torch.tensor(labels)
    return Samples(torch.arange(len(y), dtype=torch.float32)[:, None], y, index)


def test_renamed_classes_are_all_renamed_alike_for_training_and_test() -> None:
    whole = samples([0, 1, 2, 3, 0, 1])
    own = {
        c: ClientData(Samples(whole.x, whole.y, np.array([i, i + 2])), samples([3, 2])) for i, c in enumerate("abcd")
    }
    about = around(own, classes=4)
    names: dict[int, int] = {}
    for c, data in told(Rename(at=2, share=1.0), 2, about).items():
        for old, new in ((own[c].train, data.train), (own[c].test, data.test)):
            assert torch.equal(old.batch(slice(0, 2))[0], new.batch(slice(0, 2))[0])
            for a, b in zip(old.batch(slice(0, 2))[1].tolist(), new.batch(slice(0, 2))[1].tolist(), strict=True):
                assert names.setdefault(a, b) == b
    assert sorted(names.values()) == [0, 1, 2, 3]
    assert all(a != b for a, b in names.items())
    assert len({id(d.train.y) for d in told(Rename(at=2, share=1.0), 2, about).values()}) == 1  # one storage still
    assert told(Rename(at=2), 1, about) == own


@pytest.mark.parametrize("wrong", [{"at": 0}, {"share": -0.1}, {"share": 1.5}, {"over": 0}])
def test_settings_out_of_range_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="drift=swap: at and over must be at least 1, and share between 0 and 1"):
        build("drift", Part("swap", wrong))


def test_what_these_clients_cannot_do_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"drift.share: 0.1 of 10 clients is 1, and this drift needs at least 2"):
        check_drift(Swap(share=0.1), around())
    with pytest.raises(ConfigError, match="drift=rename: the clients of this task have no samples with classes"):
        check_drift(Rename(), around(classes=3))
    check_drift(Swap(share=0.2), around())
    check_drift(none, around())


class Noting:
    """A handler that answers with what it was given."""

    capabilities = Capabilities(metrics={"seen"})

    def __call__(self, request: Request, site: Site) -> Reply:
        assert NOW not in request.config
        site.state["count"] = site.state.get("count", np.zeros(1)) + 1
        return Reply({"seen": np.array([float(site.data)])}, n=1)


class NotingMany(Noting):
    def many(self, requests: Any, sites: Any) -> dict[str, Reply]:
        return {c: self(requests[c], sites[c]) for c in requests}


def seen_by(handler: Any, request: Request) -> dict[str, float]:
    numbers = {c: float(i) for i, c in enumerate(NAMED)}
    fleet = LocalFleet(DriftHandler(handler, Swap(at=3), DriftContext(numbers, 0)), numbers)
    first = fleet.ask(dict.fromkeys(NAMED, request))
    assert {c: int(s["count"][0]) for c, s in fleet.states.items()} == dict.fromkeys(NAMED, 1)
    return {c: float(r.arrays["seen"][0]) for c, r in first.replies.items()}


def test_many_at_once_have_the_data_they_have_one_by_one_and_keep_their_state() -> None:
    asked = [Request("train", {}, {"seed": 0, "round": r}) for r in (2, 3)]
    alone, together = ([seen_by(h, r) for r in asked] for h in (Noting(), NotingMany()))
    assert alone == together
    assert list(alone[0].values()) == [float(i) for i in range(10)]
    assert alone[1] != alone[0]
    assert DriftHandler(Noting(), none, around()).capabilities == Capabilities(metrics={"seen"})
    assert DriftHandler(Noting(), none, around()).many is None


def test_a_request_of_no_round_is_told_which_is_being_made() -> None:
    numbers = {c: float(i) for i, c in enumerate(NAMED)}
    inner = LocalFleet(DriftHandler(NotingMany(), Swap(at=3), DriftContext(numbers, 0)), numbers)
    run = Run({})
    fleet = DriftFleet(inner, Swap(at=3), run)
    seen = []
    for done in (0, 1, 2):
        run.round = done
        warm = Request("warm", {}, {"seed": 0, "round": 0})
        answers = fleet.ask(dict.fromkeys(NAMED, warm))
        seen.append([float(r.arrays["seen"][0]) for r in answers.replies.values()])
    assert seen[0] == seen[1] == list(numbers.values())
    assert seen[2] != seen[1]


class Elsewhere(Wrapper):
    def is_remote(self) -> bool:
        return True

    def ask(self, requests: Any) -> Answers:
        raise AssertionError("nobody is asked")


def test_other_parties_have_data_of_their_own() -> None:
    config = resolve(find("quickstart").config, SMALL | {"drift": "swap"})
    task = find("quickstart").prepare(config)
    fleet = Elsewhere(LocalFleet(task.handler, task.population))
    with pytest.raises(ConfigError, match="drift: only simulated clients"):
        next(iter(find("quickstart").flow(fleet, config, task, Run(task.initial()))))


def test_a_flow_that_does_not_model_it_refuses_it() -> None:
    with pytest.raises(ConfigError, match="drift=swap: the flow of this recipe does not model it"):
        find("recsys").prepare(resolve(find("recsys").config, {"drift": "swap"}))


@pytest.mark.parametrize("kind", ["swap", "rename"])
def test_a_run_that_is_interrupted_meets_the_same_data(kind: str, tmp_path: Path) -> None:
    settings = SMALL | {"drift": {"name": kind, "at": 2, "over": 3}}
    config = resolve(find("quickstart").config, settings)
    whole = execute("quickstart", config, tmp_path / "whole")
    execute("quickstart", resolve(find("quickstart").config, settings | {"rounds": 2}), tmp_path / "parts")
    parts = execute("quickstart", config, tmp_path / "parts", resume=True)
    assert parts["digest"] == whole["digest"]
    still = execute("quickstart", resolve(find("quickstart").config, SMALL), tmp_path / "still")
    assert still["digest"] != whole["digest"]
    lines = (tmp_path / "whole" / "history.csv").read_text().splitlines()
    column = lines[0].split(",").index("drifted")
    assert [line.split(",")[column] for line in lines[1:]] == ["0", "2", "3", "4"]
    assert "drifted" not in whole["final"]  # it is no metric


@pytest.mark.parametrize("engine", ["plain", "stacked", "threads"])
def test_every_way_of_the_engine_meets_the_same_data(engine: str) -> None:
    found = []
    for way in (engine, "auto"):
        config = resolve(find("quickstart").config, SMALL | {"drift": {"name": "swap", "at": 2}, "engine": way})
        task = find("quickstart").prepare(config)
        run = Run(task.initial())
        list(find("quickstart").flow(LocalFleet(task.handler, task.population), config, task, run))
        found.append(run.arrays)
    for name, array in found[0].items():
        np.testing.assert_allclose(array, found[1][name], atol=2e-5)


def test_who_is_excluded_lends_nobody_data() -> None:
    config = resolve(find("quickstart").config, SMALL | {"drift": {"name": "swap", "share": 1.0}, "exclude": "c3"})
    handler: Any = find("quickstart").prepare(config).handler
    assert "c3" not in handler.context.names
    assert "c3" not in {change.other for change in handler.context.changes(handler.drift).values()}


def test_after_a_swap_clients_belong_with_those_whose_data_they_have() -> None:
    about, truth = around(), {c: i % 5 for i, c in enumerate(NAMED)}
    drift = Swap(at=3)
    after = groups_after(drift, truth, 3, about)
    assert groups_after(drift, truth, 2, about) == groups_after(none, truth, 9, about) == truth
    data = told(drift, 3, about)
    assert after == {c: truth[data[c].removeprefix("data of ")] for c in NAMED}
    renamed = groups_after(Rename(at=3), truth, 3, around(classes=2)) or {}
    assert {c for c in NAMED if renamed[c] >= 5} == set(about.changes(drift))
    assert {c: g % 5 for c, g in renamed.items()} == truth
    assert groups_after(lambda client, data, round, around: data, truth, 3, about) is None


@pytest.mark.parametrize("regroup", [0, 2])
def test_groups_that_are_formed_anew_follow_the_data(regroup: int) -> None:
    settings = GROUPS | {"rounds": 6, "regroup": regroup, "drift": {"name": "swap", "at": 4, "share": 0.6}}
    config = resolve(find("groups").config, settings)
    task = find("groups").prepare(config)
    run = Run(task.initial())
    rows = [d.row for d in find("groups").flow(LocalFleet(task.handler, task.population), config, task, run)]
    rand = [row["rand"] for row in rows]
    assert [row["drifted"] for row in rows] == [0, 0, 0, 6, 6, 6]
    assert rand[:3] == [1.0] * 3
    assert rand[3] < 1  # who is alike is another question now
    assert rand[4:] == [1.0, 1.0] if regroup else max(rand[4:]) < 1
    summary = task.exhibits.findings(run) if task.exhibits.findings else {}
    assert summary["group_quality"]["rand"] == pytest.approx(rand[-1])
