"""Methods that keep something at the client: their steps, what is kept and what is told, against the formulas."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from mutirao.aggregation.base import effective_steps
from mutirao.core.arrays import Arrays
from mutirao.core.fleet import Failure, Reply, Request, Site
from mutirao.errors import Refused
from mutirao.randomness import rng
from mutirao.training.corrections import CONTROL
from mutirao.training.pull import ANCHOR, CORRECTION
from mutirao.training.samples import Samples
from mutirao.training.trainer import Trainer

FEATURES, CLASSES, SAMPLES = 6, 3, 20


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(FEATURES, 5), nn.ReLU(), nn.Linear(5, CLASSES))


def normed() -> nn.Module:
    return nn.Sequential(nn.Linear(FEATURES, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, CLASSES))


def data(client: str) -> Samples:
    draw = rng(3, 0, "data", client)
    x = draw.normal(size=(SAMPLES, FEATURES)).astype(np.float32)
    return Samples(x, draw.integers(0, CLASSES, SAMPLES))


def like(arrays: Arrays, name: str, size: float = 0.3) -> Arrays:
    draw = rng(5, 0, name)
    return {k: (size * draw.normal(size=v.shape)).astype(v.dtype) for k, v in arrays.items() if v.dtype.kind == "f"}


def follow(trainer: Trainer, request: Request, site: Site, b: Arrays, a: Arrays, mu: float) -> Arrays:
    """w <- w - lr v, v = m v + g + d w + b + mu (w - a), with autograd's gradients and nothing else of the trainer."""
    module = trainer.model()
    module.load_state_dict({k: torch.tensor(v) for k, v in request.arrays.items()})
    speed: dict[str, Any] = {}
    hyperparameters = trainer.hyperparameters(request.config)
    for rows in hyperparameters.plan(
        rng(request.config["seed"], request.config["round"], "batches", site.id), SAMPLES, True
    ):
        x, y = site.data.batch(rows)
        module.zero_grad()
        nn.functional.cross_entropy(module(x), y).backward()
        for name, p in module.named_parameters():
            g = p.grad.numpy().astype(np.float64) + trainer.weight_decay * p.detach().numpy()
            g = g + b.get(name, 0.0) + mu * (p.detach().numpy() - a[name])
            speed[name] = trainer.momentum * speed.get(name, 0.0) + g
            p.data.sub_(torch.tensor(hyperparameters.lr * speed[name], dtype=torch.float32))
    return {k: v.numpy() for k, v in module.state_dict().items()}


@pytest.mark.parametrize("engine", ["plain", "stacked", "threads", "processes", "fused", "auto"])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("make", [network, normed])
def test_steps_have_the_correction_and_the_anchor_whatever_way_they_go(engine: str, momentum: float, make: Any) -> None:
    trainer = Trainer(make, lr=0.05, momentum=momentum, weight_decay=0.01, epochs=3, batch_size=8, engine=engine)
    arrays = trainer.initial(0)
    requests, sites, wanted = {}, {}, {}
    for client in ("ana", "bia", "caio"):
        b, a = like(arrays, f"b {client}"), arrays | like(arrays, f"a {client}")
        extras = {CORRECTION + k: v for k, v in b.items()} | {ANCHOR + k: a[k] for k in b}
        requests[client] = Request("train", arrays, {"seed": 1, "round": 2, "mu": 0.2}, extras)
        sites[client] = Site(client, data(client))
        wanted[client] = follow(trainer, requests[client], sites[client], b, a, 0.2)
    got = trainer.many(requests, sites)
    for client, end in wanted.items():
        reply = got[client]
        assert isinstance(reply, Reply), reply
        for name in end:
            np.testing.assert_allclose(reply.arrays[name], end[name], rtol=2e-4, atol=2e-5, err_msg=f"{client} {name}")


