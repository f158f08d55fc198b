"""Ranking networks and their trainers: a classifier of grades, as in the paper, or a scorer trained on lists."""

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn import functional

from mutirao.systems.ranking.encoding import flatten_lists
from mutirao.systems.ranking.losses import ListLoss
from mutirao.systems.ranking.metrics import Metrics
from mutirao.training.optimizers import one_thread
from mutirao.training.torch_device import device_of
from mutirao.training.trainer import Trainer

CHUNK = 65_536  # documents scored at once
NORMS = {"none": None, "batch": nn.BatchNorm1d, "layer": nn.LayerNorm}


def dense(features: int, outputs: int, hidden: int = 64, layers: int = 1, norm: str = "none") -> nn.Sequential:
    """`layers` times Linear, normalisation and ReLU, then Linear to the outputs."""
    widths = [features] + [hidden] * layers
    normalization = NORMS[norm]
    modules: list[nn.Module] = []
    for inputs, width in itertools.pairwise(widths):
        modules.append(nn.Linear(inputs, width))
        if normalization is not None:
            modules.append(normalization(width))
        modules.append(nn.ReLU())
    return nn.Sequential(*modules, nn.Linear(widths[-1], outputs))


class Scorer(nn.Module):
    """A score for each document, single or in lists; `there` masks the places of lists that contain a document.

    Batch normalisation takes its means over documents alone, never over padding. In a federation its running means and
    variances are averaged with the weights, as all other arrays of the model.
    """

    def __init__(self, features: int, hidden: int = 64, layers: int = 1, norm: str = "none") -> None:
        super().__init__()
        self.body = dense(features, 1, hidden, layers, norm)
        self.has_batch_norm = norm == "batch"

    def forward(self, x: Tensor, there: Tensor | None = None) -> Tensor:
        """Scores in the shape of x without its last dimension."""
        if there is None or not self.has_batch_norm:
            scores: Tensor = self.body(x)
            return scores.squeeze(-1)
        return x.new_zeros(there.shape).masked_scatter(there, self.body(x[there]).squeeze(-1))


def expected_grade(outputs: Tensor) -> Tensor:
    """The ranking score: sum_c c p_c of a classifier, or the output of a scorer itself."""
    if outputs.dim() == 1:
        return outputs
    grades = torch.arange(outputs.shape[-1], dtype=outputs.dtype, device=outputs.device)
    return functional.softmax(outputs, -1) @ grades


def network_factory(
    features: int, grades: int, loss: str, hidden: int = 64, layers: int = 1, norm: str = "none"
) -> Callable[[], nn.Module]:
    """A constructor of the network: a classifier of `grades` grades, or a scorer for a loss of lists."""
    if loss == "grades":
        return partial(dense, features, grades, hidden, layers, norm)
    return partial(Scorer, features, hidden, layers, norm)


def make_trainer(config: Any, features: int, grades: int, metrics: Metrics) -> Trainer:
    """A trainer of such a network; one of a scorer evaluates ranking metrics."""
    network = network_factory(features, grades, config.loss, config.hidden, config.layers, config.norm)
    if config.loss == "grades":
        return Trainer.of(config, network)
    return Trainer.of(config, network, loss=ListLoss(config.loss, grades), figures=partial(list_metrics, metrics))


def list_metrics(metrics: Metrics, outputs: npt.NDArray[Any], grades: npt.NDArray[Any]) -> dict[str, float]:
    """Each metric over lists, as a client reports it of its own."""
    scores, labels, lists = flatten_lists(outputs, grades)
    return {name: metric(np.nan_to_num(scores), labels, lists) for name, metric in metrics.items()}


def score(model: nn.Module, x: npt.NDArray[np.float32]) -> npt.NDArray[np.float64]:
    """Ranking scores of documents, on the model's device, in chunks."""
    model.eval()
    rows = torch.from_numpy(x)
    place = device_of(model)
    with one_thread(), torch.inference_mode():
        chunks = [expected_grade(model(rows[i : i + CHUNK].to(place))).cpu() for i in range(0, len(x), CHUNK)]
    scores: npt.NDArray[np.float64] = torch.cat(chunks).double().numpy()
    return np.nan_to_num(scores)  # a diverged model ranks nothing; the round reports it
