"""The part of a model that is trained: a head on frozen features, with more of the backbone where that is asked for."""

import copy
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from mutirao.systems.images.backbones import Backbone
from mutirao.systems.images.choices import Trainable
from mutirao.training.inputs import call_model, map_tensors
from mutirao.training.optimizers import one_thread
from mutirao.training.samples import Samples
from mutirao.training.torch_device import device_of


class OneView(nn.Module):
    """Of the k views of each sample one by lot in training, the picture as it is otherwise: samples x views x ..."""

    def forward(self, x: Tensor) -> Tensor:
        """One view of each sample."""
        if not self.training or x.shape[1] == 1:
            return x[:, 0]
        return x[torch.arange(len(x), device=x.device), torch.randint(x.shape[1], (len(x),), device=x.device)]


def trained_part(backbone: Backbone, trainable: Trainable, classes: int) -> nn.Module:
    """What the hospitals train together and what travels: a linear head, with the last block, or with all.

    The head starts from zero: every class is equally likely until somebody has seen a cell.
    """
    head = nn.Linear(backbone.width, classes)
    nn.init.zeros_(head.weight)
    nn.init.zeros_(head.bias)
    if trainable == "head":
        return nn.Sequential(OneView(), head)
    part = copy.deepcopy(backbone.tail if trainable == "last_block" else backbone).requires_grad_(True)
    return nn.Sequential(OneView(), part, head)


class Whole(nn.Module):
    """Pictures of bytes in, probabilities of the classes out: backbone and trained part together, as it is exported."""

    def __init__(self, backbone: Backbone, part: nn.Module, trainable: Trainable) -> None:
        super().__init__()
        frozen = {"head": backbone, "last_block": backbone.trunk, "all": nn.Identity()}
        self.frozen: nn.Module = copy.deepcopy(frozen[trainable])
        self.trained = nn.Sequential(*list(part.children())[1:])  # without the choice of a view

    def forward(self, x: Tensor) -> Tensor:
        """Probabilities, a row a picture."""
        return torch.softmax(self.trained(self.frozen(x)), -1)


def probabilities(model: nn.Module, x: Any) -> npt.NDArray[np.float64]:
    """The class probabilities by a trained part of each picture as it is; `x` are the pictures' views, or bags."""
    model.eval()
    held, place = Samples(x, np.zeros(len(x[0] if isinstance(x, tuple) else x))), device_of(model)
    batches = (held.batch(slice(i, i + 64))[0] for i in range(0, len(held), 64))
    with one_thread(), torch.inference_mode():
        found_in = (call_model(model, map_tensors(batch, lambda t: t.to(place))) for batch in batches)
        rows = [torch.softmax(scores.cpu().double(), -1) for scores in found_in]
    found: npt.NDArray[np.float64] = torch.cat(rows).numpy()
    return np.nan_to_num(found)  # a diverged model finds nothing; the round itself names it
