"""`mutirao drill leak`: what an update of a site reveals, plain, under its policy, and with clipping and noise.

A client of the recipe answers the requests of a curious server with the code that runs at a site. Two attacks recover
samples, two test whether a sample was trained on.

In a dense layer with ReLU the update of a unit is sum_k g_k x_k over the samples that activate it, and that of its
bias sum_k g_k. Where only one sample does, the quotient of the two is that sample (Phong et al., 2018). A server
chooses the weights so that this happens often: many thresholds along one direction (Fowl et al., 2022), units that few
samples activate (Boenisch et al., 2023), or a unit for one candidate sample (Nguyen et al., 2023).

The picture shows, row under row, samples that a client trained on and what was recovered from its update.
"""

import functools
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from mutirao.aggregation import FedAvg
from mutirao.config import resolve
from mutirao.core.arrays import Arrays
from mutirao.core.fleet import Request, Site
from mutirao.deploy.policy.enforcement import PolicyHandler, Requester, approve
from mutirao.deploy.policy.pins import content_hash, settings_of
from mutirao.deploy.policy.rules import (
    Policy,
    PrivacyRules,
    ReplyRules,
    RequestRules,
    assignments,
    load_policy,
    policy_template,
)
from mutirao.errors import ConfigError, MutiraoError
from mutirao.experiments.task import Task, find
from mutirao.io import write_whole
from mutirao.metrics import auc
from mutirao.privacy.trials import Trial, align_columns
from mutirao.randomness import rng
from mutirao.report.plots import INK, blank, save
from mutirao.systems.images.metrics import auc_interval


def draw_samples(rows: Mapping[str, npt.NDArray[Any]], path: Path) -> None:
    """Draw each row's flat samples, grey and square where their length is a square number, else as strips."""
    count = max(len(samples) for samples in rows.values())
    figure, axes = blank(0.75 * count + 1.2, 0.85 * len(rows), len(rows), count, squeeze=False)
    low, high = (float(f(next(iter(rows.values())))) for f in (np.min, np.max))
    for line, (name, samples) in zip(axes, rows.items(), strict=True):
        for place, sample in zip(line, samples, strict=False):
            side = math.isqrt(len(sample))
            shape = (side, side) if side * side == len(sample) else (1, len(sample))
            place.imshow(sample.reshape(shape), cmap="gray_r", vmin=low, vmax=high, aspect="equal")
        for place in line:
            place.set_xticks([])
            place.set_yticks([])
            for spine in place.spines.values():
                spine.set_visible(False)
        line[0].set_ylabel(name, rotation=0, ha="right", va="center", fontsize=9, color=INK)
    save(figure, path)


Floats = npt.NDArray[np.float64]
Assignments = tuple[tuple[str, Any], ...]
CLIENTS = 2  # few, so that the site has many samples: a single sample is then harder to isolate
WIDE: Assignments = (("hidden", 4000), ("batch_size", 100_000), ("epochs", 1))  # a wide model, one step on all samples
HONEST_ROUNDS = 5  # before the update for which losses are compared
CANDIDATES = 128  # members, and as many others
SHOWN = 12  # samples in the picture
RECOVERED = 0.1  # |found - x| / |x| below which a sample counts as recovered


@dataclass(frozen=True)
class LeakDrill:
    """What to attack: a recipe, the policy to test (the template's if none is given), and the noise to compare with."""

    recipe: str = "quickstart"
    policy: Path | None = None
    noise: float = 1.0
    clip: float = 1.0
    seed: int = 0


@dataclass
class AttackResult:
    """What one attack got out of updates under one rule."""

    attack: str
    rule: str  # plain, policy, noise
    recovered: int | None = None
    samples: int | None = None
    auc: float | None = None
    low: float | None = None
    high: float | None = None
    refused: str = ""
    found: Floats | None = field(default=None, repr=False)  # recovered samples, one for each hidden unit

    def summary(self) -> str:
        """In a few words."""
        if self.refused:
            return f"refused: {self.refused}"
        if self.auc is not None:
            return f"AUC {self.auc:.3f} ({self.low:.2f} to {self.high:.2f})"
        return f"{self.recovered} of {self.samples}"


