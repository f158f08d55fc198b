"""What a client does in groups: sign its warm-up, train its group's model, judge it, and take over a finished one.

A group's head may have fewer outputs than there are classes; the class map travels with the request, as
`classes = "0,3"`: output 0 is class 0, output 1 is class 3.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn import functional

from mutirao.core.arrays import Arrays, part_of
from mutirao.core.fleet import ClientId, Failure, Reply, Request, Scalar, Site, failure_of
from mutirao.core.rounds import Run
from mutirao.groups.signature import generator, noised
from mutirao.groups.state import State
from mutirao.training.samples import Samples
from mutirao.training.trainer import Trainer, one_thread

TAKEN = "model."  # under which a site keeps the model it was handed
CHUNK = 512  # samples judged at once


@dataclass(frozen=True)
class Holdout:
    """What a client holds: samples to train on, and others it only judges by."""

    train: Samples
    test: Samples


@dataclass(frozen=True)
class Member:
    """A handler for `warm`, `train`, `evaluate`, `take` and `probe`; `trainers(outputs)` trains a head of that size."""

    trainers: Callable[[int], Trainer]
    classes: int
    signature: Any
    warm_epochs: int
    head: str

    provides = Trainer.provides

    def __call__(self, request: Request, site: Site) -> Reply:
        """The answer to one request."""
        return self.answer(
            request, site, self.trainer(request)(*self.inner(request, site)) if inside(request) else None
        )

    def many(
        self, requests: Mapping[ClientId, Request], sites: Mapping[ClientId, Site]
    ) -> dict[ClientId, Reply | Failure]:
        """The same answers for many clients at once; those with heads of one size go through the engine together."""
        out: dict[ClientId, Reply | Failure] = {}
        stacks: dict[tuple[str, int], dict[ClientId, tuple[Request, Site]]] = {}
        for c in sorted(requests):
            try:
                if inside(requests[c]):
                    kind = (requests[c].do, len(class_map(requests[c].config, self.classes)))
                    stacks.setdefault(kind, {})[c] = self.inner(requests[c], sites[c])
                else:
                    out[c] = self.answer(requests[c], sites[c], None)
            except Exception as error:  # it is this client's failure alone
                out[c] = failure_of(error)
        for stack in stacks.values():
            trainer = self.trainer(requests[next(iter(stack))])
            made = trainer.many({c: r for c, (r, _) in stack.items()}, {c: s for c, (_, s) in stack.items()})
            for c, reply in made.items():
                out[c] = self.answer(requests[c], sites[c], reply) if isinstance(reply, Reply) else reply
        return dict(sorted(out.items()))

    def trainer(self, request: Request) -> Trainer:
        """Who trains the model of a request: for its head, and for as many epochs as a warm-up or a round takes."""
        if request.do == "warm":
            return warmer(self.trainers(self.classes), self.warm_epochs)
        return self.trainers(len(class_map(request.config, self.classes)))

    def inner(self, request: Request, site: Site) -> tuple[Request, Site]:
        """What the trainer is asked, and the client's own samples as that model names their classes."""
        samples = site.data.train
        if request.do != "warm" and "classes" in request.config:
            samples = renamed(samples, class_map(request.config, self.classes), self.classes)
        plain = {k: v for k, v in request.config.items() if k not in ("classes", "holdings")}
        return Request("train" if request.do == "warm" else request.do, request.arrays, plain), replace(
            site, data=samples
        )

    def answer(self, request: Request, site: Site, made: Reply | None) -> Reply:
        """What leaves the client: of a warm-up only the signature, never the model."""
        if made is not None:
            return self.signed(request, site, made) if request.do == "warm" else made
        if request.do not in ("evaluate", "take"):
            raise ValueError(f"a member of groups can warm, train, evaluate, take and probe, not {request.do!r}")
        if request.do == "take":
            site.state.update({TAKEN + k: v.copy() for k, v in request.arrays.items()})
        metrics = self.judged(request, site.data)
        return Reply({}, metrics=metrics, n=max(1, len(site.data.test)))

    def signed(self, request: Request, site: Site, made: Reply) -> Reply:
        """The signature of a warm-up and, if asked for, which classes the client holds."""
        part, config = self.signature, request.config
        vector = part(request.arrays, made.arrays, self.head)
        if part.epsilon:
            draw = generator(part.repeatable, int(config["seed"]), int(config["round"]), site.id)
            vector = noised(vector, part.epsilon, part.clip, draw)
        extras: Arrays = {"signature": vector.astype(np.float32)}
        if config.get("holdings"):
            extras["holdings"] = held(site.data.train, self.classes).astype(np.uint8)
        return Reply({}, extras, {}, made.n)

    def judged(self, request: Request, data: Holdout) -> dict[str, float]:
        """Loss and accuracy on the client's own test samples; `accuracy_known` when only classes it holds may be named.

        A label that the head does not have counts as wrong.
        """
        names = np.array(class_map(request.config, self.classes))
        model = self.trainers(len(names)).filled(request.arrays).eval()
        outputs, y = outputs_of(model, data.test)
        guess = names[outputs.argmax(1).numpy()]
        known = torch.from_numpy(held(data.train, self.classes)[names])
        among = outputs.masked_fill(~known, -torch.inf) if known.any() else outputs
        place = np.full(self.classes, -1)
        place[names] = np.arange(len(names))
        target = torch.from_numpy(place[y])
        seen = target >= 0
        metrics = {
            "accuracy": float(np.mean(guess == y)),
            "accuracy_known": float(np.mean(names[among.argmax(1).numpy()] == y)),
        }
        if bool(seen.any()):
            metrics["loss"] = float(functional.cross_entropy(outputs[seen], target[seen]))
        return metrics

    def opinions(self, run: Run, samples: Samples) -> tuple[dict[str, npt.NDArray[np.float64]], dict[str, list[int]]]:
        """What the model of each group says of samples, as probabilities, and its class map: what `combine` takes."""
        state = State.from_memory(run.memory)
        if state is None:
            raise ValueError("the run has formed no groups yet")
        out = {}
        for group, names in state.classes.items():
            model = self.trainers(len(names)).filled(part_of(run.arrays, group)).eval()
            out[group] = outputs_of(model, samples)[0].double().softmax(1).numpy()
        return out, state.classes


