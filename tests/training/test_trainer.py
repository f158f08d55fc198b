"""The plain trainer against NumPy written out by hand and against scikit-learn."""

import re
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest
import torch
from sklearn.metrics import accuracy_score, log_loss
from torch import nn

from mutirao.config import Common
from mutirao.core.arrays import Arrays, digest
from mutirao.core.fleet import Request, Site
from mutirao.errors import ConfigError
from mutirao.randomness import rng
from mutirao.training.optimizers import LocalOptimizer
from mutirao.training.samples import ClientData, Samples
from mutirao.training.trainer import Trainer

Floats = npt.NDArray[np.float64]
DRAW = np.random.default_rng(0)
X = DRAW.normal(size=(50, 4)).astype(np.float32)
Y = DRAW.integers(0, 3, 50)
CONFIG = {"seed": 5, "round": 2}


def linear() -> nn.Module:
    return nn.Linear(4, 3)


def ask(trainer: Trainer, arrays: Arrays | None = None, **config: float) -> Arrays:
    start = trainer.initial(0) if arrays is None else arrays
    return trainer(Request("train", start, {**CONFIG, **config}), Site("ana", Samples(X, Y))).arrays


def by_hand(trainer: Trainer, mu: float = 0.0, adam: bool = False) -> tuple[Floats, Floats]:
    """Softmax regression with the trainer's batches, in float64 NumPy."""
    start = trainer.initial(0)
    theta = np.concatenate([start["weight"], start["bias"][:, None]], axis=1).astype(np.float64)
    origin, m, v = theta.copy(), np.zeros_like(theta), np.zeros_like(theta)
    draw, t = rng(5, 2, "batches", "ana"), 0
    for _ in range(trainer.epochs):
        order = draw.permutation(len(Y))
        for i in range(0, len(Y), trainer.batch_size):
            rows, t = order[i : i + trainer.batch_size], t + 1
            x = np.concatenate([X[rows], np.ones((len(rows), 1))], axis=1)
            p = np.exp(x @ theta.T)
            p = p / p.sum(1, keepdims=True) - np.eye(3)[Y[rows]]
            g = p.T @ x / len(rows) + mu * (theta - origin)
            if trainer.clip:
                g *= min(1.0, trainer.clip / (np.linalg.norm(g) + 1e-6))
            g += trainer.weight_decay * theta
            if adam:
                m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g * g
                step = (m / (1 - 0.9**t)) / (np.sqrt(v / (1 - 0.999**t)) + 1e-8)
            else:
                m = g if t == 1 else trainer.momentum * m + g
                step = m if trainer.momentum else g
            theta = theta - trainer.lr * step
    return theta[:, :4], theta[:, 4]


@pytest.mark.parametrize(
    ("settings", "mu"),
    [
        ({}, 0.0),
        ({"momentum": 0.9, "epochs": 3}, 0.0),
        ({"weight_decay": 0.1, "epochs": 2}, 0.0),
        ({"epochs": 3}, 0.9),
        ({"clip": 0.2, "epochs": 2}, 0.0),
        ({"clip": 0.2, "momentum": 0.5, "weight_decay": 0.01, "epochs": 2}, 0.3),
        ({"optimizer": "adam", "lr": 0.01, "epochs": 3}, 0.0),
    ],
)
def test_training_equals_numpy_by_hand(settings: dict[str, float], mu: float) -> None:
    trainer = Trainer(linear, batch_size=8, **settings)  # type: ignore[arg-type]
    weight, bias = by_hand(trainer, mu, adam=trainer.optimizer == "adam")
    reply = ask(trainer, mu=mu)
    np.testing.assert_allclose(reply["weight"], weight, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(reply["bias"], bias, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("sgd", {}),
        ("sgd", {"weight_decay": 0.1}),
        ("sgd", {"momentum": 0.9}),
        ("sgd", {"momentum": 0.5, "weight_decay": 0.01}),
        ("adam", {}),
        ("adam", {"weight_decay": 0.1}),
    ],
)
def test_descent_is_torch_optim_to_the_bit(name: str, settings: dict[str, float]) -> None:
    def net() -> nn.Module:
        torch.manual_seed(3)
        return nn.Sequential(nn.Linear(4, 9), nn.ReLU(), nn.Linear(9, 3))

    with torch.random.fork_rng(devices=[]):
        ours, theirs = net(), net()
    mine = LocalOptimizer(list(ours.parameters()), optimizer=name, lr=0.03, **settings)  # type: ignore[arg-type]
    kind = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam}[name]
    reference = kind(theirs.parameters(), lr=0.03, foreach=False, **settings)  # type: ignore[arg-type]
    for _ in range(20):
        for model, step in ((ours, mine), (theirs, reference)):
            model.zero_grad()
            nn.functional.cross_entropy(model(torch.from_numpy(X)), torch.from_numpy(Y)).backward()  # type: ignore[no-untyped-call]
            step.step()  # type: ignore[union-attr, call-arg]
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(a, b)