class Target:
    """The attacked client. The server also has the test samples."""

    def __init__(self, drill: LeakDrill, base: Assignments) -> None:
        self.drill = drill
        self.base = base
        population = self.task(()).population
        self.client = max(population, key=lambda c: len(population[c]))
        self.x, self.y = flat_samples(population[self.client].train)
        tests = [flat_samples(population[c].test) for c in population]
        self.test_x = np.concatenate([x for x, _ in tests])
        self.test_y = np.concatenate([y for _, y in tests])
        layer_names(self.task(()).initial(), self.x.shape[1])  # fails at once for other models

    @functools.cache  # noqa: B019  # a target lives as long as the drill
    def task(self, assignments: Assignments) -> Task:
        """The recipe's task with these settings."""
        recipe = find(self.drill.recipe)
        return recipe.prepare(resolve(recipe.config, {}, [*self.base, *assignments]))

    @functools.cache  # noqa: B019
    def honest_model(self) -> Arrays:
        """The model after a few honest rounds."""
        task = self.task(())
        arrays = task.initial()
        for number in range(1, HONEST_ROUNDS + 1):
            request = Request("train", arrays, {"seed": self.drill.seed, "round": number})
            replies = {c: task.handler(request, Site(c, data)) for c, data in task.population.items()}
            arrays = FedAvg()(arrays, replies, {}).arrays
        return arrays

    def update(self, policy: Policy | None, settings: Assignments, arrays: Arrays, number: int = 1) -> Arrays:
        """The client's model after training on these arrays, as it leaves the site. Raises Refused if it does not."""
        task = self.task(settings)
        request = Request("train", arrays, {"seed": self.drill.seed, "round": number})
        site = Site(self.client, task.population[self.client])
        if policy is None:
            return task.handler(request, site).arrays
        requested = dict([*self.base, *settings])
        pinned = [*assignments(requested), *policy.settings.items()]
        asker = Requester("drill", self.drill.recipe, self.client)
        asker = approve(policy, asker, requested, functools.partial(settings_of, self.drill.recipe, pinned))
        return PolicyHandler(task.handler, policy, asker)(request, site).arrays


def flat_samples(samples: Any) -> tuple[Floats, Floats]:
    """Samples as vectors, and their labels."""
    x, y = samples.batch(slice(0, len(samples)))
    return x.numpy().reshape(len(x), -1).astype(np.float64), y.numpy()


# Crafted models


def layer_names(arrays: Arrays, features: int) -> tuple[str, str, str, str]:
    """Names of the weights and biases of a model of two dense layers on this number of features."""
    shapes = [(name, array.shape) for name, array in arrays.items()]
    if [len(shape) for _, shape in shapes] == [2, 1, 2, 1]:
        (w1, (units, inputs)), (b1, _), (w2, (_, hidden)), (b2, _) = shapes
        if inputs == features and hidden == units:
            return w1, b1, w2, b2
    raise ConfigError("this attack is on models of two dense layers and flat samples, such as the quickstart's")


def craft(arrays: Arrays, directions: Floats, thresholds: Floats, steepness: float, weight: float) -> Arrays:
    """The model with hidden units i of steepness * relu(directions_i x - thresholds_i), all with the same gradient."""
    w1, b1, w2, b2 = layer_names(arrays, directions.shape[1])
    outputs, units = arrays[w2].shape
    # Distinct weights for each class: with equal ones the gradients of all classes would cancel.
    output_weights = weight * np.linspace(-1.0, 1.0, outputs)
    crafted = {
        w1: steepness * directions,
        b1: -steepness * thresholds,
        w2: np.tile(output_weights[:, None], (1, units)),
        b2: np.zeros(outputs),
    }
    return {name: crafted[name].astype(array.dtype) for name, array in arrays.items()}


def craft_thresholds(arrays: Arrays, known: Floats, draw: np.random.Generator) -> Arrays:
    """One direction for all units, with thresholds where samples like the `known` ones are expected."""
    units = next(iter(arrays.values())).shape[0]
    direction = unit_vectors(draw.normal(size=(1, known.shape[1])))
    along = known @ direction[0]
    levels = quantiles((np.arange(units) + 0.5) / units, along.mean(), 1.1 * along.std())
    return craft(arrays, np.repeat(direction, units, 0), levels, 1e-4, 1.0)


def craft_rare(arrays: Arrays, known: Floats, samples: int, draw: np.random.Generator) -> Arrays:
    """A direction for each unit, and a threshold that about one of this number of samples passes."""
    units = next(iter(arrays.values())).shape[0]
    directions = unit_vectors(draw.normal(size=(units, known.shape[1])))
    along = known @ directions.T
    return craft(arrays, directions, quantiles(1 - 2 / samples, along.mean(0), along.std(0)), 10.0, 1.0)


