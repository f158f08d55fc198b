"""One job per client of a round: its samples, hyperparameters and batches, as the engines take them."""

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from mutirao.core.arrays import Arrays
from mutirao.core.fleet import ClientId, Failure, Request, Site, failure_of
from mutirao.randomness import rng
from mutirao.training.engine.tracer import Unsupported
from mutirao.training.lr_schedules import Constant
from mutirao.training.measurements import read_extras
from mutirao.training.plain import PlainTrainer, Requests, Sites
from mutirao.training.pull import LocalHyperparameters, Pull
from mutirao.training.samples import Index, Samples


@dataclass(frozen=True, eq=False)
class Job:
    """The training of one client in a round."""

    trainer: PlainTrainer
    request: Request
    site: Site
    samples: Samples
    lengths: npt.NDArray[np.int64]  # samples of each batch
    drops_single: bool  # whether a batch of one is left out
    hyperparameters: LocalHyperparameters
    extras: frozenset[str]
    pull: Pull

    @property
    def client(self) -> ClientId:
        """The client of this job."""
        return self.site.id

    @property
    def arrays(self) -> Arrays:
        """The model that it starts from, including frozen arrays."""
        frozen = self.trainer.frozen()
        if frozen:
            return self.request.arrays | frozen
        return self.request.arrays

    @property
    def kind(self) -> tuple[Any, ...]:
        """What clients in one stack must have in common."""
        return self.samples.kind, self.hyperparameters, self.extras, bool(self.pull.correction)

    @property
    def has_varying_lr(self) -> bool:
        """Whether its learning rate may differ from the trainer's own, which a compiled step could count on."""
        return self.hyperparameters.lr != self.trainer.lr or self.trainer.schedule != Constant()

    def order(self) -> Index:
        """The sample indices of all its batches, concatenated, as in plain training."""
        config = self.request.config
        draw = rng(int(config["seed"]), int(config["round"]), "batches", self.client)
        return self.hyperparameters.order(draw, len(self.samples), self.drops_single)[: self.lengths.sum()]

    def first(self) -> tuple[Any, Tensor]:
        """Its first batch."""
        return self.samples.batch(self.order()[: self.lengths[0]])


def plan_jobs(trainer: PlainTrainer, requests: Requests, sites: Sites) -> tuple[list[Job], dict[ClientId, Failure]]:
    """The job of each client, and the failures of clients with unusable data; sorted by client."""
    jobs: list[Job] = []
    failures: dict[ClientId, Failure] = {}
    drops_single = trainer.needs_two_samples()
    lengths = functools.cache(lambda hyperparameters, n: np.array(hyperparameters.lengths(n, drops_single)))
    for client in sorted(requests):
        request = requests[client]
        site = sites[client]
        try:
            samples = trainer.to_device(Samples.of(site.data))
            hyperparameters = trainer.hyperparameters(request.config)
            extras = read_extras(request.config, samples, trainer.loss)
            own = lengths(hyperparameters, len(samples)), drops_single, hyperparameters, extras, Pull.of(request)
            jobs.append(Job(trainer, request, site, samples, *own))
        except Exception as error:  # it is this client's failure alone
            failures[client] = failure_of(error)
    return jobs, failures


def shared_storage(samples: Sequence[Samples]) -> tuple[Any, Tensor, list[Index]]:
    """One storage for several clients and the rows of each: theirs if they share one, otherwise a copy."""
    first = samples[0]
    if all(s.x is first.x and s.y is first.y for s in samples):
        return first.x, first.y, [np.arange(len(s)) if s.index is None else s.index for s in samples]
    ends = np.cumsum([len(s) for s in samples])
    own = [s.batch(slice(None)) for s in samples]
    rows = [np.arange(end - len(s), end) for s, end in zip(samples, ends, strict=True)]
    return concatenate_inputs([x for x, _ in own]), torch.cat([y for _, y in own]), rows


def concatenate_inputs(some: Sequence[Any]) -> Any:
    """Inputs of one kind concatenated, tensor by tensor."""
    if isinstance(some[0], dict):
        joined: dict[str, Tensor] = {}
        for name in some[0]:
            joined[name] = torch.cat([x[name] for x in some])
        return joined
    if isinstance(some[0], tuple):
        return tuple(map(torch.cat, zip(*some, strict=True)))
    return torch.cat(list(some))


def require_tensors(jobs: Sequence[Job]) -> None:
    """Raise `Unsupported` if inputs are not one tensor in memory."""
    x = jobs[0].samples.x  # jobs of one kind
    if not isinstance(x, Tensor):
        raise Unsupported(f"its inputs are a {type(x).__name__}, not one tensor")


def group_by_kind(jobs: Iterable[Job]) -> list[list[Job]]:
    """Jobs grouped by kind."""
    groups: dict[Any, list[Job]] = {}
    for job in jobs:
        groups.setdefault(job.kind, []).append(job)
    return list(groups.values())
