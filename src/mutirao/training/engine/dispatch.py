"""Dispatch the clients of a round to an engine; clients that one engine cannot handle go to the next.

Clients that are trained one by one are in one thread, in several, or in processes, with the same bits. Which is fastest
depends on how long Python's lock is held between two operations, which cannot be predicted from a
model. So the first rounds are a trial: one round uses threads, one processes, one plain training if clients are quick,
and all later rounds use the fastest.
"""

import contextlib
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from mutirao.core.cpu_threads import core_count
from mutirao.core.fleet import ClientId, Reply, Request, Site, failure_of
from mutirao.errors import Refused
from mutirao.training.corrections import add_correction, finish_correction
from mutirao.training.engine.batched_evaluation import evaluate_in_batches, evaluate_model
from mutirao.training.engine.compiled_step import CompiledStep
from mutirao.training.engine.fused import fits_kernel, train_fused
from mutirao.training.engine.jobs import Job, group_by_kind, plan_jobs, require_tensors
from mutirao.training.engine.process_pool import fork_fault, train_processes
from mutirao.training.engine.stacked import train_stacked
from mutirao.training.engine.threaded import Timed, train_threads
from mutirao.training.engine.tracer import Unsupported
from mutirao.training.inputs import call_model, map_tensors
from mutirao.training.measurements import PROBED, probe_samples, read_extras
from mutirao.training.optimizers import one_thread, seeded
from mutirao.training.plain import Outcomes, PlainTrainer, Requests, Sites, answer_or_failure
from mutirao.training.samples import Samples, own_test_samples
from mutirao.training.torch_device import is_heavy

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


# Floating-point operations a call from which on a client keeps a core busy by itself, measured with models of many
# sizes. It is a constant because the engines on either side differ in the last bits: a run must not depend on a clock.
HEAVY_CALL = 1_000_000


def is_busy(trainer: PlainTrainer, job: Job) -> bool:
    """Whether a step of such a client is dominated by arithmetic, not by the overhead of calls."""
    known = trainer._cache.setdefault("busy", {})
    key = job.samples.kind, job.hyperparameters.batch_size
    if key not in known:
        flops, calls = count_calls(trainer, job)
        known[key] = flops >= HEAVY_CALL * calls
    return bool(known[key])


def count_calls(trainer: PlainTrainer, job: Job) -> tuple[int, int]:
    """The floating-point operations of a forward pass and the number of calls; 0 if it fails."""
    module = PlainTrainer.make(trainer)
    counter = OperationCounter()
    rows = torch.zeros(job.hyperparameters.batch_size, dtype=torch.int64)
    x = map_tensors(job.samples.batch(slice(0, 1))[0], lambda t: t[rows.to(t.device)])
    # Samples that do not fit raise an error when they are trained on.
    silent = contextlib.suppress(Exception)
    with silent, one_thread(), seeded(0, trainer.torch_device()), torch.no_grad(), counter:
        call_model(module.train(), x)
    return counter.flops, max(1, counter.calls)


class OperationCounter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts calls, and the multiplications and additions of products and convolutions."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.flops = 0
        self.calls = 0

    @classmethod
    def _should_skip_dynamo(cls) -> bool:  # or torch imports its compiler, which takes a second
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation and count it."""
        out = func(*args, **kwargs or {})
        if func.is_view:
            return out
        self.calls += 1
        packet = func._overloadpacket
        if packet is torch.ops.aten.mkldnn_rnn_layer:  # steps, samples; and the weights of inputs and of what is kept
            self.flops += 2 * args[0].shape[0] * args[0].shape[1] * (args[1].numel() + args[2].numel())
        elif packet in flop_registry:
            self.flops += flop_registry[packet](*args, **kwargs or {}, out_val=out)
        return out


log = logging.getLogger("mutirao")

MAX_COMPILED_STEPS = 8  # kept of one trainer, for several kinds of samples and proximal weights
SEQUENTIAL = "auto"
# Of small models that the kernel cannot train, so few are trained plainly: they take a tenth of a second at most, and
# give the same bits as over a network, where clients cannot be stacked.
FEW_CLIENTS = 16
FEW_STEPS = 512


def answer_request(trainer: PlainTrainer, request: Request, site: Site) -> Reply:
    """One client's reply to a request to `train`, `evaluate` or `probe`."""
    trainer.check_request(request.config, site.data)
    if request.do == "train":
        return train_alone(trainer, request, site)
    if request.do == "evaluate":
        samples = own_test_samples(site.data)
        return Reply({}, metrics=evaluate_model(trainer, request.arrays, samples), n=len(samples))
    if request.do == "probe":
        samples = Samples.of(site.data)
        most = probe_samples(request.config)
        extras = read_extras(request.config, samples, trainer.loss)
        return Reply({}, metrics=trainer.probe(request.arrays, samples, most, extras), n=len(samples))
    raise ValueError(f"a Trainer can train, evaluate and probe, not {request.do!r}")