def craft_membership(arrays: Arrays, known: Floats, candidates: Floats) -> Arrays:
    """A unit for each candidate that it alone activates: far out along its own direction, in whitened coordinates."""
    units = next(iter(arrays.values())).shape[0]
    centre = known.mean(0)
    # Features that never vary make the covariance singular; 0.01 on the diagonal keeps it invertible.
    covariance = np.cov(known.T) + 0.01 * np.eye(known.shape[1])
    # In the direction Sigma^-1 (x - mean) a sample x stands out most from the distribution (Fisher's discriminant).
    directions = unit_vectors(np.linalg.solve(covariance, (candidates - centre).T).T)
    own = (directions * candidates).sum(1)
    middle = directions @ centre
    thresholds = middle + 0.95 * (own - middle)
    # No sample passes the threshold of a unit without a candidate.
    unused = units - len(candidates)
    directions = np.vstack([directions, np.zeros((unused, known.shape[1]))])
    return craft(arrays, directions, np.concatenate([thresholds, np.full(unused, 1e6)]), 10.0, 0.1)


def first_layer_change(before: Arrays, after: Arrays, features: int) -> tuple[Floats, Floats]:
    """How far the weights and biases of the hidden units moved."""
    w1, b1, *_ = layer_names(before, features)
    return after[w1].astype(np.float64) - before[w1], after[b1].astype(np.float64) - before[b1]


def read_thresholds(before: Arrays, after: Arrays, features: int) -> Floats:
    """The samples between two neighbouring thresholds; NaN where there is none."""
    weights, biases = first_layer_change(before, after, features)
    # Units have one direction, so each also sums the samples of the next: the difference leaves those between the two.
    return quotients(weights - np.vstack([weights[1:], 0 * weights[:1]]), biases - np.append(biases[1:], 0.0))


def read_rare(before: Arrays, after: Arrays, features: int) -> Floats:
    """The sample of each unit; NaN for units that did not move."""
    return quotients(*first_layer_change(before, after, features))


def read_membership(before: Arrays, after: Arrays, candidates: Floats) -> Floats:
    """How far the unit of each candidate moved along it: not at all if the candidate was not trained on."""
    weights, biases = first_layer_change(before, after, candidates.shape[1])
    count = len(candidates)
    return np.asarray(np.abs((weights[:count] * candidates).sum(1) + biases[:count]), np.float64)


def quotients(weights: Floats, biases: Floats) -> Floats:
    """weights / biases for each row; NaN where the bias hardly moved."""
    # For a unit that one sample x activates, dL/dw = g x and dL/db = g (Phong et al., 2018).
    moved = np.abs(biases) > 1e-9 * np.abs(biases).max(initial=0.0)
    out = np.full(weights.shape, np.nan)
    out[moved] = weights[moved] / biases[moved, None]
    return out


def nearest_samples(found: Floats, samples: Floats) -> tuple[npt.NDArray[np.intp], Floats]:
    """For each row found its nearest sample x, and |found - x| / |x|; infinite for rows of NaN."""
    valid = np.isfinite(found).all(1)
    # |a - b|^2 = |a|^2 - 2 a b + |b|^2 needs no array of all differences; rounding may make it slightly negative.
    squares = (found[valid] ** 2).sum(1)[:, None] - 2 * found[valid] @ samples.T + (samples**2).sum(1)
    errors = np.sqrt(np.maximum(squares, 0.0)) / np.maximum(np.linalg.norm(samples, axis=1), 1e-12)
    nearest = np.zeros(len(found), np.intp)
    nearest[valid] = errors.argmin(1)
    error = np.full(len(found), np.inf)
    error[valid] = errors.min(1, initial=np.inf)
    return nearest, error


def count_recovered(found: Floats, samples: Floats) -> int:
    """The number of different samples that were recovered."""
    nearest, error = nearest_samples(found, samples)
    return len(set(nearest[error < RECOVERED].tolist()))


def unit_vectors(rows: Floats) -> Floats:
    """The rows, scaled to length one."""
    return np.asarray(rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1e-12), np.float64)


def quantiles(levels: Floats | float, mean: Floats | float, deviation: Floats | float) -> Floats:
    """Quantiles of a normal distribution, which a server with a few samples of its own can assume."""
    from scipy.special import ndtri

    return np.asarray(mean + deviation * ndtri(levels), np.float64)


