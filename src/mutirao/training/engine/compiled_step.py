"""A compiled local step: traced once, verified against the plain gradient, then only replayed."""

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
from mutirao.training.engine.dropout import NAME, draw_masks, find_masks, give_masks
from mutirao.training.engine.jobs import Job
from mutirao.training.engine.local_step import LocalStep, StateLayout, StepForm, moments_of, scalars_of
from mutirao.training.engine.tracer import (
    Program,
    Unsupported,
    freeze_program,
    merge_traces,
    simplify_trace,
    trace_step,
)
from mutirao.training.optimizers import one_thread, seeded
from mutirao.training.plain import PlainTrainer
from mutirao.training.pull import NOTHING, Pull
from mutirao.training.torch_device import random_state

log = logging.getLogger("mutirao")

FREEZE_AFTER = 32  # steps of one height until freezing its tape pays
BLOCK = 5  # steps frozen together: Python is needed, and its lock taken, once a block
# The inputs of a step, in addition to the clients' state and masks.
FIXED = ("x", "y")
MOVING = ("rows", "weights", "scalars")
TOLERANCE = 1e-3  # of the largest number: far above rounding, far below a different formula


class CompiledStep:
    """Programs that move k clients by one step, made for one trainer and one kind of samples."""

    def __init__(self, trainer: PlainTrainer, job: Job) -> None:
        self.trainer = trainer
        self.mu = job.hyperparameters.mu
        self.has_varying_lr = job.has_varying_lr
        self.device = trainer.torch_device()
        self.corrected = bool(job.pull.correction)
        self.sent = job.request.arrays
        self.arrays = job.arrays
        self.example = job.first()
        # Tracing must not touch the module that plain training uses.
        self.module = trainer.state_names.prepare(copy.deepcopy(trainer.thread_module()))
        self._look(*self.example)
        give_masks(self.module, self.masks)
        # Labels found to be classes of the model.
        self.valid_labels: Tensor | None = None
        self._logged = False
        self._obstacles: dict[tuple[bool, bool], str] = {}
        self._traces: dict[StepForm, fx.GraphModule] = {}
        self._frozen: dict[tuple[StepForm, int, int], Program | None] = {}  # by form, clients and steps
        self._steps: collections.Counter[tuple[StepForm, int, int]] = collections.Counter()

    def _look(self, x: Tensor, y: Tensor) -> None:
        """Run one plain step to see which weights the loss uses, and whether randomness other than dropout occurs."""
        module = self.trainer.state_names.prepare(self.trainer.fill(self.sent))
        named = {n: p for n, p in module.named_parameters() if p.requires_grad}
        with isolated(self.device):
            before = random_state(self.device)
            outputs = module(x)
            is_random = not torch.equal(before, random_state(self.device))
            if not isinstance(outputs, Tensor):
                raise Unsupported(f"its output is a {type(outputs).__name__}, not a tensor")
            loss = self.trainer.loss(outputs, y)
            found = torch.autograd.grad(loss, list(named.values()), allow_unused=True)
            self.masks = find_masks(module, x) if is_random else []
        self.random = is_random and not self.masks
        self.classes = outputs.shape[-1]
        self.dtype = loss.dtype
        self.layout = StateLayout.of(module, {n for n, g in zip(named, found, strict=True) if g is None})
        self.like = {n: t.detach() for n, t in module.state_dict().items()}

    def form(self, batch: int, aligned: bool) -> StepForm:
        """The fastest form of a step with this batch size that gives the plain gradient.

        By rows, short batches can be filled up. If loss or layers mix the samples of a batch, as batch normalisation
        does, only batches of the same length can be stacked (`aligned`). A model that is random in other ways than by
        dropout draws client by client.
        """
        forms = [(True, True)] + [(True, False)] * aligned + [(False, False)]
        for stacked, by_rows in forms:
            if not self.obstacle(stacked, by_rows):
                if not stacked and not self._logged:
                    self._logged = True
                    log.info(
                        "clients are trained one at a time, each with a recorded step: %s", self.obstacle(*forms[0])
                    )
                return StepForm(stacked, by_rows, batch)
        raise Unsupported(self.obstacle(*forms[0]))

    def obstacle(self, stacked: bool, by_rows: bool) -> str:
        """Why a step cannot take this form; empty if it can."""
        if (stacked, by_rows) not in self._obstacles:
            form = StepForm(stacked, by_rows, len(self.example[1]))
            try:
                why = "it is random" if stacked and self.random else self._compare(form)
                if not why:
                    self._traces[form] = self._record(form)
            except Exception as error:  # a model may do anything that cannot be done this way
                why = " ".join(str(error).split())[:160] or type(error).__name__
            self._obstacles[stacked, by_rows] = why
        return self._obstacles[stacked, by_rows]

    def _compare(self, form: StepForm) -> str:
        """Compare the gradients of stacked clients, the second with a shorter batch, with the module's own."""
        (x, y) = self.example
        trained = len(self.layout.trained)
        lengths = [len(y), max(1, len(y) - form.by_rows)] if form.stacked else [len(y)]
        # The second client has a shorter batch: its gradient differs if the loss or a layer mixes samples.
        for labels in self._labels(x, y):
            state = self.state([self.arrays] * len(lengths))
            step = self._step(form)
            # The rest of the state belongs to the optimizer.
            other = state[trained : trained + len(self.layout.other)]
            xs, ys = (torch.stack([t] * len(lengths)) for t in (x, labels))
            generators = [self.trainer.generator(0) for _ in lengths]  # as the module itself will draw
            masks = [m[0] for m in draw_masks(self.masks, generators, np.array([lengths]), len(y))]
            with isolated(self.device):
                _, _, ours = step.gradients(state[:trained], other, xs, ys, self.weights(lengths, form), masks)
            for i, length in enumerate(lengths):
                if not is_close([g[i] for g in ours], self._plain_gradients(x[:length], labels[:length]), TOLERANCE):
                    mixes = "its loss or its layers mix the samples of a batch"
                    if form.by_rows:
                        return mixes
                    return "its gradient differs"
        return ""

    def _labels(self, x: Tensor, y: Tensor) -> list[Tensor]:
        """The example's labels and, as one client may have few classes, all classes if the loss accepts them."""
        if y.is_floating_point() or y.dim() != 1:
            return [y]
        every = torch.arange(len(y), device=y.device).remainder(self.classes).to(y.dtype)
        try:
            self._plain_gradients(x, every)
        except Exception:  # labels that are not numbers of classes
            return [y]
        return [y, every]

    def _plain_gradients(self, x: Tensor, y: Tensor) -> Sequence[Tensor]:
        module = self.trainer.state_names.prepare(self.trainer.fill(self.sent))
        named = dict(module.named_parameters())
        with isolated(self.device):
            return torch.autograd.grad(self.trainer.loss(module(x), y), [named[n] for n in self.layout.trained])

    def _step(self, form: StepForm) -> LocalStep:
        masked = [f"{mask.layer}.{NAME}" for mask in self.masks]
        return LocalStep(
            self.trainer, self.module, self.layout, self.mu, self.corrected, self.has_varying_lr, form, masked
        )

    def _record(self, form: StepForm) -> fx.GraphModule:
        """The trace of a step, tested on other samples than those it was recorded with."""
        step = self._step(form)
        clients = 4 if form.stacked else 1
        with isolated(self.device):
            if form.stacked:
                trace = simplify_trace(merge_traces(*(trace_step(step, self.inputs(k, form)) for k in (2, 3))))
            else:
                trace = simplify_trace(
                    trace_step(step, self.inputs(1, form), self.trainer.generator(0) if self.random else None)
                )
            theirs = self.inputs(clients, form, turned=True)
            ours = self.inputs(clients, form, turned=True)
            with seeded(1, self.device):
                expected = [*step(*theirs), *theirs]
            replay = self._replay(trace, form, clients, self.trainer.generator(1))
            with torch.no_grad():
                got = [*replay(*ours), *ours]
        data = len(FIXED) + self._moving
        if not is_close(got[:-data], expected[:-data], TOLERANCE / 100):
            raise Unsupported("what it does changes from batch to batch")
        return trace

    def inputs(self, clients: int, form: StepForm, turned: bool = False) -> list[Tensor]:
        """Example inputs of a step, new ones at each call, as the step writes to them."""
        x, y = self.example
        rows = torch.arange(form.batch, device=self.device).remainder(len(y)).expand(clients, -1)
        rows = rows.flip(1) if turned else rows.contiguous()
        weights = self.weights([form.batch] * clients, form)
        generators = [self.trainer.generator(i + turned) for i in range(clients)]
        masks = draw_masks(self.masks, generators, np.full((1, clients), form.batch), form.batch)
        moving = [rows, weights, self.scalars(1, self.trainer.lr)[0], *(mask[0] for mask in masks)]
        return [*self.state([self.arrays] * clients), x, y, *moving]

    def state(self, models: Sequence[Arrays], pulls: Sequence[Pull] = ()) -> list[Tensor]:
        """The stacked state of these models: trained and other tensors, moments, anchors and corrections."""
        # Of tied weights the last name counts.
        last = {held: name for name, held in self.layout.held.items()}
        ours = {n: tuple(t.shape) for n, t in self.like.items()}
        for arrays in models[:1] if all(m is models[0] for m in models) else models:
            if ours != (theirs := {n: a.shape for n, a in arrays.items()}):
                raise ValueError(f"the model's arrays are {ours}; received {theirs}")
        names = self.layout.trained + self.layout.other
        tensors: list[Tensor] = []
        for name in names:
            arrays_of_clients = [model[last[name]] for model in models]
            tensors.append(stack_arrays(arrays_of_clients, self.like[name].dtype).to(self.device))
        trained = tensors[: len(self.layout.trained)]
        moments = [torch.zeros_like(t) for t in trained for _ in range(moments_of(self.trainer))]
        pulls = pulls or [NOTHING] * len(models)
        places = [last[n] for n in self.layout.trained]
        anchors = [t.clone() for t in trained] if self.mu else []
        pairs = list(zip(models, pulls, strict=True))
        if self.mu and any(pull.anchor for pull in pulls):
            anchors = self._stacked([pull.anchors(places, model) for model, pull in pairs], trained)
        if not self.corrected:
            return tensors + moments + anchors
        corrections = self._stacked([pull.corrections(places, model) for model, pull in pairs], trained)
        return tensors + moments + anchors + corrections

    def _stacked(self, each: Sequence[Sequence[Array]], like: Sequence[Tensor]) -> list[Tensor]:
        """Per-client arrays, weight by weight, as stacks with the dtype and device of `like`."""
        return [
            stack_arrays(own, t.dtype).to(self.device) for own, t in zip(zip(*each, strict=True), like, strict=True)
        ]

    def weights(self, lengths: Sequence[int] | npt.NDArray[np.int64], form: StepForm) -> Tensor:
        """The weight of each sample in the loss or, with whole batches, of each client."""
        if not form.by_rows:
            return torch.ones(len(lengths), dtype=self.dtype, device=self.device)
        many = torch.as_tensor(lengths, device=self.device)[:, None]
        return (torch.arange(form.batch, device=self.device) < many).to(self.dtype) / many

    def scalars(self, steps: int, lr: float) -> Tensor:
        """The optimizer's numbers that change from round to round, or from step to step."""
        return torch.tensor(scalars_of(self.trainer, steps, lr), dtype=self.dtype, device=self.device)

    def prepare(self, form: StepForm, clients: int, steps: int) -> bool:
        """Trace what these steps need, and freeze what is used often; whether the step is frozen now."""
        if form not in self._traces:
            self._traces[form] = self._record(form)
        for some, count in ((BLOCK, steps - steps % BLOCK), (1, steps % BLOCK)):
            key = form, clients, some
            self._steps[key] += count
            if self._steps[key] >= FREEZE_AFTER and key not in self._frozen and not self.random:
                example = self.inputs(clients, form)
                program = self._program(form, clients)
                fixed = example[: -self._moving]
                moving = example[-self._moving :]
                self._frozen[key] = freeze_program(program, [*fixed, *(torch.stack([t] * some) for t in moving)])
        return self._frozen.get((form, clients, BLOCK)) is not None

    def run(
        self,
        form: StepForm,
        fixed: Sequence[Tensor],
        moving: Sequence[Tensor],
        lengths: npt.NDArray[np.int64],
        generators: Sequence[torch.Generator],
    ) -> list[Sequence[Tensor]]:
        """Run the steps along the first dimension of `moving`; the outputs in blocks of steps.

        `lengths` are the samples of each step and client, and what is random comes from the clients' `generators`.
        """
        made: list[Sequence[Tensor]] = []
        start = 0
        (steps, clients) = lengths.shape
        replay = self._program(form, clients, generators)
        while start < steps:
            some = BLOCK if steps - start >= BLOCK else 1
            now = slice(start, start + some)
            program = self._frozen.get((form, clients, some)) or replay
            masks = draw_masks(
                self.masks, generators, lengths[now], form.batch
            )  # of a block: those of all would be many
            made.append(program(*fixed, *(t[now] for t in moving), *masks))
            start += some
        return made

    @property
    def _moving(self) -> int:
        """The number of inputs that change from step to step."""
        return len(MOVING) + len(self.masks)

    def _program(self, form: StepForm, clients: int, generators: Sequence[torch.Generator] = ()) -> Program:
        """The trace, repeated along the first dimension of the inputs that change from step to step."""
        replay = self._replay(self._traces[form], form, clients, *generators[:1])
        return functools.partial(repeat_step, replay, self._moving)

    def _replay(self, trace: fx.GraphModule, form: StepForm, clients: int, draw: Any = None) -> Program:
        if self.random:
            return functools.partial(trace.forward, draw)
        if form.stacked:
            return functools.partial(trace.forward, clients)
        return trace.forward