def answer_requests(trainer: PlainTrainer, requests: Requests, sites: Sites) -> Outcomes:
    """All clients' replies, sorted by client; a failure concerns one client only."""
    refused = check_requests(trainer, requests, sites)
    training = {c: r for c, r in requests.items() if r.do == "train" and c not in refused}
    evaluations = {c: r for c, r in requests.items() if r.do in ("evaluate", "probe") and c not in refused}
    with one_thread():
        outcomes = refused | train_many(trainer, training, sites) | evaluate_in_batches(trainer, evaluations, sites)
        for client in requests.keys() - outcomes.keys():
            outcomes[client] = answer_or_failure(partial(answer_request, trainer), requests[client], sites[client])
    return dict(sorted(outcomes.items()))


def check_requests(trainer: PlainTrainer, requests: Requests, sites: Sites) -> Outcomes:
    """The failures of clients with requests that name unknown hyperparameters or other agreed content."""
    outcomes: Outcomes = {}
    for client, request in requests.items():
        try:
            trainer.check_request(request.config, sites[client].data)
        except Refused as error:
            outcomes[client] = failure_of(error)
    return outcomes


def train_alone(trainer: PlainTrainer, request: Request, site: Site) -> Reply:
    """Train one client, with the same bits as among others wherever a client's bits are its own."""
    request = add_correction(trainer, request, site)
    jobs, _ = plan_jobs(trainer, {site.id: request}, {site.id: site})
    if jobs and choose_engine(trainer, jobs) == "fused" and (replies := train_in_kernel(trainer, jobs)):
        return finish_correction(trainer, request, site, replies[site.id])
    # Plain training reports what is wrong with the client's data.
    reply = trainer.train(request, site)
    return finish_correction(trainer, request, site, reply)


def train_many(trainer: PlainTrainer, requests: Requests, sites: Sites) -> Outcomes:
    """Train all clients of a round, applying each method's correction before and updating its state after."""
    prepared: dict[ClientId, Request] = {}
    outcomes: Outcomes = {}
    for client, request in requests.items():
        try:
            prepared[client] = add_correction(trainer, request, sites[client])
        except Exception as error:  # it is this client's failure alone
            outcomes[client] = failure_of(error)
    for client, made in train_each(trainer, prepared, sites).items():
        try:
            request = prepared[client]
            site = sites[client]
            outcomes[client] = made
            if isinstance(made, Reply):
                outcomes[client] = finish_correction(trainer, request, site, made)
        except Exception as error:
            outcomes[client] = failure_of(error)
    return outcomes


def train_each(trainer: PlainTrainer, requests: Requests, sites: Sites) -> Outcomes:
    """Train all clients of a round, each group by the engine that fits it, and the rest one by one."""
    jobs, failures = plan_jobs(trainer, requests, sites)
    outcomes: Outcomes = dict(failures)
    for group in group_by_kind(jobs):
        engine = choose_engine(trainer, group)
        if engine == "fused":
            outcomes |= train_in_kernel(trainer, group)
        elif engine == "stacked":
            outcomes |= train_in_stacks(trainer, group)
        left = [job for job in group if job.client not in outcomes]
        if left:
            outcomes |= train_sequentially(trainer, left, engine if engine in TRAIN else SEQUENTIAL)
    return outcomes


