"""Every way of simulating a round gives the plain path's model, metrics and extras."""

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from mutirao.aggregation import FedAvg
from mutirao.core.arrays import Arrays, digest, flat
from mutirao.core.fleet import Reply, Request, Site
from mutirao.training.engine.compiled_step import CompiledStep
from mutirao.training.samples import VirtualClients, virtual_clients
from mutirao.training.trainer import Trainer

FEATURES, CLASSES, SEEDS = 12, 4, {"seed": 3}


class Tied(nn.Module):
    """An autoencoder in front of a classifier, whose decoder is its encoder transposed, and a layer used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(FEATURES, 8)
        self.hidden = nn.Linear(8, 8)
        self.again = self.hidden
        self.head = nn.Linear(FEATURES, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        code = self.again(self.hidden(self.encoder(x)).tanh()).tanh()
        return self.head(functional.linear(code, self.encoder.weight.t()))


class Attention(nn.Module):
    """Six tokens of two numbers each, which look at each other."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(2, 8)
        self.block = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.head = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.block(self.embed(x.view(-1, 6, 2))).mean(1))


class Words(nn.Module):
    """The signs of the features as words."""

    def __init__(self, recurrent: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(2 * FEATURES, 6)
        self.lstm = nn.LSTM(6, 6, batch_first=True) if recurrent else None
        self.head = nn.Linear(6, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        words = self.embed((x > 0).long() + 2 * torch.arange(FEATURES))
        return self.head(words.mean(1) if self.lstm is None else self.lstm(words)[0][:, -1])


class Noisy(nn.Module):
    """Random by an operation that cannot be told where to draw from."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(FEATURES, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + 0.1 * torch.rand_like(x[:, :1])


class Partly(nn.Module):
    """A layer that the loss does not depend on, and a frozen one."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(FEATURES, 8).requires_grad_(False)
        self.idle = nn.Linear(3, 3)
        self.head = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.frozen(x).relu())


def dense(*layers: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(FEATURES, 8), *layers, nn.Linear(8, CLASSES))


def cnn(norm: Callable[[int], nn.Module] = lambda channels: nn.Identity()) -> nn.Module:
    body = (
        nn.Unflatten(1, (1, 3, 4)),
        nn.Conv2d(1, 6, 3, padding=1),
        norm(6),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
    )
    return nn.Sequential(*body, nn.Linear(12, CLASSES))


def wide() -> nn.Module:
    """Layers that the kernels for convolutions and pools take."""
    convolutions = nn.Conv2d(1, 16, 3, padding=2), nn.Conv2d(16, 16, 3, padding=2), nn.Conv2d(16, 32, 5, bias=False)
    return nn.Sequential(
        nn.Unflatten(1, (1, 3, 4)), *convolutions, nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(64, CLASSES)
    )


MODELS: dict[str, Callable[[], nn.Module]] = {
    "mlp": lambda: dense(nn.ReLU()),
    "in place": lambda: dense(nn.ReLU(inplace=True)),
    "deep": lambda: dense(nn.Tanh(), nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8, bias=False), nn.Sigmoid()),
    "layer norm": lambda: dense(nn.LayerNorm(8), nn.ReLU()),
    "batch norm": lambda: dense(nn.BatchNorm1d(8), nn.ReLU()),
    "dropout": lambda: dense(nn.Dropout(0.2, inplace=True), nn.ReLU(), nn.Dropout(0.4)),
    "cnn": cnn,
    "wide cnn": wide,
    "group norm": lambda: cnn(lambda channels: nn.GroupNorm(2, channels)),
    "cnn batch norm": lambda: cnn(nn.BatchNorm2d),
    "cnn dropout": lambda: cnn(lambda channels: nn.Dropout2d(0.3)),
    "attention": Attention,
    "embedding": Words,
    "lstm": lambda: Words(recurrent=True),
    "tied": Tied,
    "partly": Partly,
    "noisy": Noisy,
}
SETTINGS: dict[str, dict[str, Any]] = {
    "momentum": {"momentum": 0.9, "lr": 0.05},
    "weight decay": {"weight_decay": 0.01},
    "momentum and decay": {"momentum": 0.5, "weight_decay": 0.01},
    "adam": {"optimizer": "adam", "lr": 0.01},
    "adam and decay": {"optimizer": "adam", "lr": 0.01, "weight_decay": 0.1},
    "adamw": {"optimizer": "adamw", "lr": 0.01, "weight_decay": 0.1},
    "rmsprop": {"optimizer": "rmsprop", "lr": 0.01},
    "rmsprop, momentum and decay": {"optimizer": "rmsprop", "lr": 0.01, "momentum": 0.9, "weight_decay": 0.1},
    "adagrad": {"optimizer": "adagrad", "lr": 0.05, "weight_decay": 0.1},
    "prox": {"mu": 0.5},
    "clip": {"clip": 0.2},
    "everything": {"mu": 0.1, "clip": 0.3, "momentum": 0.9, "weight_decay": 0.01, "lr": 0.02},
    "steps": {"steps": 7, "epochs": 1},
    "batch of one": {"batch_size": 1, "epochs": 1},
    "one batch": {"batch_size": 100},
}
UNEQUAL = [33, 5, 2, 16, 40, 21, 8]  # batch normalisation cannot train on one


