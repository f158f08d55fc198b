"""Heads that classify a bag of tiles, such as all tiles of a slide, by mean, maximum or attention pooling."""

import copy

import torch
from torch import Tensor, nn

from mutirao.errors import ConfigError
from mutirao.systems.images.backbones import Backbone
from mutirao.systems.images.choices import Trainable
from mutirao.systems.images.heads import trained_part

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
        """The share of features whose maximum is this tile's."""
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
        self.weigh = nn.Linear(hidden, 1, bias=False)  # a bias would cancel in the softmax

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
