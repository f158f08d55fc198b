"""One client a thread, one torch thread each: for convolutions and large models, which keep a core busy alone."""

import contextlib
import copy
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from mutirao.core.fleet import ClientId, Failure, Reply, failure_of
from mutirao.training.descent import one_thread, seeded
from mutirao.training.engine.jobs import Job
from mutirao.training.engine.pools import join_pools
from mutirao.training.engine.tape import Unsupported, is_random, refuse, takes_generator
from mutirao.training.engine.workers import hold_memory, run_in_threads
from mutirao.training.inputs import call_model
from mutirao.training.plain import PlainTrainer

Item = TypeVar("Item")
Result = TypeVar("Result")

HEAVY = 1 << 29  # floating-point operations a step: from here on calls cost little beside the arithmetic


def is_heavy(trainer: PlainTrainer) -> bool:
    """Whether a step of one client is work enough for a core: large kernels, or six operations a weight and sample.

    Two of the six are the gradient of the weight itself, which a frozen one has not.
    """
    module = trainer.blank()
    trained = sum(p.numel() for p in module.parameters() if p.requires_grad)
    weights = sum(p.numel() for p in module.parameters())
    kernels = any(isinstance(m, nn.modules.conv._ConvNd | nn.RNNBase) for m in module.modules())
    return kernels or (4 * weights + 2 * trained) * trainer.batch_size > HEAVY


def in_threads(trainer: PlainTrainer, work: Callable[[Item], Result], items: Sequence[Item]) -> list[Result]:
    """`work` on each item, in threads that each have a module of their own."""
    template = trainer.blank()
    if "memory" not in trainer._recorded:
        hold_memory()
        trainer._recorded["memory"] = "held"

    def prepared(item: Item) -> Result:
        if not hasattr(trainer._own, "module"):
            trainer._own.module = join_pools(copy.deepcopy(template))
        return work(item)

    return run_in_threads(trainer.workers, prepared, items)


def train_threads(trainer: PlainTrainer, jobs: Sequence[Job]) -> dict[ClientId, Reply | Failure]:
    """Train each client by the plain path, several at a time; left out is who draws where no generator can be given."""
    randomness = OwnRandomness if draws(trainer, jobs) else contextlib.nullcontext

    def train(job: Job) -> Reply | Failure | None:
        try:
            return trainer.train(job.request, job.site, randomness)
        except Unsupported:
            return None
        except Exception as error:  # a client may raise anything: it is its own failure alone
            return failure_of(error)

    outcomes = zip(jobs, in_threads(trainer, train, jobs), strict=True)
    return {job.client: outcome for job, outcome in outcomes if outcome is not None}


def draws(trainer: PlainTrainer, jobs: Sequence[Job]) -> bool:
    """Whether the model draws random numbers when it is trained; found out once, with a client whose data are sound."""
    for job in jobs if "draws" not in trainer._recorded else ():
        module = trainer.travel.prepare(trainer.fill(job.request.arrays))
        with one_thread(), seeded(0), torch.no_grad(), contextlib.suppress(Exception):
            before = torch.get_rng_state()
            call_model(module, job.first()[0])
            trainer._recorded["draws"] = not torch.equal(before, torch.get_rng_state())
            break
    return bool(trainer._recorded.get("draws", True))


class OwnRandomness(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The same random numbers as with torch's global generator seeded with `seed`, whatever other threads do.

    Random operations of this thread draw from a generator of their own; torch has one for all threads.
    """

    def __init__(self, seed: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.generator = torch.Generator().manual_seed(seed)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:  # or torch imports its compiler, which takes a second
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Do the operation."""
        kwargs = kwargs or {}
        if is_random(func):
            if not takes_generator(func):
                refuse(func)
            kwargs = {**kwargs, "generator": self.generator}
        return func(*args, **kwargs)
