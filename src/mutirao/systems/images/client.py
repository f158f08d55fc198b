"""Hospitals as clients: each trains on its own pictures, and validates on some it kept back."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from mutirao.core.bounds import SIZE_CAP
from mutirao.core.client_evaluation import weighted_client_metrics
from mutirao.core.fleet import ClientId, Fleet, Reply, Request, Site
from mutirao.core.rounds import Run
from mutirao.datasets.class_folders import ImageSet, agree
from mutirao.datasets.image_layouts import set_apart
from mutirao.randomness import derive_seed
from mutirao.systems.images.bags import BagExtractor, join_bags
from mutirao.systems.images.features import Extractor
from mutirao.training.inputs import map_tensors
from mutirao.training.plain import answer_sequentially
from mutirao.training.samples import ClientData, Population, Samples
from mutirao.training.trainer import Trainer

BACKBONE = "body"  # names of digests that clients and server compare
PREPROCESSING = "preprocessing"


@dataclass(frozen=True)
class Party(Trainer):
    """A Trainer that refuses work on another frozen backbone, or on pictures that were prepared otherwise.

    Both are digests; that of the backbone is empty if none is frozen.
    """

    backbone: str = ""
    preprocessing: str = ""

    def agreed(self) -> dict[str, str]:
        """What a Trainer says, the frozen backbone that made the features, and what was done with pictures before."""
        own = {BACKBONE: self.backbone, PREPROCESSING: self.preprocessing}
        return super().agreed() | {name: digest for name, digest in own.items() if digest}


@dataclass(frozen=True)
class Hospital(Party):
    """A party that also validates what it trained: `val_loss`, `val_acc`."""

    @property
    def provides(self) -> frozenset[str]:
        """What any party does, and how it validates."""
        return super().provides | {"metrics:val_loss", "metrics:val_acc"}

    def __call__(self, request: Request, site: Site) -> Reply:
        """Answer as any party does, and judge what was trained."""
        reply = super().__call__(request, site)
        return self.validate(reply, site.data.test) if request.do == "train" else reply

    many = answer_sequentially  # hospitals are few and their rounds short

    def validate(self, reply: Reply, kept: Samples) -> Reply:
        """The reply with loss and accuracy of the trained model on what was kept back."""
        if not len(kept):
            return reply
        judged = self.evaluate(reply.arrays, kept)
        more = {"val_loss": judged["loss"], "val_acc": judged["accuracy"]}
        return replace(reply, metrics=reply.metrics | more)


@dataclass
class HospitalPopulation(Population):
    """The hospitals by name; what one holds is read, split and looked at when it is first asked for.

    So a site needs only its own folder, and the server none.
    """

    pictures: Mapping[ClientId, Callable[[], ImageSet]]
    extract: Extractor | BagExtractor
    validation: float
    seed: int
    most: int = 0
    classes: tuple[str, ...] = ()
    grouped: bool = True  # whether slides are expected to be known
    anybody: bool = False  # whether any name will do: a site's own pictures are its own whatever it is called
    _made: dict[ClientId, ClientData] = field(default_factory=dict)

    @property
    def has_tests(self) -> bool:
        """Whether hospitals keep anything back."""
        return self.validation > 0

    def __len__(self) -> int:
        return len(self.pictures)

    def __iter__(self) -> Iterator[ClientId]:
        return iter(self.pictures)

    def __contains__(self, name: object) -> bool:
        return name in self.pictures or self.anybody

    def counts(self, name: ClientId) -> dict[str, int]:
        """How many pictures of each class a hospital has; no features are made for that."""
        return self._pictures(name).counts()

    def _pictures(self, name: ClientId) -> ImageSet:
        return self.pictures.get(name, next(iter(self.pictures.values())))()

    def __getitem__(self, name: ClientId) -> ClientData:
        if name not in self:
            raise KeyError(name)
        if name not in self._made:
            self._made[name] = self._read(name)
        return self._made[name]

    def _read(self, name: ClientId) -> ClientData:
        held = self._pictures(name)
        if self.classes and not self.anybody:  # what a site has by itself is compared when all agree
            agree({"the class list agreed on": self.classes, name: held.classes})
        seed = derive_seed(self.seed, 0, "validation", name)
        rows = np.arange(len(held)), np.empty(0, np.intp)
        if self.validation and len(held) > 1:
            rows = set_apart(held, self.validation, seed, f"the validation set of {name}", self.grouped)
        if self.most:
            order = np.random.default_rng(seed).permutation(rows[0])
            rows = np.sort(order[: self.most]), rows[1]
        used = held.take(np.concatenate(rows))
        found, cut = self.extract.inputs(used), len(rows[0])
        train, kept = map_tensors(found, lambda rows: rows[:cut]), map_tensors(found, lambda rows: rows[cut:])
        return ClientData(Samples(train, used.labels[:cut]), Samples(kept, used.labels[cut:]), tuple(held.classes))


def pool_hospitals(hospitals: HospitalPopulation) -> dict[ClientId, ClientData]:
    """One hospital that holds what all the others do: the pooled reference."""
    parts = [hospitals[name] for name in hospitals]
    agree({name: hospitals[name].classes for name in hospitals})
    train, kept = join_samples([p.train for p in parts]), join_samples([p.test for p in parts])
    return {"pooled": ClientData(train, kept, parts[0].classes)}


def join_samples(parts: Sequence[Samples]) -> Samples:
    """The samples of several hospitals as one set."""
    if isinstance(parts[0].x, tuple):
        return join_bags(parts)
    return Samples(torch.cat([s.x for s in parts]), torch.cat([s.y for s in parts]))


def evaluate_at_hospitals(
    fleet: Fleet, run: Run, metrics: Sequence[str] = (), size_cap: float = SIZE_CAP
) -> dict[str, float]:
    """The current model on what each hospital kept back: accuracy and loss weighted by their samples.

    `metrics` are what nothing else judges by: they are given under their own names, too.
    """
    means = weighted_client_metrics(fleet, run, {"accuracy", "loss", *metrics}, size_cap)
    named = {name: means[name] for name in metrics if name in means}
    return named | {f"distributed_{name}": means[name] for name in ("accuracy", "loss") if name in means}
