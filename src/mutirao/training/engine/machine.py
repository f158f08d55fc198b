"""A trainer's local step, recorded: looked at once, proven against the plain gradient, then only replayed."""

import collections
import contextlib
import copy
import functools
import logging
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, fx
from torch.nn.attention import SDPBackend, sdpa_kernel

from mutirao.core.arrays import Array, Arrays
from mutirao.training.descent import one_thread, seeded
from mutirao.training.engine.jobs import Job
from mutirao.training.engine.step import Form, Layout, Step, moments_of, scalars_of
from mutirao.training.engine.tape import Program, Unsupported, freeze_program, join_tapes, record_tape, tidy_tape
from mutirao.training.plain import PlainTrainer

log = logging.getLogger("mutirao")

FREEZE_AFTER = 32  # steps of one height until freezing its tape pays
BLOCK = 5  # steps frozen together: Python is needed, and its lock taken, once a block
DATA = ("x", "y", "rows", "weights", "scalars")  # the inputs of a step that are not the clients' state
CLOSE = 1e-3  # of the largest number: far above rounding, far below a different formula


class Machine:
    """Gives programs that move k clients by one step; made for one trainer and one kind of samples."""

    def __init__(self, trainer: PlainTrainer, job: Job) -> None:
        self.trainer, self.mu, self.moves = trainer, job.pace.mu, job.moves
        self.sent, self.arrays, self.example = job.request.arrays, job.arrays, job.first()
        self.module = trainer.travel.prepare(
            copy.deepcopy(trainer.blank())
        )  # recording must not touch the one others use
        self._look(*self.example)
        self.sound: Tensor | None = None  # labels found to be classes of the model
        self._said = False
        self._objections: dict[tuple[bool, bool], str] = {}
        self._tapes: dict[Form, fx.GraphModule] = {}
        self._frozen: dict[tuple[Form, int, int], Program | None] = {}  # by form, clients and steps
        self._steps: collections.Counter[tuple[Form, int, int]] = collections.Counter()

    def _look(self, x: Tensor, y: Tensor) -> None:
        """Find out from one plain step what the loss depends on, and whether the model is random."""
        module = self.trainer.travel.prepare(self.trainer.fill(self.sent))
        named = {n: p for n, p in module.named_parameters() if p.requires_grad}
        with quietly():
            before = torch.get_rng_state()
            outputs = module(x)
            self.random = not torch.equal(before, torch.get_rng_state())
            if not isinstance(outputs, Tensor):
                raise Unsupported(f"its output is a {type(outputs).__name__}, not a tensor")
            loss = self.trainer.loss(outputs, y)
            found = torch.autograd.grad(loss, list(named.values()), allow_unused=True)
        self.classes, self.dtype = outputs.shape[-1], loss.dtype
        self.layout = Layout.of(module, {n for n, g in zip(named, found, strict=True) if g is None})
        self.like = {n: t.detach() for n, t in module.state_dict().items()}

    def form(self, batch: int, aligned: bool) -> Form:
        """The fastest way to write a step of so many samples that gives the plain gradient.

        By rows, short batches can be filled up. If loss or layers mix the samples of a batch, as batch normalisation
        does, only batches of the same length can be stacked (`aligned`). A random model draws client by client.
        """
        ways = [(True, True)] + [(True, False)] * aligned + [(False, False)]
        for stacked, by_rows in ways:
            if not self.objection(stacked, by_rows):
                if not stacked and not self._said:
                    self._said = True
                    log.info(
                        "clients are trained one at a time, each with a recorded step: %s", self.objection(*ways[0])
                    )
                return Form(stacked, by_rows, batch)
        raise Unsupported(self.objection(*ways[0]))

    def objection(self, stacked: bool, by_rows: bool) -> str:
        """Why a step cannot be written this way; nothing if it can."""
        if (stacked, by_rows) not in self._objections:
            form = Form(stacked, by_rows, len(self.example[1]))
            try:
                why = "it is random" if stacked and self.random else self._compare(form)
                if not why:
                    self._tapes[form] = self._record(form)
            except Exception as error:  # a model may do anything that cannot be done this way
                why = " ".join(str(error).split())[:160] or type(error).__name__
            self._objections[stacked, by_rows] = why
        return self._objections[stacked, by_rows]

    def _compare(self, form: Form) -> str:
        """The gradients of clients, the second with a shorter batch, against those of the module itself."""
        (x, y), trained = self.example, len(self.layout.trained)
        lengths = [len(y), max(1, len(y) - form.by_rows)] if form.stacked else [len(y)]
        for labels in self._labels(x, y):
            state, step = self.state([self.arrays] * len(lengths)), self._step(form)
            other = state[trained : trained + len(self.layout.other)]  # what comes after is the optimiser's
            xs, ys = (torch.stack([t] * len(lengths)) for t in (x, labels))
            with quietly():
                _, _, ours = step.gradients(state[:trained], other, xs, ys, self.weights(lengths, form))
            for i, length in enumerate(lengths):
                if not close([g[i] for g in ours], self._plain_gradients(x[:length], labels[:length]), CLOSE):
                    mixes = "its loss or its layers mix the samples of a batch"
                    return mixes if form.by_rows else "its gradient differs"
        return ""

    def _labels(self, x: Tensor, y: Tensor) -> list[Tensor]:
        """The labels of the example and, as one client may have few classes, labels of all, if the loss takes them."""
        if y.is_floating_point() or y.dim() != 1:
            return [y]
        every = torch.arange(len(y)).remainder(self.classes).to(y.dtype)
        try:
            self._plain_gradients(x, every)
        except Exception:  # labels that are not numbers of classes
            return [y]
        return [y, every]

    def _plain_gradients(self, x: Tensor, y: Tensor) -> Sequence[Tensor]:
        module = self.trainer.travel.prepare(self.trainer.fill(self.sent))
        named = dict(module.named_parameters())
        with quietly():
            return torch.autograd.grad(self.trainer.loss(module(x), y), [named[n] for n in self.layout.trained])

    def _step(self, form: Form) -> Step:
        return Step(self.trainer, self.module, self.layout, self.mu, self.moves, form)

    def _record(self, form: Form) -> fx.GraphModule:
        """The tape of a step, tried on other samples than those it was recorded with."""
        step, clients = self._step(form), 4 if form.stacked else 1
        with quietly():
            if form.stacked:
                tape = tidy_tape(join_tapes(*(record_tape(step, self.inputs(k, form)) for k in (2, 3))))
            else:
                tape = tidy_tape(record_tape(step, self.inputs(1, form), torch.Generator() if self.random else None))
            theirs, ours = self.inputs(clients, form, turned=True), self.inputs(clients, form, turned=True)
            torch.manual_seed(1)
            expected = [*step(*theirs), *theirs]
            replay = self._replay(tape, form, clients, torch.Generator().manual_seed(1))
            with torch.no_grad():
                got = [*replay(*ours), *ours]
        if not close(got[: -len(DATA)], expected[: -len(DATA)], CLOSE / 100):
            raise Unsupported("what it does changes from batch to batch")
        return tape

    def inputs(self, clients: int, form: Form, turned: bool = False) -> list[Tensor]:
        """Inputs of a step as an example, new ones at each call, as the step writes to them."""
        x, y = self.example
        rows = torch.arange(form.batch).remainder(len(y)).expand(clients, -1)
        rows = rows.flip(1) if turned else rows.contiguous()
        weights = self.weights([form.batch] * clients, form)
        return [*self.state([self.arrays] * clients), x, y, rows, weights, self.scalars(1, self.trainer.lr)[0]]

    def state(self, models: Sequence[Arrays]) -> list[Tensor]:
        """The stack of these models, ready to be trained: tensors trained and not, moments, and where they start."""
        last = {held: name for name, held in self.layout.held.items()}  # of tied names the last one counts
        ours = {n: tuple(t.shape) for n, t in self.like.items()}
        for arrays in models[:1] if all(m is models[0] for m in models) else models:
            if ours != (theirs := {n: a.shape for n, a in arrays.items()}):
                raise ValueError(f"the model's arrays are {ours}; received {theirs}")
        names = self.layout.trained + self.layout.other
        tensors = [stack([m[last[n]] for m in models], self.like[n].dtype) for n in names]
        trained = tensors[: len(self.layout.trained)]
        moments = [torch.zeros_like(t) for t in trained for _ in range(moments_of(self.trainer))]
        return tensors + moments + ([t.clone() for t in trained] if self.mu else [])

    def weights(self, lengths: Sequence[int] | npt.NDArray[np.int64], form: Form) -> Tensor:
        """How much each sample, or with whole batches each client, counts in the loss."""
        if not form.by_rows:
            return torch.ones(len(lengths), dtype=self.dtype)
        many = torch.as_tensor(lengths)[:, None]
        return (torch.arange(form.batch) < many).to(self.dtype) / many

    def scalars(self, steps: int, lr: float) -> Tensor:
        """The numbers of the optimiser that change from round to round, or from step to step."""
        return torch.tensor(scalars_of(self.trainer, steps, lr), dtype=self.dtype)

    def prepare(self, form: Form, clients: int, steps: int) -> bool:
        """Record what so many steps of so many clients need, and freeze what is used often; whether it now is."""
        if form not in self._tapes:
            self._tapes[form] = self._record(form)
        for some, count in ((BLOCK, steps - steps % BLOCK), (1, steps % BLOCK)):
            key = form, clients, some
            self._steps[key] += count
            if self._steps[key] >= FREEZE_AFTER and key not in self._frozen and not self.random:
                *fixed, rows, weights, scalars = self.inputs(clients, form)
                moving = [torch.stack([t] * some) for t in (rows, weights, scalars)]
                replay = self._replay(self._tapes[form], form, clients)
                self._frozen[key] = freeze_program(functools.partial(each_step, replay), [*fixed, *moving])
        return self._frozen.get((form, clients, BLOCK)) is not None

    def run(
        self, form: Form, clients: int, fixed: Sequence[Tensor], moving: Sequence[Tensor], draw: torch.Generator | None
    ) -> list[Sequence[Tensor]]:
        """Make the steps along the first dimension of `moving`; what each returns, in blocks of steps."""
        made: list[Sequence[Tensor]] = []
        start, steps = 0, len(moving[0])
        replay = functools.partial(each_step, self._replay(self._tapes[form], form, clients, draw))
        while start < steps:
            some = BLOCK if steps - start >= BLOCK else 1
            program = self._frozen.get((form, clients, some)) or replay
            made.append(program(*fixed, *(t[start : start + some] for t in moving)))
            start += some
        return made

    def _replay(self, tape: fx.GraphModule, form: Form, clients: int, draw: Any = None) -> Program:
        if self.random:
            return functools.partial(tape.forward, draw)
        return functools.partial(tape.forward, clients) if form.stacked else tape.forward


