"""Client state of SCAFFOLD and FedDyn: the correction before local training, and the update of the state after it.

A request names its method, such as `correct = "scaffold2"`. The formulas are in `mutirao.aggregation`; the trainer only
applies corrections (`mutirao.training.pull`). The state lies in the site's state, together with its previous value: an
update that never counted is undone when the client is asked again (`counted = 3`), or else the server's part of the
method would be wrong for good.
"""

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import torch

from mutirao.aggregation import feddyn, scaffold
from mutirao.aggregation.base import EFFECTIVE_STEPS, effective_steps
from mutirao.core.arrays import Arrays
from mutirao.core.fleet import Reply, Request, Scalar, Site
from mutirao.core.needs import Capabilities
from mutirao.errors import Refused
from mutirao.randomness import derive_seed
from mutirao.training.engine.batched_evaluation import evaluate_model
from mutirao.training.inputs import call_model
from mutirao.training.measurements import read_extras
from mutirao.training.optimizers import one_thread, seeded
from mutirao.training.plain import PlainTrainer
from mutirao.training.pull import CORRECTION, Pull
from mutirao.training.samples import Samples

CONTROL = "scaffold.c"  # c_k, as one vector
FEDDYN = "feddyn.h."  # h_k, before the names of the arrays
PREVIOUS = "before."  # what was kept until the last update, before the names it had
LAST_ROUND = "correct.round"  # of the last update


def missing_capabilities(trainer: PlainTrainer) -> Capabilities:
    """What a trainer cannot provide because its steps are not plain sums of gradients and corrections."""
    corrections = Capabilities(extras={"control"}, config={"correct"}, request_extras={"control"})
    if trainer.optimizer != "sgd" or trainer.keep_optimizer:
        return corrections | Capabilities(metrics={EFFECTIVE_STEPS})
    if trainer.clip:
        return corrections
    return Capabilities()


def add_correction(trainer: PlainTrainer, request: Request, site: Site) -> Request:
    """The request with the correction of its method, if it names one."""
    method = request.config.get("correct")
    if method is None:
        if "counted" in request.config:
            raise Refused("told.counted", "no method with client state was requested, so there is nothing to undo")
        return request
    if "correct" in missing_capabilities(trainer).config:
        raise Refused("told.correct", "corrections need plain SGD without clipping")
    undo_uncounted(site, request.config)
    if method == "feddyn":
        correction = feddyn.correction(request.arrays, feddyn_state(site))
    else:
        correction = scaffold.correct(request.arrays, request.extras, site.state.get(CONTROL))
    return replace(request, extras={CORRECTION + k: v for k, v in correction.items()})


def finish_correction(trainer: PlainTrainer, request: Request, site: Site, reply: Reply) -> Reply:
    """The reply with the metrics of its method; the method's new state goes into the site's state."""
    samples = Samples.of(site.data)
    wanted = read_extras(request.config, samples, trainer.loss)
    method = request.config.get("correct")
    if method is None and not wanted & {EFFECTIVE_STEPS, "start_loss"}:
        return reply
    hyperparameters = trainer.hyperparameters(request.config)
    steps = len(hyperparameters.lengths(len(samples), trainer.needs_two_samples()))
    metrics: dict[str, float] = {}
    extras = {}
    if EFFECTIVE_STEPS in wanted:
        metrics[EFFECTIVE_STEPS] = effective_steps(hyperparameters.lr, trainer.momentum, hyperparameters.mu, steps)
    if "start_loss" in wanted:
        # F_k of q-FedAvg is the loss of the received model, so not of `reply.arrays`.
        metrics["start_loss"] = evaluate_model(trainer, request.arrays, samples)["loss"]
    if method == "feddyn":
        state = feddyn.update_gradient(request.arrays, reply.arrays, feddyn_state(site), hyperparameters.mu)
        store_state(site, {FEDDYN + k: v for k, v in state.items()}, request.config)
    elif method is not None:
        correction = Pull.of(request).correction
        if method == "scaffold1":
            # Option I of SCAFFOLD: the new control variate is the gradient at the received model.
            own = scaffold.vector_of(full_gradient(trainer, request, site, samples))
            before = site.state.get(CONTROL)
            change = own
            # A c_k of another length is of another model, such as one with another head, and starts from 0 again.
            if before is not None and before.shape == own.shape:
                change = own - before
            extras["control"] = change.astype(np.float32)
        else:
            # Option II: it follows from the distance travelled and the number of effective steps.
            taken = effective_steps(hyperparameters.lr, trainer.momentum, hyperparameters.mu, steps)
            own = scaffold.update_control(request.arrays, reply.arrays, correction, taken)
        store_state(site, {CONTROL: own.astype(np.float32)}, request.config)
    return replace(reply, metrics=reply.metrics | metrics, extras=reply.extras | extras)


def store_state(site: Site, new: Arrays, config: Mapping[str, Scalar]) -> None:
    """Store the state that an update leaves behind, and keep the previous state beside it."""
    old = {PREVIOUS + k: v for k, v in site.state.items() if k == CONTROL or k.startswith(FEDDYN)}
    remove_state(site, PREVIOUS + CONTROL, PREVIOUS + FEDDYN)
    site.state.update(old | new | {LAST_ROUND: np.asarray(int(config["round"]))})


def undo_uncounted(site: Site, config: Mapping[str, Scalar]) -> None:
    """Restore the previous state if the server reports that the last update never counted."""
    counted = config.get("counted")
    if counted is None or int(site.state.get(LAST_ROUND, np.asarray(0))) <= int(counted):
        return
    before = {k.removeprefix(PREVIOUS): v for k, v in site.state.items() if k.startswith(PREVIOUS)}
    remove_state(site, CONTROL, FEDDYN, PREVIOUS)
    site.state.update(before | {LAST_ROUND: np.asarray(int(counted))})


def remove_state(site: Site, *prefixes: str) -> None:
    """Remove all entries of the state with these prefixes."""
    for name in [name for name in site.state if name.startswith(prefixes)]:
        del site.state[name]


def feddyn_state(site: Site) -> Arrays:
    """The state h_k of FedDyn by the names of the model's arrays."""
    return {k.removeprefix(FEDDYN): v for k, v in site.state.items() if k.startswith(FEDDYN)}


def full_gradient(trainer: PlainTrainer, request: Request, site: Site, samples: Samples) -> Arrays:
    """The gradient of the mean loss over all samples at the received model; 0 for arrays that are not trained."""
    samples = trainer.to_device(samples)
    size = trainer.hyperparameters(request.config).batch_size
    model = trainer.state_names.prepare(trainer.fill(request.arrays))
    named = {n: p for n, p in model.named_parameters() if p.requires_grad}
    total = [torch.zeros_like(p) for p in named.values()]
    seed = derive_seed(int(request.config["seed"]), int(request.config["round"]), "gradient", site.id)
    with one_thread(), seeded(seed, trainer.torch_device()):
        for start in range(0, len(samples), size):
            x, y = samples.batch(np.arange(start, min(start + size, len(samples))))
            # The loss is a mean over its batch, and the last batch may be shorter.
            loss = trainer.loss(call_model(model, x), y) * (len(y) / len(samples))
            slopes = torch.autograd.grad(loss, list(named.values()), allow_unused=True)
            total = [t if g is None else t + g for t, g in zip(total, slopes, strict=True)]
    found = {n: t.cpu().numpy() for n, t in zip(named, total, strict=True)}
    return {k: found.get(k, np.zeros_like(v)) for k, v in request.arrays.items()}
