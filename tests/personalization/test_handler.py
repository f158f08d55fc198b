"""Personal models against the authors' formulas, written out in NumPy."""

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from torch import Tensor, nn
from torch.nn import functional

from mutirao.aggregation import FedAvg
from mutirao.core.arrays import Arrays
from mutirao.core.fleet import Answers, ClientId, Failure, Reply, Request, Site
from mutirao.core.rounds import Run, train
from mutirao.errors import ConfigError
from mutirao.personalization import Ditto, FedBN, FedPer, FedRep, Finetune, Settings
from mutirao.personalization.handler import PREFIX, PersonalTrainer, ask_each
from mutirao.selection import everyone
from mutirao.simulation.local_fleet import LocalFleet
from mutirao.training.samples import ClientData, Samples
from mutirao.training.trainer import Trainer

Floats = npt.NDArray[np.float64]
LR, EPOCHS = 0.1, 3
DRAW = np.random.default_rng(0)
X = DRAW.normal(size=(12, 3))
Y = DRAW.normal(size=(12, 1))
ABOUT = {"seed": 0, "round": 1}


def chain() -> nn.Module:
    """y = B A x: a body A and a head B."""
    return nn.Sequential(nn.Linear(3, 2, bias=False), nn.Linear(2, 1, bias=False))


def normed() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4, bias=False), nn.BatchNorm1d(4), nn.Linear(4, 1, bias=False))


def trainer_of(model: Callable[[], nn.Module] = chain, **more: Any) -> Trainer:
    return Trainer(model, functional.mse_loss, **{"lr": LR, "epochs": EPOCHS, "batch_size": 99, **more})


def made(kind: Settings, model: Callable[[], nn.Module] = chain, **more: Any) -> PersonalTrainer:
    return trainer_of(model, **more).personal_training(kind)


def data(part: slice = slice(None)) -> ClientData:
    whole = Samples(X[part].astype(np.float32), Y[part].astype(np.float32))
    return ClientData(whole, whole)


def slopes(a: Floats, b: Floats) -> tuple[Floats, Floats]:
    """Gradients of mean (B A x - y)^2 by A and by B."""
    wrong = 2 * (X @ a.T @ b.T - Y) / len(X)
    return b.T @ wrong.T @ X, wrong.T @ (X @ a.T)


def start(handler: PersonalTrainer) -> tuple[Floats, Floats]:
    whole = handler.trainer.initial(0)
    return whole["0.weight"].astype(np.float64), whole["1.weight"].astype(np.float64)


def ask(handler: PersonalTrainer, site: Site, arrays: Arrays, round: int = 1, do: str = "train", **told: Any) -> Reply:
    return handler(Request(do, arrays, {"seed": 0, "round": round, **told}), site)


def test_fedper_moves_both_at_once_and_keeps_the_head() -> None:
    handler, site = made(FedPer()), Site("ana", data())
    a, b = start(handler)
    arrays = handler.initial(0)
    assert list(arrays) == ["0.weight"]
    for round in (1, 2):
        for _ in range(EPOCHS):
            da, db = slopes(a, b)
            a, b = a - LR * da, b - LR * db
        reply = ask(handler, site, arrays, round)
        assert list(reply.arrays) == ["0.weight"]
        np.testing.assert_allclose(reply.arrays["0.weight"], a, rtol=1e-4)
        np.testing.assert_allclose(site.state[PREFIX + "1.weight"], b, rtol=1e-4)
        a = a + 1.0  # what others did to it on the server
        arrays = {"0.weight": a.astype(np.float32)}


@pytest.mark.parametrize("epochs", [0, 5])
def test_fedrep_moves_the_head_alone_and_then_the_body_alone(epochs: int) -> None:
    handler, site = made(FedRep(epochs=epochs)), Site("ana", data())
    a, b = start(handler)
    for round in (1, 2):
        arrays = {"0.weight": a.astype(np.float32)}
        for _ in range(epochs or EPOCHS):
            b = b - LR * slopes(a, b)[1]
        for _ in range(EPOCHS):
            a = a - LR * slopes(a, b)[0]
        reply = ask(handler, site, arrays, round)
        assert list(reply.arrays) == ["0.weight"]
        np.testing.assert_allclose(reply.arrays["0.weight"], a, rtol=1e-4)
        np.testing.assert_allclose(site.state[PREFIX + "1.weight"], b, rtol=1e-4)