# The four attacks


def recover_by_thresholds(target: Target, policy: Policy | None) -> AttackResult:
    """Recover samples with a wide model that the server chose, and one step on all samples."""
    sent = craft_thresholds(target.task(WIDE).initial(), target.test_x, rng(target.drill.seed, 0, "leak"))
    found = read_thresholds(sent, target.update(policy, WIDE, sent), target.x.shape[1])
    return AttackResult("", "", count_recovered(found, target.x), len(target.x), found=found)


def recover_by_rare_units(target: Target, policy: Policy | None) -> AttackResult:
    """Recover samples with crafted weights in the agreed model and with the agreed settings."""
    sent = craft_rare(target.task(()).initial(), target.test_x, len(target.x), rng(target.drill.seed, 0, "leak"))
    found = read_rare(sent, target.update(policy, (), sent), target.x.shape[1])
    return AttackResult("", "", count_recovered(found, target.x), len(target.x), found=found)


def candidates(target: Target) -> tuple[Floats, Floats, npt.NDArray[np.bool_]]:
    """Samples of the client and as many others of the same classes: samples, labels, and whether each is a member."""
    draw = rng(target.drill.seed, 0, "candidates")
    members: list[int] = []
    others: list[int] = []
    for label in np.unique(target.y):
        member_rows = np.flatnonzero(target.y == label)
        other_rows = np.flatnonzero(target.test_y == label)
        count = min(len(member_rows), len(other_rows))
        members += draw.permutation(member_rows)[:count].tolist()
        others += draw.permutation(other_rows)[:count].tolist()
    chosen = draw.permutation(len(members))[:CANDIDATES]
    members = [members[i] for i in chosen]
    others = [others[i] for i in chosen]
    is_member = np.repeat([True, False], len(chosen))
    order = draw.permutation(len(is_member))
    x = np.concatenate([target.x[members], target.test_x[others]])
    y = np.concatenate([target.y[members], target.test_y[others]])
    return x[order], y[order], is_member[order]


def infer_by_units(target: Target, policy: Policy | None) -> AttackResult:
    """Infer membership with a crafted unit for each candidate in the agreed model, in a few requests."""
    x, _, is_member = candidates(target)
    initial = target.task(()).initial()
    units = next(iter(initial.values())).shape[0]
    scores: list[float] = []
    for start in range(0, len(x), units):
        some = x[start : start + units]
        sent = craft_membership(initial, target.test_x, some)
        scores += read_membership(sent, target.update(policy, (), sent), some).tolist()
    return evaluate_scores(target, scores, is_member)


def infer_by_losses(target: Target, policy: Policy | None) -> AttackResult:
    """Infer membership from how much an update of an honest run lowers a candidate's loss."""
    import torch
    from torch.nn import functional

    task = target.task(())
    arrays = target.honest_model()
    x, y, is_member = candidates(target)
    after = target.update(policy, (), arrays, HONEST_ROUNDS + 1)
    trainer: Any = task.handler
    shape = task.population[target.client].train.x.shape[1:]

    def losses(model: Arrays) -> Floats:
        with torch.inference_mode():
            outputs = trainer.fill(model).eval()(torch.from_numpy(x.astype(np.float32)).reshape(-1, *shape))
            each = functional.cross_entropy(outputs, torch.from_numpy(y), reduction="none")
        return np.asarray(each.numpy(), np.float64)

    return evaluate_scores(target, (losses(arrays) - losses(after)).tolist(), is_member)


def evaluate_scores(target: Target, scores: Sequence[float], is_member: npt.NDArray[np.bool_]) -> AttackResult:
    """AUC of the scores for members against others, with a bootstrap interval of 95%."""
    draw = rng(target.drill.seed, 0, "bootstrap")
    low, high = auc_interval(scores, is_member, np.arange(len(scores)), draw, draws=300)
    return AttackResult("", "", auc=auc(scores, is_member), low=low, high=high, samples=len(scores))


ATTACKS: Mapping[str, Callable[[Target, Policy | None], AttackResult]] = {
    "images, a wide model": recover_by_thresholds,
    "images, the agreed model": recover_by_rare_units,
    "membership, crafted units": infer_by_units,
    "membership, honest losses": infer_by_losses,
}


# The drill


