"""The client of the groups recipe: warm-up with a signature, training and evaluation of its group's model.

The output layer of a group may have fewer outputs than there are classes. The request has the class map, such as
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

from mutirao.clustering.context import FIT_EPOCHS
from mutirao.clustering.group_state import Grouping
from mutirao.clustering.signature_handler import SIGNS
from mutirao.clustering.signatures import add_noise, generator, noise_of
from mutirao.core.arrays import Arrays, part_of
from mutirao.core.fleet import ClientId, Reply, Request, Scalar, Site, failure_of
from mutirao.core.hyperparameters import check_hyperparameter
from mutirao.core.needs import Capabilities
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

OF_CLASSES = {"classes", "holdings"}  # settings of a request that make the reply depend on the client's classes
TAKEN = "model."  # prefix of the model that a site keeps
CHUNK = 512  # samples evaluated at once


@dataclass(frozen=True)
class GroupMember:
    """A handler for `warm`, `train`, `evaluate`, `take`, `choose`, `fit` and `probe`.

    `trainers(outputs)` trains a model with that many outputs.
    """

    trainers: Callable[[int], Trainer]
    classes: int
    signature: Any
    warm_epochs: int
    head: str
    privacy: Any = NoPrivacy()  # the client's own privacy mechanism
    held_out_share: float = 0.0  # share of its training samples that a client holds out, to choose the served model

    @property
    def capabilities(self) -> Capabilities:
        """What a client sends besides arrays; with local privacy only its spent budget."""
        if self.private:
            return SIGNS | Capabilities(metrics=SPENT, config={"mu"})
        return SIGNS | self.trainers(self.classes).capabilities | Capabilities(requests={"evaluate"})

    @property
    def private(self) -> bool:
        """Whether nothing but noised updates and signatures may leave a client."""
        return not isinstance(self.privacy, NoPrivacy | Central)

    @property
    def schedule(self) -> Schedule:
        """The learning rate schedule of the groups' models."""
        return self.trainers(self.classes).schedule

    def __call__(self, request: Request, site: Site) -> Reply:
        """The reply to one request."""
        self.check_allowed(request)
        made = None
        if self.needs_training(request):
            made = self.handler(request)(*self.training_request(request, site))
        return self.answer(request, site, made)

    def many(self, requests: Requests, sites: Sites) -> Outcomes:
        """The same replies for many clients at once; models with equal outputs are trained together."""
        out: Outcomes = {}
        stacks: dict[tuple[str, int], dict[ClientId, tuple[Request, Site]]] = {}
        for c in sorted(requests):
            try:
                self.check_allowed(requests[c])
                if self.needs_training(requests[c]):
                    kind = (requests[c].do, len(class_map(requests[c].config, self.classes)))
                    stacks.setdefault(kind, {})[c] = self.training_request(requests[c], sites[c])
                else:
                    out[c] = self.answer(requests[c], sites[c], None)
            except Exception as error:  # only this client fails
                out[c] = failure_of(error)
        for stack in stacks.values():
            handler = self.handler(requests[next(iter(stack))])
            made = handler.many({c: r for c, (r, _) in stack.items()}, {c: s for c, (_, s) in stack.items()})
            for c, reply in made.items():
                out[c] = reply
                if isinstance(reply, Reply):
                    out[c] = answer_or_failure(partial(self.answer, made=reply), requests[c], sites[c])
        return dict(sorted(out.items()))

    def needs_training(self, request: Request) -> bool:
        """Whether a request is for the trainer; a signature of the data alone needs no training."""
        if request.do == "warm":
            return bool(self.signature.trains)
        return request.do in ("train", "probe") or (request.do == "fit" and bool(request.config.get(FIT_EPOCHS)))

    def check_allowed(self, request: Request) -> None:
        """Refuse requests if the reply would disclose more than local privacy or the noise of signatures allows."""
        if (self.private or self.signature.epsilon) and request.config.keys() & OF_CLASSES:
            raise Refused("privacy", "the classes of a client are not disclosed: use head=full")
        if not self.private:
            return
        if request.do not in ("warm", "train"):
            raise Refused("privacy", f"only noised updates and signatures leave, no answer to {request.do!r}")
        if request.do == "warm" and not self.signature.epsilon:
            raise Refused("privacy", "signatures need noise with this privacy: set signature.epsilon")

    def check(self, arrays: Arrays, population: Mapping[ClientId, Any]) -> None:
        """Check the initial model against all clients' data; the models of groups have the same layers."""
        trainer = self.trainers(self.classes)
        trainer.check(trainer.initial(0), population)

    def handler(self, request: Request) -> Any:
        """The handler that trains the model of a request, with its outputs and epochs."""
        # A warm-up is trained without privacy: only the signature leaves, with noise of its own.
        if request.do == "warm":
            return warm_up_trainer(self.trainers(self.classes), self.warm_epochs)
        return with_privacy(self.privacy, self.trainers(len(class_map(request.config, self.classes))))

    def training_request(self, request: Request, site: Site) -> tuple[Request, Site]:
        """The request to the trainer, and the client's samples with labels by the model's outputs."""
        samples = Samples.of(site.data)
        names = class_map(request.config, self.classes)
        if request.do != "warm":
            samples = self.split(request, site)[0]
            if "classes" in request.config:
                samples = relabel(samples, names, self.classes)
        plain = {k: v for k, v in request.config.items() if k not in OF_CLASSES | {"keep", FIT_EPOCHS}}
        # A fit is not a round of the run: it has the initial rate, wherever the schedule is.
        if request.do == "fit":
            plain["lr"] = self.trainers(len(names)).lr
            plain["epochs"] = check_hyperparameter("epochs", request.config[FIT_EPOCHS])
        do = "train" if request.do in ("warm", "fit") else request.do
        return replace(request, do=do, config=plain), replace(site, data=samples)

    def split(self, request: Request, site: Site) -> tuple[Samples, Samples]:
        """The samples that a client trains on, and those that it holds out."""
        return split_held_out(Samples.of(site.data), self.held_out_share, int(request.config.get("seed", 0)), site.id)

    def answer(self, request: Request, site: Site, made: Reply | None) -> Reply:
        """The reply to the server: of a warm-up only the signature, never the model."""
        if request.do == "warm":
            return self.sign(request, site, made)
        if request.do == "fit":
            if made is not None:
                request = replace(request, arrays=made.arrays)
            return self.fit(request, site)
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
        """The metrics of a model fitted to the client's own samples, on its test and held-out samples.

        The model stays at the client, which keeps it if the request has `keep`.
        """
        _, held = self.split(request, site)
        metrics, used = self.evaluate(request, Samples.of(site.data), own_test_samples(site.data))
        if len(held):
            metrics["accuracy_held"] = self.evaluate(request, Samples.of(site.data), held)[0]["accuracy"]
        if request.config.get("keep"):
            site.state.update({TAKEN + k: v.copy() for k, v in request.arrays.items()})
        return Reply({}, metrics=metrics, n=max(1, used))

    def sign(self, request: Request, site: Site, made: Reply | None) -> Reply:
        """The signature of a warm-up, or of the data; without noise also the client's classes, if requested."""
        part = self.signature
        config = request.config
        samples = Samples.of(site.data)
        if made is None:
            vector = part(samples)
            count = len(samples)
        else:
            vector = part(request.arrays, made.arrays, self.head)
            count = made.n
        # `charge` checks the budget and returns the new account; it is stored once the noised signature is made.
        table = None
        if self.private:
            table = self.charge(site)
        if part.epsilon:
            draw = generator(part.repeatable, int(config["seed"]), int(config["round"]), site.id)
            vector = add_noise(vector, part.epsilon, part.clip, draw)
        extras: Arrays = {"signature": vector.astype(np.float32)}
        if table is not None:
            site.state[RELEASES] = table
        # The number of samples would leave without noise, so it is not sent with a noised signature.
        if part.epsilon:
            return Reply({}, extras, {}, 1)
        if config.get("holdings"):
            extras["holdings"] = classes_in(samples, self.classes).astype(np.uint8)
        return Reply({}, extras, {}, count)

    def choose(self, models: Arrays, samples: Samples) -> Reply:
        """The number of the group model with the least mean loss on the training samples."""
        trainer = self.trainers(self.classes)
        # IFCA (Ghosh et al., NeurIPS 2020): the client's group is argmin_j of the loss of model j on its samples.
        losses = []
        for group in sorted({name.partition("/")[0] for name in models}):
            outputs, y = outputs_of(trainer.fill(part_of(models, group)).eval(), samples)
            losses.append(float(functional.cross_entropy(outputs, torch.from_numpy(y))))
        return Reply({}, {"choice": np.array([np.argmin(losses)], np.int64)}, {}, len(samples))

    def charge(self, site: Site) -> Releases:
        """The site's privacy account with a signature added; Refused without an account or above the budget."""
        if not isinstance(self.privacy, AtClient):
            raise Refused("privacy", f"{self.privacy!r} has no privacy account for signatures")
        return self.privacy.charge(site, noise_of(self.signature), 1.0, 1)

    def evaluate(self, request: Request, train: Samples, test: Samples) -> tuple[dict[str, float], int]:
        """Loss and accuracy on the client's own test samples; `accuracy_known` among its own classes alone.

        A label that the model does not have counts as wrong and is not in the loss. Returned with the metrics is the
        number of labels in the loss.
        """
        names = np.array(class_map(request.config, self.classes))
        model = self.trainers(len(names)).fill(request.arrays).eval()
        outputs, y = outputs_of(model, test)
        guess = names[outputs.argmax(1).numpy()]
        known = torch.from_numpy(classes_in(train, self.classes)[names])
        among = outputs
        # If the model has none of the client's classes, masking would leave nothing to choose from.
        if known.any():
            among = outputs.masked_fill(~known, -torch.inf)
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
        """Class probabilities by each group's model, and the class maps: the arguments of `combine`."""
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
    """The trainer with the client's privacy; cached, because some mechanisms take long to build."""
    return privacy.at_client(trainer)