def test_a_correction_of_another_shape_is_one_clients_failure() -> None:
    trainer = Trainer(network)
    arrays = trainer.initial(0)
    good = Request("train", arrays, {"seed": 1, "round": 1})
    requests = {
        "good": good,
        "short": replace(good, extras={CORRECTION + "0.bias": np.zeros(2, np.float32)}),
        "strange": replace(good, extras={ANCHOR + "9.bias": np.zeros(5, np.float32)}),
        "nan": replace(good, extras={CORRECTION + "0.bias": np.full(5, np.nan, np.float32)}),
    }
    got = trainer.many(requests, {c: Site(c, data(c)) for c in requests})
    assert isinstance(got["good"], Reply)
    for client, word in {"short": "shape and type", "strange": "shape and type", "nan": "NaN"}.items():
        failure = got[client]
        assert isinstance(failure, Failure)
        assert word in failure.reason


@given(lr=st.floats(0.001, 0.5), momentum=st.floats(0, 0.95), mu=st.floats(0, 1), steps=st.integers(1, 40))
@settings(max_examples=60, deadline=None)
def test_reach_is_the_sum_of_what_each_gradient_counts_for(lr: float, momentum: float, mu: float, steps: int) -> None:
    """Each gradient by itself, put through the recurrence: the sum of their effects is what all together do."""

    def end(pulses: np.ndarray) -> float:
        away = speed = 0.0
        for g in pulses:
            speed = momentum * speed + g - mu * away
            away += lr * speed
        return away

    whole = sum(end(pulse) for pulse in np.eye(steps))
    assert effective_steps(lr, momentum, mu, steps) == pytest.approx(whole, rel=1e-9, abs=1e-12)


@given(lr=st.floats(0.001, 0.5), momentum=st.floats(0.01, 0.95), steps=st.integers(1, 200))
def test_reach_is_the_published_sum_with_momentum(lr: float, momentum: float, steps: int) -> None:
    a = (steps - momentum * (1 - momentum**steps) / (1 - momentum)) / (1 - momentum)
    assert effective_steps(lr, momentum, 0.0, steps) == pytest.approx(lr * a, rel=1e-9)
    mu = 0.3
    assert effective_steps(lr, 0.0, mu, steps) == pytest.approx((1 - (1 - lr * mu) ** steps) / mu, rel=1e-9)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_scaffolds_client_keeps_the_mean_of_the_gradients_it_has_seen(momentum: float) -> None:
    """With one step a round c_k is that step's gradient; with momentum the correction is in it, and must come out."""
    trainer = Trainer(network, lr=0.1, momentum=momentum, batch_size=SAMPLES)
    arrays, site = trainer.initial(0), Site("ana", data("ana"))
    site.state[CONTROL] = np.concatenate([np.ravel(v) for _, v in sorted(like(arrays, "own").items())])
    c = np.concatenate([np.ravel(v) for _, v in sorted(like(arrays, "all").items())])
    config = {"seed": 1, "round": 1, "correct": "scaffold2", "extras": "reach"}
    reply = trainer(Request("train", arrays, config, {"control": c}), site)
    module = trainer.model()
    module.load_state_dict({k: torch.tensor(v) for k, v in arrays.items()})
    nn.functional.cross_entropy(module(site.data.x), site.data.y).backward()
    slope = {k: p.grad.numpy() for k, p in module.named_parameters()}
    own = np.concatenate([np.ravel(slope[k]) for k in sorted(slope)])
    np.testing.assert_allclose(site.state[CONTROL], own, atol=2e-6)
    assert reply.metrics["reach"] == pytest.approx(0.1)


def test_scaffolds_first_option_sends_the_change_of_the_gradient_at_the_model_received() -> None:
    trainer = Trainer(network, lr=0.1, batch_size=7, epochs=2)
    arrays, site = trainer.initial(0), Site("ana", data("ana"))
    config = {"seed": 1, "round": 1, "correct": "scaffold1", "extras": "control"}
    first = trainer(Request("train", arrays, config), site)
    module = trainer.model()
    module.load_state_dict({k: torch.tensor(v) for k, v in arrays.items()})
    nn.functional.cross_entropy(module(site.data.x), site.data.y).backward()
    slope = {k: p.grad.numpy() for k, p in module.named_parameters()}
    np.testing.assert_allclose(
        first.extras["control"], np.concatenate([np.ravel(slope[k]) for k in sorted(slope)]), atol=2e-6
    )
    again = trainer(Request("train", arrays, {**config, "round": 2}), site)
    np.testing.assert_allclose(again.extras["control"], 0, atol=1e-7)  # the same model, the same gradient


