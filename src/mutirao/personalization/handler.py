"""A client with a personal model: a handler around a `Trainer` that combines received and kept arrays.

Personal arrays lie in the site's state under `personal.`, and no reply contains them. A client without a personal model
fits one before it is evaluated, without changing its state; new clients do the same.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import partial
from typing import Any, Self

from torch import nn

from mutirao.core.arrays import Arrays, is_finite
from mutirao.core.fleet import ClientId, Failure, Reply, Request, Scalar, Site
from mutirao.core.needs import Capabilities
from mutirao.errors import ConfigError
from mutirao.personalization import Ditto, FedBN, FedRecon, Settings
from mutirao.training.plain import Outcomes, PlainTrainer, Requests, Sites
from mutirao.training.pull import ANCHOR
from mutirao.training.trainable_state import list_some


def last_layer_names(module: nn.Module, names: Sequence[str]) -> list[str]:
    """The arrays of the last layer with weights of its own, restricted to `names`."""
    found: list[str] = []
    for path, part in module.named_modules():
        if own := [name for k in part._parameters if (name := array_name(path, k)) in names]:
            found = own + [name for k in part._buffers if (name := array_name(path, k)) in names]
    return found


def matching_names(names: Sequence[str], patterns: str) -> list[str]:
    """The arrays that match patterns, separated by commas, of array or layer names.

    >>> matching_names(["0.weight", "2.weight", "2.bias"], "2")
    ['2.weight', '2.bias']
    """
    wanted = [pattern.strip() for pattern in patterns.split(",") if pattern.strip()]
    matched: set[str] = set()
    for pattern in wanted:
        found = [name for name in names if matches_layer(name, pattern)]
        if not found:
            raise ConfigError(
                f"personal.layers: {pattern!r} matches none of the shared arrays: {list_some(list(names))}"
            )
        matched.update(found)
    return [name for name in names if name in matched]


def matches_layer(name: str, pattern: str) -> bool:
    """Whether a pattern matches this array, or a layer that contains it."""
    return fnmatchcase(name, pattern) or fnmatchcase(name, f"{pattern}.*")


def batch_norms(module: nn.Module, names: Sequence[str]) -> list[str]:
    """Weights, biases and statistics of all batch normalisation layers, restricted to `names`.

    A custom layer counts if it has the attribute `is_batch_norm = True`.
    """
    kind = nn.modules.batchnorm._BatchNorm
    parts = module.named_modules()
    norms = {path for path, part in parts if isinstance(part, kind) or getattr(part, "is_batch_norm", False) is True}
    return [name for name in names if name.rpartition(".")[0] in norms]


def array_name(path: str, name: str) -> str:
    """The full name of an array in a submodule."""
    if path:
        return f"{path}.{name}"
    return name


def freeze_others(make: Callable[[], nn.Module], names: Collection[str]) -> nn.Module:
    """The module with all parameters frozen except these."""
    module = make()
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if name not in names:
            parameter.requires_grad_(False)
    return module


PREFIX = "personal."
# Corrections concern all arrays of a model: their vectors do not fit a part of one.
WHOLE_MODEL_ONLY = Capabilities(extras={"control"}, config={"correct"}, request_extras={"control"})
Work = Callable[[Any, Requests, Sites], Outcomes]  # how clients are asked: one by one, or all at once
Models = dict[ClientId, Arrays]


def ask_each(trainer: Any, requests: Requests, sites: Sites) -> Outcomes:
    """Ask one client after the other, as over a network; an exception of a client is raised."""
    return {client: trainer(requests[client], sites[client]) for client in sorted(requests)}


def ask_together(trainer: Any, requests: Requests, sites: Sites) -> Outcomes:
    """Ask all clients at once, by the trainer's engine."""
    if requests:
        return dict(trainer.many(requests, sites))
    return {}