@lru_cache(maxsize=8)
def warm_up_trainer(trainer: Trainer, epochs: int) -> Trainer:
    """The trainer of the test model, with a constant rate; cached with what it has prepared."""
    return replace(trainer, epochs=epochs, schedule=Constant())


def class_map(config: Mapping[str, Scalar], classes: int) -> list[int]:
    """The class of each output."""
    text = str(config.get("classes", ""))
    if text:
        return [int(c) for c in text.split(",")]
    return list(range(classes))


def relabel(samples: Samples, names: list[int], classes: int) -> Samples:
    """The samples of the model's classes, labelled by its outputs."""
    y = outputs_for(samples.y, tuple(names), classes)
    index = samples.index
    rows = np.arange(len(samples)) if index is None else index
    return Samples(samples.x, y, rows[y.numpy()[rows] >= 0])


@lru_cache(maxsize=64)
def outputs_for(y: Tensor, names: tuple[int, ...], classes: int) -> Tensor:
    """Labels as outputs of a model, -1 for other classes; computed once for a storage that clients share."""
    place = torch.full((classes,), -1, dtype=torch.int64)
    place[list(names)] = torch.arange(len(names))
    return place[y]


def split_held_out(samples: Samples, share: float, seed: int, client: ClientId) -> tuple[Samples, Samples]:
    """Training samples and a random held-out share; at least one sample is left for training."""
    count = min(math.ceil(share * len(samples)), len(samples) - 1)
    if count <= 0:
        return samples, samples.first(0)
    rows = np.arange(len(samples)) if samples.index is None else samples.index
    order = rng(seed, 0, "held back", client).permutation(len(rows))
    train = Samples(samples.x, samples.y, rows[np.sort(order[count:])])
    held_out = Samples(samples.x, samples.y, rows[np.sort(order[:count])])
    return train, held_out


def classes_in(samples: Samples, classes: int) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """The mask of the classes that occur in the samples."""
    y = samples.y.numpy() if samples.index is None else samples.y.numpy()[samples.index]
    return np.bincount(y, minlength=classes) > 0


def outputs_of(model: nn.Module, samples: Samples) -> tuple[Tensor, np.ndarray[Any, Any]]:
    """The outputs of a model for each sample, and the labels."""
    if not len(samples):
        raise ValueError("has no samples to evaluate on")
    place = device_of(model)
    with one_thread(), torch.inference_mode():
        batches = [samples.batch(np.arange(i, min(i + CHUNK, len(samples)))) for i in range(0, len(samples), CHUNK)]
        outputs = [call_model(model, map_tensors(x, lambda t: t.to(place))).cpu() for x, _ in batches]
        labels = [y for _, y in batches]
        return torch.cat(outputs), torch.cat(labels).numpy()


def last_layer(model: nn.Module) -> str:
    """The name of the last dense layer; its bias and weights give signatures."""
    names = [name for name, m in model.named_modules() if isinstance(m, nn.Linear)]
    if not names:
        raise ValueError("the model has no dense layer at its end, so clients cannot be grouped by it")
    return str(names[-1])
