"""One client per thread, with one torch thread each: for convolutions and large models, which keep a core busy.

The threads outlive a round. Torch releases Python's lock while it computes.
"""

import contextlib
import copy
import ctypes
import functools
import os
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from mutirao.core.cpu_threads import core_count
from mutirao.core.fleet import ClientId, Failure, Reply, failure_of
from mutirao.training.engine.jobs import Job
from mutirao.training.engine.pooling import fuse_pools
from mutirao.training.engine.tracer import Unsupported, check_repeatable, is_random, takes_generator
from mutirao.training.inputs import call_model
from mutirao.training.optimizers import one_thread, seeded
from mutirao.training.plain import PlainTrainer
from mutirao.training.torch_device import random_state

# Parameters of glibc's mallopt.
MMAP_THRESHOLD = -3
TRIM_THRESHOLD = -1

Item = TypeVar("Item")
Result = TypeVar("Result")


def keep_freed_memory() -> None:
    """Keep freed memory for the next step: glibc would return large blocks and request them again.

    What was freed before, such as copies made while data were read, is given back.
    """
    with contextlib.suppress(OSError, AttributeError):  # not glibc: nothing to do
        libc = ctypes.CDLL(None)
        libc.malloc_trim(0)
        libc.mallopt(MMAP_THRESHOLD, 1 << 30)
        libc.mallopt(TRIM_THRESHOLD, (1 << 31) - 1)


def run_in_threads(workers: int, work: Callable[[Item], Result], items: Iterable[Item]) -> list[Result]:
    """The results of `work` for each item, in order; `workers` = 0 means one per core."""
    return list(_pool(workers or core_count(), os.getpid()).map(work, items))


@functools.lru_cache(maxsize=8)
def _pool(workers: int, process: int) -> ThreadPoolExecutor:
    """The threads of this process; a forked child gets its own."""
    return ThreadPoolExecutor(workers, thread_name_prefix="mutirao", initializer=torch.set_num_threads, initargs=(1,))


Timed = tuple[Reply | Failure, float]  # what came of a client, and the seconds it took


def map_in_threads(trainer: PlainTrainer, work: Callable[[Item], Result], items: Sequence[Item]) -> list[Result]:
    """The results of `work` for each item, in threads that each have their own module."""
    if "memory" not in trainer._cache:
        keep_freed_memory()
        trainer._cache["memory"] = "held"
    template = trainer.thread_module()

    def prepared(item: Item) -> Result:
        if not hasattr(trainer._thread, "module"):
            trainer._thread.module = clone_module(trainer, template)
        return work(item)

    return run_in_threads(trainer.workers, prepared, items)


def clone_module(trainer: PlainTrainer, template: nn.Module) -> nn.Module:
    """A copy of a module for another thread or process, with fused pooling on the CPU."""
    own = copy.deepcopy(template)
    # Our kernels are for the CPU only.
    if trainer.torch_device().type == "cpu":
        return fuse_pools(own)
    return own.eval()


def train_threads(trainer: PlainTrainer, jobs: Sequence[Job]) -> dict[ClientId, Timed]:
    """Train each client by plain training, several at a time; the outcome and the seconds each took.

    Left out is who draws where no generator can be given.
    """
    randomness = partial(ThreadRandomness, trainer) if uses_randomness(trainer, jobs) else contextlib.nullcontext

    def train(job: Job) -> Timed | None:
        began = time.perf_counter()
        try:
            outcome: Reply | Failure = trainer.train(job.request, job.site, randomness)
        except Unsupported:
            return None
        except Exception as error:  # a client may raise anything: it is its own failure alone
            outcome = failure_of(error)
        return outcome, time.perf_counter() - began

    # Long jobs start first, so that no worker waits for one that began late.
    longest = sorted(jobs, key=lambda job: -sum(job.lengths))
    outcomes = zip(longest, map_in_threads(trainer, train, longest), strict=True)
    return {job.client: outcome for job, outcome in outcomes if outcome is not None}


def uses_randomness(trainer: PlainTrainer, jobs: Sequence[Job]) -> bool:
    """Whether the model draws random numbers in training; found out once, on a client with valid data."""
    if "draws" in trainer._cache:
        return bool(trainer._cache["draws"])
    for job in jobs:
        with one_thread(), seeded(0, trainer.torch_device()), torch.no_grad(), contextlib.suppress(Exception):
            module = trainer.state_names.prepare(trainer.fill(job.request.arrays))
            before = random_state(trainer.torch_device())
            call_model(module, job.first()[0])
            trainer._cache["draws"] = not torch.equal(before, random_state(trainer.torch_device()))
            break
    return bool(trainer._cache.get("draws", True))


class ThreadRandomness(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The random numbers of torch's global generator seeded with `seed`, whatever other threads draw.

    Random operations of this thread draw from a generator of their own; torch has one for all threads.
    """

    def __init__(self, trainer: PlainTrainer, seed: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.generators = {
            "cpu": torch.Generator().manual_seed(seed),
            trainer.torch_device().type: trainer.generator(seed),
        }

    @classmethod
    def _should_skip_dynamo(cls) -> bool:  # or torch imports its compiler, which takes a second
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation."""
        kwargs = kwargs or {}
        if is_random(func):
            if not takes_generator(func):
                check_repeatable(func)
            where = kwargs.get("device") or next((a.device for a in args if isinstance(a, torch.Tensor)), "cpu")
            kwargs = {**kwargs, "generator": self.generators[torch.device(where).type]}
        return func(*args, **kwargs)