@dataclass(frozen=True)
class PersonalTrainer:
    """The base of all personal trainers; `fitter` trains the personal part for the epochs of the method."""

    trainer: PlainTrainer
    kind: Settings
    fitter: PlainTrainer

    @classmethod
    def of(cls, trainer: PlainTrainer, kind: Settings) -> Self:
        """Wrap a trainer."""
        return cls(trainer, kind, personal_trainer(trainer, kind))

    @property
    def capabilities(self) -> Capabilities:
        """Those of the trainer."""
        found: Capabilities = getattr(self.trainer, "capabilities", Capabilities())
        return found

    @property
    def schedule(self) -> Callable[[int], float]:
        """The trainer's learning rate schedule."""
        return self.trainer.schedule

    @property
    def figures(self) -> Any:
        """The trainer's own metrics."""
        return self.trainer.figures

    def agreed(self) -> Mapping[str, str]:
        """Digests of what all parties must have in common: those of the trainer."""
        return self.trainer.agreed()

    def check(self, arrays: Arrays, population: Mapping[ClientId, Any]) -> None:
        """The trainer's checks before the first round, on the complete model."""
        trainer: Any = self.trainer
        trainer.check(self.complete_model(arrays, 0), population)

    def shared(self, arrays: Arrays) -> Arrays:
        """The shared arrays of a complete model."""
        return arrays

    def complete_model(self, arrays: Arrays, seed: int) -> Arrays:
        """The shared arrays together with the initial personal arrays."""
        return arrays

    def initial(self, seed: int) -> Arrays:
        """The shared arrays of a fresh model."""
        return self.shared(self.trainer.initial(seed))

    def __call__(self, request: Request, site: Site) -> Reply:
        """One client's reply."""
        answer = self.answer(ask_each, {site.id: request}, {site.id: site})[site.id]
        if isinstance(answer, Failure):
            raise ValueError(answer.reason)
        return answer

    def many(self, requests: Requests, sites: Sites) -> Outcomes:
        """The replies of many clients."""
        return self.answer(ask_together, requests, sites)

    def answer(self, work: Work, requests: Requests, sites: Sites) -> Outcomes:
        """The replies of all clients, sorted by client."""
        outcomes: Outcomes = {}
        for do in sorted({request.do for request in requests.values()}):
            way = {"train": self.train, "evaluate": self.evaluate}.get(do, self.answer_as_received)
            outcomes |= way(work, {c: r for c, r in requests.items() if r.do == do}, sites)
        return dict(sorted(outcomes.items()))

    def train(self, work: Work, requests: Requests, sites: Sites) -> Outcomes:
        """Train the common model as it is received."""
        return work(self.trainer, requests, sites)

    def answer_as_received(self, work: Work, requests: Requests, sites: Sites) -> Outcomes:
        """Answer requests about the model as it is received, such as a probe."""
        return work(self.trainer, requests, sites)

    def evaluate(self, work: Work, requests: Requests, sites: Sites) -> Outcomes:
        """Evaluate each client's own model on its own test data; clients without one fit one first."""
        own = {c: found for c in requests if (found := self.own_model(requests[c], sites[c])) is not None}
        fitted, failed = self.fit(work, {c: r for c, r in requests.items() if c not in own}, sites)
        models = own | fitted
        return failed | work(self.trainer, {c: replace(requests[c], arrays=a) for c, a in models.items()}, sites)

    def own_model(self, request: Request, site: Site) -> Arrays | None:
        """The client's own model, if it has one."""
        return None

    def fit(self, work: Work, requests: Requests, sites: Sites) -> tuple[Models, Outcomes]:
        """Models fitted to the clients' own data, which are not kept; and the failures."""
        asked = {c: replace(r, do="train", config=without_common(r.config), extras={}) for c, r in requests.items()}
        # Sites without their state: to fit a model for an evaluation must leave no trace at the client.
        done = work(self.fitter, self.starting_requests(asked), {c: Site(c, sites[c].data) for c in asked})
        return {c: r.arrays for c, r in done.items() if isinstance(r, Reply)}, only_failures(done)

    def starting_requests(self, requests: Requests) -> Requests:
        """The requests with the model from which fitting starts."""
        return requests


