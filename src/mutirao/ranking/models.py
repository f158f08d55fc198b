"""Networks that rank: a classifier of grades, as in the paper, and a scorer trained on whole lists."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn import functional

from mutirao.training.descent import one_thread
from mutirao.training.devices import place_of
from mutirao.training.samples import Index

CHUNK = 65_536  # documents scored at once

PAD = -1.0  # the grade of a place in a list that holds no document


def classifier(features: int, hidden: int = 64, grades: int = 5) -> nn.Module:
    """logits = W2 relu(W1 x + b1) + b2, one output a grade."""
    return nn.Sequential(nn.Linear(features, hidden), nn.ReLU(), nn.Linear(hidden, grades))


class Scorer(nn.Module):
    """One number a document, for single documents or lists of them."""

    def __init__(self, features: int, hidden: int = 64) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(features, hidden), nn.ReLU(), nn.Linear(hidden, 1))

    def forward(self, x: Tensor) -> Tensor:
        """Scores in the shape of x without its last dimension."""
        scores: Tensor = self.body(x)
        return scores.squeeze(-1)


def expected_grade(outputs: Tensor) -> Tensor:
    """What documents are ranked by: sum_c c p_c of a classifier, or the score itself."""
    if outputs.dim() == 1:
        return outputs
    grades = torch.arange(outputs.shape[-1], dtype=outputs.dtype, device=outputs.device)
    return functional.softmax(outputs, -1) @ grades


def listnet(scores: Tensor, grades: Tensor) -> Tensor:
    """Cross-entropy of the top-one probabilities: -sum_i softmax(y)_i log softmax(s)_i (Cao et al., 2007)."""
    there = grades > PAD
    logs = functional.log_softmax(scores.masked_fill(~there, -1e9), -1)
    target = functional.softmax(grades.masked_fill(~there, -1e9), -1)
    return -(target * logs.masked_fill(~there, 0.0)).sum(-1).mean()


def lambdarank(scores: Tensor, grades: Tensor) -> Tensor:
    """sum over pairs y_i > y_j of |change of nDCG if they swap places| log(1 + exp(s_j - s_i)) (Burges, 2010)."""
    there = grades > PAD
    gains = torch.where(there, torch.exp2(grades) - 1, torch.zeros_like(grades))
    order = scores.detach().masked_fill(~there, -1e9).argsort(-1, descending=True)
    rank = order.argsort(-1).to(scores.dtype)
    discount = 1 / torch.log2(rank + 2)
    places = torch.arange(grades.shape[-1], dtype=scores.dtype, device=scores.device)
    ideal = (gains.sort(-1, descending=True).values / torch.log2(places + 2)).sum(-1).clamp(min=1e-9)
    swap = (gains[..., :, None] - gains[..., None, :]) * (discount[..., :, None] - discount[..., None, :])
    above = (grades[..., :, None] > grades[..., None, :]) & there[..., :, None] & there[..., None, :]
    pairs = functional.softplus(scores[..., None, :] - scores[..., :, None]) * swap.abs() / ideal[..., None, None]
    return torch.where(above, pairs, torch.zeros_like(pairs)).sum((-2, -1)).mean()


LOSSES = {"listnet": listnet, "lambdarank": lambdarank}


def lists_of(
    x: npt.NDArray[np.float32],
    grades: npt.NDArray[np.int64],
    queries: npt.NDArray[np.intp],
    parts: Sequence[Index],
    most: int = 64,
) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32], list[Index]]:
    """Each client's documents as lists, one a query, padded to one length; longer ones are cut into several.

    Returns the lists, their grades (PAD where there is no document), and which lists are whose.
    """
    rows: list[Index] = []
    owned: list[Index] = []
    for part in parts:
        ordered = part[np.argsort(queries[part], kind="stable")]
        cuts = np.flatnonzero(np.diff(queries[ordered])) + 1
        own = [piece[i : i + most] for piece in np.split(ordered, cuts) for i in range(0, len(piece), most)]
        own = [piece for piece in own if len(piece)]
        owned.append(np.arange(len(rows), len(rows) + len(own)))
        rows += own
    longest = max((len(r) for r in rows), default=1)
    xs = np.zeros((len(rows), longest, x.shape[1]), np.float32)
    ys = np.full((len(rows), longest), PAD, np.float32)
    for i, r in enumerate(rows):
        xs[i, : len(r)], ys[i, : len(r)] = x[r], grades[r]
    return xs, ys, owned


def score(model: nn.Module, x: npt.NDArray[np.float32]) -> npt.NDArray[np.float64]:
    """What the documents are ranked by."""
    model.eval()
    rows, place = torch.from_numpy(x), place_of(model)
    with one_thread(), torch.inference_mode():
        chunks = [expected_grade(model(rows[i : i + CHUNK].to(place))).cpu() for i in range(0, len(x), CHUNK)]
    scores: npt.NDArray[np.float64] = torch.cat(chunks).double().numpy()
    return np.nan_to_num(scores)  # a diverged model ranks nothing; the round itself names it
