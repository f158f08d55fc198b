"""The trained part of a model: a linear head on a backbone's features, with the last block or all of the backbone.

Other heads classify a bag of tiles, such as all tiles of a slide, by mean, maximum or attention pooling.
"""

import copy
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from mutirao.errors import ConfigError
from mutirao.systems.images.backbones import Backbone
from mutirao.systems.images.choices import Trainable
from mutirao.training.inputs import call_model, map_tensors
from mutirao.training.optimizers import one_thread
from mutirao.training.samples import Samples
from mutirao.training.torch_device import device_of


class OneView(nn.Module):
    """Selects one view of each sample (samples x views x ...): at random in training, else the unchanged image."""

    def forward(self, x: Tensor) -> Tensor:
        """One view of each sample."""
        if not self.training or x.shape[1] == 1:
            return x[:, 0]
        return x[torch.arange(len(x), device=x.device), torch.randint(x.shape[1], (len(x),), device=x.device)]


def trained_part(backbone: Backbone, trainable: Trainable, classes: int) -> nn.Module:
    """The module that hospitals train and send: a linear head, with the last block or all of the backbone.

    The head starts from zeros, so that before training every class is equally likely.
    """
    head = nn.Linear(backbone.width, classes)
    nn.init.zeros_(head.weight)
    nn.init.zeros_(head.bias)
    if trainable == "head":
        return nn.Sequential(OneView(), head)
    part = copy.deepcopy(backbone.tail if trainable == "last_block" else backbone).requires_grad_(True)
    return nn.Sequential(OneView(), part, head)


class FullNetwork(nn.Module):
    """Backbone and trained part as one network, from images (bytes) to class probabilities, as it is exported."""

    def __init__(self, backbone: Backbone, part: nn.Module, trainable: Trainable) -> None:
        super().__init__()
        frozen = {"head": backbone, "last_block": backbone.trunk, "all": nn.Identity()}
        self.frozen: nn.Module = copy.deepcopy(frozen[trainable])
        self.trained = nn.Sequential(*list(part.children())[1:])  # without OneView

    def forward(self, x: Tensor) -> Tensor:
        """One row of class probabilities for each image."""
        return torch.softmax(self.trained(self.frozen(x)), -1)


def probabilities(model: nn.Module, x: Any) -> npt.NDArray[np.float64]:
    """Class probabilities of images by a trained part, in evaluation mode; `x` are the images' views, or bags."""
    model.eval()
    count = len(x[0] if isinstance(x, tuple) else x)
    samples = Samples(x, np.zeros(count))
    device = device_of(model)
    rows = []
    with one_thread(), torch.inference_mode():
        for start in range(0, count, 64):
            batch = samples.batch(slice(start, start + 64))[0]
            logits = call_model(model, map_tensors(batch, lambda t: t.to(device)))
            rows.append(torch.softmax(logits.cpu().double(), -1))
    found: npt.NDArray[np.float64] = torch.cat(rows).numpy()
    # A diverged model gives NaN here. The round itself reports that, so the metrics need not fail as well.
    return np.nan_to_num(found)


HIDDEN = 64  # units of the attention


class MeanPool(nn.Module):
    """Mean pooling: the mean of the tiles' features goes through one linear layer to the classes of the bag.

    Tiles are bags x tiles x views x features, and the mask `there` is false for padding. In training every tile is
    seen in one of its views at random, else as it is.
    """

    def __init__(self, width: int, classes: int) -> None:
        super().__init__()
        self.classify = nn.Linear(width, classes)
        nn.init.zeros_(self.classify.weight)
        nn.init.zeros_(self.classify.bias)

    def forward(self, tiles: Tensor, there: Tensor) -> Tensor:
        """One row of logits for each bag."""
        out: Tensor = self.classify(self.pool(self.view(tiles), there))
        return out

    def view(self, tiles: Tensor) -> Tensor:
        """One view of each tile: bags x tiles x features."""
        if not self.training or tiles.shape[2] == 1:
            return tiles[:, :, 0]
        choice = torch.randint(tiles.shape[2], tiles.shape[:2], device=tiles.device)
        return tiles.gather(2, choice[..., None, None].expand(-1, -1, 1, tiles.shape[3]))[:, :, 0]

    def pool(self, h: Tensor, there: Tensor) -> Tensor:
        """The features of each bag: sum_k a_k h_k."""
        return (self.attention(h, there)[..., None] * h).sum(1)

    def attention(self, h: Tensor, there: Tensor) -> Tensor:
        """The weight a_k of each tile, summing to one in a bag; here 1 / K for each of K tiles."""
        return there.to(h.dtype) / there.sum(1, keepdim=True)


