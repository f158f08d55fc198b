"""DP-SGD against per-sample gradients worked out by hand, in NumPy."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from mutirao.core.arrays import Arrays, digest
from mutirao.core.fleet import Request, Site
from mutirao.errors import ConfigError
from mutirao.privacy import DPSGD, RELEASES
from mutirao.privacy.accounting import add_releases, epsilon
from mutirao.simulation.local_fleet import LocalFleet
from mutirao.training.samples import Samples
from mutirao.training.trainer import Trainer

DRAW = np.random.default_rng(0)
X, Y = DRAW.normal(size=(12, 4)).astype(np.float32), DRAW.integers(0, 3, 12)
START: Arrays = {
    "weight": DRAW.normal(size=(3, 4)).astype(np.float32),
    "bias": DRAW.normal(size=3).astype(np.float32),
}


def trainer(**settings: Any) -> Trainer:
    return Trainer(lambda: nn.Linear(4, 3), **{"lr": 0.5, "batch_size": 12, "epochs": 1, **settings})


def trained(privacy: DPSGD, n: int = 12, round: int = 1, **settings: Any) -> tuple[Any, Site]:
    site = Site("ana", Samples(X[:n], Y[:n]))
    request = Request("train", START, {"seed": 0, "round": round, **settings.pop("tell", {})})
    return privacy.at_client(trainer(**settings))(request, site), site


def by_hand(clip: float, n: int = 12, mu: float = 0.0, steps: int = 1) -> Arrays:
    """Full-batch steps of softmax regression with each sample's gradient cut to length `clip`, in float64."""
    w, b = (START[k].astype(np.float64) for k in ("weight", "bias"))
    start = w.copy(), b.copy()
    for _ in range(steps):
        gw, gb = np.zeros_like(w), np.zeros_like(b)
        for x, y in zip(X[:n].astype(np.float64), Y[:n], strict=True):
            p = np.exp(w @ x + b - (w @ x + b).max())
            p /= p.sum()
            p[y] -= 1
            one_w, one_b = np.outer(p, x), p
            scale = min(1.0, clip / np.sqrt((one_w**2).sum() + (one_b**2).sum()))
            gw, gb = gw + scale * one_w, gb + scale * one_b
        w, b = w - 0.5 * (gw / n + mu * (w - start[0])), b - 0.5 * (gb / n + mu * (b - start[1]))
    return {"weight": w, "bias": b}


@pytest.mark.parametrize("clip", [0.3, 1.0, 1e4])
@pytest.mark.parametrize("n", [12, 5])
def test_each_sample_is_clipped_by_itself(clip: float, n: int) -> None:
    reply, _ = trained(DPSGD(noise=1e-9 / clip, clip=clip, repeatable=True), n, epochs=3)
    for name, value in by_hand(clip, n, steps=3).items():
        np.testing.assert_allclose(reply.arrays[name], value, atol=2e-6)