def choose_engine(trainer: PlainTrainer, jobs: Sequence[Job]) -> str:
    """The engine for clients of one kind: the `engine` setting, or what suits the model and the samples.

    `auto` means one by one, on the fastest of the ways that differ in nothing but time.
    """
    if trainer.engine != "auto":
        return trainer.engine
    job = jobs[0]
    gpu = trainer.torch_device().type != "cpu"
    heavy = is_heavy(trainer.thread_module(), trainer.batch_size)
    if callable(trainer.optimizer) or trainer.transform is not None or trainer.keep_optimizer or (gpu and heavy):
        # Compiled steps and the kernel apply no transform and start with fresh optimizers.
        return SEQUENTIAL
    if gpu:
        # A GPU is only busy with many small models at once.
        return "stacked"
    if not heavy and fits_kernel(trainer, jobs):
        return "fused"
    if not isinstance(job.samples.x, Tensor) or is_busy(trainer, job):
        return SEQUENTIAL
    small = len(jobs) <= FEW_CLIENTS and sum(len(job.lengths) for job in jobs) <= FEW_STEPS
    if small:
        return "plain"
    return "stacked"


def train_in_kernel(trainer: PlainTrainer, jobs: Sequence[Job]) -> dict[ClientId, Reply]:
    """The replies of clients that the kernel for dense networks can train: usually all, or none."""
    try:
        return add_probes(trainer, jobs, train_fused(trainer, jobs))
    except Unsupported as reason:
        if trainer.engine == "fused" and "unfused" not in trainer._cache:
            trainer._cache["unfused"] = True
            log.warning("the kernel cannot train this model, so clients are trained one by one: %s", reason)
    except Exception as error:  # a client has invalid data; which one shows when they are trained one by one
        log.info("clients are not trained by the kernel this time: %s", failure_of(error))
    return {}


def train_in_stacks(trainer: PlainTrainer, jobs: Sequence[Job]) -> dict[ClientId, Reply]:
    """The replies of clients that can be stacked: usually all, or none if the model cannot."""
    if not jobs:
        return {}
    compiled_steps = trainer._cache
    largest = max(jobs, key=lambda job: len(job.samples))
    key = (
        largest.samples.kind,
        largest.hyperparameters.mu,
        largest.has_varying_lr,
        bool(largest.pull.correction),
        largest.lengths[0] > 1,
    )
    try:
        if key not in compiled_steps:
            require_tensors(jobs)
            compiled_steps[key] = compile_step(trainer, jobs)
            for old in [k for k in compiled_steps if isinstance(k, tuple)][:-MAX_COMPILED_STEPS]:
                del compiled_steps[old]
        compiled = compiled_steps[key]
        if compiled is None:
            return {}
        return add_probes(trainer, jobs, train_stacked(trainer, compiled, jobs))
    except Unsupported as reason:
        compiled_steps[key] = None
        level = logging.INFO if trainer.engine == "auto" else logging.WARNING
        log.log(level, "the model cannot be stacked, so clients are trained one by one: %s", reason)
    except Exception as error:  # a client has invalid data; which one shows when they are trained one by one
        log.info("clients are trained one by one this time: %s", failure_of(error))
    return {}


def compile_step(trainer: PlainTrainer, jobs: Sequence[Job]) -> CompiledStep:
    """A compiled step for jobs of this kind, verified with the samples of a client that has many."""
    for job in sorted(jobs, key=lambda job: -len(job.samples))[:3]:
        try:
            return CompiledStep(trainer, job)
        except (IndexError, RuntimeError, ValueError) as error:
            failed = error
    raise failed


def add_probes(trainer: PlainTrainer, jobs: Sequence[Job], replies: dict[ClientId, Reply]) -> dict[ClientId, Reply]:
    """The replies with the probes of the received model that were requested."""
    if names := jobs[0].extras & PROBED:
        asked = {job.client: replace(job.request, do="probe") for job in jobs if job.client in replies}
        for client, probe in answer_requests(trainer, asked, {job.client: job.site for job in jobs}).items():
            if isinstance(probe, Reply):
                replies[client].metrics.update({k: v for k, v in probe.metrics.items() if k in names})
    return replies
