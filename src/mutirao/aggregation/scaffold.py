"""SCAFFOLD: control variates correct the drift of clients with different data.

The server keeps c, client k keeps c_k, both at first 0. A client takes steps y <- y - lr (g(y) + c - c_k) from the
server's model x and then has

    option 1:  c_k' = the gradient of its whole data at x
    option 2:  c_k' = c_k - c + (x - y) / r        (K steps without momentum: r = K lr)

and the server, with N clients of which those in S answered,

    x' = x + lr_g sum_S p_k (y_k - x),    c' = c + sum_S q_k (c_k' - c_k)

Karimireddy, Kale, Mohri, Reddi, Stich and Suresh, "SCAFFOLD: Stochastic Controlled Averaging for Federated Learning",
ICML 2020, where p_k = 1 / |S| and q_k = 1 / N. With weights by samples p_k = n_k / n_S and q_k = n_k / (N m), m the
mean size of the clients of the first round. q_k must be in proportion to p_k, and the same in every round with k: then
c stays sum_k q_k c_k, which is 0 at the optimum. |S| / N p_k depends on which other clients answered, and converges
elsewhere. In option 2 only the model and the effective steps r (`mutirao.aggregation.base`) leave a client:
the server computes c_k' - c_k = (x - y) / r - c. With momentum m, (x - y) / (K lr) is about 1 / (1 - m) times the mean
gradient; (x - y) / r is the mean gradient.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np

from mutirao.aggregation.base import (
    Checked,
    Floats,
    Replies,
    effective_steps_fault,
    equal_shares,
    is_moved,
    merge_models,
    population_of,
    reported_effective_steps,
    sample_shares,
)
from mutirao.config import handed_over
from mutirao.core.arrays import Array, Arrays, blend
from mutirao.core.fleet import Failure, Reply
from mutirao.core.needs import Needs
from mutirao.core.parts import Merged

CONTROL = "control"  # the extra that holds c on the way down, and with option 1 c_k' - c_k on the way up
MEMORY = "scaffold.c"
SCALE = "scaffold.scale"
SIZE = "scaffold.size"
CAP = 10.0  # times the usual length: the most that one client's c_k may change


@dataclass(frozen=True)
class Scaffold(Checked):
    """FedAvg whose clients' steps are corrected by control variates: y <- y - lr (g + c - c_k).

    Karimireddy, Kale, Mohri, Reddi, Stich and Suresh, 2020.

    The control variate c becomes the clients' mean gradient, computed from their effective steps:

    >>> import numpy as np
    >>> from mutirao import Reply
    >>> memory = {}
    >>> ends = {"ana": 1.0, "bia": 3.0}
    >>> replies = {c: Reply({"w": np.array([x])}, metrics={"reach": 0.5}, n=10) for c, x in ends.items()}
    >>> merged = Scaffold(population=2)({"w": np.array([0.0])}, replies, memory)
    >>> merged.arrays["w"], memory["scaffold.c"]  # 2 in 0.5 downhill: a gradient of -4
    (array([2.]), array([-4.], dtype=float32))
    """

    lr: float = 1.0
    option: Literal[1, 2] = 2
    weights: Literal["samples", "equal"] = "samples"
    population: int | None = handed_over()  # N, the number of all clients; set by the run

    @property
    def needs(self) -> Needs:
        """Clients must support the correction, which keeps c_k, and send its change or their effective steps."""
        correction = Needs(config={"correct": f"scaffold{self.option}"}, request_extras={"control"})
        if self.option == 1:
            return correction | Needs(extras={"control"})
        return correction | Needs(metrics={"reach"})

    def sends(self, current: Arrays, memory: Arrays) -> Arrays:
        """c, as one vector, once it is not 0."""
        if MEMORY in memory:
            return {CONTROL: memory[MEMORY]}
        return {}

    def fault(self, reply: Reply) -> Failure | None:
        """A reply without what c is computed from."""
        if self.option == 2:
            return effective_steps_fault(reply)
        sent = reply.extras.get(CONTROL)
        size = sum(x.size for k, x in reply.arrays.items() if is_moved(k, x))
        if sent is None or sent.dtype != np.float32 or sent.shape != (size,):
            return Failure("shape", f"did not send its change of the control variate, {size} numbers of float32")
        return None

    def __call__(self, current: Arrays, replies: Replies, memory: Arrays) -> Merged:
        """The next model; the next c goes into the memory."""
        shares = equal_shares(replies)
        counts = dict.fromkeys(shares, 1)
        if self.weights == "samples":
            shares = sample_shares(replies)
            counts = {c: replies[c].n for c in shares}
        merged = merge_models(current, replies, shares, lambda name, d: self.lr * d)
        before: Floats = np.asarray(memory.get(MEMORY, np.zeros(len(vector_of(current)), np.float32)), np.float64)
        if self.option == 1:
            changes = [replies[c].extras[CONTROL].astype(np.float64) for c in shares]
        else:
            # c_k' - c_k = (x - y) / r - c.
            start = vector_of(current)
            steps = reported_effective_steps(replies)
            changes = [(start - vector_of(replies[c].arrays)) / steps[c] - before for c in shares]
        # c' = c + sum_S q_k (c_k' - c_k), q_k = n_k / (N m); m is that of the first round, so that q_k never changes.
        size = memory.setdefault(SIZE, np.asarray(float(np.mean(list(counts.values())))))
        samples = float(size) * max(len(replies), population_of(self, self.population))  # N m
        after = before + blend(clip_changes(changes, memory), [n / samples for n in counts.values()])
        memory[MEMORY] = after.astype(np.float32)
        return merged


def clip_changes(changes: list[Floats], memory: Arrays) -> list[Floats]:
    """The changes of the c_k, clipped to CAP times the largest median length of any round so far.

    Of any round: near the optimum changes are short, but that of a client selected for the first time is not.
    """
    lengths = [float(np.linalg.norm(x)) for x in changes]
    scale = max(float(memory.get(SCALE, np.asarray(0.0))), float(np.median(lengths)))
    memory[SCALE] = np.asarray(scale)
    clipped = []
    for change, length in zip(changes, lengths, strict=True):
        if length:
            change = change * min(1.0, CAP * scale / length)
        clipped.append(change)
    return clipped


def vector_of(arrays: Arrays) -> Floats:
    """All arrays that gradients change as one vector, in the order of the names."""
    parts = [np.ravel(arrays[k]).astype(np.float64) for k in sorted(arrays) if is_moved(k, arrays[k])]
    if parts:
        return np.concatenate(parts)
    return np.zeros(0)


def arrays_in(vector: Array, like: Arrays) -> Arrays:
    """The arrays of a vector; ValueError if its length is not the model's."""
    names = [k for k in sorted(like) if is_moved(k, like[k])]
    if vector.ndim != 1 or len(vector) != sum(like[k].size for k in names):
        raise ValueError("the control variate received does not have the model's size")
    out = {}
    start = 0
    for name in names:
        end = start + like[name].size
        out[name] = vector[start:end].reshape(like[name].shape).astype(like[name].dtype)
        start = end
    return out


def correct(model: Arrays, extras: Mapping[str, Array], kept: Array | None) -> Arrays:
    """The correction of a client's steps, c - c_k; empty while both are 0."""
    c = extras.get(CONTROL)
    if c is None and kept is None:
        return {}
    size = len(vector_of(model))
    gap = c
    if gap is None:
        gap = np.zeros(size, np.float32)
    # A c_k of another length is of another model, such as one with another head, and starts from 0 again.
    if kept is not None and kept.shape == (size,):
        gap = gap - kept
    return arrays_in(np.asarray(gap, np.float32), model)


def update_control(start: Arrays, end: Arrays, correction: Arrays, steps: float) -> Floats:
    """c_k' of option 2: (x - y) / r, the mean gradient, less the correction c - c_k."""
    gradient = (vector_of(start) - vector_of(end)) / steps
    return gradient - vector_of({k: correction.get(k, np.zeros_like(x)) for k, x in start.items()})