def repeat_step(program: Program, moving: int, *inputs: Tensor) -> tuple[Tensor, ...]:
    """A program of one step, repeated along the first dimension of its last `moving` inputs."""
    steps = zip(*(t.unbind() for t in inputs[-moving:]), strict=True)
    made = [program(*inputs[:-moving], *now) for now in steps]
    return tuple(torch.stack(column) for column in zip(*made, strict=True))


def stack_arrays(values: Sequence[Array], dtype: torch.dtype) -> Tensor:
    """Arrays stacked along a new first dimension, as a tensor with its own memory."""
    if any(v is not values[0] for v in values):
        return torch.from_numpy(np.stack(values)).to(dtype)
    one = torch.from_numpy(np.require(values[0], requirements="W")).to(dtype)
    return one.expand(len(values), *one.shape).clone(memory_format=torch.contiguous_format)


def is_close(ours: Sequence[Tensor], theirs: Sequence[Tensor], share: float) -> bool:
    """Whether two results agree up to a share of the largest value among them."""
    most = max((float(t.abs().max()) for t in theirs if t.numel()), default=0.0)
    pairs = zip(ours, theirs, strict=True)
    return all(torch.allclose(a.cpu().double(), b.cpu().double(), 0.0, share * most) for a, b in pairs)


@contextlib.contextmanager
def isolated(device: torch.device) -> Iterator[None]:
    """A context with one thread, private randomness, and attention in a form that can be stacked."""
    with one_thread(), seeded(0, device), warnings.catch_warnings(), sdpa_kernel(SDPBackend.MATH):
        # torch warns about operations that it cannot stack well.
        warnings.simplefilter("ignore")
        yield
