"""The seam of groupers: one that asks, one that listens, one that leaves everybody alone; all go on after a kill."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from group_runs import go, state_of
from mutirao.clustering.base import Grouper, GroupUpdates, groups_without_signatures
from mutirao.clustering.context import GroupContext
from mutirao.clustering.group_state import Grouping, Groups, move, open_group
from mutirao.config import resolve
from mutirao.core.arrays import flat, part_of
from mutirao.core.fleet import ClientId, Reply
from mutirao.core.rounds import Round, Run
from mutirao.errors import ConfigError
from mutirao.experiments.group_evaluation import request_of
from mutirao.experiments.task import Task, find
from mutirao.report import execute
from mutirao.runs.run_folder import load_run

RECIPE = find("groups")
SMALL = {"clients": 10, "rounds": 3, "epochs": 1, "judge_samples": 40, "per_round": 1.0, "references": 0}


@dataclass(frozen=True)
class Asking(Grouper):
    """Three models that begin apart; before a round each client goes to the one with the least loss on its data."""

    groups: int = 3
    uses_warm_up = False
    different_models = True
    moves_clients = True
    requests = ("probe",)

    def __call__(self, context: GroupContext, replies: Mapping[ClientId, Reply]) -> Groups:
        return groups_without_signatures(replies, np.zeros(len(replies)), min_count=self.groups)

    def before(self, context: GroupContext, state: Grouping) -> None:
        losses: dict[str, dict[ClientId, float]] = {}
        for group in state.groups.names:
            request = request_of(context.run, state, group, "probe")
            answers = context.ask(dict.fromkeys(state.groups.clients, request), "a question")
            losses[group] = {c: r.metrics["loss"] for c, r in answers.items()}
        move(state, {c: min(losses, key=lambda g: losses[g][c]) for c in state.groups.clients})


@dataclass(frozen=True)
class Listening(Grouper):
    """One group; after each round the client that moved the model farthest is put into a group of its own."""

    uses_warm_up = False
    needs_updates = True
    moves_clients = True

    def __call__(self, context: GroupContext, replies: Mapping[ClientId, Reply]) -> Groups:
        return groups_without_signatures(replies, np.zeros(len(replies)))

    def after(self, context: GroupContext, state: Grouping, updates: Mapping[str, GroupUpdates]) -> None:
        group = state.groups.names[0]
        sent = updates[group]
        far = {c: float(np.linalg.norm(flat(r.arrays) - flat(sent.model))) for c, r in sent.replies.items()}
        state.own.setdefault("moved", []).append(max(far, key=lambda c: far[c]))
        model, classes = part_of(context.run.arrays, group), state.classes[group]
        open_group(context.run, state, state.own["moved"][-1:], model, classes)


def test_a_grouper_that_asks_moves_clients_between_models_that_began_apart() -> None:
    rounds, run, fleet, _ = go(cluster="test_clustering_base:Asking", head="full", founders=0)
    kinds = [sorted({r.do for r in asked.values()}) for asked in fleet.asked]
    assert kinds == [*[["probe"]] * 3, ["train"], ["evaluate"]] * 3
    groups = state_of(run).groups
    assert groups.count == 3
    assert sorted(groups.labelled) == sorted(c for who in groups.members().values() for c in who)
    starts = [fleet.asked[i]["c0"].arrays for i in range(3)]
    assert len({flat(start).tobytes() for start in starts}) == 3
    sent = [sum(np.asarray(a).nbytes for a in start.values()) for start in starts]
    assert rounds[0].row["bytes_down"] == 10 * (sum(sent) + sent[0])


def test_a_grouper_that_listens_opens_groups_and_names_stay_in_order() -> None:
    _, run, _, _ = go(cluster="test_clustering_base:Listening", rounds=3)
    state = state_of(run)
    assert state.groups.names == ["g0", "g1", "g2", "g3"]
    assert [state.groups.group_of(c) for c in state.own["moved"]] == ["g1", "g2", "g3"]
    assert len(state.groups.members()["g0"]) == 7
    rows = state.scores
    assert [len(rows[g]) for g in sorted(rows)] == [3, 3, 2, 1]
    for number in range(4, 11):
        model = part_of(run.arrays, state.groups.names[0])
        name = open_group(run, state, [f"x{number}"], model, [0, 1])
    assert name == "g10"
    assert state.groups.names[0] == "g00"
    assert len(state.scores["g00"]) == 3
    assert {k.partition("/")[0] for k in run.arrays} == set(state.groups.names)
    assert np.array_equal(part_of(run.arrays, "g10")["2.bias"], model["2.bias"])
    again = Grouping.from_memory(state.to_memory())
    assert again is not None
    assert again.groups.members() == state.groups.members()
    assert again.own == state.own


@pytest.mark.slow
@pytest.mark.parametrize("cluster", ["alone", *(f"test_clustering_base:{name}" for name in ("Asking", "Listening"))])
def test_a_run_of_any_grouper_goes_on_after_a_kill(cluster: str, tmp_path: Path) -> None:
    class Killed(BaseException):
        pass

    def kill(run: Run, done: Round, task: Task) -> None:
        if run.round == 1:
            raise Killed

    config = resolve(RECIPE.config, {**SMALL, "cluster": cluster})
    with pytest.raises(Killed):
        execute("groups", config, tmp_path / "a", watch=kill, pictures=False)
    resumed = execute("groups", config, tmp_path / "a", resume=True, pictures=False)
    straight = execute("groups", config, tmp_path / "b")
    assert resumed["digest"] == straight["digest"]
    assert resumed["groups"] == straight["groups"]


def test_alone_is_a_model_of_its_own_for_each_that_nobody_else_touches() -> None:
    rounds, run, fleet, task = go(cluster="alone", rounds=2, founders=0)
    assert [sorted({r.do for r in asked.values()}) for asked in fleet.asked] == [["train"], ["evaluate"]] * 2
    state = state_of(run)
    assert state.groups.count == 10
    assert rounds[-1].row["accuracy"] > 0.9
    trainer, client = task.knows.member.trainers(10), "c3"
    arrays: Any = trainer.initial(0)
    for number in (1, 2):  # the same two rounds by itself
        site = fleet.fleet.population[client]
        request = type(fleet.asked[0][client])("train", arrays, {"seed": 0, "round": number})
        arrays = trainer(request, type("S", (), {"id": client, "data": site, "state": {}})()).arrays
    own = part_of(run.arrays, state.groups.group_of(client))
    for name, value in own.items():
        assert value == pytest.approx(arrays[name], abs=1e-5)


def test_a_newcomer_alone_gets_a_group_of_its_own() -> None:
    _, run, _, _ = go({1: {"c3", "c7"}}, cluster="alone", rounds=3)
    state = state_of(run)
    assert state.groups.names == [f"g{i}" for i in range(10)]
    assert {state.groups.group_of(c) for c in ("c3", "c7")} == {"g8", "g9"}
    assert all(len(who) == 1 for who in state.groups.members().values())


def test_what_a_grouper_asks_is_in_the_exchange_and_what_it_cannot_do_is_refused() -> None:
    def exchange(cluster: str) -> Any:
        config = resolve(RECIPE.config, {**SMALL, "cluster": cluster})
        return RECIPE.disclosure(config, RECIPE.prepare(config))

    assert {"warm", "take"} <= set(exchange("auto").requests)
    assert "warm" not in exchange("alone").requests
    assert exchange("alone").extras == ()
    assert "probe" in exchange("test_clustering_base:Asking").requests
    private = {
        "privacy": {"name": "central", "noise": 1.0},
        "head": "full",
        "signature": {"name": "bias", "epsilon": 9.0},
    }
    for more, text in (
        (private, "only the signature of a warm-up is covered; use auto, or privacy=none"),
        ({"secure": "secagg+", "head": "full"}, "use auto, or secure=none"),
        ({"regroup": 2}, "it cannot form groups anew by signatures; use regroup=0"),
    ):
        with pytest.raises(ConfigError, match=text):
            RECIPE.prepare(resolve(RECIPE.config, {**SMALL, "cluster": "alone", **more}))


@pytest.mark.slow
def test_a_run_alone_leaves_no_picture_of_signatures(tmp_path: Path) -> None:
    summary = execute("groups", resolve(RECIPE.config, {**SMALL, "rounds": 1, "cluster": "alone"}), tmp_path / "run")
    assert summary["other_clusterers"] == {}
    assert summary["eps_range"] is None
    assert not (tmp_path / "run" / "groups.png").exists()
    assert state_of(load_run(tmp_path / "run")).groups.count == 10
