"""Personalized federated learning by name: each client has a model of its own.

Methods that *keep* arrays hold them in the client's state: these arrays are never sent, and replace those of the
received model. The other methods share the whole model, and each client derives its own from it. A client is evaluated
with its own model on its own test data. A client that has not trained yet fits its personal part first; so do the new
clients, a share `new` of all that never trains. The client side is in `mutirao.personalization.handler`.
"""

import math
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, ClassVar

from mutirao.config import load_name
from mutirao.core.fleet import ClientId
from mutirao.core.parts import AnyHandler, as_handler
from mutirao.errors import ConfigError
from mutirao.randomness import rng
from mutirao.selection import check_setting


class Personal:
    """The interface of all methods; the base class means one model for all clients."""

    name = "none"
    new: float = 0.0
    whole: bool = True  # whether the run's model is complete, so that it can be evaluated by itself, too

    def at_client(self, handler: AnyHandler) -> AnyHandler:
        """The handler as the client runs it."""
        return handler

    def new_clients(self, clients: Collection[ClientId], seed: int) -> frozenset[ClientId]:
        """The new clients: a random share `new` of all, at least one if `new` is above 0."""
        if not self.new:
            return frozenset()
        count = max(1, round(self.new * len(clients)))
        if count >= len(clients):
            raise ConfigError(f"personal.new={self.new:g}: none of {len(clients)} clients is left to train")
        sampled = rng(seed, 0, "new clients").choice(sorted(clients), count, replace=False)
        return frozenset(str(client) for client in sampled)


@dataclass(frozen=True)
class OneModel(Personal):
    """No personalization: all clients use the model that they train together.

    >>> from torch import nn
    >>> from mutirao import Trainer
    >>> trainer = Trainer(lambda: nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)))
    >>> sorted(trainer.initial(0))  # all of the model travels
    ['0.bias', '0.weight', '2.bias', '2.weight']
    """


@dataclass(frozen=True)
class Settings(Personal):
    """Settings of all methods: `epochs` for the personal part (0: as many as of a round), and the share `new`."""

    epochs: int = 0
    new: float = 0.0
    # What trains at a client, as module:class. It needs torch, so it is imported when a task is made.
    handler: ClassVar[str] = "mutirao.personalization.handler:PersonalTrainer"

    def __post_init__(self) -> None:
        check_setting("epochs", self.epochs >= 0, self.epochs, "0 (as many as of a round) or above")
        check_setting("new", 0 <= self.new < 1, self.new, "0 (none) or above, and below 1")

    def at_client(self, handler: AnyHandler) -> AnyHandler:
        """The handler with a personal model."""
        return as_handler(handler).personal_training(self)

    def around(self, trainer: Any) -> Any:
        """The handler of this method around a `Trainer`."""
        return load_name(self.handler).of(trainer, self)


@dataclass(frozen=True)
class Keeps(Settings):
    """Base class of methods that keep arrays at the client."""

    whole = False


@dataclass(frozen=True)
class FedPer(Keeps):
    """The last layer, or the `layers` named (patterns, separated by commas), is personal; all is trained at once.

    Arivazhagan, Aggarwal, Singh and Choudhary, "Federated Learning with Personalization Layers", 2019. `epochs` are
    those in which a new client fits them, the rest frozen.

    >>> from torch import nn
    >>> from mutirao import Trainer
    >>> trainer = Trainer(lambda: nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)))
    >>> sorted(trainer.personal_training(FedPer()).initial(0))  # the last layer does not travel
    ['0.bias', '0.weight']
    """

    layers: str = ""
    name = "fedper"
    handler = "mutirao.personalization.handler:KeptLayersTrainer"


@dataclass(frozen=True)
class FedRep(Keeps):
    """As FedPer, but alternating: first `epochs` of the personal layers, then the round's epochs of the others.

    Collins, Hassani, Mokhtari and Shakkottai, "Exploiting Shared Representations for Personalized Federated Learning",
    ICML 2021.

    >>> from torch import nn
    >>> from mutirao import Trainer
    >>> trainer = Trainer(lambda: nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)))
    >>> sorted(trainer.personal_training(FedRep(layers="2", epochs=3)).initial(0))
    ['0.bias', '0.weight']
    """

    layers: str = ""
    name = "fedrep"
    handler = "mutirao.personalization.alternating:AlternatingTrainer"


