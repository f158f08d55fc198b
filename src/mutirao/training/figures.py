"""What a client tells of a model besides its arrays: which figures can be asked for, and how each is worked out."""

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional

from mutirao.core.arrays import Arrays
from mutirao.core.fleet import Scalar
from mutirao.training.samples import Samples

PROBE_SAMPLES = 100
PROBED = frozenset({"entropy", "rms_loss", "gradient_norm"})  # what is measured on the model as it was received
EXTRAS = PROBED | {"squared_errors"}  # what a request to train may ask for


def metrics_of(total: float, right: int | None, seen: int) -> dict[str, float]:
    """Mean loss and, where the labels are classes, accuracy, from sums over samples."""
    metrics = {"loss": float(total) / seen}
    return metrics if right is None else metrics | {"accuracy": right / seen}


def errors_of(found: Tensor, y: Tensor) -> Tensor:
    """The squared error of each sample, (predicted class - grade)^2, as a byte."""
    errors = (found - y).square()
    if errors.numel() and int(errors.max()) > 255:
        raise ValueError("squared errors do not fit a byte: they are for up to 16 grades")
    return errors.to(torch.uint8)


def extras_of(errors: npt.NDArray[np.uint8], sizes: Sequence[int] | npt.NDArray[np.int64]) -> Arrays:
    """Squared errors in the order of the batches, and how many samples each batch had."""
    return {"squared_errors": errors, "batch_sizes": np.asarray(sizes, np.int32)}


def entropies(outputs: Tensor) -> Tensor:
    """The entropy of each sample's predicted classes, -sum p ln p."""
    logs = functional.log_softmax(outputs, -1)
    return -(logs.exp() * logs).sum(-1)


def read_extras(config: Mapping[str, Scalar], samples: Samples) -> frozenset[str]:
    """What a training request wants besides arrays: its `extras`, separated by commas."""
    names = frozenset(name.strip() for name in str(config.get("extras", "")).split(",") if name.strip())
    if names - EXTRAS:
        raise ValueError(f"there are no extras {', '.join(sorted(names - EXTRAS))}, only {', '.join(sorted(EXTRAS))}")
    if (classes := names & {"entropy", "squared_errors"}) and not is_classes(samples.y):
        raise ValueError(f"{', '.join(sorted(classes))}: only where the labels are classes")
    return names


def probe_samples(config: Mapping[str, Scalar]) -> int:
    """On how many samples at most a model is probed."""
    return int(config.get("probe_samples", PROBE_SAMPLES))


def is_classes(y: Tensor) -> bool:
    """Whether labels are class numbers."""
    return not y.is_floating_point()
