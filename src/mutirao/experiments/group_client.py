"""What a client does in groups: sign its warm-up, train its group's model, judge it, and take over a finished one.

A group's head may have fewer outputs than there are classes; the class map travels with the request, as
`classes = "0,3"`: output 0 is class 0, output 1 is class 3.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn import functional

from mutirao.clustering.choices import FIT_EPOCHS
from mutirao.clustering.group_state import Grouping
from mutirao.clustering.signature_handler import SIGNS
from mutirao.clustering.signatures import add_noise, generator, noise_of
from mutirao.core.arrays import Arrays, part_of
from mutirao.core.fleet import ClientId, Reply, Request, Scalar, Site, failure_of
from mutirao.core.hyperparameters import check_hyperparameter
from mutirao.core.rounds import Run
from mutirao.errors import Refused
from mutirao.privacy import RELEASES, SPENT, AtClient, Central, NoPrivacy
from mutirao.privacy.accounting import Releases
from mutirao.randomness import rng
from mutirao.training.inputs import call_model, map_tensors
from mutirao.training.lr_schedules import Constant, Schedule
from mutirao.training.optimizers import one_thread
from mutirao.training.plain import Outcomes, Requests, Sites, answer_or_failure
from mutirao.training.samples import Samples, own_test_samples
from mutirao.training.torch_device import device_of
from mutirao.training.trainer import Trainer

OF_CLASSES = {"classes", "holdings"}  # settings of a request by which a client's answer depends on its classes
TAKEN = "model."  # under which a site keeps the model it was handed
CHUNK = 512  # samples judged at once


@dataclass(frozen=True)
class GroupMember:
    """A handler for `warm`, `train`, `evaluate`, `take`, `choose`, `fit` and `probe`.

    `trainers(outputs)` trains a head of that size.
    """

    trainers: Callable[[int], Trainer]
    classes: int
    signature: Any
    warm_epochs: int
    head: str
    privacy: Any = NoPrivacy()  # what each client does for its own
    hold: float = 0.0  # share of its training samples that a client keeps back, to say which model serves it best

    @property
    def provides(self) -> frozenset[str]:
        """What a member sends besides arrays; where it sees to its own privacy, only what it has spent."""
        private = SPENT | {"config:mu"} if self.private else self.trainers(self.classes).provides | {"evaluate"}
        return private | {SIGNS}

    @property
    def private(self) -> bool:
        """Whether nothing but noised updates and signatures may leave a client."""
        return not isinstance(self.privacy, NoPrivacy | Central)

    @property
    def schedule(self) -> Schedule:
        """How the rate of the groups' models goes from round to round."""
        return self.trainers(self.classes).schedule

    def __call__(self, request: Request, site: Site) -> Reply:
        """The answer to one request."""
        self.permit(request)
        made = self.handler(request)(*self.inner(request, site)) if self.inside(request) else None
        return self.answer(request, site, made)

    def many(self, requests: Requests, sites: Sites) -> Outcomes:
        """The same answers for many clients at once; those with heads of one size go through the engine together."""
        out: Outcomes = {}
        stacks: dict[tuple[str, int], dict[ClientId, tuple[Request, Site]]] = {}
        for c in sorted(requests):
            try:
                self.permit(requests[c])
                if self.inside(requests[c]):
                    kind = (requests[c].do, len(class_map(requests[c].config, self.classes)))
                    stacks.setdefault(kind, {})[c] = self.inner(requests[c], sites[c])
                else:
                    out[c] = self.answer(requests[c], sites[c], None)
            except Exception as error:  # it is this client's failure alone
                out[c] = failure_of(error)
        for stack in stacks.values():
            handler = self.handler(requests[next(iter(stack))])
            made = handler.many({c: r for c, (r, _) in stack.items()}, {c: s for c, (_, s) in stack.items()})
            for c, reply in made.items():
                out[c] = reply
                if isinstance(reply, Reply):
                    out[c] = answer_or_failure(partial(self.answer, made=reply), requests[c], sites[c])
        return dict(sorted(out.items()))

    def inside(self, request: Request) -> bool:
        """Whether a request is for the trainer inside; a signature of the data alone needs no training."""
        if request.do == "warm":
            return bool(self.signature.trains)
        return request.do in ("train", "probe") or (request.do == "fit" and bool(request.config.get(FIT_EPOCHS)))

    def permit(self, request: Request) -> None:
        """Refuse what would tell more of a client than its own privacy, or the noise on its signature, lets it."""
        if (self.private or self.signature.epsilon) and request.config.keys() & OF_CLASSES:
            raise Refused("privacy", "which classes a client holds is not told: use head=full")
        if not self.private:
            return
        if request.do not in ("warm", "train"):
            raise Refused("privacy", f"only noised updates and signatures leave, no answer to {request.do!r}")
        if request.do == "warm" and not self.signature.epsilon:
            raise Refused("privacy", "a signature leaves only with noise, which signature.epsilon says how much of")

    def check(self, arrays: Arrays, population: Mapping[ClientId, Any]) -> None:
        """The first model against everybody's data; those of groups, which a run goes on with, have the same layers."""
        trainer = self.trainers(self.classes)
        trainer.check(trainer.initial(0), population)

    def handler(self, request: Request) -> Any:
        """Who trains the model of a request: for its head, and for as many epochs as a warm-up or a round takes."""
        if request.do == "warm":  # of which only the signature leaves, with noise of its own
            return warm_up_trainer(self.trainers(self.classes), self.warm_epochs)
        return with_privacy(self.privacy, self.trainers(len(class_map(request.config, self.classes))))

    def inner(self, request: Request, site: Site) -> tuple[Request, Site]:
        """What the trainer is asked, and the client's own samples as that model names their classes."""
        samples, names = Samples.of(site.data), class_map(request.config, self.classes)
        if request.do != "warm":
            samples = self.part(request, site)[0]
            samples = relabel(samples, names, self.classes) if "classes" in request.config else samples
        plain = {k: v for k, v in request.config.items() if k not in OF_CLASSES | {"keep", FIT_EPOCHS}}
        if request.do == "fit":  # from wherever the rate of rounds has gone to
            plain["lr"] = self.trainers(len(names)).lr
            plain["epochs"] = check_hyperparameter("epochs", request.config[FIT_EPOCHS])
        do = "train" if request.do in ("warm", "fit") else request.do
        return replace(request, do=do, config=plain), replace(site, data=samples)

    def part(self, request: Request, site: Site) -> tuple[Samples, Samples]:
        """The samples that a client trains on, and those that it keeps back."""
        return split_held_out(Samples.of(site.data), self.hold, int(request.config.get("seed", 0)), site.id)

    def answer(self, request: Request, site: Site, made: Reply | None) -> Reply:
        """What leaves the client: of a warm-up only the signature, never the model."""
        if request.do == "warm":
            return self.sign(request, site, made)
        if request.do == "fit":
            return self.fit(request if made is None else replace(request, arrays=made.arrays), site)
        if made is not None:
            return made
        if request.do == "choose":
            return self.choose(request.arrays, Samples.of(site.data))
        if request.do not in ("evaluate", "take"):
            kinds = "warm, train, evaluate, take, choose, fit and probe"
            raise ValueError(f"a member of groups can {kinds}, not {request.do!r}")
        if request.do == "take":
            site.state.update({TAKEN + k: v.copy() for k, v in request.arrays.items()})
        metrics, used = self.evaluate(request, Samples.of(site.data), own_test_samples(site.data))
        return Reply({}, metrics=metrics, n=max(1, used))

    def fit(self, request: Request, site: Site) -> Reply:
        """How a model fitted to the client's own samples does on its test samples and on those kept back.

        The model stays; if the request says `keep`, it is the one the client goes on with.
        """
        _, held = self.part(request, site)
        metrics, used = self.evaluate(request, Samples.of(site.data), own_test_samples(site.data))
        if len(held):
            metrics["accuracy_held"] = self.evaluate(request, Samples.of(site.data), held)[0]["accuracy"]
        if request.config.get("keep"):
            site.state.update({TAKEN + k: v.copy() for k, v in request.arrays.items()})
        return Reply({}, metrics=metrics, n=max(1, used))

    def sign(self, request: Request, site: Site, made: Reply | None) -> Reply:
        """The signature of a warm-up, or of the data; if asked, the classes held, but for a signature with noise."""
        part, config, samples = self.signature, request.config, Samples.of(site.data)
        vector = part(samples) if made is None else part(request.arrays, made.arrays, self.head)
        table = self.charge(site) if self.private else None
        if part.epsilon:
            draw = generator(part.repeatable, int(config["seed"]), int(config["round"]), site.id)
            vector = add_noise(vector, part.epsilon, part.clip, draw)
        extras: Arrays = {"signature": vector.astype(np.float32)}
        if table is not None:
            site.state[RELEASES] = table
        if part.epsilon:
            return Reply({}, extras, {}, 1)  # there is no noise on the number of samples
        if config.get("holdings"):
            extras["holdings"] = classes_in(samples, self.classes).astype(np.uint8)
        return Reply({}, extras, {}, len(samples) if made is None else made.n)

    def choose(self, models: Arrays, samples: Samples) -> Reply:
        """Which of several groups' models has the least mean loss on the samples to train on: its number alone."""
        trainer, losses = self.trainers(self.classes), []
        for group in sorted({name.partition("/")[0] for name in models}):
            outputs, y = outputs_of(trainer.fill(part_of(models, group)).eval(), samples)
            losses.append(float(functional.cross_entropy(outputs, torch.from_numpy(y))))
        return Reply({}, {"choice": np.array([np.argmin(losses)], np.int64)}, {}, len(samples))

    def charge(self, site: Site) -> Releases:
        """The site's account with a signature in it; Refused if it cannot be, or the budget does not allow it."""
        if not isinstance(self.privacy, AtClient):
            raise Refused("privacy", f"{self.privacy!r} keeps no account that a signature could be entered into")
        return self.privacy.charge(site, noise_of(self.signature), 1.0, 1)

    def evaluate(self, request: Request, train: Samples, test: Samples) -> tuple[dict[str, float], int]:
        """Loss and accuracy on the client's own test samples; `accuracy_known` when only classes it holds may be named.

        A label that the head does not have counts as wrong, and is not in the loss: how many are in it is told, too.
        """
        names = np.array(class_map(request.config, self.classes))
        model = self.trainers(len(names)).fill(request.arrays).eval()
        outputs, y = outputs_of(model, test)
        guess = names[outputs.argmax(1).numpy()]
        known = torch.from_numpy(classes_in(train, self.classes)[names])
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
        return metrics, int(seen.sum())

    def predictions(
        self, run: Run, samples: Samples
    ) -> tuple[dict[str, npt.NDArray[np.float64]], dict[str, list[int]]]:
        """What the model of each group says of samples, as probabilities, and its class map: what `combine` takes."""
        state = Grouping.from_memory(run.memory)
        if state is None:
            raise ValueError("the run has formed no groups yet")
        out = {}
        for group, names in state.classes.items():
            model = self.trainers(len(names)).fill(part_of(run.arrays, group)).eval()
            out[group] = outputs_of(model, samples)[0].double().softmax(1).numpy()
        return out, state.classes


