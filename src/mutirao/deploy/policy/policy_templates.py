"""A policy that lets a site take part in the recipes it names, and in nothing else: each line says what it lets out.

A policy is also described in words, with its privacy spending and its weak points.
"""

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from mutirao.config import load_name, toml_string
from mutirao.core.fleet import failure_of
from mutirao.deploy.policy.pins import ARCHITECTURE, prepared
from mutirao.deploy.policy.privacy_ledger import Ledger
from mutirao.deploy.policy.rules import Policy, is_allowed, policy_template
from mutirao.errors import ConfigError
from mutirao.experiments.disclosure import Disclosure
from mutirao.experiments.task import Recipe, find
from mutirao.privacy.accounting import epsilon

# An update from fewer samples or steps gets a warning.
FEW_SAMPLES = 50
FEW_STEPS = 10
UPDATE_PINS = (ARCHITECTURE, "batch_size", "epochs", "lr", "samples")  # pins without which a server shapes an update


def describe_policy(policy: Policy) -> dict[str, str]:
    """What a policy allows and has spent, by topic."""
    faults = {name: policy.fault_of(name) for name in policy.recipes}
    out = {f"recipe {name}": f"REFUSED: {fault}" if fault else "allowed" for name, fault in faults.items()}
    cover = policy.privacy
    reply = policy.reply
    parts = {"arrays": reply.arrays, "extras": reply.extras, "metrics": reply.metrics}
    out |= {"may be asked": ", ".join(policy.asked.requests) or "nothing"}
    out["extras coming in"] = ", ".join(policy.asked.extras) or "none"
    out["method settings"] = ", ".join(policy.asked.told) or "nothing"
    out |= {f"{kind} that leave": ", ".join(names) or "none" for kind, names in parts.items()}
    out |= {f"pinned {name}": f"{len(pins)} settings" for name, pins in policy.pinned.items()}
    out["fewest samples"] = str(policy.asked.min_samples)
    out["largest reply"] = f"{reply.largest} bytes"
    out["clip, noise"] = f"{cover.clip:g}, {cover.noise:g}" if cover.clip else "none"
    if cover.budget or cover.run_budget:
        spent = epsilon(Ledger(policy.ledger).total(), cover.delta, cover.accountant)
        most = cover.budget or math.inf
        in_run = cover.run_budget or math.inf
        out["epsilon spent"] = f"{spent:.4g} of {most:g}, at most {in_run:g} a run"
    return out | {f"warning {i}": text for i, text in enumerate(weaknesses(policy), 1)}


