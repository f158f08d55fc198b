"""FedRecon for any torch model: the local part is rebuilt from the support, the shared one learns from the query."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional

from mutirao.aggregation import FedAvg
from mutirao.core.fleet import Reply, Request, Site
from mutirao.core.rounds import Run, train
from mutirao.errors import ConfigError
from mutirao.personalization import FedRecon
from mutirao.personalization.alternating import split_support, support_size
from mutirao.personalization.handler import PersonalTrainer
from mutirao.selection import everyone
from mutirao.simulation.local_fleet import LocalFleet
from mutirao.training.samples import ClientData, Samples
from mutirao.training.trainer import Trainer

LR, EPOCHS, PASSES, FAST = 0.1, 2, 3, 0.4
DRAW = np.random.default_rng(0)
X = DRAW.integers(0, 5, size=(11, 1))
Y = DRAW.normal(size=(11, 1)).astype(np.float32)


class Rating(nn.Module):
    """Matrix factorisation with a hidden layer: what is known of the user is local, items and layer are shared."""

    def __init__(self) -> None:
        super().__init__()
        self.user = nn.Parameter(torch.full((3,), 0.1))
        self.items = nn.Embedding(5, 3)
        self.mix = nn.Linear(3, 1)

    def forward(self, items: Tensor) -> Tensor:
        return self.mix(torch.tanh(self.items(items[:, 0]) * self.user))  # type: ignore[no-any-return]


def handler_of(kind: FedRecon, **more: Any) -> PersonalTrainer:
    trainer = Trainer(Rating, functional.mse_loss, lr=LR, epochs=EPOCHS, batch_size=99, **more)
    return trainer.personal_training(kind)


def site_of(rows: slice = slice(None), name: str = "ana") -> Site:
    samples = Samples(X[rows], Y[rows])
    return Site(name, ClientData(samples, samples))


def ask(handler: PersonalTrainer, site: Site, round: int = 1, do: str = "train") -> Reply:
    return handler(Request(do, handler.initial(0), {"seed": 0, "round": round}), site)


def fitted(model: nn.Module, names: set[str], data: Samples, lr: float, epochs: int) -> None:
    """Gradient descent of these parameters alone, by torch's autograd and nothing else."""
    x, y = data.batch(np.arange(len(data)))
    moving = [p for n, p in model.named_parameters() if n in names]
    for _ in range(epochs):
        slopes = torch.autograd.grad(functional.mse_loss(model(x), y), moving)
        with torch.no_grad():
            for p, g in zip(moving, slopes, strict=True):
                p -= lr * g


@pytest.mark.parametrize("support", [0.5, 0.2, 1.0])
def test_the_local_part_is_fitted_to_the_support_and_the_shared_one_to_the_query(support: float) -> None:
    handler, site = handler_of(FedRecon(layers="user", support=support, epochs=PASSES, lr=FAST)), site_of()
    model = Rating()
    model.load_state_dict({k: torch.from_numpy(v) for k, v in handler.trainer.initial(0).items()})
    for round in (1, 2):  # nothing is left of the first
        with torch.no_grad():
            model.user.fill_(0.1)
        arrays = {k: v.detach().numpy().copy() for k, v in model.named_parameters() if k != "user"}
        request = Request("train", arrays, {"seed": 0, "round": round})
        one, two = (Samples.of(half) for half in split_support(site.data, support, request, "ana"))
        fitted(model, {"user"}, one, FAST, PASSES)
        fitted(model, {"items.weight", "mix.weight", "mix.bias"}, two, LR, EPOCHS)
        reply = handler(request, site)
        assert set(reply.arrays) == {"items.weight", "mix.weight", "mix.bias"}
        for name, found in reply.arrays.items():
            np.testing.assert_allclose(found, dict(model.named_parameters())[name].detach(), rtol=1e-4, atol=1e-6)
        assert reply.n == len(two)
        assert site.state == {}


def test_to_be_judged_a_client_fits_its_part_to_all_it_has_and_keeps_nothing() -> None:
    handler, site = handler_of(FedRecon(layers="user", epochs=PASSES, lr=FAST)), site_of()
    model = Rating()
    model.load_state_dict({k: torch.from_numpy(v) for k, v in handler.trainer.initial(0).items()})
    fitted(model, {"user"}, Samples(X, Y), FAST, PASSES)
    loss = float(functional.mse_loss(model(torch.from_numpy(X)), torch.from_numpy(Y)).detach())
    for do in ("evaluate", "probe"):
        assert ask(handler, site, do=do).metrics["loss"] == pytest.approx(loss, rel=1e-4)
    assert site.state == {}


