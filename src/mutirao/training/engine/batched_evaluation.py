"""Evaluate one model on many clients in one pass over all their samples, then average per client."""

import logging
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from mutirao.core.arrays import Array, Arrays
from mutirao.core.cpu_threads import core_count
from mutirao.core.fleet import ClientId, Reply, failure_of
from mutirao.training.engine.jobs import shared_storage
from mutirao.training.engine.threaded import map_in_threads
from mutirao.training.inputs import call_model
from mutirao.training.measurements import (
    has_error_measures,
    is_classes,
    losses_without_grad,
    predictive_entropies,
    probe_samples,
    read_extras,
    training_metrics,
)
from mutirao.training.optimizers import one_thread
from mutirao.training.plain import Outcomes, PlainTrainer, Requests, Sites
from mutirao.training.samples import ClientData, Samples, own_test_samples
from mutirao.training.torch_device import is_heavy

log = logging.getLogger("mutirao")

Seen = TypeVar("Seen")

EVALUATED = {"loss", "accuracy"}
BATCH_NUMBERS = 1 << 18  # of input in one batch: what stays in a core's cache


def evaluate_model(trainer: PlainTrainer, arrays: Arrays, data: Any) -> dict[str, float]:
    """Mean loss, accuracy where labels are classes, and the trainer's own metrics of all outputs.

    `data` are Samples, or what they can be made of.
    """
    samples = own_test_samples(data) if isinstance(data, ClientData) else Samples.of(data)
    if len(samples) == 0:
        raise ValueError("has no samples to evaluate on")
    classes = is_classes(samples.y)

    def look(outputs: Tensor, y: Tensor) -> tuple[float, int, tuple[Array, Array] | None]:
        right = int((outputs.argmax(-1) == y).sum()) if classes else 0
        kept = (outputs.cpu().numpy(), y.cpu().numpy()) if trainer.figures is not None else None
        return float(trainer.loss(outputs, y)) * len(y), right, kept

    seen = map_batches(trainer, arrays, samples, look)
    total = sum(loss for loss, _, _ in seen)
    right = sum(right for _, right, _ in seen)
    found = training_metrics(total, right if classes else None, len(samples))
    return found | custom_metrics(trainer, [kept for _, _, kept in seen if kept is not None])


def custom_metrics(trainer: PlainTrainer, seen: Sequence[tuple[Array, Array]]) -> dict[str, float]:
    """The trainer's own metrics (`figures`) of all outputs and labels."""
    if trainer.figures is None:
        return {}
    outputs, labels = (np.concatenate(parts) for parts in zip(*seen, strict=True))
    return {name: float(value) for name, value in trainer.figures(outputs, labels).items()}


def evaluate_in_batches(trainer: PlainTrainer, requests: Requests, sites: Sites) -> Outcomes:
    """Replies to `evaluate` and `probe`; clients that need a pass of their own are left out."""
    outcomes: Outcomes = {}
    groups: dict[tuple[str, int, Any, frozenset[str]], list[tuple[ClientId, Samples, int]]] = {}
    for client in sorted(requests):
        request = requests[client]
        try:
            extras = frozenset[str]()
            if request.do == "probe":
                whole = Samples.of(sites[client].data)
                samples = whole.first(probe_samples(request.config))
            else:
                samples = whole = own_test_samples(sites[client].data)
            if len(samples) == 0:
                raise ValueError("has no samples to evaluate on")
            if request.do == "probe":
                extras = read_extras(request.config, whole, trainer.loss)
        except Exception as error:  # it is this client's failure alone
            outcomes[client] = failure_of(error)
            continue
        if "gradient_norm" in extras:
            continue  # a gradient is one client's own: there is no common pass
        key = request.do, id(request.arrays), samples.kind, extras
        groups.setdefault(key, []).append((client, samples, len(whole)))
    for (do, _, _, extras), group in groups.items():
        try:
            means = metrics_by_client(trainer, requests[group[0][0]].arrays, [samples for _, samples, _ in group])
        except Exception as error:  # a client has invalid data; which one shows when they are asked one by one
            log.debug("clients are evaluated one by one: %s", error)
            continue
        names = {"loss", "entropy", *(extras & {"rms_loss"})} if do == "probe" else EVALUATED
        for (client, _, n), (found, figures) in zip(group, means, strict=True):
            metrics = {k: v for k, v in found.items() if k in names}
            if do == "evaluate":
                metrics |= figures
            outcomes[client] = Reply({}, metrics=metrics, n=n)
    return outcomes


def metrics_by_client(
    trainer: PlainTrainer, arrays: Arrays, clients: Sequence[Samples]
) -> list[tuple[dict[str, float], dict[str, float]]]:
    """Mean loss, root mean squared loss, accuracy and entropy of one model on each client's samples.

    With them come the trainer's own metrics (`figures`), if it has any.
    """
    x, y, rows = shared_storage(clients)
    names = ["loss", "rms_loss", *(["entropy"] * has_error_measures(trainer.loss, y)), *(["accuracy"] * is_classes(y))]

    def look(outputs: Tensor, y: Tensor) -> tuple[Array, Array]:
        # Not every device supports float64.
        losses = losses_without_grad(trainer.loss, outputs, y).cpu().double()
        if not torch.isclose(losses.mean(), trainer.loss(outputs, y).cpu().double(), 1e-3, 1e-6):
            raise ValueError("the loss of a batch is not the mean over its samples")
        more = [predictive_entropies(trainer.loss, outputs, y).cpu()] if has_error_measures(trainer.loss, y) else []
        more += [(outputs.argmax(-1) == y).cpu()] if is_classes(y) else []
        return torch.stack([losses, losses.square(), *more]).numpy(), outputs.cpu().numpy()

    seen = map_batches(trainer, arrays, Samples(x, y, np.concatenate(rows)), look)
    values = np.concatenate([means for means, _ in seen], axis=1)
    sizes = np.array([len(r) for r in rows])
    means = np.add.reduceat(values, np.cumsum(sizes) - sizes, axis=1) / sizes
    means[1] = np.sqrt(means[1])
    found = [dict(zip(names, column, strict=True)) for column in means.T.tolist()]
    if trainer.figures is None:
        return [(mean, {}) for mean in found]
    own = np.split(np.concatenate([outputs for _, outputs in seen]), np.cumsum(sizes)[:-1])
    labels = (y[torch.from_numpy(r)].numpy() for r in rows)
    return [(m, custom_metrics(trainer, [pair])) for m, pair in zip(found, zip(own, labels, strict=True), strict=True)]


def map_batches(
    trainer: PlainTrainer, arrays: Arrays, samples: Samples, look: Callable[[Tensor, Tensor], Seen]
) -> list[Seen]:
    """The results of `look(outputs, y)` for each batch; heavy models process their batches in threads."""
    size = max(1, BATCH_NUMBERS // max(1, samples.width))
    starts = range(0, len(samples), size)
    there = trainer.to_device(samples)

    def some(starts: Sequence[int]) -> list[Seen]:
        model = trainer.fill(arrays).eval()
        with one_thread(), torch.inference_mode():
            batches = (there.batch(slice(start, start + size)) for start in starts)
            return [look(call_model(model, x), y) for x, y in batches]

    if not is_heavy(trainer.thread_module(), trainer.batch_size):
        return some(starts)
    share = -(-len(starts) // (trainer.workers or core_count()))
    parts = [starts[i : i + share] for i in range(0, len(starts), share)]
    return [seen for part in map_in_threads(trainer, some, parts) for seen in part]