def normalised_step(w: dict[str, Floats]) -> dict[str, Floats]:
    """One step on C (gamma (z - mean) / sd + beta), z = A x, by the chain rule; running statistics by 0.1."""
    z = X @ w["0.weight"].T
    mean, var, n = z.mean(0), z.var(0), len(z)
    sd = np.sqrt(var + 1e-5)
    unit = (z - mean) / sd
    h = w["1.weight"] * unit + w["1.bias"]
    wrong = 2 * (h @ w["2.weight"].T - Y) / n
    dh = wrong @ w["2.weight"]
    du = dh * w["1.weight"]
    dz = (du - du.mean(0) - unit * (du * unit).mean(0)) / sd
    return {
        "0.weight": w["0.weight"] - LR * dz.T @ X,
        "1.weight": w["1.weight"] - LR * (dh * unit).sum(0),
        "1.bias": w["1.bias"] - LR * dh.sum(0),
        "2.weight": w["2.weight"] - LR * wrong.T @ h,
        "1.running_mean": 0.9 * w["1.running_mean"] + 0.1 * mean,
        "1.running_var": 0.9 * w["1.running_var"] + 0.1 * var * n / (n - 1),
        "1.num_batches_tracked": w["1.num_batches_tracked"] + 1,
    }


def test_fedbn_keeps_weights_biases_and_statistics_of_batch_normalisation() -> None:
    handler, site = made(FedBN(), normed), Site("ana", data())
    w = {k: v.astype(np.float64) for k, v in handler.trainer.initial(0).items()}
    shared = ["0.weight", "2.weight"]
    assert list(handler.initial(0)) == shared
    for round in (1, 2):
        arrays = {k: w[k].astype(np.float32) for k in shared}
        for _ in range(EPOCHS):
            w = normalised_step(w)
        reply = ask(handler, site, arrays, round)
        assert list(reply.arrays) == shared
        for name, value in reply.arrays.items():
            np.testing.assert_allclose(value, w[name], rtol=1e-4, atol=1e-6)
        for name in w.keys() - set(shared):
            np.testing.assert_allclose(site.state[PREFIX + name], w[name], rtol=1e-4, atol=1e-6)
        for name in shared:
            w[name] = w[name] * 0.9  # the server's average is not what this client had


def mean_loss(a: Floats, b: Floats) -> float:
    return float(np.mean((X @ a.T @ b.T - Y) ** 2))


def test_finetune_sends_the_common_model_and_judges_what_it_makes_of_it() -> None:
    handler, site = made(Finetune(epochs=2)), Site("ana", data())
    arrays = handler.initial(0)
    a, b = start(handler)
    trained = ask(handler, site, arrays)
    assert trained.arrays.keys() == arrays.keys()
    for _ in range(2):
        da, db = slopes(a, b)
        a, b = a - LR * da, b - LR * db
    judged = ask(handler, site, arrays, do="evaluate")
    assert judged.metrics["loss"] == pytest.approx(mean_loss(a, b), rel=1e-4)
    assert site.state == {}
    assert judged.arrays == {}


@pytest.mark.parametrize("epochs", [0, 2])
def test_ditto_trains_a_second_model_that_is_pulled_to_the_common_one(epochs: int) -> None:
    lam = 0.7
    handler, site = made(Ditto(lam=lam, epochs=epochs)), Site("ana", data())
    a, b = start(handler)
    v = a.copy(), b.copy()  # the first model it received
    for round in (1, 2):
        arrays = {"0.weight": a.astype(np.float32), "1.weight": b.astype(np.float32)}
        for _ in range(epochs or EPOCHS):
            da, db = slopes(*v)
            v = v[0] - LR * (da + lam * (v[0] - a)), v[1] - LR * (db + lam * (v[1] - b))
        for _ in range(EPOCHS):
            da, db = slopes(a, b)
            a, b = a - LR * da, b - LR * db
        reply = ask(handler, site, arrays, round)
        np.testing.assert_allclose(reply.arrays["0.weight"], a, rtol=1e-4)
        np.testing.assert_allclose(reply.arrays["1.weight"], b, rtol=1e-4)
        for name, value in zip(arrays, v, strict=True):
            np.testing.assert_allclose(site.state[PREFIX + name], value, rtol=1e-4)
        judged = ask(handler, site, reply.arrays, round, do="evaluate")
        assert judged.metrics["loss"] == pytest.approx(mean_loss(*v), rel=1e-4)
        a, b = a + 0.5, b - 0.5  # what others did to it on the server


