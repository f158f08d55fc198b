"""Image clients, such as hospitals: each trains on its own images, and validates on a part that it holds out."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from mutirao.core.client_evaluation import weighted_client_metrics
from mutirao.core.fleet import ClientId, Fleet, Reply, Request, Site
from mutirao.core.needs import Capabilities
from mutirao.core.rounds import Run
from mutirao.core.validation import SIZE_CAP
from mutirao.datasets.class_folders import ImageSet, require_same_classes
from mutirao.datasets.image_layouts import train_test_split
from mutirao.randomness import derive_seed
from mutirao.systems.images.bags import BagExtractor, concatenate_bags
from mutirao.systems.images.features import Extractor
from mutirao.training.inputs import map_tensors
from mutirao.training.plain import answer_sequentially
from mutirao.training.samples import ClientData, Population, Samples
from mutirao.training.trainer import Trainer

BACKBONE = "body"  # names of digests that clients and server compare
PREPROCESSING = "preprocessing"


@dataclass(frozen=True)
class ImageTrainer(Trainer):
    """A Trainer that refuses requests for another frozen backbone or another preprocessing.

    Both are digests; the backbone's is empty if no part of it is frozen.
    """

    backbone: str = ""
    preprocessing: str = ""

    def agreed(self) -> dict[str, str]:
        """The Trainer's digests, and those of the frozen backbone and of the preprocessing."""
        own = {BACKBONE: self.backbone, PREPROCESSING: self.preprocessing}
        return super().agreed() | {name: digest for name, digest in own.items() if digest}


@dataclass(frozen=True)
class Hospital(ImageTrainer):
    """A client that also validates the model it trained: `val_loss`, `val_acc`."""

    @property
    def capabilities(self) -> Capabilities:
        """Those of a Trainer, and the validation metrics."""
        return super().capabilities | Capabilities(metrics={"val_loss", "val_acc"})

    def __call__(self, request: Request, site: Site) -> Reply:
        """Handle a request as a Trainer does, and evaluate the model after training."""
        reply = super().__call__(request, site)
        if request.do == "train":
            return self.validate(reply, site.data.test)
        return reply

    # One after another: hospitals are few, and their rounds short.
    many = answer_sequentially

    def validate(self, reply: Reply, held_out: Samples) -> Reply:
        """Add loss and accuracy of the trained model on the held-out samples."""
        if not len(held_out):
            return reply
        metrics = self.evaluate(reply.arrays, held_out)
        validation = {"val_loss": metrics["loss"], "val_acc": metrics["accuracy"]}
        return replace(reply, metrics=reply.metrics | validation)


@dataclass
class HospitalPopulation(Population):
    """Hospitals by name; a hospital's images are read, split and turned into features when first used.

    So a site needs only its own folder, and the server none.
    """

    images: Mapping[ClientId, Callable[[], ImageSet]]
    extract: Extractor | BagExtractor
    validation: float
    seed: int
    max_samples: int = 0  # 0: all
    classes: tuple[str, ...] = ()
    grouped: bool = True  # whether the slide of each image is expected to be known
    accepts_any_client: bool = False  # a site's own images belong to it whatever its name
    _loaded: dict[ClientId, ClientData] = field(default_factory=dict)

    @property
    def has_tests(self) -> bool:
        """Whether hospitals hold out samples for validation."""
        return self.validation > 0

    def __len__(self) -> int:
        return len(self.images)

    def __iter__(self) -> Iterator[ClientId]:
        return iter(self.images)

    def __contains__(self, name: object) -> bool:
        return name in self.images or self.accepts_any_client

    def counts(self, name: ClientId) -> dict[str, int]:
        """How many images of each class a hospital has, without computing features."""
        return self._images(name).counts()

    def _images(self, name: ClientId) -> ImageSet:
        return self.images.get(name, next(iter(self.images.values())))()

    def __getitem__(self, name: ClientId) -> ClientData:
        if name not in self:
            raise KeyError(name)
        if name not in self._loaded:
            self._loaded[name] = self._read(name)
        return self._loaded[name]

    def _read(self, name: ClientId) -> ClientData:
        images = self._images(name)
        # The classes of a site's own images are compared in the agreement before the first round.
        if self.classes and not self.accepts_any_client:
            require_same_classes({"the class list agreed on": self.classes, name: images.classes})
        seed = derive_seed(self.seed, 0, "validation", name)
        train_rows = np.arange(len(images))
        validation_rows = np.empty(0, np.intp)
        if self.validation and len(images) > 1:
            where = f"the validation set of {name}"
            train_rows, validation_rows = train_test_split(images, self.validation, seed, where, self.grouped)
        if self.max_samples:
            order = np.random.default_rng(seed).permutation(train_rows)
            train_rows = np.sort(order[: self.max_samples])
        # One call computes the features of both sets; training rows come first, up to `cut`.
        used = images.take(np.concatenate([train_rows, validation_rows]))
        inputs = self.extract.inputs(used)
        cut = len(train_rows)
        train = Samples(map_tensors(inputs, lambda rows: rows[:cut]), used.labels[:cut])
        held_out = Samples(map_tensors(inputs, lambda rows: rows[cut:]), used.labels[cut:])
        return ClientData(train, held_out, tuple(images.classes))


def pool_hospitals(hospitals: HospitalPopulation) -> dict[ClientId, ClientData]:
    """One client with the data of all hospitals: the centralised reference."""
    parts = [hospitals[name] for name in hospitals]
    require_same_classes({name: hospitals[name].classes for name in hospitals})
    train = concatenate_samples([p.train for p in parts])
    test = concatenate_samples([p.test for p in parts])
    return {"pooled": ClientData(train, test, parts[0].classes)}


def concatenate_samples(parts: Sequence[Samples]) -> Samples:
    """The samples of several hospitals as one set."""
    if isinstance(parts[0].x, tuple):
        return concatenate_bags(parts)
    return Samples(torch.cat([s.x for s in parts]), torch.cat([s.y for s in parts]))


def evaluate_at_hospitals(
    fleet: Fleet, run: Run, metrics: Sequence[str] = (), size_cap: float = SIZE_CAP
) -> dict[str, float]:
    """Evaluate the current model on each hospital's held-out samples; return means weighted by samples.

    Accuracy and loss are named `distributed_*`; `metrics`, where no test set gives them, keep their own names.
    """
    means = weighted_client_metrics(fleet, run, {"accuracy", "loss", *metrics}, size_cap)
    named = {name: means[name] for name in metrics if name in means}
    return named | {f"distributed_{name}": means[name] for name in ("accuracy", "loss") if name in means}
