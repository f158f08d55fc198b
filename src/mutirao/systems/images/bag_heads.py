"""Heads that judge a bag of tiles, such as all tiles of a slide: means, maxima, or attention over their features."""

import copy

import torch
from torch import Tensor, nn

from mutirao.errors import ConfigError
from mutirao.systems.images.backbones import Backbone
from mutirao.systems.images.choices import Trainable
from mutirao.systems.images.heads import trained_part

HIDDEN = 64  # units of the attention


class Pool(nn.Module):
    """From the features of a bag's tiles to the classes of the bag: their mean goes through one linear layer.

    Tiles are bags x tiles x views x features, and `there` says which are tiles and which only fill up. In training
    every tile is seen in one of its views by lot, and as it is otherwise.
    """

    def __init__(self, width: int, classes: int) -> None:
        super().__init__()
        self.classify = nn.Linear(width, classes)
        nn.init.zeros_(self.classify.weight)
        nn.init.zeros_(self.classify.bias)

    def forward(self, tiles: Tensor, there: Tensor) -> Tensor:
        """A row of class scores (logits) a bag."""
        out: Tensor = self.classify(self.pool(self.view(tiles), there))
        return out

    def view(self, tiles: Tensor) -> Tensor:
        """One view of each tile: bags x tiles x features."""
        if not self.training or tiles.shape[2] == 1:
            return tiles[:, :, 0]
        drawn = torch.randint(tiles.shape[2], tiles.shape[:2], device=tiles.device)
        return tiles.gather(2, drawn[..., None, None].expand(-1, -1, 1, tiles.shape[3]))[:, :, 0]

    def pool(self, h: Tensor, there: Tensor) -> Tensor:
        """The features of each bag: sum_k a_k h_k."""
        return (self.attention(h, there)[..., None] * h).sum(1)

    def attention(self, h: Tensor, there: Tensor) -> Tensor:
        """How much each tile counts, a_k; a bag's sum to one. All alike here: 1 / K for each of K tiles."""
        return there.to(h.dtype) / there.sum(1, keepdim=True)


class MaxPool(Pool):
    """The maximum over tiles, feature by feature."""

    def pool(self, h: Tensor, there: Tensor) -> Tensor:
        """The largest value of each feature among the tiles."""
        return h.masked_fill(~there[..., None], -torch.inf).amax(1)

    def attention(self, h: Tensor, there: Tensor) -> Tensor:
        """The share of features whose maximum is this tile's."""
        first = h.masked_fill(~there[..., None], -torch.inf).argmax(1)
        return nn.functional.one_hot(first, h.shape[1]).to(h.dtype).mean(1)


class AttentionPool(Pool):
    """Gated attention: a_k = softmax_k(w' (tanh(V h_k) * sigmoid(U h_k))).

    Ilse, Tomczak and Welling, "Attention-based Deep Multiple Instance Learning", ICML 2018, equation 9.

    >>> pool, tiles = AttentionPool(width=4, classes=2).eval(), torch.zeros(1, 3, 1, 4)
    >>> there = torch.tensor([[True, True, False]])  # the third tile only fills up
    >>> pool(tiles, there).shape, pool.attention(tiles[:, :, 0], there).tolist()
    (torch.Size([1, 2]), [[0.5, 0.5, 0.0]])
    """

    def __init__(self, width: int, classes: int, hidden: int = HIDDEN) -> None:
        super().__init__(width, classes)
        self.content, self.gate = nn.Linear(width, hidden), nn.Linear(width, hidden)
        self.weigh = nn.Linear(hidden, 1, bias=False)  # a bias would cancel in the softmax

    def attention(self, h: Tensor, there: Tensor) -> Tensor:
        """The softmax over the tiles of each bag."""
        scores = self.weigh(torch.tanh(self.content(h)) * torch.sigmoid(self.gate(h)))[..., 0]
        return torch.softmax(scores.masked_fill(~there, -torch.inf), 1)


class WholeSlide(nn.Module):
    """Tiles of one slide in (bytes), probabilities of its classes and each tile's attention out: backbone and head."""

    def __init__(self, backbone: nn.Module, head: Pool) -> None:
        super().__init__()
        self.frozen, self.trained = copy.deepcopy(backbone), copy.deepcopy(head)

    def forward(self, tiles: Tensor) -> tuple[Tensor, Tensor]:
        """Of N tiles: 1 x classes, and N."""
        return self.judge(self.frozen(tiles))

    def judge(self, h: Tensor) -> tuple[Tensor, Tensor]:
        """The same of the tiles' features."""
        h = h[None]
        there = torch.ones_like(h[..., 0], dtype=torch.bool)
        scores = self.trained.classify(self.trained.pool(h, there))
        return torch.softmax(scores, -1), self.trained.attention(h, there)[0]


POOLS: dict[str, type[Pool]] = {"mean": Pool, "max": MaxPool, "abmil": AttentionPool}


def make_head(head: str, backbone: Backbone, trainable: Trainable, classes: int) -> nn.Module:
    """What the hospitals train together: a head for pictures with more of the backbone, or one for whole slides."""
    if head == "linear":
        return trained_part(backbone, trainable, classes)
    if trainable != "head":
        raise ConfigError(f"trainable={trainable}: head={head} is trained on features of a frozen backbone; use head")
    return POOLS[head](backbone.width, classes)
