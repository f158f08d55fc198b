"""A model judged on many clients at once: one pass over all their samples, then means client by client."""

import logging
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from mutirao.core.arrays import Array, Arrays
from mutirao.core.fleet import ClientId, Reply, failure_of
from mutirao.training.cores import cores
from mutirao.training.descent import one_thread
from mutirao.training.engine.jobs import storage_of
from mutirao.training.engine.threads import in_threads, is_heavy
from mutirao.training.figures import entropies, is_classes, mean_metrics, noted_losses, probe_samples, read_extras
from mutirao.training.inputs import call_model
from mutirao.training.plain import Outcomes, PlainTrainer, Requests, Sites
from mutirao.training.samples import ClientData, Samples, own_test_of

log = logging.getLogger("mutirao")

Seen = TypeVar("Seen")

NUMBERS = 1 << 18  # of input in one batch: what stays in a core's cache


def evaluate_model(trainer: PlainTrainer, arrays: Arrays, data: Any) -> dict[str, float]:
    """Mean loss, and accuracy where the labels are classes, on Samples or what they can be made of."""
    samples = own_test_of(data) if isinstance(data, ClientData) else Samples.of(data)
    if len(samples) == 0:
        raise ValueError("has no samples to be judged on")
    classes = is_classes(samples.y)

    def look(outputs: Tensor, y: Tensor) -> tuple[float, int]:
        right = int((outputs.argmax(-1) == y).sum()) if classes else 0
        return float(trainer.loss(outputs, y)) * len(y), right

    seen = batch_by_batch(trainer, arrays, samples, look)
    total, right = sum(loss for loss, _ in seen), sum(right for _, right in seen)
    return mean_metrics(total, right if classes else None, len(samples))


def judge_many(trainer: PlainTrainer, requests: Requests, sites: Sites) -> Outcomes:
    """Answers to `evaluate` and `probe`; clients for whom there is no common pass are left out."""
    outcomes: Outcomes = {}
    groups: dict[tuple[str, int, Any, frozenset[str]], list[tuple[ClientId, Samples, int]]] = {}
    for client in sorted(requests):
        request = requests[client]
        try:
            whole = (own_test_of if request.do == "evaluate" else Samples.of)(sites[client].data)
            samples = whole.first(probe_samples(request.config)) if request.do == "probe" else whole
            if len(samples) == 0:
                raise ValueError("has no samples to be judged on")
            extras: frozenset[str] = read_extras(request.config, whole) if request.do == "probe" else frozenset()
        except Exception as error:  # it is this client's failure alone
            outcomes[client] = failure_of(error)
            continue
        if "gradient_norm" in extras:
            continue  # a gradient is one client's own: there is no common pass
        key = request.do, id(request.arrays), samples.kind, extras
        groups.setdefault(key, []).append((client, samples, len(whole)))
    for (do, _, _, extras), group in groups.items():
        try:
            means = mean_by_client(trainer, requests[group[0][0]].arrays, [samples for _, samples, _ in group])
        except Exception as error:  # some client's data are wrong: whose will show when they are asked one by one
            log.debug("clients are judged one by one: %s", error)
            continue
        names = ("loss", "entropy", *(extras & {"rms_loss"})) if do == "probe" else ("loss", "accuracy")
        for (client, _, n), found in zip(group, means, strict=True):
            outcomes[client] = Reply({}, metrics={k: found[k] for k in names if k in found}, n=n)
    return outcomes


def mean_by_client(trainer: PlainTrainer, arrays: Arrays, clients: Sequence[Samples]) -> list[dict[str, float]]:
    """Mean loss, root mean squared loss, accuracy and entropy of one model on the samples of each client."""
    x, y, rows = storage_of(clients)
    names = ["loss", "rms_loss", "accuracy", "entropy"] if is_classes(y) else ["loss", "rms_loss"]

    def look(outputs: Tensor, y: Tensor) -> Array:
        losses = noted_losses(trainer.loss, outputs, y).double()
        if not torch.isclose(losses.mean(), trainer.loss(outputs, y).double(), 1e-3, 1e-6):
            raise ValueError("the loss of a batch is not the mean over its samples")
        both = [losses, losses.square()]
        return torch.stack([*both, outputs.argmax(-1) == y, entropies(outputs)] if is_classes(y) else both).numpy()

    values = np.concatenate(batch_by_batch(trainer, arrays, Samples(x, y, np.concatenate(rows)), look), axis=1)
    sizes = np.array([len(r) for r in rows])
    means = np.add.reduceat(values, np.cumsum(sizes) - sizes, axis=1) / sizes
    means[1] = np.sqrt(means[1])
    return [dict(zip(names, column, strict=True)) for column in means.T.tolist()]


def batch_by_batch(
    trainer: PlainTrainer, arrays: Arrays, samples: Samples, look: Callable[[Tensor, Tensor], Seen]
) -> list[Seen]:
    """What `look(outputs, y)` sees of each batch; heavy models do their batches in threads."""
    size = max(1, NUMBERS // max(1, samples.width))
    starts = range(0, len(samples), size)

    def some(starts: Sequence[int]) -> list[Seen]:
        model = trainer.fill(arrays).eval()
        with one_thread(), torch.inference_mode():
            batches = (samples.batch(slice(start, start + size)) for start in starts)
            return [look(call_model(model, x), y) for x, y in batches]

    if not is_heavy(trainer):
        return some(starts)
    share = -(-len(starts) // (trainer.workers or cores()))
    parts = [starts[i : i + share] for i in range(0, len(starts), share)]
    return [seen for part in in_threads(trainer, some, parts) for seen in part]
