"""A policy that lets a site take part in the recipes it names, and in nothing else: each line says what it lets out."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from mutirao.config import load_name, toml_string
from mutirao.core.fleet import failure_of
from mutirao.deploy.policy.pins import prepared
from mutirao.deploy.policy.rules import policy_template
from mutirao.errors import ConfigError
from mutirao.experiments.disclosure import Disclosure
from mutirao.experiments.task import Recipe, find

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
    "accuracy_known": "share that is right among the classes a group knows",
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
