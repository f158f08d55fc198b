"""`mutirao drill leak`: what an update of a site tells, plain, under its policy, and with clipping and noise.

A client of the recipe is asked as a server could ask it, by the very code that answers at a site. Two attacks get
samples back, two find out whether a sample was among those trained on; `recovery` says how.
"""

import functools
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from mutirao.aggregation import FedAvg
from mutirao.config import resolve
from mutirao.core.arrays import Arrays
from mutirao.core.fleet import Request, Site
from mutirao.deploy.drill import recovery
from mutirao.deploy.drill.recovery import RECOVERED, Floats
from mutirao.deploy.drill.trials import Trial, in_columns
from mutirao.deploy.policy.content_hash import content_hash
from mutirao.deploy.policy.enforcement import Asker, approve, guarded
from mutirao.deploy.policy.pins import settings_of
from mutirao.deploy.policy.rules import Asked, Cover, Leaving, Policy, assignments, load_policy, policy_template
from mutirao.errors import ConfigError, MutiraoError
from mutirao.experiments.task import Task, find
from mutirao.io import write_whole
from mutirao.metrics import auc
from mutirao.randomness import rng
from mutirao.report.sample_grid import draw_samples
from mutirao.systems.images.metrics import auc_interval

Sets = tuple[tuple[str, Any], ...]
CLIENTS = 2  # so that the site holds much: the more it holds, the harder it is to get at one sample
WIDE: Sets = (("hidden", 4000), ("batch_size", 100_000), ("epochs", 1))  # of the crafted model: one step on all samples
HONEST_ROUNDS = 5  # before the update that is looked at by its losses
CANDIDATES = 128  # of members, and of others
SHOWN = 12  # samples in the picture


@dataclass(frozen=True)
class Leaking:
    """What to drill: a recipe, the policy to try (the template's if none is named), and the noise to compare with."""

    recipe: str = "quickstart"
    policy: Path | None = None
    noise: float = 1.0
    clip: float = 1.0
    seed: int = 0


@dataclass
class Told:
    """What one attack got out of updates under one rule."""

    attack: str
    rule: str  # plain, policy, noise
    recovered: int | None = None
    samples: int | None = None
    auc: float | None = None
    low: float | None = None
    high: float | None = None
    refused: str = ""
    found: Floats | None = field(default=None, repr=False)  # samples as they were read, one a hidden unit

    def words(self) -> str:
        """In a few words."""
        if self.refused:
            return f"refused: {self.refused}"
        if self.auc is not None:
            return f"AUC {self.auc:.3f} ({self.low:.2f} to {self.high:.2f})"
        return f"{self.recovered} of {self.samples}"


class Target:
    """The client that is attacked, and what the server knows besides: the common test samples."""

    def __init__(self, about: Leaking, base: Sets, folder: Path) -> None:
        self.recipe, self.base, self.folder, self.about = about.recipe, base, folder, about
        population = self.task(()).population
        self.client = max(population, key=lambda c: len(population[c]))
        self.x, self.y = samples_of(population[self.client].train)
        others = [samples_of(population[c].test) for c in population]
        self.known, self.labels = np.concatenate([x for x, _ in others]), np.concatenate([y for _, y in others])
        recovery.dense_pair(self.task(()).initial(), self.x.shape[1])

    @functools.cache  # noqa: B019  # it lives as long as the drill
    def task(self, sets: Sets) -> Task:
        """The recipe's task with these settings."""
        found = find(self.recipe)
        return found.prepare(resolve(found.config, {}, [*self.base, *sets]))

    @functools.cache  # noqa: B019
    def honest_model(self) -> Arrays:
        """The model after a few rounds in which nobody did anything odd."""
        task = self.task(())
        arrays = task.initial()
        for number in range(1, HONEST_ROUNDS + 1):
            request = Request("train", arrays, {"seed": self.about.seed, "round": number})
            replies = {c: task.handler(request, Site(c, data)) for c, data in task.population.items()}
            arrays = FedAvg()(arrays, replies, {}).arrays
        return arrays

    def update(self, policy: Policy | None, sets: Sets, arrays: Arrays, number: int = 1) -> Arrays:
        """The client's model after training on what the server sent, as it leaves; Refused if it does not."""
        task, request = self.task(sets), Request("train", arrays, {"seed": self.about.seed, "round": number})
        site = Site(self.client, task.population[self.client])
        if policy is None:
            return task.handler(request, site).arrays
        said = dict([*self.base, *sets])
        settle = functools.partial(settings_of, self.recipe, [*assignments(said), *policy.settings.items()])
        asker = approve(policy, Asker("drill", self.recipe, self.client), said, settle)
        return guarded(task.handler, policy, asker)(request, site).arrays


