"""The Trainer: a client that trains and evaluates a torch module on its own samples."""

from dataclasses import dataclass
from typing import Any

from torch import nn

from mutirao.core.hyperparameters import HYPERPARAMETERS
from mutirao.core.needs import Capabilities
from mutirao.privacy import DPSGD
from mutirao.training.corrections import missing_capabilities
from mutirao.training.dp_sgd import PrivateTrainer
from mutirao.training.engine.attention import accelerate_encoders
from mutirao.training.engine.batched_evaluation import evaluate_model
from mutirao.training.engine.dispatch import answer_request, answer_requests
from mutirao.training.engine.recurrent import accelerate_recurrent
from mutirao.training.engine.winograd import accelerate_convolutions
from mutirao.training.measurements import PROBED
from mutirao.training.plain import PlainTrainer
from mutirao.training.preflight import check_start

CAPABILITIES = Capabilities(
    metrics={"loss", "accuracy", "reach", "start_loss", *PROBED},
    extras={"squared_errors", "control"},
    config={"probe_samples", *HYPERPARAMETERS},
    request_extras={"control"},
)


@dataclass(frozen=True)
class Trainer(PlainTrainer):
    """A handler that trains `model()` by mini-batches on `site.data` and returns the trained arrays.

    Steps are w <- w - lr (g + b + mu (w - a)): with mu (its own, or the one that the server sends) they are pulled to
    an anchor a, as a rule the model received (FedProx; Li et al., 2020), and b is the correction of a method such as
    SCAFFOLD (`mutirao.training.corrections`). `steps` > 0 replaces whole epochs. The server may also send `lr`,
    `epochs` and `batch_size`; else the rate is `lr` times `schedule(round)`. `optimizer` is a name, a class of
    torch.optim or a function that makes one of the weights. What is frozen does not travel.

    >>> import numpy as np
    >>> from mutirao import Request, Samples, Site
    >>> trainer = Trainer(lambda: nn.Linear(2, 2), lr=0.1, epochs=3)
    >>> site = Site("ana", Samples(np.eye(2, dtype=np.float32), np.array([0, 1])))
    >>> reply = trainer(Request("train", trainer.initial(seed=0), {"seed": 0, "round": 1}), site)
    >>> sorted(reply.arrays), reply.n
    (['bias', 'weight'], 2)
    """

    @property
    def capabilities(self) -> Capabilities:
        """The metrics, extras and hyperparameters that it supports; some only with plain SGD."""
        return CAPABILITIES - missing_capabilities(self)

    __call__ = answer_request
    many = answer_requests
    evaluate = evaluate_model
    check = check_start

    def private_training(self, privacy: DPSGD) -> PrivateTrainer:
        """A handler that trains with DP-SGD: per-sample gradients are clipped and noised."""
        return PrivateTrainer.of(self, privacy)

    def personal_training(self, personal: Any) -> Any:
        """A handler around this trainer that gives each client a model of its own (`mutirao.personalization`)."""
        return personal.around(self)

    def make(self) -> nn.Module:
        """A new module for one thread, with our kernels unless `engine` requires torch's own layers."""
        module = super().make()
        own = self.engine in ("auto", "threads", "processes") and self.torch_device().type == "cpu"
        if own:
            return accelerate_recurrent(accelerate_encoders(accelerate_convolutions(module)))
        return module
