"""What the server tells clients to train by, on every way of the engine, and what is refused."""

from typing import Any

import numpy as np
import pytest
from torch import nn

from mutirao.aggregation import FedAvg
from mutirao.core.arrays import Arrays, digest, flat
from mutirao.core.fleet import Failure, Reply, Request, Site
from mutirao.core.group import Group
from mutirao.core.rounds import Run, train
from mutirao.errors import ConfigError, TooFewReplies
from mutirao.selection import everyone
from mutirao.simulation.local_fleet import LocalFleet
from mutirao.systems.recsys.fedrecon import FedRecon
from mutirao.systems.recsys.ratings import Taste
from mutirao.training.lr_schedules import Cosine
from mutirao.training.samples import Samples
from mutirao.training.trainer import Trainer

DRAW = np.random.default_rng(0)
X, Y = DRAW.normal(size=(400, 4)).astype(np.float32), DRAW.integers(0, 3, 400)
SITES = {f"c{i}": Site(f"c{i}", Samples(X[20 * i : 20 * i + 12 + i], Y[20 * i : 20 * i + 12 + i])) for i in range(20)}


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 9), nn.ReLU(), nn.Linear(9, 3))


def ask(trainer: Trainer, round: int = 1, **told: Any) -> dict[str, Reply | Failure]:
    request = Request("train", trainer.initial(0), {"seed": 0, "round": round, **told})
    return trainer.many(dict.fromkeys(SITES, request), SITES)


def models(answers: dict[str, Reply | Failure]) -> list[Arrays]:
    made = [r.arrays for r in answers.values() if isinstance(r, Reply)]
    assert len(made) == len(answers)
    return made


@pytest.mark.parametrize("engine", ["plain", "threads", "fused", "stacked", "auto"])
@pytest.mark.parametrize(
    "told",
    [{"lr": 0.02}, {"epochs": 3}, {"batch_size": 5}, {"lr": 0.3, "epochs": 2, "batch_size": 7, "mu": 0.1}],
    ids=str,
)
def test_what_is_told_is_as_if_it_were_set(engine: str, told: dict[str, Any]) -> None:
    own = {"lr": 0.1, "epochs": 1, "batch_size": 4}
    ours = models(ask(Trainer(net, engine=engine, **own), **told))  # type: ignore[arg-type]
    theirs = models(ask(Trainer(net, engine=engine, **own | told)))
    if engine == "stacked" and "lr" in told:  # a rate that moves is not part of the recorded step
        for a, b in zip(ours, theirs, strict=True):
            np.testing.assert_allclose(flat(a), flat(b), rtol=1e-5, atol=1e-6)
    else:
        assert list(map(digest, ours)) == list(map(digest, theirs))
    assert digest(ours[0]) != digest(models(ask(Trainer(net, engine=engine, **own)))[0])  # type: ignore[arg-type]


@pytest.mark.parametrize("optimizer", ["sgd", "adam", "adamw", "rmsprop", "adagrad"])
def test_a_schedule_does_not_record_steps_anew_and_gives_the_plain_paths_model(optimizer: str) -> None:
    settings: dict[str, Any] = {"optimizer": optimizer, "lr": 0.05, "weight_decay": 0.01, "batch_size": 4}
    stacked, plain = (
        Trainer(net, engine=engine, schedule=Cosine(length=6), **settings) for engine in ("stacked", "plain")
    )
    for round in range(1, 7):
        for ours, theirs in zip(models(ask(stacked, round)), models(ask(plain, round)), strict=True):
            np.testing.assert_allclose(flat(ours), flat(theirs), rtol=1e-4, atol=1e-5)
    machines = [m for k, m in stacked._cache.items() if isinstance(k, tuple)]
    assert len(machines) == 1
    assert machines[0] is not None


@pytest.mark.parametrize(
    ("key", "value", "right"),
    [
        ("lr", -0.1, "a number above 0"),
        ("lr", 0.0, "a number above 0"),
        ("lr", float("nan"), "a number above 0"),
        ("lr", float("inf"), "a number above 0"),
        ("lr", 10**400, "a number above 0"),
        ("lr", True, "a number above 0"),
        ("lr", "0.1", "a number above 0"),
        ("epochs", 0, "a whole number above 0 and at most 10000"),
        ("epochs", 1.5, "a whole number above 0 and at most 10000"),
        ("epochs", 10**9, "a whole number above 0 and at most 10000"),
        ("batch_size", -3, "a whole number above 0"),
        ("batch_size", True, "a whole number above 0"),
        ("mu", -1.0, "a number 0 or above"),
        ("mu", float("nan"), "a number 0 or above"),
    ],
)
def test_a_value_that_cannot_be_is_refused_by_name(key: str, value: Any, right: str) -> None:
    trainer = Trainer(net)
    for answer in ask(trainer, **{key: value}).values():
        assert isinstance(answer, Failure)
        assert answer.kind == "refused"
        assert answer.reason.startswith(f"told.{key}: it is ")
        assert right in answer.reason


@pytest.mark.parametrize("do", ["train", "evaluate", "probe"])
def test_a_key_that_nobody_knows_is_refused_by_name(do: str) -> None:
    trainer = Trainer(net)
    request = Request(do, trainer.initial(0), {"seed": 0, "round": 1, "learning_rate": 0.1})
    for answer in trainer.many({"c0": request}, SITES).values():
        assert isinstance(answer, Failure)
        assert str(answer) == (
            "refused: told.learning_rate: not a hyperparameter of this client; "
            "supported: batch_size, correct, counted, epochs, lr, mu"
        )


def test_epochs_are_not_told_to_who_counts_steps() -> None:
    answer = ask(Trainer(net, steps=5), epochs=2)["c0"]
    assert isinstance(answer, Failure)
    assert answer.reason == "told.epochs: this client trains 5 steps, whatever the number of epochs"


def test_a_user_of_the_recommender_refuses_a_rate_that_it_would_ignore() -> None:
    method = FedRecon(items=5, dimension=3)
    site = Site("ana", Taste(np.array([0, 1, 2], np.int32), np.array([1, 2, 3], np.float32)))
    request = Request("train", method.initial(0), {"seed": 0, "round": 1, "lr": 0.1})
    answer = method.many({"ana": request}, {"ana": site})["ana"]
    assert isinstance(answer, Failure)
    assert answer.reason == "told.lr: not a hyperparameter of this client; supported: mu"


def fleet(trainer: Trainer) -> LocalFleet:
    return LocalFleet(trainer, {c: site.data for c, site in SITES.items()})


def trained(tell: Any = None, **settings: Any) -> Arrays:
    trainer = Trainer(net, **settings)
    run = Run(trainer.initial(0))
    list(train(run, fleet(trainer), rounds=3, select=everyone, aggregate=FedAvg(), config=tell))
    return run.arrays


def test_a_run_may_tell_the_same_in_every_round_or_a_function_of_it() -> None:
    assert digest(trained({"lr": 0.02})) == digest(trained(lr=0.02))
    halved = trained(lambda round: {"lr": 0.1 * 0.5**round})
    assert digest(halved) == digest(trained(lr=0.1, schedule=lambda round: 0.5**round))
    assert digest(halved) != digest(trained())


def test_a_run_that_tells_what_nobody_knows_says_so() -> None:
    with pytest.raises(TooFewReplies, match=r"told\.rate: not a hyperparameter of this client"):
        trained({"rate": 0.1})
    with pytest.raises(ConfigError, match="config: extras must be the same in every round"):
        Group(everyone, FedAvg(), config=lambda round: {"extras": "entropy"}).request(Run({}), "train", ())