def population(sizes: list[int]) -> VirtualClients:
    draw = np.random.default_rng(1)
    x = draw.normal(size=(sum(sizes), FEATURES)).astype(np.float32)
    y = (x @ draw.normal(size=(FEATURES, CLASSES))).argmax(1)
    return virtual_clients(x, y, np.split(draw.permutation(sum(sizes)), np.cumsum(sizes)[:-1]))


def rounds(trainer: Trainer, clients: VirtualClients, count: int = 5, **config: Any) -> tuple[Arrays, dict[str, Reply]]:
    """FedAvg for some rounds: the last model and the last replies."""
    arrays = trainer.initial(0)
    replies: dict[str, Reply] = {}
    for number in range(1, count + 1):
        requests = {c: Request("train", arrays, {**SEEDS, "round": number, **config}) for c in clients}
        answers = trainer.many(requests, {c: Site(c, clients[c]) for c in clients})
        replies = {c: r for c, r in answers.items() if isinstance(r, Reply)}
        assert len(replies) == len(clients), answers
        arrays = FedAvg()(arrays, replies, {}).arrays
    return arrays, replies


def trained(model: str, engine: str, sizes: list[int], count: int = 5, workers: int = 2, **settings: Any) -> Any:
    settings = {"lr": 0.1, "batch_size": 8, "epochs": 2} | settings
    trainer = Trainer(MODELS[model], engine=engine, workers=workers, **settings)
    made = rounds(trainer, population(sizes), count)
    if engine == "stacked" and model not in ("noisy", "lstm"):  # or the plain path would be compared with itself
        assert machines_of(trainer)
    return made


def machines_of(trainer: Trainer) -> list[CompiledStep]:
    return [m for k, m in trainer._cache.items() if isinstance(k, tuple) and m is not None]


def assert_same(
    ours: tuple[Arrays, dict[str, Reply]], plain: tuple[Arrays, dict[str, Reply]], share: float = 1e-4
) -> None:
    assert {k: (v.dtype, v.shape) for k, v in ours[0].items()} == {k: (v.dtype, v.shape) for k, v in plain[0].items()}
    assert np.linalg.norm(flat(ours[0]) - flat(plain[0])) <= share * np.linalg.norm(flat(plain[0]))
    for client, reply in plain[1].items():
        assert ours[1][client].n == reply.n
        assert ours[1][client].metrics == pytest.approx(reply.metrics, rel=1e-3, abs=1e-5)


@pytest.mark.parametrize("sizes", [[24] * 4, UNEQUAL], ids=["equal", "unequal"])
@pytest.mark.parametrize("engine", ["stacked", "threads"])
@pytest.mark.parametrize("model", MODELS)
def test_models(model: str, engine: str, sizes: list[int]) -> None:
    assert_same(trained(model, engine, sizes), trained(model, "plain", sizes))


@pytest.mark.parametrize("settings", SETTINGS)
def test_settings(settings: str) -> None:
    """Weights outside torch's optimisers' reach, such as unused ones, are part of it."""
    for model in ("mlp", "partly"):
        plain = trained(model, "plain", UNEQUAL, **SETTINGS[settings])
        assert_same(trained(model, "stacked", UNEQUAL, **SETTINGS[settings]), plain)


@pytest.mark.parametrize("settings", ["adam", "everything"])
@pytest.mark.parametrize("model", ["batch norm", "dropout", "attention", "tied"])
def test_models_with_settings(model: str, settings: str) -> None:
    plain = trained(model, "plain", UNEQUAL, **SETTINGS[settings])
    # The gradient of a key's bias is 0 but for rounding, and Adam makes steps of full length along that.
    share = 1e-3 if (model, settings) == ("attention", "adam") else 1e-4
    assert_same(trained(model, "stacked", UNEQUAL, **SETTINGS[settings]), plain, share)