class Halves(nn.Module):
    """The same layer, given its inputs in two parts."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layer(torch.cat([left, right], 1))
        return out


class Given(Halves):
    """The same, given a dict or a tuple as it is."""

    def forward(self, both: Any) -> torch.Tensor:  # type: ignore[override]
        return super().forward(*(both.values() if isinstance(both, dict) else both))


@pytest.mark.parametrize("model", [Halves, Given])
@pytest.mark.parametrize("kind", [dict, tuple])
def test_several_inputs_are_trained_as_one_would_be(model: Any, kind: type) -> None:
    halves = {"left": X[:, :1], "right": X[:, 1:]}
    site = Site("ana", Samples(halves if kind is dict else tuple(halves.values()), Y))
    privacy = DPSGD(noise=1.0, clip=0.5, repeatable=True)
    start = {f"layer.{name}": array for name, array in START.items()}
    handler = privacy.at_client(replace(trainer(), model=model))
    got = handler(Request("train", start, {"seed": 0, "round": 1}), site).arrays
    wanted = trained(privacy)[0].arrays
    assert {name: array.tobytes() for name, array in got.items()} == {
        f"layer.{name}": array.tobytes() for name, array in wanted.items()
    }


def test_the_proximal_term_is_not_clipped_away() -> None:
    reply, _ = trained(DPSGD(noise=1e-9, clip=0.4, repeatable=True), epochs=2, tell={"mu": 0.7})
    for name, value in by_hand(0.4, mu=0.7, steps=2).items():
        np.testing.assert_allclose(reply.arrays[name], value, atol=2e-6)


def test_the_noise_of_a_step_has_the_deviation_it_should() -> None:
    quiet = by_hand(0.5)
    gaps = [
        trained(DPSGD(noise=2.0, clip=0.5, repeatable=True), round=r)[0].arrays["weight"] - quiet["weight"]
        for r in range(60)
    ]
    assert np.std(gaps) == pytest.approx(0.5 * 2.0 * 0.5 / 12, rel=0.1)  # lr noise clip / batch, 720 numbers


def test_batches_are_drawn_and_may_be_empty_and_the_account_says_so() -> None:
    privacy = DPSGD(noise=1.5, clip=1.0)
    reply, site = trained(privacy, batch_size=1, epochs=2)
    assert site.state[RELEASES].tolist() == [[1.5, 1 / 12, 24.0]]
    assert reply.metrics["epsilon"] == pytest.approx(epsilon(add_releases(None, 1.5, 1 / 12, 24), 1e-5))
    assert reply.metrics["epsilon_next"] == pytest.approx(epsilon(add_releases(None, 1.5, 1 / 12, 48), 1e-5))
    assert reply.metrics.keys() == {"epsilon", "epsilon_next"}
    assert reply.n == 12
    assert np.isfinite(reply.arrays["weight"]).all()
    again, _ = trained(privacy, batch_size=1, epochs=2)
    assert (again.arrays["weight"] != reply.arrays["weight"]).any()  # neither noise nor batches follow from the seed


def test_no_number_of_63_bits_tells_the_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever guesses the seed of the generator takes the noise off: so there must be none to guess."""
    seeds: list[int] = []

    class Telling(torch.Generator):
        def manual_seed(self, seed: int) -> torch.Generator:
            seeds.append(seed)
            return super().manual_seed(seed)

    monkeypatch.setattr(torch, "Generator", Telling)
    reply, _ = trained(DPSGD(noise=2.0, clip=0.5))
    monkeypatch.undo()
    noise = 12 / 0.5 * (by_hand(0.5)["weight"] - reply.arrays["weight"])  # of the one step, on the sum of gradients
    guesses = [torch.normal(0.0, 1.0, (3, 4), generator=torch.Generator().manual_seed(s)).numpy() for s in seeds]
    assert not [s for s, guess in zip(seeds, guesses, strict=True) if np.allclose(noise, guess, atol=1e-3)]


def test_what_cannot_be_trained_so_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="for tasks whose clients are a Trainer"):
        DPSGD().at_client(lambda request, site: None)  # type: ignore[arg-type,return-value]
    with pytest.raises(ConfigError, match="BatchNorm"):
        DPSGD().at_client(Trainer(lambda: nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))))


def test_a_trainer_offers_its_own_private_training_and_many_clients_at_once_get_the_same() -> None:
    privacy = DPSGD(noise=1.0, repeatable=True)
    private, request = trainer().private_training(privacy), Request("train", START, {"seed": 0, "round": 1})
    replies = private.many({"ana": request, "bia": request}, {c: Site(c, Samples(X, Y)) for c in ("ana", "bia")})
    assert list(replies) == ["ana", "bia"]
    assert digest(replies["ana"].arrays) == digest(trained(privacy)[0].arrays)  # type: ignore[union-attr]
    refused = private.many({"ana": replace(request, do="probe")}, {"ana": Site("ana", Samples(X, Y))})["ana"]
    assert str(refused).startswith("refused: privacy=dpsgd")


def test_a_client_without_budget_or_asked_for_metrics_refuses() -> None:
    handler = DPSGD(noise=1.0, budget=0.5).at_client(trainer())
    fleet = LocalFleet(handler, {"ana": Samples(X, Y)})
    for do, rule in (("train", "privacy.budget"), ("evaluate", "privacy=dpsgd")):
        failure = fleet.ask({"ana": Request(do, START, {"seed": 0, "round": 1})}).failures["ana"]
        assert failure.kind == "refused"
        assert failure.reason.startswith(rule)
