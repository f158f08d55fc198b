"""The stacked engine: parameters of many clients lie along a leading dimension, and one compiled step moves all."""

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional

from mutirao.core.arrays import Arrays, nbytes
from mutirao.core.fleet import ClientId, Reply
from mutirao.randomness import derive_seed
from mutirao.training.engine.compiled_step import CompiledStep
from mutirao.training.engine.jobs import Job, shared_storage
from mutirao.training.engine.local_step import StepForm
from mutirao.training.engine.threaded import run_in_threads
from mutirao.training.engine.tracer import Unsupported
from mutirao.training.measurements import (
    concatenate_errors,
    is_classes,
    losses_without_grad,
    squared_errors,
    training_metrics,
)
from mutirao.training.optimizers import one_thread
from mutirao.training.plain import PlainTrainer
from mutirao.training.samples import Index

Share = tuple[Job, Index]  # a client's job and the rows of the storage it owns

STACK_BYTES = 1 << 18  # of parameters in one stack: more would not stay in a core's cache with all that goes with them
MAX_CLIENTS = 64  # clients in one stack
SEGMENT_STEPS = 256  # steps whose outputs are kept until they are recorded


def train_stacked(trainer: PlainTrainer, compiled: CompiledStep, jobs: Sequence[Job]) -> dict[ClientId, Reply]:
    """Train clients of one kind, except those with invalid labels; raises `Unsupported` if the model cannot."""
    x, y, rows = shared_storage([job.samples for job in jobs])
    if x.device != compiled.device:
        raise Unsupported("its samples do not fit the device's memory")
    shares = with_known_labels(compiled, y, list(zip(jobs, rows, strict=True)))
    if not shares:
        return {}
    lengths = [job.lengths for job, _ in shares]
    longest = max(lengths, key=len)
    aligned = all(np.array_equal(some, longest[: len(some)]) for some in lengths if some is not longest)
    form = compiled.form(int(max(map(np.max, lengths))), aligned)
    tallest = min(MAX_CLIENTS, max(1, STACK_BYTES // max(1, nbytes(jobs[0].arrays)))) if form.stacked else 1
    stacks = [Stack(compiled, form, x, y, part) for part in assign_to_stacks(shares, tallest)]
    is_frozen = False
    for stack in stacks:
        for start, stop, clients, batch in stack.segments():
            is_frozen |= compiled.prepare(form._replace(batch=batch), clients, stop - start)
    # Python's lock makes threads useless for steps that are not frozen.
    workers = trainer.workers if is_frozen else 1
    replies: dict[ClientId, Reply] = {}
    for some in run_in_threads(workers, Stack.train, stacks):
        replies |= some
    return replies


def with_known_labels(compiled: CompiledStep, y: Tensor, shares: list[Share]) -> list[Share]:
    """The clients with labels that are classes of the model; the others are left to plain training."""
    if compiled.trainer.loss is not functional.cross_entropy or not is_classes(y) or y is compiled.valid_labels:
        return shares

    def known(labels: Tensor) -> bool:
        return int(labels.min()) >= 0 and int(labels.max()) < compiled.classes

    if known(y):
        # All labels of this storage are valid, which is checked only once.
        compiled.valid_labels = y
        return shares
    return [(job, rows) for job, rows in shares if known(y[torch.from_numpy(rows).to(y.device)])]


def assign_to_stacks(shares: Sequence[Share], tallest: int) -> list[list[Share]]:
    """Assign the clients, longest first, each to the stack with the least work; at least two stacks.

    The assignment depends on the clients only, not on the number of workers, because the last bit of an
    activation may depend on where in a stack a client stands.
    """
    count = max(-(-len(shares) // tallest), min(2, len(shares) // 2), 1)
    pieces: list[list[Share]] = [[] for _ in range(count)]
    loads = [0] * count
    for job, rows in sorted(shares, key=lambda share: (-len(share[0].lengths), share[0].client)):
        least = min(range(count), key=lambda i: (len(pieces[i]) >= tallest, loads[i], i))
        pieces[least].append((job, rows))
        loads[least] += len(job.lengths)
    return pieces


class Stack:
    """One stack of clients, longest first, so that it shrinks as they finish."""

    def __init__(self, compiled: CompiledStep, form: StepForm, x: Tensor, y: Tensor, shares: Sequence[Share]) -> None:
        self.compiled = compiled
        self.form = form
        self.x = x
        self.y = y
        self.shares = shares
        self.jobs = [job for job, _ in shares]
        # Samples of each batch; 0 after a client has finished.
        self.lengths = np.zeros((len(self.jobs[0].lengths), len(shares)), np.int64)
        for i, job in enumerate(self.jobs):
            self.lengths[: len(job.lengths), i] = job.lengths

    def rows(self) -> npt.NDArray[np.int64]:
        """The samples of each client at each step; short batches are filled up with samples of weight 0."""
        table = np.zeros((*self.lengths.shape, self.form.batch), np.int64)
        for i, (job, owned) in enumerate(self.shares):
            mine = table[: len(job.lengths), i]
            lengths = job.lengths
            rows = owned[job.order()]
            if len(rows) == mine.size:
                mine[:] = rows.reshape(mine.shape)
            else:
                mine[:] = rows[np.cumsum(lengths) - lengths][:, None]
                mine[np.arange(self.form.batch) < lengths[:, None]] = rows
        return table

    def segments(self) -> Iterator[tuple[int, int, int, int]]:
        """Runs of steps with the same number of clients and samples: (start, stop, clients, batch)."""
        clients = (self.lengths > 0).sum(1)
        batch = np.full(len(clients), self.form.batch) if self.form.by_rows else self.lengths[:, 0]
        changes = np.flatnonzero((np.diff(clients) != 0) | (np.diff(batch) != 0)) + 1
        for start, end in zip([0, *changes.tolist()], [*changes.tolist(), len(clients)], strict=True):
            for first in range(start, end, SEGMENT_STEPS):
                yield first, min(first + SEGMENT_STEPS, end), int(clients[start]), int(batch[start])

    def train(self) -> dict[ClientId, Reply]:
        """Run all steps; each client's reply."""
        compiled = self.compiled
        record = StepRecord(self)
        table = torch.from_numpy(self.rows()).to(compiled.device)
        generators = [self.draw(job) for job in self.jobs] if compiled.random or compiled.masks else []
        with one_thread(), torch.inference_mode():
            state = compiled.state([job.arrays for job in self.jobs], [job.pull for job in self.jobs])
            scalars = compiled.scalars(len(self.lengths), self.jobs[0].hyperparameters.lr)
            for start, stop, clients, batch in self.segments():
                form = self.form._replace(batch=batch)
                rows = table[start:stop, :clients, :batch]
                fixed = [*(tensor[:clients] for tensor in state), self.x, self.y]
                moving = [rows, self.weights(start, stop, clients, form), scalars[start:stop]]
                made = compiled.run(form, fixed, moving, self.lengths[start:stop, :clients], generators)
                record.take(start, stop, clients, made, self.y[rows])
        layout = compiled.layout
        arrays = {n: t.cpu().numpy() for n, t in zip([*layout.trained, *layout.other], state, strict=False)}
        held = {name: arrays[layout.held[name]] for name in compiled.trainer.state_names.shared}
        replies: dict[ClientId, Reply] = {}
        for i, job in enumerate(self.jobs):
            own = {name: values[i, ...] for name, values in held.items()}
            replies[job.client] = record.reply(i, own)
        return replies

    def draw(self, job: Job) -> torch.Generator:
        """A client's random generator, as in plain training."""
        config = job.request.config
        return self.compiled.trainer.generator(
            derive_seed(int(config["seed"]), int(config["round"]), "torch", job.client)
        )

    def weights(self, start: int, stop: int, clients: int, form: StepForm) -> Tensor:
        """The weight of each sample or client in each step."""
        lengths = self.lengths[start:stop, :clients]
        weights = self.compiled.weights(lengths.ravel(), form)
        return weights.view(*lengths.shape, *weights.shape[1:])


class StepRecord:
    """What the steps of a stack saw: losses, hits and, if requested, squared errors of samples."""

    def __init__(self, piece: Stack) -> None:
        self.piece = piece
        steps, clients = piece.lengths.shape
        self.loss = np.zeros(clients)
        self.right = np.zeros(clients, np.int64)
        self.errors: npt.NDArray[np.int16] | None = None
        if "squared_errors" in piece.jobs[0].extras:
            self.errors = np.zeros((steps, clients, piece.form.batch, *piece.y.shape[1:]), np.int16)

    def take(self, start: int, stop: int, clients: int, made: Sequence[Sequence[Tensor]], y: Tensor) -> None:
        """Record what some steps saw before their update."""
        outputs = torch.cat([m[0] for m in made])
        lengths = torch.from_numpy(self.piece.lengths[start:stop, :clients])
        there = torch.arange(y.shape[2]) < lengths[..., None]
        if self.piece.form.by_rows:
            losses = losses_without_grad(self.piece.compiled.trainer.loss, outputs.flatten(0, 2), y.flatten(0, 2))
            total = torch.where(there, losses.view(there.shape).cpu().double(), 0.0).sum((0, 2))
        else:
            total = (torch.cat([m[1] for m in made]).cpu().double() * lengths).sum(0)
        self.loss[:clients] += total.numpy()
        if is_classes(y):
            self.right[:clients] += ((outputs.argmax(-1) == y).cpu() & there).sum((0, 2)).numpy()
        if self.errors is not None:
            errors = squared_errors(self.piece.compiled.trainer.loss, outputs, y)
            self.errors[start:stop, :clients, : y.shape[2]] = errors.cpu().numpy()

    def reply(self, i: int, arrays: Arrays) -> Reply:
        """The reply of the i-th client."""
        job = self.piece.jobs[i]
        lengths = self.piece.lengths[:, i]
        lengths = lengths[lengths > 0]
        right = int(self.right[i]) if is_classes(self.piece.y) else None
        metrics = training_metrics(float(self.loss[i]), right, int(lengths.sum()))
        if self.errors is None:
            return Reply(arrays, {}, metrics, len(job.samples))
        errors = [step[:length] for step, length in zip(self.errors[:, i], lengths.tolist(), strict=False)]
        return Reply(arrays, concatenate_errors(errors), metrics, len(job.samples))