class MaxPool(MeanPool):
    """The maximum over tiles, feature by feature."""

    def pool(self, h: Tensor, there: Tensor) -> Tensor:
        """The largest value of each feature among the tiles."""
        return h.masked_fill(~there[..., None], -torch.inf).amax(1)

    def attention(self, h: Tensor, there: Tensor) -> Tensor:
        """The share of features that have their maximum in this tile."""
        first = h.masked_fill(~there[..., None], -torch.inf).argmax(1)
        return nn.functional.one_hot(first, h.shape[1]).to(h.dtype).mean(1)


class AttentionPool(MeanPool):
    """Gated attention: a_k = softmax_k(w' (tanh(V h_k) * sigmoid(U h_k))).

    Ilse, Tomczak and Welling, "Attention-based Deep Multiple Instance Learning", ICML 2018, equation 9.

    >>> pool, tiles = AttentionPool(width=4, classes=2).eval(), torch.zeros(1, 3, 1, 4)
    >>> there = torch.tensor([[True, True, False]])  # the third tile is padding
    >>> pool(tiles, there).shape, pool.attention(tiles[:, :, 0], there).tolist()
    (torch.Size([1, 2]), [[0.5, 0.5, 0.0]])
    """

    def __init__(self, width: int, classes: int, hidden: int = HIDDEN) -> None:
        super().__init__(width, classes)
        self.content = nn.Linear(width, hidden)
        self.gate = nn.Linear(width, hidden)
        # Without a bias, which would cancel in the softmax.
        self.weigh = nn.Linear(hidden, 1, bias=False)

    def attention(self, h: Tensor, there: Tensor) -> Tensor:
        """The softmax over the tiles of each bag."""
        scores = self.weigh(torch.tanh(self.content(h)) * torch.sigmoid(self.gate(h)))[..., 0]
        return torch.softmax(scores.masked_fill(~there, -torch.inf), 1)


class WholeSlide(nn.Module):
    """Backbone and head as one network: from the tiles of a slide to its class probabilities and their attention."""

    def __init__(self, backbone: nn.Module, head: MeanPool) -> None:
        super().__init__()
        self.frozen = copy.deepcopy(backbone)
        self.trained = copy.deepcopy(head)

    def forward(self, tiles: Tensor) -> tuple[Tensor, Tensor]:
        """Probabilities (1 x classes) and attention (N) of N tiles (bytes)."""
        return self.classify_features(self.frozen(tiles))

    def classify_features(self, h: Tensor) -> tuple[Tensor, Tensor]:
        """Probabilities and attention from the tiles' features."""
        h = h[None]
        there = torch.ones_like(h[..., 0], dtype=torch.bool)
        logits = self.trained.classify(self.trained.pool(h, there))
        return torch.softmax(logits, -1), self.trained.attention(h, there)[0]


POOLS: dict[str, type[MeanPool]] = {"mean": MeanPool, "max": MaxPool, "abmil": AttentionPool}


def make_head(head: str, backbone: Backbone, trainable: Trainable, classes: int) -> nn.Module:
    """The module that hospitals train: a head for images, with parts of the backbone, or a head for whole slides."""
    if head == "linear":
        return trained_part(backbone, trainable, classes)
    if trainable != "head":
        raise ConfigError(f"trainable={trainable}: head={head} is trained on features of a frozen backbone; use head")
    return POOLS[head](backbone.width, classes)