def samples_of(samples: Any) -> tuple[Floats, Floats]:
    """Flat samples and their labels."""
    x, y = samples.batch(slice(0, len(samples)))
    return x.numpy().reshape(len(x), -1).astype(np.float64), y.numpy()


def read_by_thresholds(target: Target, policy: Policy | None) -> Told:
    """Samples, by a wide model of the server's choice and one step on all of them."""
    sent = recovery.craft_thresholds(target.task(WIDE).initial(), target.known, rng(target.about.seed, 0, "leak"))
    found = recovery.read_thresholds(sent, target.update(policy, WIDE, sent), target.x.shape[1])
    return Told("", "", recovery.count_recovered(found, target.x), len(target.x), found=found)


def read_by_rare_units(target: Target, policy: Policy | None) -> Told:
    """Samples, by crafted weights in the model and with the settings that all agreed on."""
    draw = rng(target.about.seed, 0, "leak")
    sent = recovery.craft_rare(target.task(()).initial(), target.known, len(target.x), draw)
    found = recovery.read_rare(sent, target.update(policy, (), sent), target.x.shape[1])
    return Told("", "", recovery.count_recovered(found, target.x), len(target.x), found=found)


def candidates(target: Target) -> tuple[Floats, Floats, np.ndarray[Any, Any]]:
    """Samples of the client and as many others of the same classes; their labels, and which are the client's."""
    draw, ours, others = rng(target.about.seed, 0, "candidates"), list[int](), list[int]()
    for label in np.unique(target.y):
        mine, theirs = np.flatnonzero(target.y == label), np.flatnonzero(target.labels == label)
        count = min(len(mine), len(theirs))
        ours += draw.permutation(mine)[:count].tolist()
        others += draw.permutation(theirs)[:count].tolist()
    chosen = draw.permutation(len(ours))[:CANDIDATES]
    ours, others = [ours[i] for i in chosen], [others[i] for i in chosen]
    member = np.repeat([True, False], len(chosen))
    order = draw.permutation(len(member))
    x = np.concatenate([target.x[ours], target.known[others]])
    return x[order], np.concatenate([target.y[ours], target.labels[others]])[order], member[order]


def ask_by_units(target: Target, policy: Policy | None) -> Told:
    """Membership, by a crafted unit for each candidate in the model that all agreed on, in a few requests."""
    x, _, member = candidates(target)
    first = target.task(()).initial()
    units, scores = next(iter(first.values())).shape[0], list[float]()
    for start in range(0, len(x), units):
        some = x[start : start + units]
        sent = recovery.craft_question(first, target.known, some)
        scores += recovery.read_answer(sent, target.update(policy, (), sent), some).tolist()
    return judged(target, scores, member)


def ask_by_losses(target: Target, policy: Policy | None) -> Told:
    """Membership, by how far the loss of a candidate falls with an update of an honest run."""
    import torch
    from torch.nn import functional

    task, arrays = target.task(()), target.honest_model()
    x, y, member = candidates(target)
    after = target.update(policy, (), arrays, HONEST_ROUNDS + 1)
    trainer: Any = task.handler
    shape = task.population[target.client].train.x.shape[1:]

    def losses(model: Arrays) -> Floats:
        with torch.inference_mode():
            outputs = trainer.fill(model).eval()(torch.from_numpy(x.astype(np.float32)).reshape(-1, *shape))
            each = functional.cross_entropy(outputs, torch.from_numpy(y), reduction="none")
        return np.asarray(each.numpy(), np.float64)

    return judged(target, (losses(arrays) - losses(after)).tolist(), member)


def judged(target: Target, scores: Sequence[float], member: np.ndarray[Any, Any]) -> Told:
    """How well scores tell members from others, with an interval of 95% by bootstrap."""
    draw = rng(target.about.seed, 0, "bootstrap")
    low, high = auc_interval(scores, member, np.arange(len(scores)), draw, draws=300)
    return Told("", "", auc=auc(scores, member), low=low, high=high, samples=len(scores))