def test_a_new_client_of_ditto_begins_with_the_common_model() -> None:
    handler, site = made(Ditto(lam=0.7, epochs=3)), Site("new", data())
    a, b = start(handler)
    v = a, b
    for _ in range(3):
        da, db = slopes(*v)
        v = v[0] - LR * (da + 0.7 * (v[0] - a)), v[1] - LR * (db + 0.7 * (v[1] - b))
    judged = ask(handler, site, handler.initial(0), do="evaluate")
    assert judged.metrics["loss"] == pytest.approx(mean_loss(*v), rel=1e-4)
    assert site.state == {}


def test_ditto_finds_the_known_optimum_of_quadratics() -> None:
    """With F_k(v) = (v - c_k)^2 it is w = mean c_k and v_k = (2 c_k + lam w) / (2 + lam)."""
    lam, centres = 0.5, {"ana": -3.0, "bia": 0.0, "caio": 6.0}
    one = np.ones((4, 1), np.float32)
    population = {c: ClientData(s := Samples(one, one * np.float32(at)), s) for c, at in centres.items()}
    handler = made(Ditto(lam=lam), lambda: nn.Linear(1, 1, bias=False))
    fleet, run = LocalFleet(handler, population), Run(handler.initial(0))
    for _ in train(run, fleet, rounds=40, select=everyone, aggregate=FedAvg()):
        pass
    assert run.arrays["weight"].item() == pytest.approx(1.0, abs=1e-4)
    found = {c: fleet.states[c][PREFIX + "weight"].item() for c in centres}
    assert found == pytest.approx({c: (2 * at + lam) / (2 + lam) for c, at in centres.items()}, abs=1e-4)


@pytest.mark.parametrize("kind", [FedPer(epochs=4), FedRep(epochs=4)])
def test_who_has_no_head_yet_fits_one_to_be_judged_and_keeps_nothing_of_it(kind: Settings) -> None:
    handler, site = made(kind), Site("new", data())
    a, b = start(handler)
    for _ in range(4):
        b = b - LR * slopes(a, b)[1]
    judged = ask(handler, site, handler.initial(0), do="evaluate")
    assert judged.metrics["loss"] == pytest.approx(mean_loss(a, b), rel=1e-4)
    assert site.state == {}


def test_a_new_client_of_fedbn_fits_its_normalisation_and_leaves_the_rest() -> None:
    handler, site = made(FedBN(epochs=30), normed), Site("new", data())
    arrays = handler.initial(0)
    asked = {"new": Request("evaluate", arrays, ABOUT)}
    models, failed = handler.fit(ask_each, asked, {"new": site})
    assert not failed
    assert all((models["new"][k] == arrays[k]).all() for k in arrays)
    z = X @ arrays["0.weight"].T.astype(np.float64)
    close = 0.9**30  # of the first mean, 0, is left
    np.testing.assert_allclose(models["new"]["1.running_mean"], z.mean(0) * (1 - close), rtol=1e-4)
    before = handler.trainer.evaluate({**arrays, **handler.complete_model({}, 0)}, site.data)["loss"]  # type: ignore[attr-defined]
    assert ask(handler, site, arrays, do="evaluate").metrics["loss"] < before


def test_who_has_a_head_is_judged_by_it() -> None:
    handler, site = made(FedPer()), Site("ana", data())
    reply = ask(handler, site, handler.initial(0))
    kept = dict(site.state)
    judged = ask(handler, site, reply.arrays, do="evaluate")
    whole = {**reply.arrays, "1.weight": kept[PREFIX + "1.weight"]}
    assert judged.metrics == trainer_of().evaluate(whole, site.data)  # type: ignore[misc]
    assert site.state.keys() == kept.keys()


