"""Hospitals as clients: each trains on its own pictures, validates on some it kept back, and tells its class list."""

import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from mutirao.core.agreement import as_extra
from mutirao.core.bounds import SIZE_CAP
from mutirao.core.checks import fault_of_extras, sift
from mutirao.core.evaluation import join_judgements
from mutirao.core.fleet import ClientId, Fleet, Reply, Request, Site
from mutirao.core.rounds import Run
from mutirao.datasets.folders import Pictures, agree
from mutirao.datasets.layouts import set_apart
from mutirao.images.bags import BagExtractor, join_bags
from mutirao.images.features import Extractor
from mutirao.randomness import number
from mutirao.training.inputs import change
from mutirao.training.plain import Outcomes, Requests, Sites, answer_in_turn
from mutirao.training.samples import CLASSES, ClientData, Population, Samples
from mutirao.training.trainer import Trainer

log = logging.getLogger("mutirao")

BODY = "body"


@dataclass(frozen=True)
class Party(Trainer):
    """A Trainer that tells its classes when asked, and refuses work on other classes or another frozen body.

    `body` is the frozen part's digest, empty if there is none.
    """

    body: str = ""

    def agreed(self) -> dict[str, str]:
        """What a Trainer says, and the frozen body that made the features."""
        return super().agreed() | ({BODY: self.body} if self.body else {})

    def __call__(self, request: Request, site: Site) -> Reply:
        """Answer as a Trainer does, and a question for the class list."""
        if request.do == CLASSES:
            return Reply({}, as_extra(CLASSES, json.dumps(site.data.classes).encode()), n=len(site.data))
        return super().__call__(request, site)

    def many(self, requests: Requests, sites: Sites) -> Outcomes:
        """The same of many, by the engine; a question for classes is answered in turn."""
        if any(request.do == CLASSES for request in requests.values()):
            return answer_in_turn(self, requests, sites)
        return super().many(requests, sites)


@dataclass(frozen=True)
class Hospital(Party):
    """A party that also validates what it trained: `val_loss`, `val_acc`."""

    provides = Trainer.provides | {"metrics:val_loss", "metrics:val_acc"}

    def __call__(self, request: Request, site: Site) -> Reply:
        """Answer as any party does, and judge what was trained."""
        reply = super().__call__(request, site)
        return self.validate(reply, site.data.test) if request.do == "train" else reply

    many = answer_in_turn  # hospitals are few and their rounds short

    def validate(self, reply: Reply, kept: Samples) -> Reply:
        """The reply with loss and accuracy of the trained model on what was kept back."""
        if not len(kept):
            return reply
        judged = self.evaluate(reply.arrays, kept)
        more = {"val_loss": judged["loss"], "val_acc": judged["accuracy"]}
        return replace(reply, metrics=reply.metrics | more)


@dataclass
class Wards(Population):
    """The hospitals by name; what one holds is read, split and looked at when it is first asked for.

    So a site needs only its own folder, and the server none.
    """

    pictures: Mapping[ClientId, Callable[[], Pictures]]
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

    def __getitem__(self, name: ClientId) -> ClientData:
        if name not in self:
            raise KeyError(name)
        if name not in self._made:
            self._made[name] = self._read(name)
        return self._made[name]

    def _read(self, name: ClientId) -> ClientData:
        held = self.pictures.get(name, next(iter(self.pictures.values())))()
        if self.classes:
            agree({"the class list agreed on": self.classes, name: held.classes})
        seed = number(self.seed, 0, "validation", name)
        rows = np.arange(len(held)), np.empty(0, np.intp)
        if self.validation and len(held) > 1:
            rows = set_apart(held, self.validation, seed, f"the validation set of {name}", self.grouped)
        if self.most:
            order = np.random.default_rng(seed).permutation(rows[0])
            rows = np.sort(order[: self.most]), rows[1]
        used = held.take(np.concatenate(rows))
        found, cut = self.extract.inputs(used), len(rows[0])
        train, kept = change(found, lambda rows: rows[:cut]), change(found, lambda rows: rows[cut:])
        return ClientData(Samples(train, used.labels[:cut]), Samples(kept, used.labels[cut:]), tuple(held.classes))


def pool_hospitals(wards: Wards) -> dict[ClientId, ClientData]:
    """One hospital that holds what all the others do: the pooled reference."""
    parts = [wards[name] for name in wards]
    agree({name: wards[name].classes for name in wards})
    train, kept = join_samples([p.train for p in parts]), join_samples([p.test for p in parts])
    return {"pooled": ClientData(train, kept, parts[0].classes)}


def join_samples(parts: Sequence[Samples]) -> Samples:
    """The samples of several hospitals as one set."""
    if isinstance(parts[0].x, tuple):
        return join_bags(parts)
    return Samples(torch.cat([s.x for s in parts]), torch.cat([s.y for s in parts]))


def find_odd(fleet: Fleet, classes: Sequence[str], config: Mapping[str, Any]) -> list[ClientId]:
    """Ask every hospital for its class list before the first round: those whose list is not the agreed one, named.

    One of them cannot stop the others; if more than half of them differ the run is refused.
    """
    requests = {c: Request(CLASSES, {}, config) for c in fleet.clients()}
    answers = sift(fleet.ask(requests), fault_of_extras)
    for client, failure in answers.failures.items():
        log.warning("%s did not tell its class list: %s", client, failure)
    told = {c: read_classes(r) for c, r in answers.replies.items()}
    odd = {c: names for c, names in told.items() if names != list(classes)}
    if 2 * len(odd) > len(told):
        agree({"the agreed list": classes, **odd})
    for client, names in odd.items():
        log.warning("%s is refused: its classes are %s, agreed are %s", client, shown(names), shown(classes))
    return sorted(odd)


def read_classes(reply: Reply) -> list[str]:
    """The class list in a reply; empty if it cannot be read."""
    try:
        names = json.loads(bytes(np.asarray(reply.extras[CLASSES], np.uint8)))
        return [str(name) for name in names]
    except (KeyError, ValueError, TypeError, RecursionError):
        return []


def shown(names: Sequence[str]) -> str:
    """A few of these names, fit for a log."""
    return ", ".join(repr(name[:40]) for name in names[:20]) or "none that can be read"


def evaluate_at_hospitals(fleet: Fleet, run: Run, size_cap: float = SIZE_CAP) -> dict[str, float]:
    """The current model on what each hospital kept back: accuracy and loss weighted by their samples."""
    means = join_judgements(fleet, run, ("accuracy", "loss"), size_cap)
    return {f"distributed_{name}": value for name, value in means.items()}