def weaknesses(policy: Policy) -> list[str]:
    """Warnings where an update may reveal few samples; empty if no update leaves, or only with noise."""
    asked = policy.asked
    reply = policy.reply
    found: list[str] = []
    if is_allowed("squared_errors", reply.extras):
        found.append("reply.extras: squared_errors reveals the error of each single sample")
    if "train" not in asked.requests or not reply.arrays or policy.privacy.noise:
        return found
    if asked.min_samples < FEW_SAMPLES:
        found.append(f"asked.min_samples: an update of {asked.min_samples} samples may leave")
    for name in policy.recipes:
        pins = policy.pinned.get(name, {})
        if missing := [key for key in UPDATE_PINS if key not in pins]:
            found.append(f"pinned.{name}: {', '.join(missing)} may be chosen so that an update shows single samples")
        batch = pins.get("batch_size")
        epochs = pins.get("epochs")
        if isinstance(batch, int) and isinstance(epochs, int) and not isinstance(batch, bool) and batch > 0:
            # Batches of an epoch, rounded up: the last may be smaller.
            steps = epochs * -(-asked.min_samples // batch)
            if steps < FEW_STEPS:
                found.append(f"pinned.{name}: an update of {steps} steps may leave, which is nearly a plain gradient")
    found.append("privacy.noise: without noise an update can show single samples; try it: mutirao drill leak")
    return found


OTHER_METRIC = "a figure of that name, over the samples used"
LEAST = 10  # samples, of those trained on as of those kept back: a fifth of a small site's are not many
REQUESTS = {
    "train": "an update of the model, made with this site's data",
    "evaluate": "how the model does on what this site keeps back: the metrics below",
    "probe": "the same on a few samples, before it is chosen for a round",
    "agree": "whether this site has what all agree on: classes, columns, frozen weights; yes or no, and no number",
    "profile": "of each column or feature counts, mean and spread, and common categories, before the first round",
    "rows": "which rows of the model it needs: for recommendations, which items this user has rated",
    "warm": "how a model changes by this site's data, as a short signature by which groups are formed",
    "choose": "which of several models errs least on the data here; its number leaves",
    "fit": "how a model does that is fitted to this site's data and stays here; the metrics below leave",
    "take": "a model of its group that is kept here, if it comes late; the metrics below leave",
}
REQUEST_EXTRAS = {
    "schema": "columns, scales and categories that all agree on",
    "scale": "means and deviations of features that all standardise by, and the highest grade",
    "rows": "which items a round is about, the same for all",
    "control": "SCAFFOLD's control variate: how all clients together drift, in one vector",
}
HYPERPARAMETERS = {
    "mu": "how strongly steps are pulled back towards the model that was sent",
    "correct": "how steps are corrected; what that takes is kept here",
}
EXTRAS = {
    "profile": "the answer to the request of that name",
    "items": "the numbers of the items that are rated here",
    "blocks": "the numbers of all items of the blocks that the items rated here are in",
    "signature": "the answer to a warm-up",
    "choice": "the number of the model that errs least here, of several that were sent",
    "holdings": "which classes are here, yes or no each, in clear; only where the signature has no noise",
    "squared_errors": "the error of EACH SINGLE sample on the model that was sent, which FedRisk needs",
    "batch_sizes": "how these errors belong to batches",
    "control": "the gradient of ALL samples here at the model that was sent, less the one before (SCAFFOLD's option 1)",
}
METRICS = {
    "loss": "mean loss, over the samples used",
    "accuracy": "share of them that is right",
    "val_loss": "mean loss of the update on samples kept back",
    "val_acc": "share of samples kept back that is right",
    "accuracy_known": "share that is right among the classes of a group",
    "accuracy_held": "share that is right of training samples kept back, by which one way to serve all is chosen",
    "entropy": "how undecided the model is, in the mean",
    "rms_loss": "root of the mean squared loss",
    "gradient_norm": "length of the gradient",
    "reach": "learning rate times number of steps, from which the number of samples follows",
    "start_loss": "mean loss of the model that was sent, before training, over all samples here",
    "shown_ndcg": "how good the rankings were that this user saw (nDCG), in the mean",
    "shown_loss": "what they lacked where there was something to find",
    "epsilon": "privacy spent so far; it reveals no data",
    "epsilon_next": "privacy spent after one more round; it reveals no data",
}


def policy_for(recipes: Sequence[str] = (), sets: Sequence[tuple[str, Any]] = ()) -> str:
    """A policy under which these recipes run as they are installed, with these settings; without any, nothing may.

    Where what a recipe needs cannot be found out here, the policy says why, and lets nothing leave.
    """
    text = policy_template(recipes, sets)
    needed = Disclosure()
    unknown: list[str] = []
    for name in recipes:
        if ":" in name and not isinstance(load_name(name), Recipe):
            unknown.append(f"{name} is code of this site: only its authors can say what it needs")
            continue
        try:
            needed |= find(name).disclosure(*prepared(name, tuple(sets)))
        except Exception as error:  # the data or weights of a site may come later, and reading them may raise anything
            unknown.append(f"what {name} needs is not known yet: {failure_of(error).reason[:160]}")
    if needed != Disclosure():
        return fill_template(text, needed, unknown)
    return text + "".join(f"# {why}\n" for why in unknown)


def fill_template(text: str, needed: Disclosure, unknown: Sequence[str] = ()) -> str:
    """The template with what is needed in its empty lists."""
    asked, _, reply = text.partition("\n[reply]\n")
    explained = {line: HYPERPARAMETERS[line.partition("=")[0]] for line in needed.hyperparameters}
    for name, found, words in (
        ("requests", needed.requests, REQUESTS),
        ("extras", needed.request_extras, REQUEST_EXTRAS),
        ("told", needed.hyperparameters, explained),
    ):
        asked = fill_list(asked, name, found, words)
    reply = fill_list(reply, "arrays", ("*",), {"*": "the whole of the trained model, as an update"})
    for name, found, words in (("extras", needed.extras, EXTRAS), ("metrics", needed.metrics, METRICS)):
        reply = fill_list(reply, name, found, words)
    notes = "".join(f"# {why}\n" for why in unknown)
    return set_numbers(f"{asked}\n[reply]\n{reply}", min_samples=LEAST) + notes


def fill_list(text: str, key: str, names: Sequence[str], words: Mapping[str, str], else_: str = OTHER_METRIC) -> str:
    """A list in place of an empty one, a line a name, each with what it means."""
    if not names:
        return text
    lines = [f"  {toml_string(name)},  # {words.get(name, else_)}" for name in names]
    filled = "\n".join([f"{key} = [", *lines, "]"])
    if f"\n{key} = []\n" not in text:
        raise ConfigError(f"the template of a policy has no line {key} = []")
    return text.replace(f"\n{key} = []\n", f"\n{filled}\n", 1)


def set_numbers(text: str, **numbers: int) -> str:
    """A policy's text with other numbers."""
    for key, value in numbers.items():
        text, found = re.subn(rf"(?m)^{key} = \d+$", f"{key} = {value}", text)
        if not found:
            raise ConfigError(f"the template of a policy has no line {key} = ...")
    return text


def allows_anything(text: str) -> bool:
    """Whether a template was filled."""
    return "\nrequests = []\n" not in text