@pytest.mark.parametrize("settings", [{"lr": 0.1}, SETTINGS["adam"]], ids=["sgd", "adam"])
@pytest.mark.parametrize("sizes", [[24] * 4, UNEQUAL], ids=["equal", "unequal"])
def test_dropout_is_stacked(sizes: list[int], settings: dict[str, Any]) -> None:
    stacked, plain = (Trainer(MODELS["dropout"], engine=e, batch_size=8, **settings) for e in ("stacked", "plain"))
    assert_same(rounds(stacked, population(sizes)), rounds(plain, population(sizes)))
    (compiled,) = machines_of(stacked)
    assert not compiled.random
    assert all(form.stacked and form.by_rows for form in compiled._traces)


def test_dropout_beside_layers_that_mix_samples_is_stacked_batch_by_batch() -> None:
    def model() -> nn.Module:
        return dense(nn.BatchNorm1d(8), nn.Tanh(), nn.Dropout(0.4))

    stacked, plain = (Trainer(model, engine=e, batch_size=8) for e in ("stacked", "plain"))
    sizes = [20] * 4  # the last batch is short, for all
    assert_same(rounds(stacked, population(sizes)), rounds(plain, population(sizes)))
    (compiled,) = machines_of(stacked)
    assert {(form.stacked, form.by_rows, form.batch) for form in compiled._traces} == {
        (True, False, 8),
        (True, False, 4),
    }


@pytest.mark.parametrize("again", [functional.dropout, None], ids=["function", "twice"])
def test_dropout_and_other_randomness_is_drawn_client_by_client(again: Callable[[Tensor], Tensor] | None) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.drop, self.layer = nn.Dropout(0.3), nn.Linear(FEATURES, CLASSES)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer((again or self.drop)(self.drop(x)))

    stacked, plain = (Trainer(Model, engine=e, batch_size=8) for e in ("stacked", "plain"))
    assert_same(rounds(stacked, population(UNEQUAL), 2), rounds(plain, population(UNEQUAL), 2))
    (compiled,) = machines_of(stacked)
    assert compiled.random
    assert not any(form.stacked for form in compiled._traces)


@pytest.mark.parametrize("engine", ["stacked", "threads"])
@pytest.mark.parametrize("sizes", [[20], [1], [1, 1, 1], [3, 200]], ids=str)
def test_few_clients_and_few_samples(engine: str, sizes: list[int]) -> None:
    assert_same(trained("mlp", engine, sizes), trained("mlp", "plain", sizes))


@pytest.mark.parametrize("engine", ["threads", "processes"])
@pytest.mark.parametrize("model", ["mlp", "dropout", "batch norm", "noisy", "embedding"])
def test_threads_and_processes_are_bit_for_bit_the_plain_path(engine: str, model: str) -> None:
    assert digest(trained(model, engine, UNEQUAL)[0]) == digest(trained(model, "plain", UNEQUAL)[0])


@pytest.mark.parametrize("model", ["wide cnn", "attention", "lstm"])
def test_processes_are_bit_for_bit_threads_where_kernels_do_the_work(model: str) -> None:
    assert digest(trained(model, "processes", UNEQUAL)[0]) == digest(trained(model, "threads", UNEQUAL)[0])


@pytest.mark.parametrize("model", ["wide cnn", "mlp", "lstm", "embedding"])
def test_a_client_alone_gives_the_bits_it_gives_among_others(model: str) -> None:
    """As over a network, where each client is trained by itself."""
    trainer, clients = Trainer(MODELS[model], lr=0.1, batch_size=8), population(UNEQUAL)
    sites = {c: Site(c, clients[c]) for c in clients}
    requests = {c: Request("train", trainer.initial(0), {**SEEDS, "round": 1}) for c in clients}
    for client, reply in trainer.many(requests, sites).items():
        assert isinstance(reply, Reply)
        assert digest(reply.arrays) == digest(
            Trainer(MODELS[model], lr=0.1, batch_size=8)(requests[client], sites[client]).arrays
        )


