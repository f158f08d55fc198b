"""Clients trained one by one: in turn, in threads or in processes, with the same bits.

Which is fastest depends on how long Python's lock is held between two operations, which cannot be predicted from a
model. So the first rounds are a trial: one round uses threads, one processes, one plain training if clients are quick,
and all later rounds use the fastest.
"""

import logging
import time
from collections.abc import Mapping, Sequence
from statistics import median

from mutirao.core.fleet import ClientId
from mutirao.training.cpu_cores import core_count
from mutirao.training.engine.jobs import Job
from mutirao.training.engine.process_pool import fork_fault, train_processes
from mutirao.training.engine.threaded import Timed, train_threads
from mutirao.training.plain import Outcomes, PlainTrainer, answer_or_failure

log = logging.getLogger("mutirao")

SHORT_CLIENT = 0.02  # seconds a client: below, handing it to a worker may cost more than it saves


def train_sequentially(trainer: PlainTrainer, jobs: Sequence[Job], engine: str) -> Outcomes:
    """The outcomes of these clients; with `auto` by the fastest dispatch known so far."""
    tried: dict[str, float] = trainer._cache.setdefault("tried", {})  # seconds a step of each engine
    chosen = engine if engine != "auto" else choose_dispatch(trainer, jobs, tried)
    if chosen == "processes" and (fault := fork_fault(jobs)):
        log.info("clients are trained in threads, not in processes: %s", fault)
        chosen = "threads"
    done = TRAIN[chosen](trainer, jobs)
    if engine == "auto" and len(jobs) > 1:
        tried.setdefault(chosen, seconds_a_step(jobs, done) / (1 if chosen == "plain" else worker_count(trainer)))
        if chosen != "plain" and done and median(seconds for _, seconds in done.values()) > SHORT_CLIENT:
            tried.setdefault("plain", float("inf"))  # not worth a try
    # Left over are clients with random operations that take no generator.
    left = train_plain(trainer, [job for job in jobs if job.client not in done])
    return {client: outcome for client, (outcome, _) in (done | left).items()}


def choose_dispatch(trainer: PlainTrainer, jobs: Sequence[Job], tried: Mapping[str, float]) -> str:
    """A dispatch that was not tried yet, otherwise the fastest; plain training for one client or one core."""
    if worker_count(trainer) == 1 or len(jobs) == 1:
        return "plain"
    engines = ["threads", "plain"] if trainer.torch_device().type != "cpu" or fork_fault(jobs) else list(TRAIN)
    return next((e for e in engines if e not in tried), min(engines, key=lambda e: tried.get(e, float("inf"))))


def seconds_a_step(jobs: Sequence[Job], done: Mapping[ClientId, Timed]) -> float:
    """The median client's seconds per step; infinite for clients that were not trained."""
    return median(done[job.client][1] / len(job.lengths) if job.client in done else float("inf") for job in jobs)


def worker_count(trainer: PlainTrainer) -> int:
    """The number of clients trained at a time."""
    return trainer.workers or core_count()


def train_plain(trainer: PlainTrainer, jobs: Sequence[Job]) -> dict[ClientId, Timed]:
    """Train one client after the other; the outcome and the seconds each took."""
    done: dict[ClientId, Timed] = {}
    for job in jobs:
        began = time.perf_counter()
        done[job.client] = answer_or_failure(trainer.train, job.request, job.site), time.perf_counter() - began
    return done


TRAIN = {"threads": train_threads, "processes": train_processes, "plain": train_plain}