def drill_leak(folder: Path, trial: Trial, drill: LeakDrill) -> None:
    """Run every attack under each rule; write a table, a picture and figures to the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    if not isinstance(vars(find(drill.recipe).config).get("hidden"), int):
        raise ConfigError(
            f"leak: {drill.recipe!r} has no setting 'hidden', the width of a layer, as the quickstart has"
        )
    # The policy gets an audit trail and a ledger in the folder: those of the site stay as they are.
    policy = replace(policy_to_test(drill, folder), audit=folder / "audit.jsonl", ledger=folder / "ledger.json")
    cover = PrivacyRules(clip=policy.privacy.clip or drill.clip, noise=drill.noise)
    noised = Policy(
        {drill.recipe: content_hash(drill.recipe)},
        asked=RequestRules(("train",), 1),
        reply=ReplyRules(("*",), ("*",), ("*",)),
        privacy=cover,
        audit=policy.audit,
    )
    data = tuple((k, v) for k, v in policy.settings.items() if k == "data")
    target = Target(drill, (("clients", CLIENTS), *data))
    rules = {"plain": None, "policy": policy, "noise": noised}
    results = [run_attack(target, attack, rule, rules[rule]) for attack in ATTACKS for rule in rules]
    trial.facts["table"] = table_of(results, cover)
    by = {(result.attack, result.rule): result for result in results}
    wide = "images, a wide model"
    agreed = "images, the agreed model"
    trial.good = not any(by[key].recovered for key in ((wide, "policy"), (wide, "noise"), (agreed, "noise")))
    trial.happened = (
        f"{by[wide, 'plain'].summary()} samples came back; under the policy {by[wide, 'policy'].summary()}, but "
        f"{by[agreed, 'policy'].summary()} by the agreed model; with noise {by[wide, 'noise'].summary()}"
    )
    figures = {"recipe": drill.recipe, "client": target.client, "recovered_below": RECOVERED, "clip": cover.clip}
    figures |= {"noise": cover.noise, "policy": str(drill.policy or "template")}
    figures["told"] = [to_json(result) for result in results]
    write_whole(folder / "leak.json", json.dumps(figures, indent=2) + "\n")
    draw_leak(target, by[wide, "plain"], by[wide, "noise"], folder / "leak.png")


def policy_to_test(drill: LeakDrill, folder: Path) -> Policy:
    """The policy in the given file, or the template's with training allowed."""
    if drill.policy is not None:
        return load_policy(drill.policy)
    write_whole(folder / "policy.toml", policy_template([drill.recipe]))
    policy = load_policy(folder / "policy.toml")
    asked = replace(policy.asked, requests=("train",))
    return replace(policy, asked=asked, reply=replace(policy.reply, arrays=("*",), metrics=("*",)))


def run_attack(target: Target, attack: str, rule: str, policy: Policy | None) -> AttackResult:
    """Run one attack under one rule."""
    try:
        result = ATTACKS[attack](target, policy)
    except MutiraoError as error:
        reason = getattr(error, "rule", "") or " ".join(str(error).split())[:60]
        return AttackResult(attack, rule, recovered=0 if attack.startswith("images") else None, refused=reason)
    return replace(result, attack=attack, rule=rule)


def to_json(result: AttackResult) -> dict[str, Any]:
    """The figures of a result that are set, without the recovered samples."""
    figures = asdict(result)
    del figures["found"]
    return {name: value for name, value in figures.items() if value not in (None, "")}


def table_of(results: Sequence[AttackResult], cover: PrivacyRules) -> list[str]:
    """One line for each attack, one column for each rule."""
    rows = [["", "plain", "under the policy", f"clip {cover.clip:g}, noise {cover.noise:g}"]]
    for attack in ATTACKS:
        rows.append([attack, *(result.summary() for result in results if result.attack == attack)])
    return align_columns(rows)


def draw_leak(target: Target, plain: AttackResult, noised: AttackResult, path: Path) -> None:
    """Draw samples above what was recovered of them, without noise and with it."""
    if plain.found is None or noised.found is None:
        return
    nearest, error = nearest_samples(plain.found, target.x)
    recovered = np.flatnonzero(error < RECOVERED)
    if not len(recovered):
        return
    units = recovered[np.linspace(0, len(recovered) - 1, min(SHOWN, len(recovered))).astype(int)]
    rows = {"trained on": target.x[nearest[units]], "read, no noise": plain.found[units]}
    rows[f"read, noise {target.drill.noise:g}"] = np.nan_to_num(noised.found[units])
    draw_samples(rows, path)