def test_evaluation_equals_scikit_learn() -> None:
    trainer = Trainer(linear)
    arrays = trainer.initial(1)
    outputs = X @ arrays["weight"].T + arrays["bias"]
    p = np.exp(outputs) / np.exp(outputs).sum(1, keepdims=True)
    metrics = trainer.evaluate(arrays, Samples(X, Y))
    assert metrics["accuracy"] == pytest.approx(accuracy_score(Y, outputs.argmax(1)))
    assert metrics["loss"] == pytest.approx(log_loss(Y, p.astype(np.float64)), rel=1e-5)
    reply = trainer(Request("evaluate", arrays, CONFIG), Site("ana", ClientData((X[:3], Y[:3]), (X, Y))))  # type: ignore[arg-type]
    assert reply.metrics == pytest.approx(metrics, rel=1e-6)
    assert (reply.arrays, reply.n) == ({}, 50)


def test_a_client_depends_on_seed_round_and_name_only() -> None:
    trainer = Trainer(lambda: nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 3)), batch_size=8)
    first = digest(ask(trainer))
    torch.manual_seed(99)
    torch.rand(7)
    before = torch.get_rng_state()
    assert digest(ask(trainer)) == first  # dropout does not read torch's global state
    assert torch.equal(torch.get_rng_state(), before)  # nor move it
    assert digest(ask(trainer, round=3)) != first
    assert digest(ask(trainer, seed=6)) != first


def test_batch_normalisation_keeps_integer_buffers_and_survives_a_batch_of_one() -> None:
    trainer = Trainer(lambda: nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 3)), batch_size=7)
    arrays = ask(trainer)  # 50 samples: seven batches of seven and one of one, which is left out
    assert arrays["1.num_batches_tracked"].dtype == np.int64
    assert arrays["1.num_batches_tracked"] == 7


def test_steps_replace_epochs() -> None:
    trainer = Trainer(linear, batch_size=20, steps=4)
    sizes = [len(batch) for batch in trainer.hyperparameters(CONFIG).plan(np.random.default_rng(0), 50)]
    assert sizes == [20, 20, 10, 20]


def test_regression_has_a_loss_and_no_accuracy() -> None:
    trainer = Trainer(lambda: nn.Sequential(nn.Linear(4, 1), nn.Flatten(0)), loss=nn.functional.mse_loss)
    site = Site("ana", (X, X.sum(1)))
    reply = trainer(Request("train", trainer.initial(0), CONFIG), site)
    assert set(reply.metrics) == {"loss"}


