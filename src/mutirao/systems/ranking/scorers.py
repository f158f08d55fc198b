"""Networks that rank: a classifier of grades, as in the paper, or a scorer of single documents, however deep."""

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn import functional

from mutirao.systems.ranking.encoding import flat_lists
from mutirao.systems.ranking.losses import ListLoss
from mutirao.systems.ranking.metrics import Metrics
from mutirao.training.optimizers import one_thread
from mutirao.training.torch_device import device_of
from mutirao.training.trainer import Trainer

CHUNK = 65_536  # documents scored at once
NORMS = {"none": None, "batch": nn.BatchNorm1d, "layer": nn.LayerNorm}


def dense(features: int, outputs: int, hidden: int = 64, layers: int = 1, norm: str = "none") -> nn.Sequential:
    """`layers` times Linear, normalisation and ReLU, then Linear to the outputs."""
    widths, made = [features] + [hidden] * layers, list[nn.Module]()
    for wide, next_one in itertools.pairwise(widths):
        made.append(nn.Linear(wide, next_one))
        kind = NORMS[norm]
        made += [nn.ReLU()] if kind is None else [kind(next_one), nn.ReLU()]
    return nn.Sequential(*made, nn.Linear(widths[-1], outputs))


class Scorer(nn.Module):
    """One number a document, for single documents or lists of them; `there` says which places of lists hold one.

    Batch normalisation takes its means over documents alone, never over what lists are filled up with. In a federation
    its running means and variances are averaged with the weights, as all other arrays of the model.
    """

    def __init__(self, features: int, hidden: int = 64, layers: int = 1, norm: str = "none") -> None:
        super().__init__()
        self.body = dense(features, 1, hidden, layers, norm)
        self.mixes = norm == "batch"

    def forward(self, x: Tensor, there: Tensor | None = None) -> Tensor:
        """Scores in the shape of x without its last dimension."""
        if there is None or not self.mixes:
            scores: Tensor = self.body(x)
            return scores.squeeze(-1)
        return x.new_zeros(there.shape).masked_scatter(there, self.body(x[there]).squeeze(-1))


def expected_grade(outputs: Tensor) -> Tensor:
    """What documents are ranked by: sum_c c p_c of a classifier, or the score itself."""
    if outputs.dim() == 1:
        return outputs
    grades = torch.arange(outputs.shape[-1], dtype=outputs.dtype, device=outputs.device)
    return functional.softmax(outputs, -1) @ grades


def score(model: nn.Module, x: npt.NDArray[np.float32]) -> npt.NDArray[np.float64]:
    """What the documents are ranked by."""
    model.eval()
    rows, place = torch.from_numpy(x), device_of(model)
    with one_thread(), torch.inference_mode():
        chunks = [expected_grade(model(rows[i : i + CHUNK].to(place))).cpu() for i in range(0, len(x), CHUNK)]
    scores: npt.NDArray[np.float64] = torch.cat(chunks).double().numpy()
    return np.nan_to_num(scores)  # a diverged model ranks nothing; the round itself names it


def network_of(
    features: int, grades: int, loss: str, hidden: int = 64, layers: int = 1, norm: str = "none"
) -> Callable[[], nn.Module]:
    """What makes a classifier of so many grades, or a scorer where lists are ranked."""
    shape: dict[str, Any] = {"hidden": hidden, "layers": layers, "norm": norm}
    return partial(dense, features, grades, **shape) if loss == "grades" else partial(Scorer, features, **shape)


def trainer_of(config: Any, features: int, grades: int, measures: Metrics) -> Trainer:
    """What trains such a network; whoever ranks lists tells metrics."""
    network = network_of(features, grades, config.loss, config.hidden, config.layers, config.norm)
    if config.loss == "grades":
        return Trainer.of(config, network)
    return Trainer.of(config, network, loss=ListLoss(config.loss, grades), figures=partial(judge_lists, measures))


def judge_lists(measures: Metrics, outputs: npt.NDArray[Any], grades: npt.NDArray[Any]) -> dict[str, float]:
    """Each metric over some lists, as a client tells it of its own."""
    scores, known, lists = flat_lists(outputs, grades)
    return {name: measure(np.nan_to_num(scores), known, lists) for name, measure in measures.items()}
