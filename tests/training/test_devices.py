"""Device code without a device: see `elsewhere`. A real GPU was not at hand."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import elsewhere
from mutirao import Request, Samples, Site, Trainer
from mutirao.core.fleet import Reply


@dataclass(frozen=True)
class There(Trainer):
    """A Trainer on the other device."""

    def place(self) -> torch.device:
        return elsewhere.device()


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


def round_of(kind: type[Trainer], network: str, **settings: Any) -> dict[str, Reply]:
    model, shape = NETWORKS[network]
    trainer = kind(model, batch_size=4, lr=0.1, **settings)
    sites = sites_for(shape, whole=network == "embedding")
    request = Request("train", trainer.initial(0), {"seed": 0, "round": 1, "extras": "squared_errors,entropy"})
    out = trainer.many(dict.fromkeys(sites, request), sites)
    assert all(isinstance(reply, Reply) for reply in out.values()), out
    return out  # type: ignore[return-value]


@pytest.mark.parametrize("engine", ["plain", "threads", "stacked", "auto"])
@pytest.mark.parametrize("network", NETWORKS)
def test_training_there_is_training_here(network: str, engine: str) -> None:
    for settings in ({"momentum": 0.9, "mu": 0.1, "clip": 1.0}, {"optimizer": "adam", "weight_decay": 0.01}):
        here = round_of(Trainer, network, engine=engine, **settings)
        there = round_of(There, network, engine=engine, **settings)
        for client, reply in here.items():
            assert there[client].metrics == pytest.approx(reply.metrics, rel=1e-4)
            assert (there[client].extras["squared_errors"] == reply.extras["squared_errors"]).all()
            for name, array in reply.arrays.items():
                np.testing.assert_allclose(there[client].arrays[name], array, rtol=1e-3, atol=1e-4)
