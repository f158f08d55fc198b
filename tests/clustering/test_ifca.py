"""IFCA: a client names the model that errs least on its own training samples, and nothing else of it leaves."""

from typing import Any

import numpy as np
import pytest

from mutirao.clustering.group_state import Grouping
from mutirao.clustering.ifca import Ifca, fault_of_choice
from mutirao.config import resolve
from mutirao.core.arrays import as_part
from mutirao.core.fleet import Reply, Request, Site
from mutirao.core.rounds import Run
from mutirao.experiments.task import find
from mutirao.simulation.local_fleet import LocalFleet
from mutirao.training.samples import Samples

RECIPE = find("groups")
SMALL: dict[str, Any] = {"clients": 10, "rounds": 2, "epochs": 1, "judge_samples": 20, "per_round": 1.0, "head": "full"}


def test_the_choice_is_the_least_mean_loss_over_the_training_samples() -> None:
    config = resolve(RECIPE.config, {**SMALL, "cluster": {"name": "ifca", "groups": 3}})
    task = RECIPE.prepare(config)
    member = task.knows.member
    models = [member.trainers(10).initial(seed) for seed in range(3)]
    request = Request("choose", {k: v for i, m in enumerate(models) for k, v in as_part(m, f"g{i}").items()}, {})
    for client, data in task.population.items():
        x, y = (t.numpy() for t in Samples.of(data).batch(np.arange(len(Samples.of(data)))))
        losses = []
        for m in models:  # dense, ReLU, dense, written out
            hidden = np.maximum(0, x.reshape(len(x), -1) @ m["0.weight"].T + m["0.bias"])
            logits = hidden @ m["2.weight"].T + m["2.bias"]
            losses.append(np.mean(np.log(np.exp(logits).sum(1)) - logits[np.arange(len(y)), y]))
        reply = member(request, Site(client, data, {}))
        assert reply.extras["choice"].tolist() == [int(np.argmin(losses))]
        assert (set(reply.extras), reply.arrays, reply.metrics, reply.n) == ({"choice"}, {}, {}, len(x))


def test_every_round_clients_choose_and_train_what_they_chose() -> None:
    config = resolve(RECIPE.config, {**SMALL, "rounds": 3, "cluster": {"name": "ifca", "groups": 3}})
    task = RECIPE.prepare(config)
    run = Run(task.initial(), 0)
    rounds = list(RECIPE.flow(LocalFleet(task.handler, task.population), config, task, run))
    state = Grouping.from_memory(run.memory)
    assert state is not None
    assert state.groups.names == ["g0", "g1", "g2"]
    size = sum(v.nbytes for v in task.initial().values())
    assert [done.row["bytes_down"] for done in rounds] == [10 * 4 * size] * 3  # three to choose from, one to train
    exchange = RECIPE.disclosure(config, task)
    assert "choose" in exchange.requests
    assert exchange.extras == ("choice",)
    assert "warm" not in exchange.requests


@pytest.mark.parametrize(
    ("choice", "kind"),
    [
        (None, "missing_key"),
        (np.array([0.0]), "shape"),
        (np.array([0, 1]), "shape"),
        (np.array([3]), "too_large"),
        (np.array([-1]), "too_large"),
    ],
)
def test_a_choice_that_is_none_is_its_clients_failure_alone(choice: Any, kind: str) -> None:
    found = fault_of_choice(Reply({}, {} if choice is None else {"choice": choice}, {}, 1), 3)
    assert found is not None
    assert found.kind == kind
    assert fault_of_choice(Reply({}, {"choice": np.array([2])}, {}, 1), 3) is None
    with pytest.raises(ValueError, match=r"^groups is 0"):
        Ifca(groups=0)