@dataclass(frozen=True)
class KeptLayersTrainer(PersonalTrainer):
    """FedPer and FedBN: a client keeps some arrays, trains them with the others, and sends the rest."""

    names: tuple[str, ...] = ()
    _fresh: dict[int, Arrays] = field(default_factory=dict, init=False, repr=False, compare=False)

    @classmethod
    def of(cls, trainer: PlainTrainer, kind: Settings) -> Self:
        """Wrap a trainer; its model needs personal and shared arrays."""
        names = tuple(personal_names(trainer, kind))
        return cls(trainer, kind, restricted_trainer(trainer, personal_trainer(trainer, kind), names), names)

    @property
    def capabilities(self) -> Capabilities:
        """Those of the trainer, except for corrections of a whole model."""
        return super().capabilities - WHOLE_MODEL_ONLY

    def shared(self, arrays: Arrays) -> Arrays:
        """All arrays except the personal ones."""
        return {name: array for name, array in arrays.items() if name not in self.names}

    def own_layers(self, arrays: Arrays) -> Arrays:
        """The personal arrays of a complete model."""
        return {name: arrays[name] for name in self.names}

    def complete_model(self, arrays: Arrays, seed: int) -> Arrays:
        """The shared arrays with the initial personal ones, which the seed determines."""
        if seed not in self._fresh:
            self._fresh.clear()
            self._fresh[seed] = self.own_layers(self.trainer.initial(seed))
        return {**arrays, **self._fresh[seed]}

    def with_own_layers(self, request: Request, site: Site) -> Request:
        """The request with this client's complete model: its own, or at first the common one."""
        found = self.own_model(request, site)
        if found is None:
            found = self.complete_model(request.arrays, int(request.config["seed"]))
        return replace(request, arrays=found)

    def own_model(self, request: Request, site: Site) -> Arrays | None:
        """The received arrays with those that the site keeps."""
        state = {name: site.state[PREFIX + name] for name in self.names if PREFIX + name in site.state}
        if len(state) == len(self.names):
            return {**request.arrays, **state}
        return None

    def starting_requests(self, requests: Requests) -> Requests:
        """The requests with the initial personal arrays."""
        return {c: replace(r, arrays=self.complete_model(r.arrays, int(r.config["seed"]))) for c, r in requests.items()}

    def fit(self, work: Work, requests: Requests, sites: Sites) -> tuple[Models, Outcomes]:
        """As the base class, but all shared arrays stay as received: statistics of frozen parts do not move either."""
        models, failed = super().fit(work, requests, sites)
        return {c: {**requests[c].arrays, **self.own_layers(found)} for c, found in models.items()}, failed

    def answer_as_received(self, work: Work, requests: Requests, sites: Sites) -> Outcomes:
        """Replies for the client's own model."""
        return work(self.trainer, {c: self.with_own_layers(r, sites[c]) for c, r in requests.items()}, sites)

    def train(self, work: Work, requests: Requests, sites: Sites) -> Outcomes:
        """Train the complete model; personal arrays stay at the client."""
        done = work(self.trainer, {c: self.with_own_layers(r, sites[c]) for c, r in requests.items()}, sites)
        return {c: self.finish_reply(r, r.arrays, sites[c]) if isinstance(r, Reply) else r for c, r in done.items()}

    def finish_reply(self, reply: Reply, arrays: Arrays, site: Site) -> Reply | Failure:
        """The reply without personal arrays, which are saved from `arrays`."""
        own_layers = self.own_layers(arrays)
        return save_personal(site, own_layers) or replace(reply, arrays=self.shared(reply.arrays))