def test_steps_that_are_no_sum_of_gradients_are_not_corrected() -> None:
    for trainer in (Trainer(network, optimizer="adam"), Trainer(network, clip=1.0)):
        assert "correct" not in trainer.capabilities.config
        reply = trainer.many(
            {"ana": Request("train", trainer.initial(0), {"seed": 0, "round": 1, "correct": "feddyn", "mu": 0.1})},
            {"ana": Site("ana", data("ana"))},
        )["ana"]
        assert isinstance(reply, Failure)
        assert reply.kind == "refused"
    assert "reach" not in Trainer(network, optimizer="adam").capabilities.metrics


def test_a_method_nobody_knows_is_refused() -> None:
    trainer = Trainer(network)
    asked = Request("train", trainer.initial(0), {"seed": 0, "round": 1, "correct": "scafold"})
    failure = trainer.many({"ana": asked}, {"ana": Site("ana", data("ana"))})["ana"]
    assert isinstance(failure, Failure)
    assert "scaffold1, scaffold2, feddyn" in failure.reason


def test_the_loss_before_training_is_that_of_all_samples() -> None:
    trainer = Trainer(network, batch_size=4)
    arrays, samples = trainer.initial(0), data("ana")
    reply = trainer(Request("train", arrays, {"seed": 0, "round": 1, "extras": "start_loss"}), Site("ana", samples))
    module = trainer.model()
    module.load_state_dict({k: torch.tensor(v) for k, v in arrays.items()})
    whole = nn.functional.cross_entropy(module(samples.x), samples.y)
    assert reply.metrics["start_loss"] == pytest.approx(whole.item(), rel=1e-5)


@pytest.mark.parametrize("method", ["scaffold1", "scaffold2", "feddyn"])
def test_an_update_that_never_counted_is_undone_and_no_other(method: str) -> None:
    trainer = Trainer(network, lr=0.1, batch_size=8)
    model = trainer.initial(0)
    extra = {"mu": 0.5} if method == "feddyn" else {}

    def ask(site: Site, number: int, **told: int) -> Arrays:
        config = {"seed": 1, "round": number, "correct": method, **extra, **told}
        answer = trainer(Request("train", model, config), site)
        return answer.arrays

    kept = ("scaffold.", "feddyn.")
    once, lost, vain = (Site("ana", data("ana")) for _ in range(3))
    for site in (once, lost, vain):
        ask(site, 1)
    ask(lost, 2)  # nobody hears of it
    wanted = ask(once, 4)
    for site in (lost, vain):  # the second was asked in round 2, too, and never knew
        arrays = ask(site, 4, counted=1)
        for name, value in wanted.items():
            np.testing.assert_array_equal(arrays[name], value)
        assert {k for k in site.state if k.startswith(kept)} == {k for k in once.state if k.startswith(kept)}
        for name, value in once.state.items():
            np.testing.assert_array_equal(site.state[name], value)
    never = Site("ana", data("ana"))
    ask(never, 1)
    first = ask(Site("ana", data("ana")), 2)
    for name, value in ask(never, 2, counted=0).items():
        np.testing.assert_array_equal(value, first[name])


def test_nothing_is_undone_where_no_method_keeps_anything() -> None:
    trainer = Trainer(network)
    with pytest.raises(Refused, match=r"^told\.counted: no method with client state was requested"):
        trainer(Request("train", trainer.initial(0), {"seed": 0, "round": 3, "counted": 1}), Site("ana", data("ana")))