@dataclass(frozen=True)
class FedRecon(Keeps):
    """The personal layers are reconstructed whenever they are needed; a client keeps no state.

    A round draws a share of the client's samples, its `support`; the layers are fitted to it for `epochs` at the rate
    `lr` (0: the round's), from where all begin, the rest of the model frozen. Then that rest is trained on the other
    samples, the query, with those layers frozen, and alone is sent. With `support` = 1 all samples do both. Singhal,
    Sidahmed, Garrett, Wu, Rush and Prakash, "Federated Reconstruction: Partially Local Federated Learning", NeurIPS
    2021.

    >>> from torch import nn
    >>> from mutirao import Trainer
    >>> trainer = Trainer(lambda: nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)))
    >>> personal = trainer.personal_training(FedRecon(layers="0", support=0.5))
    >>> sorted(personal.initial(0))  # the first layer is rebuilt where it is needed
    ['2.bias', '2.weight']
    """

    layers: str = ""
    support: float = 0.5
    lr: float = 0.0
    name = "fedrecon"
    handler = "mutirao.personalization.alternating:ReconstructingTrainer"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_setting("support", 0 < self.support <= 1, self.support, "above 0 and at most 1 (all samples do both)")
        check_setting("lr", 0 <= self.lr < math.inf, self.lr, "0 (that of the round) or above")


@dataclass(frozen=True)
class FedBN(Keeps):
    """Batch normalisation is personal: its weights, biases and statistics stay at the client.

    Li, Jiang, Zhang, Kamp and Dou, "FedBN: Federated Learning on Non-IID Features via Local Batch Normalization", ICLR
    2021. `epochs` are those in which a new client fits them, the rest frozen.

    >>> from torch import nn
    >>> from mutirao import Trainer
    >>> trainer = Trainer(lambda: nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2)))
    >>> sorted(trainer.personal_training(FedBN()).initial(0))  # nothing of layer 1
    ['0.bias', '0.weight', '2.bias', '2.weight']
    """

    name = "fedbn"
    handler = "mutirao.personalization.handler:KeptLayersTrainer"


@dataclass(frozen=True)
class Ditto(Settings):
    """A second model v beside the common w: v <- v - lr (g(v) + lam (v - w)), starting from the first received w.

    Li, Hu, Beirami and Smith, "Ditto: Fair and Robust Federated Learning Through Personalization", ICML 2021. `epochs`
    are those of v in a round, with w as it was received.

    >>> from torch import nn
    >>> from mutirao import Trainer
    >>> trainer = Trainer(lambda: nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)))
    >>> sorted(trainer.personal_training(Ditto(lam=0.1)).initial(0))  # the whole common model; the second one stays
    ['0.bias', '0.weight', '2.bias', '2.weight']
    """

    lam: float = 0.1
    name = "ditto"
    handler = "mutirao.personalization.handler:SecondModelTrainer"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_setting("lam", 0 <= self.lam < math.inf, self.lam, "0 (no pull towards the common model) or above")


@dataclass(frozen=True)
class Finetune(Settings):
    """One model for all, fine-tuned by a client for `epochs` on its own data before each use; nothing is kept.

    Yu, Bagdasaryan and Shmatikov, "Salvaging Federated Learning by Local Adaptation", 2020.

    >>> from torch import nn
    >>> from mutirao import Trainer
    >>> trainer = Trainer(lambda: nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)))
    >>> sorted(trainer.personal_training(Finetune(epochs=5)).initial(0))  # the whole model travels, nothing is kept
    ['0.bias', '0.weight', '2.bias', '2.weight']
    """

    name = "finetune"


NAMES: dict[str, type[Personal]] = {
    "none": OneModel,
    "fedper": FedPer,
    "fedrep": FedRep,
    "fedbn": FedBN,
    "fedrecon": FedRecon,
    "ditto": Ditto,
    "finetune": Finetune,
}
KEPT = frozenset(name for name, kind in NAMES.items() if not kind.whole)  # of these no model is whole at the server
