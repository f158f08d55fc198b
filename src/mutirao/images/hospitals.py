"""Hospitals as clients: each trains on its own pictures, validates on some it kept back, and tells its class list."""

import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mutirao.core.arrays import Arrays
from mutirao.core.checks import fault_of_extras, sift
from mutirao.core.fleet import ClientId, Failure, Fleet, Reply, Request, Site, failure_of
from mutirao.core.rounds import Run
from mutirao.datasets.folders import Pictures, agree
from mutirao.errors import ConfigError
from mutirao.images.features import Extractor
from mutirao.images.splits import apart
from mutirao.randomness import number
from mutirao.training.samples import Samples
from mutirao.training.trainer import Trainer

log = logging.getLogger("mutirao")

CLASSES = "classes"


class Ward(Samples):
    """What one hospital holds: samples to train on, others to validate on, and the names of its classes."""

    def __init__(self, x: Any, y: Any, validation: Samples, classes: Sequence[str]) -> None:
        super().__init__(x, y)
        self.validation, self.classes = validation, tuple(classes)


@dataclass(frozen=True)
class Hospital(Trainer):
    """A Trainer that also validates what it trained (`val_loss`, `val_acc`), and tells its classes when asked."""

    names: tuple[str, ...] = ()  # the classes, as the model numbers them

    def __call__(self, request: Request, site: Site) -> Reply:
        """Answer as a Trainer does; `evaluate` is on the pictures kept back for validation."""
        ward = site.data
        if request.do == CLASSES:
            names = json.dumps(ward.classes).encode()
            return Reply({}, {CLASSES: np.frombuffer(names, np.uint8)}, n=len(ward))
        if request.do == "evaluate":
            return Reply({}, metrics=self.evaluate(request.arrays, ward.validation), n=len(ward.validation))
        reply = super().__call__(request, site)
        return self.validated(reply, ward) if request.do == "train" else reply

    def many(
        self, requests: Mapping[ClientId, Request], sites: Mapping[ClientId, Site]
    ) -> dict[ClientId, Reply | Failure]:
        """The same for several: hospitals are few and their rounds short, so one after the other."""
        found: dict[ClientId, Reply | Failure] = {}
        for client, request in requests.items():
            try:
                found[client] = self(request, sites[client])
            except Exception as error:
                found[client] = failure_of(error)
        return found

    def validated(self, reply: Reply, ward: Ward) -> Reply:
        """The reply with loss and accuracy of the trained model on what was kept back."""
        if not len(ward.validation):
            return reply
        judged = self.evaluate(reply.arrays, ward.validation)
        return Reply(
            reply.arrays,
            reply.extras,
            reply.metrics | {"val_loss": judged["loss"], "val_acc": judged["accuracy"]},
            reply.n,
        )


@dataclass
class Wards(Mapping[ClientId, Ward]):
    """The hospitals by name; what one holds is read, split and looked at when it is first asked for.

    So a site needs only its own folder, and the server none.
    """

    pictures: Mapping[ClientId, Callable[[], Pictures]]
    extract: Extractor
    validation: float
    seed: int
    most: int = 0
    classes: tuple[str, ...] = ()
    _made: dict[ClientId, Ward] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.pictures)

    def __iter__(self) -> Iterator[ClientId]:
        return iter(self.pictures)

    def __contains__(self, name: object) -> bool:
        return name in self.pictures

    def __getitem__(self, name: ClientId) -> Ward:
        if name not in self._made:
            self._made[name] = self._read(name)
        return self._made[name]

    def _read(self, name: ClientId) -> Ward:
        held = self.pictures[name]()
        if self.classes:
            agree({"the class list agreed on": self.classes, name: held.classes})
        seed = number(self.seed, 0, "validation", name)
        rows = np.arange(len(held)), np.empty(0, np.intp)
        if self.validation and len(held) > 1:
            rows = apart(held, self.validation, seed, f"the validation set of {name}")
        if self.most:
            order = np.random.default_rng(seed).permutation(rows[0])
            rows = np.sort(order[: self.most]), rows[1]
        used = held.take(np.concatenate(rows))
        found, cut = self.extract(used.files), len(rows[0])
        kept = Samples(found[cut:], used.labels[cut:])
        return Ward(found[:cut], used.labels[:cut], kept, held.classes)


def together(wards: Wards) -> dict[ClientId, Ward]:
    """One hospital that holds what all the others do: the pooled reference."""
    parts = [wards[name] for name in wards]
    agree({name: wards[name].classes for name in wards})
    kept = Samples(*(np.concatenate([getattr(p.validation, k).numpy() for p in parts]) for k in "xy"))
    x, y = (np.concatenate([getattr(p, k).numpy() for p in parts]) for k in "xy")
    return {"pooled": Ward(x, y, kept, parts[0].classes)}


def agree_on_classes(fleet: Fleet, classes: Sequence[str], config: Mapping[str, Any]) -> None:
    """Ask every hospital for its class list before the first round; the run is refused if one differs."""
    requests = {c: Request(CLASSES, {}, config) for c in fleet.clients()}
    answers = sift(fleet.ask(requests), fault_of_extras)
    lists: dict[str, list[str]] = {"the global test set": list(classes)}
    for client, reply in answers.replies.items():
        try:
            names = json.loads(bytes(np.asarray(reply.extras[CLASSES], np.uint8)))
            lists[client] = [str(name) for name in names]
        except (KeyError, ValueError, TypeError) as error:
            raise ConfigError(f"{client} did not tell its class list in a form that can be read") from error
    for client, failure in answers.failures.items():
        log.warning("%s did not tell its class list: %s", client, failure)
    agree(lists)


def distributed(fleet: Fleet, run: Run) -> dict[str, float]:
    """The current model on what each hospital kept back: accuracy and loss weighted by their samples."""
    arrays: Arrays = run.arrays
    asked = {c: Request("evaluate", arrays, {"seed": run.seed, "round": run.round}) for c in fleet.clients()}
    answers = sift(fleet.ask(asked), fault_of_extras)
    told = [(r.n, r.metrics) for r in answers.replies.values() if r.n and {"accuracy", "loss"} <= r.metrics.keys()]
    total = sum(n for n, _ in told)
    if not total:
        return {}
    return {f"distributed_{k}": sum(n * m[k] for n, m in told) / total for k in ("accuracy", "loss")}