@given(st.integers(2, 40), st.floats(0.01, 0.99))
def test_support_and_query_share_nothing_and_leave_nothing_out(count: int, share: float) -> None:
    data = Samples(np.arange(count)[:, None], np.arange(count, dtype=np.float32))
    request = Request("train", {}, {"seed": 3, "round": 7})
    one, two = (
        set(half.batch(np.arange(len(half)))[1].tolist()) for half in split_support(data, share, request, "bia")
    )
    assert one | two == set(range(count))
    assert not one & two
    assert len(one) == support_size(share, count)


def test_the_support_is_drawn_anew_each_round_for_each_client() -> None:
    def drawn(round: int, client: str) -> list[float]:
        half, _ = split_support(site_of().data, 0.5, Request("train", {}, {"seed": 0, "round": round}), client)
        return Samples.of(half).batch(slice(None))[1].tolist()

    assert drawn(1, "ana") == drawn(1, "ana")
    assert len({tuple(map(str, drawn(*who))) for who in ((1, "ana"), (2, "ana"), (1, "bia"))}) == 3


def test_a_single_sample_does_both() -> None:
    reply = ask(handler_of(FedRecon(layers="user")), site_of(slice(0, 1)))
    assert reply.n == 1


class Offset(nn.Module):
    """y = a x + b, of which b is the client's."""

    def __init__(self) -> None:
        super().__init__()
        self.slope, self.own = nn.Linear(1, 1, bias=False), nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        return self.slope(x) + self.own  # type: ignore[no-any-return]


@pytest.mark.parametrize("engine", ["auto", "fused", "stacked", "threads", "plain"])
def test_where_clients_differ_in_the_local_part_the_shared_one_is_found_and_a_newcomer_rebuilds_its_own(
    engine: str,
) -> None:
    draw, own = np.random.default_rng(1), {"ana": -2.0, "bia": 1.0, "caio": 5.0, "new": 9.0}
    population = {}
    for name, offset in own.items():
        x = draw.normal(size=(30, 1)).astype(np.float32)
        population[name] = ClientData(s := Samples(x, 3 * x + np.float32(offset)), s)
    trainer = Trainer(Offset, functional.mse_loss, lr=LR, epochs=3, batch_size=8, engine=engine)
    handler = trainer.personal_training(FedRecon(layers="own", epochs=20))
    fleet, run = LocalFleet(handler, population), Run(handler.initial(0))
    for _ in train(run, fleet, rounds=12, select=lambda *_: ["ana", "bia", "caio"], aggregate=FedAvg()):
        pass
    assert run.arrays["slope.weight"].item() == pytest.approx(3.0, abs=0.02)
    judged = fleet.ask({"new": Request("evaluate", run.arrays, {"seed": 0, "round": 12})}).replies["new"]
    assert judged.metrics["loss"] < 0.01
    assert not fleet.states


def test_one_clients_trouble_is_its_own() -> None:
    handler = handler_of(FedRecon(layers="user"))
    empty = Samples(np.zeros((0, 1), np.int64), np.zeros((0, 1), np.float32))
    fleet = LocalFleet(handler, {"ana": site_of().data, "bia": ClientData(empty, empty)})
    answers = fleet.ask({c: Request("train", handler.initial(0), {"seed": 0, "round": 1}) for c in ("ana", "bia")})
    assert list(answers.replies) == ["ana"]
    assert list(answers.failures) == ["bia"]


@pytest.mark.parametrize(
    ("made", "words"),
    [
        (lambda: FedRecon(support=0.0), "support is 0.0"),
        (lambda: FedRecon(support=1.5), "support is 1.5"),
        (lambda: FedRecon(lr=-1.0), "lr is -1.0"),
        (lambda: handler_of(FedRecon(layers="users")), "'users' matches none of the shared arrays"),
        (lambda: handler_of(FedRecon(layers="*")), "personal=fedrecon: all trained arrays would be personal"),
        (
            lambda: handler_of(FedRecon(layers="user"), optimizer="adam", keep_optimizer=True),
            "personal=fedrecon trains in two phases",
        ),
    ],
)
def test_what_cannot_be_is_refused_by_name(made: Any, words: str) -> None:
    with pytest.raises((ValueError, ConfigError), match=words.replace("*", r"\*")):
        made()


def test_everyone_is_selected_by_the_ordinary_flow() -> None:
    handler = handler_of(FedRecon(layers="user"))
    fleet = LocalFleet(handler, {c: site_of(name=c).data for c in ("ana", "bia")})
    run = Run(handler.initial(0))
    rounds = list(train(run, fleet, rounds=2, select=everyone, aggregate=FedAvg()))
    size = sum(array.nbytes for array in run.arrays.values())
    assert [done.row["bytes_down"] for done in rounds] == [2 * size, 2 * size]