@lru_cache(maxsize=8)
def with_privacy(privacy: Any, trainer: Trainer) -> Any:
    """The trainer with the client's privacy around it; kept, because some of it takes long to make."""
    return privacy.at_client(trainer)


@lru_cache(maxsize=8)
def warm_up_trainer(trainer: Trainer, epochs: int) -> Trainer:
    """The trainer of the test model, at one rate whenever it is asked; kept, because it keeps what it has prepared."""
    return replace(trainer, epochs=epochs, schedule=Constant())


def class_map(config: Mapping[str, Scalar], classes: int) -> list[int]:
    """Which class each output stands for."""
    text = str(config.get("classes", ""))
    return [int(c) for c in text.split(",")] if text else list(range(classes))


def relabel(samples: Samples, names: list[int], classes: int) -> Samples:
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


def split_held_out(samples: Samples, share: float, seed: int, client: ClientId) -> tuple[Samples, Samples]:
    """The samples, and a share of them drawn by lot that is not trained on; of two at least one is left."""
    count = min(math.ceil(share * len(samples)), len(samples) - 1)
    if count <= 0:
        return samples, samples.first(0)
    rows = np.arange(len(samples)) if samples.index is None else samples.index
    drawn = rng(seed, 0, "held back", client).permutation(len(rows))
    kept, held = (Samples(samples.x, samples.y, rows[np.sort(some)]) for some in (drawn[count:], drawn[:count]))
    return kept, held


def classes_in(samples: Samples, classes: int) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """Which classes the samples have."""
    y = samples.y.numpy() if samples.index is None else samples.y.numpy()[samples.index]
    return np.bincount(y, minlength=classes) > 0


def outputs_of(model: nn.Module, samples: Samples) -> tuple[Tensor, np.ndarray[Any, Any]]:
    """What a model says of each sample, and the labels."""
    if not len(samples):
        raise ValueError("has no samples to judge by")
    place = device_of(model)
    with one_thread(), torch.inference_mode():
        batches = [samples.batch(np.arange(i, min(i + CHUNK, len(samples)))) for i in range(0, len(samples), CHUNK)]
        outputs = [call_model(model, map_tensors(x, lambda t: t.to(place))).cpu() for x, _ in batches]
        labels = [y for _, y in batches]
        return torch.cat(outputs), torch.cat(labels).numpy()


def last_layer(model: nn.Module) -> str:
    """The name of the last dense layer, whose bias and weights are a signature."""
    names = [name for name, m in model.named_modules() if isinstance(m, nn.Linear)]
    if not names:
        raise ValueError("the model has no dense layer at its end, so clients cannot be grouped by it")
    return str(names[-1])