@pytest.mark.parametrize(
    ("request_", "data", "said"),
    [
        (Request("train", {"w": np.zeros(3)}, CONFIG), (X, Y), "the model's arrays are weight, bias; received w"),
        (Request("train", Trainer(linear).initial(0), CONFIG), (X[:0], Y[:0]), "no samples"),
        (Request("dance", {}, CONFIG), (X, Y), "not 'dance'"),
        (Request("evaluate", {}, CONFIG), (X, Y), r"no test data of its own: give it ClientData\(train, test\)"),
        (
            Request("evaluate", {}, CONFIG),
            ClientData(Samples(X, Y), Samples(X[:0], Y[:0])),
            "no samples to evaluate on",
        ),
        (Request("train", {}, CONFIG), (X, Y[:3]), "do not belong together"),
    ],
)
def test_what_cannot_be_done_is_said_plainly(request_: Request, data: object, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Trainer(linear)(request_, Site("ana", data))
    assert re.search(said, str(Trainer(linear).many({"ana": request_}, {"ana": Site("ana", data)})["ana"]))


@pytest.mark.parametrize(
    ("setting", "wrong", "right"),
    [
        ("optimizer", ("nadam", ""), "one of sgd, adam, adamw, rmsprop, adagrad, or make one"),
        ("schedule", (0.5,), "a function of the round"),
        ("lr", (-0.1, 0.0, float("inf"), float("nan")), "a number above 0"),
        ("momentum", (-0.1, 1.0, float("nan")), "at least 0 and below 1"),
        ("weight_decay", (-1e-4, float("inf"), float("nan")), "0 (none) or above"),
        ("epochs", (0, -1), "at least 1"),
        ("batch_size", (0, -5), "at least 1"),
        ("steps", (-1,), "0 (whole epochs) or above"),
        ("mu", (-0.1, float("nan")), "0 (none) or above"),
        ("clip", (-1.0, float("inf")), "0 (none) or above"),
        ("engine", ("warp",), "one of auto, fused, stacked, threads, processes, plain"),
    ],
)
def test_a_wrong_setting_is_refused_as_the_trainer_is_made(setting: str, wrong: tuple[object, ...], right: str) -> None:
    for value in wrong:
        with pytest.raises(ValueError, match=f"^{setting} is .*, but must be {re.escape(right)}$"):
            Trainer(linear, **{setting: value})  # type: ignore[arg-type]
        with pytest.raises(ValueError, match=f"^{setting} is"):
            replace(Trainer(linear), **{setting: value})  # type: ignore[arg-type]


def test_a_configuration_that_no_trainer_can_have_is_a_wrong_setting_of_the_user() -> None:
    with pytest.raises(ConfigError, match=r"^lr is inf, but must be a number above 0$"):
        Trainer.of(Common(lr=float("inf")), linear)


def test_a_probe_tells_the_spread_of_losses_and_the_length_of_the_gradient() -> None:
    """Against NumPy: cross-entropy of a linear model has the gradient x^T (p - y) / n."""
    draw = np.random.default_rng(3)
    x, y = draw.normal(size=(30, 4)).astype(np.float32), draw.integers(0, 3, 30)
    trainer = Trainer(lambda: nn.Linear(4, 3))
    arrays = trainer.initial(1)
    request = Request("probe", arrays, {"probe_samples": 20, "extras": "rms_loss,gradient_norm,entropy"})
    found = trainer(request, Site("ana", (x, y))).metrics
    z = x[:20] @ arrays["weight"].T + arrays["bias"]
    p = np.exp(z - z.max(1, keepdims=True))
    p /= p.sum(1, keepdims=True)
    losses = -np.log(p[np.arange(20), y[:20]])
    slope = (p - np.eye(3)[y[:20]]) / 20
    norm = np.sqrt(np.sum((slope.T @ x[:20]) ** 2) + np.sum(slope.sum(0) ** 2))
    expected = {
        "loss": losses.mean(),
        "rms_loss": np.sqrt(np.mean(losses**2)),
        "gradient_norm": norm,
        "entropy": -np.sum(p * np.log(p), 1).mean(),
    }
    assert found == pytest.approx(expected, rel=1e-5)
    many = trainer.many({"ana": request, "bia": request}, {c: Site(c, (x, y)) for c in ("ana", "bia")})
    assert many["bia"].metrics == pytest.approx(expected, rel=1e-5)  # type: ignore[union-attr]


def test_utilities_are_sent_with_the_update_and_are_those_of_the_model_received() -> None:
    draw = np.random.default_rng(4)
    sites = {c: Site(c, (draw.normal(size=(40, 4)).astype(np.float32), draw.integers(0, 3, 40))) for c in "abc"}
    config = {"seed": 0, "round": 1, "extras": "entropy,rms_loss,gradient_norm", "probe_samples": 10}
    for engine in ("plain", "stacked", "threads", "auto"):
        trainer = Trainer(lambda: nn.Linear(4, 3), lr=0.5, engine=engine)
        arrays = trainer.initial(1)
        replies = trainer.many({c: Request("train", arrays, config) for c in sites}, sites)
        for c, site in sites.items():
            before = trainer(Request("probe", arrays, config), site).metrics
            told = replies[c].metrics  # type: ignore[union-attr]
            assert {k: told[k] for k in before if k != "loss"} == pytest.approx(
                {k: v for k, v in before.items() if k != "loss"}, rel=1e-5
            )
            assert told["loss"] != pytest.approx(before["loss"])  # that of training, as always


def test_lengths_of_gradients_need_no_classes_but_entropies_do() -> None:
    draw = np.random.default_rng(5)
    site = Site("ana", (draw.normal(size=(9, 4)).astype(np.float32), draw.normal(size=(9, 1)).astype(np.float32)))
    trainer = Trainer(lambda: nn.Linear(4, 1), loss=nn.functional.mse_loss)
    config = {"seed": 0, "round": 1, "extras": "gradient_norm,rms_loss"}
    metrics = trainer(Request("train", trainer.initial(0), config), site).metrics
    assert metrics["gradient_norm"] > 0
    assert metrics["rms_loss"] > 0
    with pytest.raises(ValueError, match=r"^entropy: only where the labels are classes$"):
        trainer(Request("train", trainer.initial(0), config | {"extras": "entropy,rms_loss"}), site)
