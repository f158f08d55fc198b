"""What a client does with a torch module: train it on its own samples, or judge it on others of its own."""

from dataclasses import dataclass

from torch import nn

from mutirao.core.told import TOLD
from mutirao.privacy import DPSGD
from mutirao.training.engine.encoder import hasten_encoders
from mutirao.training.engine.judging import evaluate_model
from mutirao.training.engine.recurrent import hasten_recurrent
from mutirao.training.engine.ways import answer_request, answer_requests
from mutirao.training.engine.winograd import hasten
from mutirao.training.figures import PROBED
from mutirao.training.plain import PlainTrainer
from mutirao.training.preflight import check_start
from mutirao.training.private import PrivateTrainer


@dataclass(frozen=True)
class Trainer(PlainTrainer):
    """A handler that trains `model()` by mini-batches on `site.data` and returns the trained arrays.

    With a proximal weight mu (its own, or the one the server tells) the local objective is
    F_k(w) + mu/2 |w - w_global|^2 (Li et al., 2020). `steps` > 0 replaces whole epochs. The server may also tell `lr`,
    `epochs` and `batch_size`; else the rate is `lr` times `schedule(round)`. `optimizer` is a name, a class of
    torch.optim or a function that makes one of the weights. What is frozen does not travel.

    >>> import numpy as np
    >>> trainer = Trainer(lambda: nn.Linear(2, 2), lr=0.5)
    >>> site = Site("ana", Samples(np.eye(2, dtype=np.float32), np.array([0, 1])))
    >>> reply = trainer(Request("train", trainer.initial(seed=0), {"seed": 0, "round": 1}), site)
    >>> sorted(reply.arrays), reply.n
    (['bias', 'weight'], 2)
    """

    provides = frozenset(
        {"metrics:loss", "metrics:accuracy", "extras:squared_errors", "config:probe_samples"}
        | {f"config:{name}" for name in TOLD}
        | {f"metrics:{name}" for name in PROBED}
    )

    __call__ = answer_request
    many = answer_requests
    evaluate = evaluate_model
    check = check_start

    def private_training(self, privacy: DPSGD) -> PrivateTrainer:
        """A handler that trains as this one does, with gradients that are clipped and noised sample by sample."""
        return PrivateTrainer.of(self, privacy)

    def make(self) -> nn.Module:
        """A module for one thread; our kernels do what they do faster unless `engine` asks for torch's own."""
        module = super().make()
        own = self.engine in ("auto", "threads", "processes") and self.place().type == "cpu"
        return hasten_recurrent(hasten_encoders(hasten(module))) if own else module