@pytest.mark.parametrize(
    ("engine", "model"),
    [
        *(("stacked", model) for model in ("deep", "batch norm", "dropout", "attention")),
        *(("threads", model) for model in ("cnn batch norm", "cnn dropout", "wide cnn")),
        *(("auto", model) for model in ("mlp", "cnn", "lstm")),
    ],
)
def test_no_result_depends_on_the_number_of_workers(engine: str, model: str) -> None:
    sizes = [*UNEQUAL, *range(3, 12)]
    first, *others = (digest(trained(model, engine, sizes, 2, workers=w, momentum=0.5)[0]) for w in (1, 2, 4))
    assert [first, first] == others


@pytest.mark.parametrize("model", ["mlp", "batch norm", "dropout", "attention"])
def test_a_frozen_tape_gives_the_same_bits(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mutirao.training.engine.compiled_step.FREEZE_AFTER", 1)
    with_jit = digest(trained(model, "stacked", UNEQUAL)[0])
    monkeypatch.setattr("mutirao.training.engine.compiled_step.freeze_program", lambda program, inputs: None)
    assert digest(trained(model, "stacked", UNEQUAL)[0]) == with_jit


def test_regression_and_another_loss() -> None:
    """A loss that is a mean over samples is stacked by rows; one that is not, batch by batch."""
    draw = np.random.default_rng(0)
    x = draw.normal(size=(90, FEATURES)).astype(np.float32)
    y = x[:, :1] - x[:, 1:2] ** 2
    clients = virtual_clients(x, y.astype(np.float32), np.split(np.arange(90), [25, 40, 41, 80]))

    def spread(outputs: Tensor, y: Tensor) -> Tensor:
        return (outputs - y).square().mean().sqrt()

    for loss in (functional.mse_loss, functional.huber_loss, nn.L1Loss(), spread):
        made = [
            rounds(Trainer(lambda: nn.Linear(FEATURES, 1), loss, batch_size=8, lr=0.02, engine=engine), clients)
            for engine in ("stacked", "plain")
        ]
        assert_same(*made)
        assert "accuracy" not in made[0][1]["c0"].metrics


def test_weighted_classes_are_no_mean_over_samples_even_if_the_first_client_has_one_class() -> None:
    draw = np.random.default_rng(0)
    x, y = draw.normal(size=(64, FEATURES)).astype(np.float32), draw.integers(0, CLASSES, 64)
    y[:32] = 1
    clients = virtual_clients(x, y, np.split(np.arange(64), [32, 48]))
    loss = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 5.0, 0.1]), label_smoothing=0.1)
    made = [rounds(Trainer(MODELS["mlp"], loss, batch_size=8, engine=e), clients) for e in ("stacked", "plain")]
    assert_same(*made)


def test_a_first_round_of_single_samples_proves_nothing() -> None:
    def spread(outputs: Tensor, y: Tensor) -> Tensor:
        return functional.cross_entropy(outputs, y).square()

    for sizes in ([1, 1], UNEQUAL):
        trainer = Trainer(MODELS["mlp"], spread, batch_size=8, engine="stacked")
        rounds(trainer, population([1, 1]), 1)
        plain = Trainer(MODELS["mlp"], spread, batch_size=8, engine="plain")
        assert_same(rounds(trainer, population(sizes)), rounds(plain, population(sizes)))


def test_a_changed_copy_of_a_trainer_records_anew() -> None:
    clients = population(UNEQUAL)
    trainer = Trainer(MODELS["mlp"], batch_size=8, engine="stacked")
    rounds(trainer, clients, 1)
    faster = dataclasses.replace(trainer, lr=0.5)
    assert_same(rounds(faster, clients), rounds(dataclasses.replace(faster, engine="plain"), clients))


@pytest.mark.parametrize("model", ["mlp", "batch norm", "dropout"])
@pytest.mark.parametrize("engine", ["stacked", "threads"])
def test_squared_errors_come_out_of_the_same_pass(engine: str, model: str) -> None:
    settings = {"lr": 0.1, "batch_size": 8, "epochs": 2}
    made = [
        rounds(Trainer(MODELS[model], engine=e, **settings), population(UNEQUAL), 2, extras="squared_errors, entropy")
        for e in (engine, "plain")
    ]
    assert_same(*made)
    for client, reply in made[1][1].items():
        ours = made[0][1][client]
        assert ours.extras["squared_errors"].dtype == np.uint8
        assert ours.extras["batch_sizes"].dtype == np.int32
        assert ours.extras["batch_sizes"].sum() == len(ours.extras["squared_errors"])
        for name in ("squared_errors", "batch_sizes"):
            np.testing.assert_array_equal(ours.extras[name], reply.extras[name])
        assert ours.metrics["entropy"] == pytest.approx(reply.metrics["entropy"], rel=1e-4)
