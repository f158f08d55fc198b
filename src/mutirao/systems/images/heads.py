"""The trained part of a model: a linear head on a backbone's features, with the last block or all of the backbone."""

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
    return np.nan_to_num(found)  # a diverged model gives NaN here; the round itself reports that
