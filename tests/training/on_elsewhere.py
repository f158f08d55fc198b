"""Training on the device of `elsewhere` beside the CPU, for each kind of layer and each way of the engine.

`test_devices` runs this file in a process of its own: autograd counts the devices when it is first used, so that
this one must be there before.
"""

import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

import elsewhere
from mutirao import ClientData, Failure, Request, Samples, Site, Trainer
from mutirao.core.fleet import Reply
from mutirao.training import torch_device
from mutirao.training.engine import tracer
from mutirao.training.lora import lora

THERE = elsewhere.device()


@dataclass(frozen=True)
class There(Trainer):
    """A Trainer on the other device."""

    def torch_device(self) -> torch.device:
        return THERE

    def generator(self, seed: int) -> torch.Generator:
        return torch.Generator().manual_seed(seed)


class Last(nn.Module):
    def __init__(self, net: nn.Module, head: nn.Module) -> None:
        super().__init__()
        self.net, self.head = net, head

    def forward(self, x: Tensor) -> Any:
        found = self.net(x)
        return self.head((found[0] if isinstance(found, tuple) else found)[:, -1])


def dense() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))


def convolution(norm: nn.Module) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1), norm, nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(4 * 9, 3)
    )


NETWORKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "dense": (dense, (6,)),
    "layer norm": (lambda: nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 3)), (6,)),
    "batch norm": (lambda: nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3)), (6,)),
    "dropout": (lambda: nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.4), nn.ReLU(), nn.Linear(8, 3)), (6,)),
    "convolution": (lambda: convolution(nn.Identity()), (2, 6, 6)),
    "convolution, batch norm": (lambda: convolution(nn.BatchNorm2d(4)), (2, 6, 6)),
    "convolution, group norm": (lambda: convolution(nn.GroupNorm(2, 4)), (2, 6, 6)),
    "lstm": (lambda: Last(nn.LSTM(6, 5, 2, batch_first=True), nn.Linear(5, 3)), (4, 6)),
    "gru": (lambda: Last(nn.GRU(6, 5, batch_first=True), nn.Linear(5, 3)), (4, 6)),
    "transformer": (
        lambda: Last(nn.TransformerEncoderLayer(6, 2, 8, dropout=0.0, batch_first=True), nn.Linear(6, 3)),
        (4, 6),
    ),
    "embedding": (lambda: Last(nn.Embedding(9, 5), nn.Linear(5, 3)), (4,)),
}


def sites_for(shape: tuple[int, ...], whole: bool = False, clients: int = 3) -> dict[str, Site]:
    draw = np.random.default_rng(0)
    sites = {}
    for i in range(clients):
        n = 10 + 3 * i
        x = draw.integers(0, 9, (n, *shape)) if whole else draw.normal(size=(n, *shape)).astype(np.float32)
        sites[f"c{i}"] = Site(f"c{i}", Samples(x, draw.integers(0, 3, n)))
    return sites


@pytest.fixture(autouse=True)
def _there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracer, "storage_pointer", lambda t: getattr(t, "inner", t).untyped_storage().data_ptr())


