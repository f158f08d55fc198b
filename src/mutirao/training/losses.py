"""The loss sample by sample: what lets short batches and many clients share one pass."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.func import vmap
from torch.nn import functional

Loss = Callable[[Tensor, Tensor], Tensor]

FEW = 16  # classes; with fewer than fill a vector register, torch's log_softmax is slow along the last axis


def row_losses(loss: Loss, outputs: Tensor, y: Tensor) -> Tensor:
    """The loss of each sample by itself.

    Their mean is the loss of the batch if the loss is a mean over samples, which is for the caller to prove.
    """
    if is_cross_entropy(loss, outputs, y):
        classes = torch.arange(outputs.shape[-1])  # a mask is cheaper to differentiate than a look-up
        if len(classes) < FEW:
            logs = functional.log_softmax(outputs.t(), 0)
            return -torch.where(y == classes[:, None], logs, 0.0).sum(0)
        return -torch.where(y[:, None] == classes, functional.log_softmax(outputs, -1), 0.0).sum(-1)
    return vmap(lambda o, t: loss(o[None], t[None]))(outputs, y)


def noted_losses(loss: Loss, outputs: Tensor, y: Tensor) -> Tensor:
    """The same numbers where nothing is to be differentiated."""
    if not is_cross_entropy(loss, outputs, y):
        return row_losses(loss, outputs, y)
    few = outputs.shape[-1] < FEW
    logs = functional.log_softmax(outputs.t(), 0).t() if few else functional.log_softmax(outputs, -1)
    return -logs.gather(1, y[:, None])[:, 0]


def is_cross_entropy(loss: Loss, outputs: Tensor, y: Tensor) -> bool:
    """Whether it is the ordinary loss of class numbers, for which there is a shorter way."""
    return loss is functional.cross_entropy and outputs.dim() == 2 and y.dim() == 1 and not y.is_floating_point()