def each_step(program: Program, *inputs: Tensor) -> tuple[Tensor, ...]:
    """A program of one step, repeated along the first dimension of the inputs that change from step to step."""
    *fixed, rows, weights, scalars = inputs
    moving = zip(rows.unbind(), weights.unbind(), scalars.unbind(), strict=True)
    made = [program(*fixed, *now) for now in moving]
    return tuple(torch.stack(column) for column in zip(*made, strict=True))


def stack(values: Sequence[Array], dtype: torch.dtype) -> Tensor:
    """Arrays along a new first dimension, as a tensor of their own."""
    if any(v is not values[0] for v in values):
        return torch.from_numpy(np.stack(values)).to(dtype)
    one = torch.from_numpy(np.require(values[0], requirements="W")).to(dtype)
    return one.expand(len(values), *one.shape).clone(memory_format=torch.contiguous_format)


def close(ours: Sequence[Tensor], theirs: Sequence[Tensor], share: float) -> bool:
    """Whether two results agree, but for a share of the largest number among them."""
    most = max((float(t.abs().max()) for t in theirs if t.numel()), default=0.0)
    pairs = zip(ours, theirs, strict=True)
    return all(torch.allclose(a.double(), b.double(), 0.0, share * most) for a, b in pairs)


@contextlib.contextmanager
def quietly() -> Iterator[None]:
    """One thread, randomness that nobody else notices, and attention in a form that can be stacked."""
    with one_thread(), seeded(0), warnings.catch_warnings(), sdpa_kernel(SDPBackend.MATH):
        warnings.simplefilter("ignore")  # what cannot be stacked well is not
        yield
