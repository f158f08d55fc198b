"""Optimisers by name, by class and by a function, against torch.optim itself."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from mutirao.config import resolve
from mutirao.core.arrays import Arrays, digest
from mutirao.core.fleet import Reply, Request, Site
from mutirao.errors import ConfigError
from mutirao.experiments.task import find
from mutirao.randomness import rng
from mutirao.training.optimizers import LocalOptimizer, seeded
from mutirao.training.samples import Samples
from mutirao.training.trainer import Trainer

DRAW = np.random.default_rng(0)
X, Y = DRAW.normal(size=(50, 4)).astype(np.float32), DRAW.integers(0, 3, 50)
TORCH: dict[str, Any] = {
    "sgd": torch.optim.SGD,
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
    "rmsprop": torch.optim.RMSprop,
    "adagrad": torch.optim.Adagrad,
}


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 9), nn.ReLU(), nn.Linear(9, 3))


def copies() -> tuple[nn.Module, nn.Module]:
    with seeded(3):
        ours = net()
    with seeded(3):
        return ours, net()


def slope(model: nn.Module, rows: slice) -> None:
    model.zero_grad()
    nn.functional.cross_entropy(model(torch.from_numpy(X[rows])), torch.from_numpy(Y[rows])).backward()  # type: ignore[no-untyped-call]


@settings(max_examples=40)
@given(
    name=st.sampled_from(sorted(TORCH)),
    lr=st.floats(1e-4, 0.5),
    decay=st.sampled_from([0.0, 0.01, 0.3]),
    momentum=st.sampled_from([0.0, 0.5, 0.9]),
    mu=st.sampled_from([0.0, 0.7]),
    clip=st.sampled_from([0.0, 0.05]),
)
def test_names_are_torch_optim_to_the_bit(
    name: str, lr: float, decay: float, momentum: float, mu: float, clip: float
) -> None:
    given = {"weight_decay": decay} | ({"momentum": momentum} if name in ("sgd", "rmsprop") else {})
    ours, theirs = copies()
    mine = LocalOptimizer(list(ours.parameters()), mu, optimizer=name, lr=lr, clip=clip, **given)  # type: ignore[arg-type]
    reference = TORCH[name](theirs.parameters(), lr=lr, **given)
    start = [p.detach().clone() for p in theirs.parameters()]
    for step in range(8):
        rows = slice(5 * step, 5 * step + 10)
        slope(ours, rows)
        mine.step()
        slope(theirs, rows)
        for p, origin in zip(theirs.parameters(), start, strict=True):
            assert p.grad is not None
            p.grad.add_(p.detach() - origin, alpha=mu)
        if clip:
            nn.utils.clip_grad_norm_(theirs.parameters(), clip)
        reference.step()
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(a, b)


def ask(trainer: Trainer, round: int = 1, **told: Any) -> Arrays:
    request = Request("train", trainer.initial(0), {"seed": 0, "round": round, **told})
    return trainer(request, Site("ana", Samples(X, Y))).arrays


def by_torch(make: Any, epochs: int = 1) -> Arrays:
    """The trainer's batches, stepped by an optimiser of torch's own."""
    trainer = Trainer(net, epochs=epochs)
    model = net()
    model.load_state_dict({k: torch.from_numpy(v) for k, v in trainer.initial(0).items()})
    optimizer = make(model.parameters())
    for rows in trainer.hyperparameters({"round": 1}).plan(rng(0, 1, "batches", "ana"), len(Y)):
        model.zero_grad()
        nn.functional.cross_entropy(model(torch.from_numpy(X)[rows]), torch.from_numpy(Y)[rows]).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return {k: v.numpy() for k, v in model.state_dict().items()}


def test_a_class_of_torch_optim_gets_the_settings_it_takes() -> None:
    ours = ask(Trainer(net, optimizer=torch.optim.RAdam, lr=0.02, weight_decay=0.1, epochs=4))
    theirs = by_torch(lambda p: torch.optim.RAdam(p, lr=0.02, weight_decay=0.1), 4)
    assert digest(ours) == digest(theirs)
    named = Trainer(net, lr=0.1, momentum=0.9, epochs=2, engine="plain")
    assert digest(ask(named)) == digest(ask(Trainer(net, optimizer=torch.optim.SGD, lr=0.1, momentum=0.9, epochs=2)))


def test_a_function_says_all_and_a_schedule_or_a_told_rate_scales_it() -> None:
    def factory(weights: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(weights, lr=0.04, betas=(0.5, 0.9))

    ours = ask(Trainer(net, optimizer=factory, epochs=3))
    assert digest(ours) == digest(by_torch(lambda p: torch.optim.AdamW(p, lr=0.04, betas=(0.5, 0.9)), 3))
    half = by_torch(lambda p: torch.optim.AdamW(p, lr=0.02, betas=(0.5, 0.9)), 3)
    assert digest(ask(Trainer(net, optimizer=factory, epochs=3, schedule=lambda round: 0.5))) == digest(half)
    assert digest(ask(Trainer(net, optimizer=factory, lr=1.0, epochs=3), lr=0.5)) == digest(half)


def test_mu_and_clip_hold_for_an_optimiser_of_ones_own() -> None:
    one = Trainer(net, lr=0.1, mu=0.5, clip=0.1, epochs=2)
    own = Trainer(net, lr=0.1, mu=0.5, clip=0.1, epochs=2, optimizer=torch.optim.SGD)
    assert digest(ask(one)) == digest(ask(own))


@pytest.mark.parametrize("engine", ["auto", "threads"])
def test_an_optimiser_of_ones_own_gives_the_same_bits_in_threads(engine: str) -> None:
    made = []
    for way in (engine, "plain"):
        trainer = Trainer(net, optimizer=torch.optim.NAdam, lr=0.01, engine=way, epochs=3)
        request = Request("train", trainer.initial(0), {"seed": 0, "round": 1})
        clients = [f"c{i}" for i in range(20)]
        sites = {c: Site(c, Samples(X[i:], Y[i:])) for i, c in enumerate(clients)}
        answers = trainer.many(dict.fromkeys(clients, request), sites)
        made.append([digest(r.arrays) for r in answers.values() if isinstance(r, Reply)])
    assert len(made[0]) == 20
    assert made[0] == made[1]


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"optimizer": "adam", "momentum": 0.9}, "momentum is 0.9, which adam ignores; it must be 0"),
        ({"optimizer": "adagrad", "momentum": 0.9}, "momentum is 0.9, which adagrad ignores"),
        ({"optimizer": torch.optim.Adam, "momentum": 0.9}, "momentum is 0.9, which Adam does not take"),
        ({"optimizer": torch.optim.Rprop, "weight_decay": 0.1}, "weight_decay is 0.1, which Rprop does not take"),
        ({"optimizer": torch.optim.LBFGS}, "optimizer is LBFGS, but must take a `lr`, and steps without a closure"),
        ({"optimizer": dict}, "optimizer is dict, but must take"),
        ({"optimizer": lambda p: None, "momentum": 0.9}, "momentum is 0.9, which a function that makes an optimiser"),
        ({"optimizer": lambda p: None, "weight_decay": 0.1}, "weight_decay is 0.1, which a function that makes"),
        ({"optimizer": 3}, "optimizer is 3, but must be one of sgd"),
        (
            {"optimizer": torch.optim.Adam, "engine": "stacked"},
            "engine is 'stacked', which supports optimizers by name",
        ),
        ({"optimizer": torch.optim.Adam, "engine": "fused"}, "engine is 'fused', which supports optimizers by name"),
    ],
)
def test_what_an_optimiser_would_ignore_is_refused_by_name(wrong: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        Trainer(net, **wrong)


def test_a_recipe_names_a_setting_that_its_optimiser_ignores() -> None:
    config = resolve(find("groups").config, {}, [("optimizer", "adam")])  # whose momentum is 0.9 unless it is said
    with pytest.raises(ConfigError, match=r"momentum is 0\.9, which adam ignores; it must be 0"):
        find("groups").prepare(config)


@given(seed=st.integers(0, 2**63 - 1))
def test_randomness_from_a_seed_is_that_of_torch_manual_seed_and_leaves_no_trace(seed: int) -> None:
    before = torch.get_rng_state()
    with seeded(seed):
        ours = torch.rand(5)
    assert torch.equal(before, torch.get_rng_state())
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        assert torch.equal(torch.rand(5), ours)


@pytest.mark.parametrize(
    ("name", "more"), [("sgd", {"momentum": 0.9}), ("adam", {}), ("adamw", {"weight_decay": 0.01}), ("rmsprop", {})]
)
def test_an_optimiser_that_is_kept_goes_on_as_torchs_does_over_rounds(name: str, more: dict[str, float]) -> None:
    trainer = Trainer(net, optimizer=name, lr=0.01, steps=2, batch_size=50, keep_optimizer=True, **more)  # type: ignore[arg-type]
    start = trainer.initial(seed=1)
    site, arrays = Site("ana", Samples(X, Y)), start
    theirs = net()
    theirs.load_state_dict({k: torch.from_numpy(v.copy()) for k, v in start.items()})
    optimiser = TORCH[name](theirs.parameters(), lr=0.01, **more)
    for round in (1, 2, 3):
        arrays = trainer(Request("train", arrays, {"seed": 0, "round": round}), site).arrays
        for _ in range(2):  # batches of all samples: their order changes only how sums round
            slope(theirs, slice(None))
            optimiser.step()
    wanted = {k: v.numpy() for k, v in theirs.state_dict().items()}
    assert all(np.allclose(arrays[k], wanted[k], atol=1e-4) for k in wanted)
    fresh = Trainer(net, optimizer=name, lr=0.01, steps=2, batch_size=50, **more)  # type: ignore[arg-type]
    other, begun = start, Site("ana", Samples(X, Y))
    for round in (1, 2, 3):
        other = fresh(Request("train", other, {"seed": 0, "round": round}), begun).arrays
    assert not begun.state
    assert not all(np.allclose(other[k], wanted[k], atol=1e-4) for k in wanted)


def test_an_optimisers_state_of_another_model_is_not_taken() -> None:
    trainer = Trainer(net, optimizer="adam", lr=0.01, keep_optimizer=True)
    site = Site("ana", Samples(X, Y), {"optimizer.count": np.array(3), "optimizer.0.0": np.zeros((2, 2), np.float32)})
    with pytest.raises(ValueError, match="is of another model"):
        trainer(Request("train", trainer.initial(0), {"seed": 0, "round": 1}), site)


def test_where_an_optimiser_cannot_be_kept_it_is_refused_by_name() -> None:
    for how, why in [
        ({"engine": "fused"}, "engine=fused starts with a fresh optimizer"),
        ({"engine": "stacked"}, "engine=stacked starts with a fresh optimizer"),
        ({"optimizer": torch.optim.Adam}, "keep_optimizer needs an optimizer by name"),
    ]:
        with pytest.raises(ValueError, match=why):
            Trainer(net, keep_optimizer=True, **how)  # type: ignore[arg-type]
    from mutirao.privacy import DPSGD

    with pytest.raises(ConfigError, match="leave keep_optimizer out"):
        Trainer(net, keep_optimizer=True).private_training(DPSGD(epsilon=1.0))


def test_many_clients_keep_their_own_optimisers_whatever_way_they_are_trained() -> None:
    from mutirao.simulation.local_fleet import LocalFleet

    found = []
    for engine in ("auto", "threads", "plain"):
        trainer = Trainer(net, optimizer="adam", lr=0.01, keep_optimizer=True, engine=engine)
        fleet = LocalFleet(trainer, {c: Samples(X[i:], Y[i:]) for i, c in enumerate("abc")})
        arrays = trainer.initial(0)
        for round in (1, 2):
            answers = fleet.ask({c: Request("train", arrays, {"seed": 0, "round": round}) for c in "abc"})
            assert not answers.failures
            arrays = answers.replies["b"].arrays
        found.append((digest(arrays), digest(fleet.snapshot())))
    assert len(set(found)) == 1