class Split(nn.Module):
    """y = a x1 + b x2, in two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.shared, self.own = nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.shared(x[:, :1]) + self.own(x[:, 1:])  # type: ignore[no-any-return]


@pytest.mark.parametrize("kind", [FedPer(), FedRep()])
def test_where_clients_share_one_slope_and_differ_in_the_other_both_are_found(kind: Settings) -> None:
    draw, slope = np.random.default_rng(1), {"ana": -2.0, "bia": 1.0, "caio": 5.0}
    population = {}
    for name, own in slope.items():
        x = draw.normal(size=(20, 2)).astype(np.float32)
        population[name] = ClientData(s := Samples(x, x @ np.array([[3.0], [own]], np.float32)), s)
    handler = made(kind, Split)
    fleet, run = LocalFleet(handler, population), Run(handler.initial(0))
    for _ in train(run, fleet, rounds=60, select=everyone, aggregate=FedAvg()):
        pass
    assert run.arrays["shared.weight"].item() == pytest.approx(3.0, abs=1e-3)
    found = {name: fleet.states[name][PREFIX + "own.weight"].item() for name in slope}
    assert found == pytest.approx(slope, abs=1e-3)


class Eavesdropper(LocalFleet):
    """Hears all that goes over the wire."""

    def ask(self, requests: Any) -> Answers:
        answers = super().ask(requests)
        self.heard: list[tuple[ClientId, Arrays]] = getattr(self, "heard", [])
        for client, sent in [*requests.items(), *answers.replies.items()]:
            self.heard.append((client, {**sent.arrays, **sent.extras}))
        return answers


@pytest.mark.parametrize(("kind", "model"), [(FedPer(), chain), (FedRep(), chain), (FedBN(), normed)])
def test_nothing_personal_is_in_any_message_and_the_traffic_shows_it(
    kind: Settings, model: Callable[[], nn.Module]
) -> None:
    handler = made(kind, model)
    names = set(handler.trainer.initial(0)) - set(handler.initial(0))
    fleet = Eavesdropper(handler, {"ana": data(slice(0, 6)), "bia": data(slice(6, 12))})
    run = Run(handler.initial(0))
    rounds = list(train(run, fleet, rounds=3, select=everyone, aggregate=FedAvg()))
    requests = {c: Request("evaluate", run.arrays, ABOUT) for c in fleet.clients()}
    fleet.ask(requests)
    assert fleet.heard
    assert names
    assert all(names.isdisjoint(held) for _, held in fleet.heard)
    values = [fleet.states[c][PREFIX + name] for c in fleet.clients() for name in names]
    carried = [array for _, held in fleet.heard for array in held.values()]
    assert not any(v.shape == a.shape and v.any() and np.array_equal(v, a) for v in values for a in carried)
    size = sum(array.nbytes for array in handler.initial(0).values())
    assert all(done.row["bytes_down"] == 2 * size for done in rounds)
    assert names == {k.removeprefix(PREFIX) for k in fleet.states["ana"]}


def classes(model: Callable[[], nn.Module], engine: str, kind: Settings) -> PersonalTrainer:
    return Trainer(model, lr=0.1, epochs=2, batch_size=4, engine=engine).personal_training(kind)


def dense() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 2))


def dense_normed() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 2))


@pytest.mark.parametrize("engine", ["auto", "fused", "stacked", "threads"])
@pytest.mark.parametrize(
    ("kind", "model"),
    [(FedPer(), dense), (FedRep(), dense), (FedBN(), dense_normed), (Finetune(), dense), (Ditto(), dense)],
)
def test_every_way_of_the_engine_gives_what_clients_asked_one_by_one_give(
    engine: str, kind: Settings, model: Callable[[], nn.Module]
) -> None:
    draw = np.random.default_rng(3)
    population = {}
    for i in range(4):
        x, y = draw.normal(size=(9 + i, 3)).astype(np.float32), draw.integers(0, 2, 9 + i)
        population[f"c{i}"] = ClientData(Samples(x, y), Samples(x, y))
    found = []
    for way in ("plain", engine):
        handler = classes(model, way, kind)
        fleet = LocalFleet(handler, population, timeout=60.0 if way == "plain" else None)  # with one: one by one
        run = Run(handler.initial(0))
        for _ in train(run, fleet, rounds=2, select=everyone, aggregate=FedAvg()):
            pass
        judged = fleet.ask({c: Request("evaluate", run.arrays, ABOUT) for c in population}).replies
        found.append((run.arrays, fleet.states, {c: r.metrics["loss"] for c, r in judged.items()}))
    (arrays, states, losses), (others, their_states, their_losses) = found
    assert states.keys() == their_states.keys()
    for a, b in [(arrays, others), *((states[c], their_states[c]) for c in states)]:
        assert a.keys() == b.keys()
        for name in a:
            np.testing.assert_allclose(a[name], b[name], rtol=1e-4, atol=1e-5)
    assert losses == pytest.approx(their_losses, rel=1e-4)


def test_what_the_aggregator_asks_for_is_told_by_the_turn_it_is_of() -> None:
    handler = classes(dense, "auto", FedRep())
    x, y = X.astype(np.float32), (Y[:, 0] > 0).astype(np.int64)
    site = Site("ana", ClientData(Samples(x, y), Samples(x, y)))
    reply = ask(handler, site, handler.initial(0), extras="entropy,squared_errors")
    assert len(reply.extras["squared_errors"]) == 2 * len(x)
    fresh = classes(dense, "auto", FedPer())
    probed = ask(fresh, Site("ana", site.data), fresh.initial(0), do="probe")
    assert reply.metrics["entropy"] == pytest.approx(probed.metrics["entropy"])  # of the model as it was received


def test_the_proximal_term_is_for_what_is_shared_in_fedrep() -> None:
    handler = made(FedRep())
    sites = Site("a", data()), Site("b", data())
    free = ask(handler, sites[0], handler.initial(0))
    held = ask(handler, sites[1], handler.initial(0), mu=5.0)
    assert np.array_equal(sites[0].state[PREFIX + "1.weight"], sites[1].state[PREFIX + "1.weight"])
    assert not np.array_equal(free.arrays["0.weight"], held.arrays["0.weight"])


@pytest.mark.parametrize("kind", [FedPer(), Ditto(), Finetune()])
def test_corrections_of_a_whole_model_are_for_kinds_that_send_one(kind: Settings) -> None:
    assert ("correct" in made(kind).capabilities.config) == (not isinstance(kind, FedPer))


def test_the_second_model_is_not_corrected() -> None:
    handler, sites = made(Ditto()), (Site("ana", data()), Site("ana", data()))
    arrays = handler.initial(0)
    size = sum(array.size for array in arrays.values())
    control = {"control": np.full(size, 0.3, np.float32)}
    config = {"seed": 0, "round": 1, "correct": "scaffold2"}
    free, bent = ask(handler, sites[0], arrays), handler(Request("train", arrays, config, control), sites[1])
    assert not np.array_equal(free.arrays["0.weight"], bent.arrays["0.weight"])
    assert np.array_equal(sites[0].state[PREFIX + "0.weight"], sites[1].state[PREFIX + "0.weight"])


def test_a_head_sent_by_a_server_is_not_taken_for_ones_own() -> None:
    handler, sites = made(FedPer()), (Site("ana", data()), Site("ana", data()))
    for site in sites:
        ask(handler, site, handler.initial(0))
    poisoned = {**handler.initial(0), "1.weight": np.full((1, 2), 9.0, np.float32)}
    replies = [ask(handler, s, a, 2) for s, a in zip(sites, (handler.initial(0), poisoned), strict=True)]
    assert list(replies[1].arrays) == ["0.weight"]
    assert np.array_equal(replies[0].arrays["0.weight"], replies[1].arrays["0.weight"])


def test_one_clients_trouble_is_its_own() -> None:
    handler = made(FedPer(), lr=LR)
    empty = Samples(np.zeros((0, 3), np.float32), np.zeros((0, 1), np.float32))
    wild = Samples(np.full((4, 3), 1e30, np.float32), np.full((4, 1), 1e30, np.float32))
    fleet = LocalFleet(handler, {"ana": data(), "bia": ClientData(empty, empty), "caio": ClientData(wild, data().test)})
    answers = fleet.ask({c: Request("train", handler.initial(0), ABOUT) for c in fleet.clients()})
    assert list(answers.replies) == ["ana"]
    assert {c: f.kind for c, f in answers.failures.items()} == {"bia": "raised", "caio": "not_finite"}
    assert list(fleet.states) == ["ana"]
    judged = fleet.ask({c: Request("evaluate", handler.initial(0), ABOUT) for c in ("ana", "bia")})
    assert list(judged.replies) == ["ana"]


def test_two_turns_do_not_keep_one_optimiser() -> None:
    with pytest.raises(ConfigError, match="personal=fedrep trains in two phases"):
        made(FedRep(), optimizer="adam", keep_optimizer=True)
    handler, site = made(FedPer(), optimizer="adam", keep_optimizer=True), Site("ana", data())
    ask(handler, site, handler.initial(0))
    assert any(not name.startswith(PREFIX) for name in site.state)


def test_a_frozen_body_stays_frozen_and_where_it_is() -> None:
    def half() -> nn.Module:
        module = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2), nn.Linear(2, 1))
        module[0].requires_grad_(False)
        return module

    handler, site = made(FedRep(), half), Site("ana", data())
    reply = ask(handler, site, handler.initial(0))
    assert list(reply.arrays) == ["1.weight", "1.bias"]
    assert handler.agreed() == trainer_of(half).agreed() != {}


def test_unknown_requests_are_the_trainers_to_refuse() -> None:
    handler = made(FedPer())
    with pytest.raises(ValueError, match="can train, evaluate and probe"):
        ask(handler, Site("ana", data()), handler.initial(0), do="dance")
    assert isinstance(handler.many({"ana": Request("dance", {}, ABOUT)}, {"ana": Site("ana", data())})["ana"], Failure)
