"""What a step costs: whether a model's calls are so small that making them takes longer than what they do."""

import contextlib
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from mutirao.training.engine.jobs import Job
from mutirao.training.inputs import call_model, map_tensors
from mutirao.training.optimizers import one_thread, seeded
from mutirao.training.plain import PlainTrainer

# Floating-point operations a call from which on a client keeps a core busy by itself. Measured with models of many
# sizes; kept here, because the ways on either side differ in the last bits, and a run must not depend on a stopwatch.
HEAVY_CALL = 1_000_000


def is_busy(trainer: PlainTrainer, job: Job) -> bool:
    """Whether a step of such a client is arithmetic rather than calls; the model, samples and batch size decide."""
    known = trainer._cache.setdefault("busy", {})
    key = job.samples.kind, job.hyperparameters.batch_size
    if key not in known:
        flops, calls = count_calls(trainer, job)
        known[key] = flops >= HEAVY_CALL * calls
    return bool(known[key])


def count_calls(trainer: PlainTrainer, job: Job) -> tuple[int, int]:
    """The floating-point operations of a forward pass, and in how many calls; none where it cannot be made."""
    module, counter = PlainTrainer.make(trainer), OperationCounter()
    rows = torch.zeros(job.hyperparameters.batch_size, dtype=torch.int64)
    x = map_tensors(job.samples.batch(slice(0, 1))[0], lambda t: t[rows.to(t.device)])
    silent = contextlib.suppress(Exception)  # who has samples that do not fit is told when they are trained on
    with silent, one_thread(), seeded(0, trainer.torch_device()), torch.no_grad(), counter:
        call_model(module.train(), x)
    return counter.flops, max(1, counter.calls)


class OperationCounter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts what is called, and the multiplications and additions of products and convolutions."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.flops, self.calls = 0, 0

    @classmethod
    def _should_skip_dynamo(cls) -> bool:  # or torch imports its compiler, which takes a second
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Do the operation, and count it."""
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