@lru_cache(maxsize=8)
def warmer(trainer: Trainer, epochs: int) -> Trainer:
    """The trainer of the test model; kept, because a trainer keeps what it has prepared."""
    return replace(trainer, epochs=epochs)


def inside(request: Request) -> bool:
    """Whether a request is for the trainer inside."""
    return request.do in ("warm", "train", "probe")


def class_map(config: Mapping[str, Scalar], classes: int) -> list[int]:
    """Which class each output stands for."""
    text = str(config.get("classes", ""))
    return [int(c) for c in text.split(",")] if text else list(range(classes))


def renamed(samples: Samples, names: list[int], classes: int) -> Samples:
    """The samples whose classes a head has, labelled by its outputs."""
    y, index = outputs_for(samples.y, tuple(names), classes), samples.index
    rows = np.arange(len(samples)) if index is None else index
    return Samples(samples.x, y, rows[y.numpy()[rows] >= 0])


@lru_cache(maxsize=64)
def outputs_for(y: Tensor, names: tuple[int, ...], classes: int) -> Tensor:
    """Labels as outputs of a head, -1 where it has none; made once for a storage that clients share."""
    place = torch.full((classes,), -1, dtype=torch.int64)
    place[list(names)] = torch.arange(len(names))
    return place[y]


def held(samples: Samples, classes: int) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """Which classes the samples have."""
    y = samples.y.numpy() if samples.index is None else samples.y.numpy()[samples.index]
    return np.bincount(y, minlength=classes) > 0


def outputs_of(model: nn.Module, samples: Samples) -> tuple[Tensor, np.ndarray[Any, Any]]:
    """What a model says of each sample, and the labels."""
    if not len(samples):
        raise ValueError("has no samples to judge by")
    with one_thread(), torch.inference_mode():
        batches = [samples.batch(np.arange(i, min(i + CHUNK, len(samples)))) for i in range(0, len(samples), CHUNK)]
        return torch.cat([model(x) for x, _ in batches]), torch.cat([y for _, y in batches]).numpy()


def last_layer(model: nn.Module) -> str:
    """The name of the last dense layer, whose bias and weights are a signature."""
    names = [name for name, m in model.named_modules() if isinstance(m, nn.Linear)]
    if not names:
        raise ValueError("the model has no dense layer at its end, so clients cannot be grouped by it")
    return str(names[-1])
