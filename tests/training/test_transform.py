"""A transform of batches that are trained on: the same whichever way clients go, and never when a model is judged."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from mutirao.core.arrays import digest
from mutirao.core.fleet import Request, Site
from mutirao.errors import ConfigError
from mutirao.privacy import DPSGD
from mutirao.randomness import rng
from mutirao.training.samples import ClientData, virtual_clients
from mutirao.training.trainer import Trainer

DRAW = np.random.default_rng(0)
X = DRAW.normal(size=(90, 1, 4, 4)).astype(np.float32)
Y = DRAW.integers(0, 3, 90)
CLIENTS = virtual_clients(X, Y, np.array_split(np.arange(90), 6))
SITES = {c: Site(c, CLIENTS[c]) for c in CLIENTS}


def flip(x: Tensor, rng: np.random.Generator) -> Tensor:
    """Half of the pictures mirrored, in place: a batch is a copy."""
    chosen = torch.from_numpy(rng.random(len(x)) < 0.5)
    x[chosen] = x[chosen].flip(-1)
    return x


def dense() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(16, 3))


def convolution() -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Dropout(0.5), nn.Flatten(), nn.Linear(16, 3))


def requests(trainer: Trainer, do: str = "train", round: int = 1) -> dict[str, Request]:
    start = trainer.initial(0)
    return {c: Request(do, start, {"seed": 3, "round": round}) for c in SITES}


@pytest.mark.parametrize("model", [dense, convolution])
def test_every_way_and_any_number_of_workers_give_the_same_bits(model: Any) -> None:
    first = Trainer(model, batch_size=4, epochs=9, transform=flip, engine="plain")
    asked = requests(first)
    alone = {c: first(asked[c], SITES[c]) for c in SITES}
    bare = Trainer(model, batch_size=4, epochs=9, engine="plain")
    assert all(digest(bare(asked[c], SITES[c]).arrays) != digest(alone[c].arrays) for c in SITES)
    for engine, workers in (("auto", 0), ("threads", 1), ("threads", 3), ("plain", 2)):
        many = Trainer(model, batch_size=4, epochs=9, transform=flip, engine=engine, workers=workers).many(asked, SITES)
        assert {c: digest(r.arrays) for c, r in many.items()} == {c: digest(r.arrays) for c, r in alone.items()}  # type: ignore[union-attr]
        assert {c: r.metrics for c, r in many.items()} == {c: r.metrics for c, r in alone.items()}  # type: ignore[union-attr]
    assert CLIENTS.x.numpy().tobytes() == X.tobytes()


def test_it_equals_training_on_what_it_would_have_made() -> None:
    trainer = Trainer(dense, batch_size=15, transform=flip, engine="plain")
    draw, rows = (
        rng(3, 1, "transform", "c2"),
        trainer.hyperparameters({"round": 1}).plan(rng(3, 1, "batches", "c2"), 15),
    )
    own = CLIENTS["c2"].batch(np.arange(15))  # type: ignore[union-attr]
    x = own[0].clone()
    x[rows[0]] = flip(x[rows[0]], draw)
    asked = requests(trainer)["c2"]
    wanted = Trainer(dense, batch_size=15, engine="plain")(asked, Site("c2", (x, own[1])))
    assert digest(trainer(asked, SITES["c2"]).arrays) == digest(wanted.arrays)


def test_rounds_and_clients_draw_their_own() -> None:
    drawn: list[float] = []

    def note(x: Tensor, rng: np.random.Generator) -> Tensor:
        drawn.append(rng.random())
        return x

    trainer = Trainer(dense, batch_size=50, transform=note)
    for round in (1, 2, 1):
        for c in ("c0", "c1"):
            trainer(requests(trainer, round=round)[c], SITES[c])
    assert len(set(drawn)) == 4
    assert drawn[:2] == drawn[4:]


def test_models_are_judged_on_samples_as_they_are() -> None:
    def never(x: Tensor, rng: np.random.Generator) -> Tensor:
        raise AssertionError("a judged batch was changed")

    trainer, bare = Trainer(dense, transform=never), Trainer(dense)
    data = ClientData((X, Y), (X, Y))  # type: ignore[arg-type]
    sites = {"ana": Site("ana", data), "bia": Site("bia", data)}
    for do in ("evaluate", "probe"):
        asked = {c: Request(do, bare.initial(0), {"seed": 3, "round": 1}) for c in sites}
        assert trainer.many(asked, sites) == bare.many(asked, sites)
        assert trainer(asked["ana"], sites["ana"]) == bare(asked["ana"], sites["ana"])
    assert trainer.evaluate(bare.initial(0), data.test) == bare.evaluate(bare.initial(0), data.test)


@pytest.mark.parametrize("engine", ["fused", "stacked"])
def test_ways_that_cannot_apply_it_are_refused(engine: str) -> None:
    with pytest.raises(ValueError, match=f"engine={engine} cannot apply a transform; use auto, threads or plain"):
        Trainer(dense, transform=flip, engine=engine)


def test_private_training_is_refused_with_it() -> None:
    pytest.importorskip("opacus")
    with pytest.raises(ConfigError, match="a transform may mix samples"):
        Trainer(dense, transform=flip).private_training(DPSGD())


def globally(x: Tensor, rng: np.random.Generator) -> Tensor:
    return x + torch.rand(len(x))[:, None, None, None]


def halved(x: Tensor, rng: np.random.Generator) -> Tensor:
    return x[::2]


def broken(x: Tensor, rng: np.random.Generator) -> Tensor:
    raise RuntimeError("no such\naxis")


@pytest.mark.parametrize(
    ("transform", "line"),
    [
        (globally, r"client c0: transform\(x, rng\) gives other inputs each time; it should draw from `rng` alone"),
        (halved, r"client c0: transform\(x, rng\) makes 8 samples of 15; each should stay one"),
        (broken, r"client c0: transform\(x, rng\) does not take its inputs, float32 \[15, 1, 4, 4\]: no such axis"),
    ],
)
def test_one_that_cannot_be_repeated_or_loses_samples_is_found_before_the_first_round(
    transform: Any, line: str
) -> None:
    trainer = Trainer(dense, transform=transform)
    with pytest.raises(ConfigError, match=line):
        trainer.check(trainer.initial(0), CLIENTS)
    Trainer(dense, transform=flip).check(trainer.initial(0), CLIENTS)
    assert CLIENTS.x.numpy().tobytes() == X.tobytes()