def round_of(kind: type[Trainer], network: str, **settings: Any) -> dict[str, Reply]:
    model, shape = NETWORKS[network]
    trainer = kind(model, batch_size=4, lr=0.1, **settings)
    sites = sites_for(shape, whole=network == "embedding")
    request = Request("train", trainer.initial(0), {"seed": 0, "round": 1, "extras": "squared_errors,entropy"})
    out = trainer.many(dict.fromkeys(sites, request), sites)
    assert all(isinstance(reply, Reply) for reply in out.values()), out
    return out  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("network", "engine"),
    [*itertools.product(NETWORKS, ("plain", "threads", "stacked")), ("dense", "auto"), ("lstm", "auto")],
)
def test_training_there_is_training_here(network: str, engine: str) -> None:
    both = ({"momentum": 0.9, "mu": 0.1, "clip": 1.0}, {"optimizer": "adam", "weight_decay": 0.01})
    for settings in both if network in ("dense", "convolution, batch norm") else both[:1]:  # a layer knows no optimiser
        here = round_of(Trainer, network, engine=engine, **settings)
        there = round_of(There, network, engine=engine, **settings)
        for client, reply in here.items():
            assert there[client].metrics == pytest.approx(reply.metrics, rel=1e-4)
            assert (there[client].extras["squared_errors"] == reply.extras["squared_errors"]).all()
            for name, array in reply.arrays.items():
                np.testing.assert_allclose(there[client].arrays[name], array, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("network", NETWORKS)
def test_judging_there_is_judging_here(network: str) -> None:
    model, shape = NETWORKS[network]
    sites = sites_for(shape, whole=network == "embedding")
    sites = {c: replace(site, data=ClientData(site.data, site.data)) for c, site in sites.items()}
    here, there = Trainer(model), There(model)
    arrays = here.initial(0)
    for do in ("evaluate", "probe"):
        asked = dict.fromkeys(sites, Request(do, arrays, {"seed": 0, "round": 1, "extras": "rms_loss"}))
        ours, theirs = here.many(asked, sites), there.many(asked, sites)
        for client, reply in ours.items():
            assert theirs[client].metrics == pytest.approx(reply.metrics, rel=1e-4)
            alone = there(asked[client], sites[client])
            assert alone.metrics == pytest.approx(reply.metrics, rel=1e-4)


class Two(nn.Module):
    """A module with two inputs, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(6, 3), nn.Linear(2, 3)

    def forward(self, a: Tensor, b: Tensor) -> Any:
        return self.left(a) + self.right(b)


def replies(trainer: Trainer, sites: dict[str, Site]) -> dict[str, Reply]:
    request = Request("train", trainer.initial(0), {"seed": 0, "round": 2, "lr": 0.05})
    trainer.check(request.arrays, {c: site.data for c, site in sites.items()})
    out = trainer.many(dict.fromkeys(sites, request), sites)
    assert all(isinstance(reply, Reply) for reply in out.values()), out
    return out  # type: ignore[return-value]


def agree(here: dict[str, Reply], there: dict[str, Reply]) -> None:
    for client, reply in here.items():
        for name, array in reply.arrays.items():
            np.testing.assert_allclose(there[client].arrays[name], array, rtol=1e-3, atol=1e-4)


NAMED = itertools.product(["adamw", "rmsprop", "adagrad"], ["plain", "threads", "stacked"])


@pytest.mark.parametrize(
    ("optimizer", "engine"), [*NAMED, (torch.optim.RAdam, "plain"), (torch.optim.RAdam, "threads")]
)
def test_every_optimiser_goes_there(optimizer: Any, engine: str) -> None:
    sites = sites_for((6,))
    both = (kind(dense, optimizer=optimizer, engine=engine, lr=0.01, epochs=2) for kind in (Trainer, There))
    agree(*(replies(trainer, sites) for trainer in both))


@pytest.mark.parametrize("engine", ["plain", "threads", "stacked"])
def test_several_inputs_and_lazy_ones_go_there(engine: str) -> None:
    draw = np.random.default_rng(0)
    x = {"a": draw.normal(size=(12, 6)), "b": draw.normal(size=(12, 2))}
    named = {"c0": Site("c0", Samples(x, draw.integers(0, 3, 12)))}
    agree(*(replies(kind(Two, engine=engine), named) for kind in (Trainer, There)))
    rows = TensorDataset(torch.from_numpy(x["a"]).float(), torch.arange(12) % 3)
    items = [rows[i] for i in range(12)]
    lazy = {"c0": Site("c0", Samples.of(Rows(items), limit=100))}
    agree(*(replies(kind(dense, engine=engine), lazy) for kind in (Trainer, There)))


class Rows(Dataset[Any]):
    def __init__(self, items: list[Any]) -> None:
        self.items = items

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, i: int) -> Any:
        return self.items[i]


@pytest.mark.parametrize("engine", ["plain", "threads", "stacked"])
def test_a_frozen_part_is_there_as_well(engine: str) -> None:
    def adapted() -> nn.Module:
        torch.manual_seed(0)
        return lora(dense(), rank=2)

    sites = sites_for((6,))
    here, there = (replies(kind(adapted, engine=engine), sites) for kind in (Trainer, There))
    assert not any(name.endswith("base.weight") for name in here["c0"].arrays)
    agree(here, there)


@pytest.mark.parametrize("engine", ["plain", "threads"])
def test_a_transform_is_made_of_batches_that_are_there(engine: str) -> None:
    def noisy(x: Tensor, draw: np.random.Generator) -> Tensor:
        return x * float(draw.uniform(0.5, 1.5))

    sites = sites_for((6,))
    agree(*(replies(kind(dense, engine=engine, transform=noisy), sites) for kind in (Trainer, There)))


def test_figures_of_what_was_judged_there() -> None:
    def figures(outputs: Any, labels: Any) -> dict[str, float]:
        return {"f1": float(np.mean(outputs.argmax(1) == labels))}

    samples = sites_for((6,))["c2"].data
    here, there = (kind(dense, figures=figures) for kind in (Trainer, There))
    arrays = here.initial(0)
    assert there.evaluate(arrays, samples) == pytest.approx(here.evaluate(arrays, samples), rel=1e-4)


class Forgetful(nn.Module):
    """A module that leaves a tensor behind on the CPU."""

    def __init__(self) -> None:
        super().__init__()
        self.net = dense()

    def forward(self, x: Tensor) -> Any:
        return self.net(x) * torch.ones(3)


@pytest.mark.parametrize("engine", ["plain", "threads", "stacked", "auto"])
def test_a_tensor_left_behind_is_found(engine: str) -> None:
    trainer, sites = There(Forgetful, engine=engine), sites_for((6,))
    request = Request("train", trainer.initial(0), {"seed": 0, "round": 1})
    for outcome in trainer.many(dict.fromkeys(sites, request), sites).values():
        assert isinstance(outcome, Failure)
        assert "a tensor of the CPU, of shape (3,), meets one of elsewhere" in outcome.reason


@pytest.mark.parametrize("network", ["dense", "layer norm", "transformer", "embedding", "convolution"])
def test_the_engine_really_stacks_there(network: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", "mutirao"):
        round_of(There, network, engine="stacked", epochs=12)  # so many steps that they would be frozen
    assert not caplog.records  # nobody was trained one by one


def test_samples_that_do_not_fit_are_brought_batch_by_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_device, "free_bytes", lambda place: 100.0)
    for engine in ("plain", "threads", "stacked"):
        agree(*(round_of(kind, "dense", engine=engine) for kind in (Trainer, There)))