ATTACKS: Mapping[str, Callable[[Target, Policy | None], Told]] = {
    "images, a wide model": read_by_thresholds,
    "images, the agreed model": read_by_rare_units,
    "membership, crafted units": ask_by_units,
    "membership, honest losses": ask_by_losses,
}


def leak(folder: Path, trial: Trial, about: Leaking) -> None:
    """Carry out every attack under each rule; leave a table, a picture and figures in the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    if not isinstance(vars(find(about.recipe).config).get("hidden"), int):
        raise ConfigError(
            f"leak: {about.recipe!r} has no setting 'hidden', the width of a layer, as the quickstart has"
        )
    given = policy_to_try(about, folder)  # tried with records of its own: the site's trail and ledger stay as they are
    given = replace(given, audit=folder / "audit.jsonl", ledger=folder / "ledger.json")
    base: Sets = (("clients", CLIENTS), *((k, v) for k, v in given.settings.items() if k == "data"))
    cover = Cover(clip=given.privacy.clip or about.clip, noise=about.noise)
    noisy = Policy(
        {about.recipe: content_hash(about.recipe)},
        asked=Asked(("train",), 1),
        reply=Leaving(("*",), ("*",), ("*",)),
        privacy=cover,
        audit=given.audit,
    )
    target = Target(about, base, folder)
    rules = {"plain": None, "policy": given, "noise": noisy}
    told = [run_attack(target, attack, rule, policy) for attack in ATTACKS for rule, policy in rules.items()]
    trial.facts["table"] = table_of(told, cover)
    by = {(t.attack, t.rule): t for t in told}
    wide, units = "images, a wide model", "images, the agreed model"
    trial.good = not by[wide, "policy"].recovered and not any(by[a, "noise"].recovered for a in (wide, units))
    trial.happened = (
        f"{by[wide, 'plain'].words()} samples came back; under the policy {by[wide, 'policy'].words()}, but "
    )
    trial.happened += f"{by[units, 'policy'].words()} by the agreed model; with noise {by[wide, 'noise'].words()}"
    kept = [{k: v for k, v in asdict(t).items() if k != "found" and v not in (None, "")} for t in told]
    facts = {"recipe": about.recipe, "client": target.client, "recovered_below": RECOVERED, "clip": cover.clip}
    facts |= {"noise": cover.noise, "policy": str(about.policy or "template"), "told": kept}
    write_whole(folder / "leak.json", json.dumps(facts, indent=2) + "\n")
    draw_leak(target, by[wide, "plain"], by[wide, "noise"], folder / "leak.png")


def policy_to_try(about: Leaking, folder: Path) -> Policy:
    """The policy in the file, or the template's with training allowed."""
    if about.policy is not None:
        return load_policy(about.policy)
    write_whole(folder / "policy.toml", policy_template([about.recipe]))
    made = load_policy(folder / "policy.toml")
    asked, reply = replace(made.asked, requests=("train",)), replace(made.reply, arrays=("*",), metrics=("*",))
    return replace(made, asked=asked, reply=reply)


def run_attack(target: Target, attack: str, rule: str, policy: Policy | None) -> Told:
    """One attack under one rule."""
    try:
        told = ATTACKS[attack](target, policy)
    except MutiraoError as error:
        why = getattr(error, "rule", "") or " ".join(str(error).split())[:60]
        return Told(attack, rule, recovered=0 if attack.startswith("images") else None, refused=why)
    return replace(told, attack=attack, rule=rule)


def table_of(told: Sequence[Told], cover: Cover) -> list[str]:
    """A line an attack, a column a rule."""
    heads = ["", "plain", "under the policy", f"clip {cover.clip:g}, noise {cover.noise:g}"]
    return in_columns([heads, *([a, *(t.words() for t in told if t.attack == a)] for a in ATTACKS)])


def draw_leak(target: Target, plain: Told, noised: Told, path: Path) -> None:
    """Originals above what was read of them without noise, and with it."""
    if plain.found is None or noised.found is None:
        return
    nearest, error = recovery.match(plain.found, target.x)
    sure = np.flatnonzero(error < RECOVERED)
    if not len(sure):
        return
    units = sure[np.linspace(0, len(sure) - 1, min(SHOWN, len(sure))).astype(int)]
    rows = {"trained on": target.x[nearest[units]], "read, no noise": plain.found[units]}
    rows[f"read, noise {target.about.noise:g}"] = np.nan_to_num(noised.found[units])
    draw_samples(rows, path)