@dataclass(frozen=True)
class SecondModelTrainer(PersonalTrainer):
    """Ditto: the common model is trained as received, and a second model is pulled towards it."""

    def train(self, work: Work, requests: Requests, sites: Sites) -> Outcomes:
        """Train both models; only the common one is sent."""
        done = work(self.trainer, requests, sites)
        sound = {c: requests[c] for c, r in done.items() if isinstance(r, Reply)}
        asked = {c: replace(r, config=without_common(r.config), extras={}) for c, r in sound.items()}
        starts = {c: replace(r, arrays=self.own_model(r, sites[c]) or r.arrays) for c, r in asked.items()}
        fitted = work(self.fitter, self.pulled(starts, sound), {c: Site(c, sites[c].data) for c in starts})
        for c, reply in fitted.items():
            if isinstance(reply, Failure):
                done[c] = reply
            elif (failed := save_personal(sites[c], reply.arrays)) is not None:
                done[c] = failed
        return done

    def starting_requests(self, requests: Requests) -> Requests:
        """The requests with the common model, pulled towards it."""
        return self.pulled(requests, requests)

    def pulled(self, requests: Requests, common: Requests) -> Requests:
        """The requests with Ditto's pull towards the models of `common`."""
        # Ditto's lam (v - w) is the trainer's proximal term mu (v - a), with mu = lam and the received w as anchor a.
        kind = self.kind
        mu = kind.lam if isinstance(kind, Ditto) else 0.0
        out: dict[ClientId, Request] = {}
        for client, request in requests.items():
            anchor = {ANCHOR + name: array for name, array in common[client].arrays.items()}
            out[client] = replace(request, config={**request.config, "mu": mu}, extras=anchor)
        return out

    def own_model(self, request: Request, site: Site) -> Arrays | None:
        """The second model."""
        names = request.arrays.keys()
        state = {name: site.state[PREFIX + name] for name in names if PREFIX + name in site.state}
        if state and len(state) == len(names):
            return state
        return None


def personal_trainer(trainer: PlainTrainer, kind: Settings) -> PlainTrainer:
    """A trainer of the personal part, for the epochs of the method, without state and without a proximal term."""
    changes: dict[str, Any] = {}
    if kind.epochs:
        changes = {"epochs": kind.epochs, "steps": 0}
    if isinstance(kind, FedRecon) and kind.lr:
        changes["lr"] = kind.lr
    return replace(trainer, mu=0.0, keep_optimizer=False, **changes)


def restricted_trainer(trainer: PlainTrainer, like: PlainTrainer, names: Collection[str]) -> PlainTrainer:
    """A trainer like `like` that trains these arrays only; the shared arrays stay those of `trainer`."""
    make = partial(freeze_others, trainer.model, frozenset(names))
    return replace(like, model=make, share=",".join(trainer.state_names.shared))


def personal_names(trainer: PlainTrainer, kind: Settings) -> list[str]:
    """The personal arrays of a method; ConfigError if there are none, or if nothing shared is trained."""
    module = trainer.thread_module()
    travels = trainer.state_names.shared
    named = str(getattr(kind, "layers", ""))
    if isinstance(kind, FedBN):
        found = batch_norms(module, travels)
        if not found:
            raise ConfigError("personal=fedbn: the model has no trainable batch normalisation; use fedper")
    elif named:
        found = matching_names(travels, named)
    else:
        found = last_layer_names(module, travels)
    trained = {name for name, p in module.named_parameters(remove_duplicate=False) if p.requires_grad}
    if trained.isdisjoint(found):
        raise ConfigError(f"personal={kind.name}: none of {', '.join(found[:3])} is trained")
    if trained <= set(found):
        right = "train more of the model, or use ditto or finetune"
        raise ConfigError(f"personal={kind.name}: all trained arrays would be personal, and none shared; {right}")
    return found


def save_personal(site: Site, arrays: Arrays) -> Failure | None:
    """Save personal arrays in the site's state; a Failure if they are not finite."""
    if not is_finite(arrays):
        return Failure("not_finite", "the personal arrays hold NaN or infinity; try a smaller learning rate")
    site.state.update({PREFIX + name: array for name, array in arrays.items()})
    return None


def without_common(config: Mapping[str, Scalar]) -> dict[str, Scalar]:
    """The configuration without entries that concern the common model only."""
    return {k: v for k, v in config.items() if k not in ("extras", "epochs", "mu", "correct", "counted")}


def only_failures(outcomes: Outcomes) -> Outcomes:
    """The failures among outcomes."""
    return {c: r for c, r in outcomes.items() if isinstance(r, Failure)}
