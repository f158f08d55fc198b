"""Metrics that clients send besides arrays: the loss, per-sample losses and errors, and the probes of a model."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.func import vmap
from torch.nn import functional

from mutirao.core.arrays import Arrays
from mutirao.core.fleet import Scalar
from mutirao.training.samples import Samples

Loss = Callable[[Tensor, Tensor], Tensor]

PROBE_SAMPLES = 100
PROBED = frozenset({"entropy", "rms_loss", "gradient_norm"})  # what is measured on the model as it was received
FEW_CLASSES = 16  # classes; with fewer than fill a vector register, torch's log_softmax is slow along the last axis
CORRECTION_EXTRAS = frozenset(
    {"reach", "start_loss", "control"}
)  # what is added to a reply: see `mutirao.training.corrections`
EXTRAS = PROBED | {"squared_errors"} | CORRECTION_EXTRAS  # what a request to train may ask for


class CustomLoss(ABC):
    """A loss for labels that are not classes, which defines errors and entropies itself."""

    def __call__(self, outputs: Tensor, y: Tensor) -> Tensor:
        """The mean over samples."""
        return self.each(outputs, y).mean()

    @abstractmethod
    def each(self, outputs: Tensor, y: Tensor) -> Tensor:
        """The loss of each sample."""

    @abstractmethod
    def errors(self, outputs: Tensor, y: Tensor) -> Tensor:
        """The squared error of each label as a whole number; negative where there is no label."""

    @abstractmethod
    def entropies(self, outputs: Tensor, y: Tensor) -> Tensor:
        """The uncertainty of the model on each sample, at least 0."""


def has_error_measures(loss: Loss, y: Tensor) -> bool:
    """Whether errors and entropies are defined: the labels are classes, or the loss is a CustomLoss."""
    return is_classes(y) or isinstance(loss, CustomLoss)


def training_metrics(total: float, right: int | None, seen: int) -> dict[str, float]:
    """Mean loss and, where labels are classes, accuracy, from sums over samples."""
    metrics = {"loss": float(total) / seen}
    if right is None:
        return metrics
    return metrics | {"accuracy": right / seen}


def squared_errors(loss: Loss, outputs: Tensor, y: Tensor) -> Tensor:
    """The squared error of each label, (predicted class - grade)^2 or the loss's own; -1 where there is none."""
    errors = loss.errors(outputs, y) if isinstance(loss, CustomLoss) else (outputs.argmax(-1) - y).square()
    if errors.numel() and int(errors.max()) > 255:
        raise ValueError("squared errors do not fit a byte: they are for up to 16 grades")
    return errors.to(torch.int16)


def squared_error_extras(errors: npt.NDArray[np.uint8], sizes: Sequence[int] | npt.NDArray[np.int64]) -> Arrays:
    """Squared errors in the order of the batches, one byte each, and the number of errors in each batch."""
    return {"squared_errors": errors, "batch_sizes": np.asarray(sizes, np.int32)}


def concatenate_errors(batches: Sequence[npt.NDArray[np.int16]]) -> Arrays:
    """The extras for a list of batches; negative entries, which have no label, are left out."""
    known = [batch[batch >= 0] for batch in batches]
    return squared_error_extras(np.concatenate(known).astype(np.uint8), [len(batch) for batch in known])


def predictive_entropies(loss: Loss, outputs: Tensor, y: Tensor) -> Tensor:
    """The entropy -sum p ln p of the predicted classes for each sample, or the loss's own measure."""
    if isinstance(loss, CustomLoss):
        return loss.entropies(outputs, y)
    logs = functional.log_softmax(outputs, -1)
    return -(logs.exp() * logs).sum(-1)


def read_extras(config: Mapping[str, Scalar], samples: Samples, loss: Loss) -> frozenset[str]:
    """The extras that a training request names: its `extras`, separated by commas."""
    names = frozenset(name.strip() for name in str(config.get("extras", "")).split(",") if name.strip())
    if names - EXTRAS:
        raise ValueError(f"there are no extras {', '.join(sorted(names - EXTRAS))}, only {', '.join(sorted(EXTRAS))}")
    if (classes := names & {"entropy", "squared_errors"}) and not has_error_measures(loss, samples.y):
        raise ValueError(f"{', '.join(sorted(classes))}: only where the labels are classes")
    return names


def probe_samples(config: Mapping[str, Scalar]) -> int:
    """The maximal number of samples on which a model is probed."""
    return int(config.get("probe_samples", PROBE_SAMPLES))


def is_classes(y: Tensor) -> bool:
    """Whether labels are class indices."""
    return not y.is_floating_point()


def per_sample_losses(loss: Loss, outputs: Tensor, y: Tensor) -> Tensor:
    """The loss of each sample by itself.

    Their mean is the loss of the batch if the loss is a mean over samples, which the code that calls this must verify.
    """
    if is_cross_entropy(loss, outputs, y):
        # A mask of the classes is cheaper to differentiate than a look-up by `gather`.
        classes = torch.arange(outputs.shape[-1], device=outputs.device)
        if len(classes) < FEW_CLASSES:
            logs = functional.log_softmax(outputs.t(), 0)
            return -torch.where(y == classes[:, None], logs, 0.0).sum(0)
        return -torch.where(y[:, None] == classes, functional.log_softmax(outputs, -1), 0.0).sum(-1)
    if isinstance(loss, CustomLoss):
        return loss.each(outputs, y)
    # The loss sees batches of one sample, so that its mean over the batch is the loss of that sample.
    return vmap(lambda o, t: loss(o[None], t[None]))(outputs, y)


def losses_without_grad(loss: Loss, outputs: Tensor, y: Tensor) -> Tensor:
    """The per-sample losses, computed faster where no gradient is needed."""
    if not is_cross_entropy(loss, outputs, y):
        return per_sample_losses(loss, outputs, y)
    if outputs.shape[-1] < FEW_CLASSES:
        logs = functional.log_softmax(outputs.t(), 0).t()
    else:
        logs = functional.log_softmax(outputs, -1)
    return -logs.gather(1, y[:, None])[:, 0]


def is_cross_entropy(loss: Loss, outputs: Tensor, y: Tensor) -> bool:
    """Whether this is plain cross-entropy on class indices, for which there is a faster formula."""
    return loss is functional.cross_entropy and outputs.dim() == 2 and y.dim() == 1 and is_classes(y)
