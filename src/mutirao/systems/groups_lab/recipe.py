"""Client groups: cluster clients by a short warm-up, train one model for each group, filter out Byzantine clients."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, ClassVar

from mutirao.clustering.formation import NoiseRule
from mutirao.clustering.group_tables import FILES, plane_of, scan_of, summarise_groups
from mutirao.config import Common, Part, build, setting
from mutirao.core.exclusion import parse_names
from mutirao.core.fleet import ClientId, Fleet
from mutirao.core.rounds import Round, Run
from mutirao.datasets.labelled import DATA, EVALUATION_HELP, EVALUATION_SPLITS, Labelled, load_for_evaluation
from mutirao.errors import ConfigError
from mutirao.experiments.artifacts import Artifacts, Picture
from mutirao.experiments.disclosure import Disclosure
from mutirao.experiments.group_evaluation import GAIN, SERVED_MODELS, References, compare_with_references, directions_of
from mutirao.experiments.group_flow import GroupOptions, federate_groups
from mutirao.experiments.grouping import (
    group_settings_in,
    grouper_of,
    has_references,
    reference_rounds,
    references_in,
    signature_of,
)
from mutirao.experiments.task import Recipe, Task
from mutirao.partitioning import describe
from mutirao.partitioning.feature_skew import disturb_rows, disturb_test, noise_levels
from mutirao.randomness import derive_seed, rng
from mutirao.registry import is_dotted
from mutirao.robustness.attacks import Attacked, malicious_among
from mutirao.simulation.drift import DriftContext, groups_after
from mutirao.systems.classification import partition_samples
from mutirao.systems.images.choices import NETWORK_NAMES, check_network

HIDDEN = ("none", "skewed", "permuted", "rotated")  # kinds of hidden populations

SERVES = ("auto", *SERVED_MODELS)


@dataclass(frozen=True, kw_only=True)
class Config(Common):
    """Settings of the groups recipe; warm-up, share a round, epochs and batch are the paper's."""

    rounds: int = setting(15, "how many rounds", low=1)
    clients: int = setting(30, "how many clients", low=1)
    per_round: int | float = setting(0.5, "clients selected a round in each group: a count, or a share", low=1e-9)
    epochs: int = setting(5, "epochs: passes over its data a client makes in a round", low=1)
    lr: float = setting(0.05, "learning rate of the clients", low=1e-12)
    momentum: float = setting(0.9, "momentum of the clients' SGD", low=0, high=1)
    data: str = setting("digits", DATA)
    partition: Part = setting(Part("by_class", {"classes": 2}), "how samples are partitioned among clients")
    hidden: str = setting("none", "hidden populations instead of a partition", choices=HIDDEN)
    populations: int = setting(5, "how many hidden populations", low=1)
    model: str = setting("small", f"the network for pictures ({', '.join(NETWORK_NAMES)}), or package.module:function")
    width: int = setting(64, "width of the hidden layer, for rows of numbers", low=1)
    judge_samples: int = setting(500, "most test samples on which a client evaluates", low=1)
    judge_by: str = setting("test", EVALUATION_HELP, choices=EVALUATION_SPLITS)
    signature: Part = setting(Part("bias"), "what a client sends of its warm-up")
    cluster: Part = setting(Part("auto"), "how groups are found")
    noise: NoiseRule = setting("nearest", "a client in no group: joins the nearest, gets its own, or waits")
    head: str = setting(
        "reduced",
        "outputs of a group's model: its classes, if a warm-up reports them, or all",
        choices=("reduced", "full"),
    )
    attack: Part = setting(Part("none", home="mutirao.robustness.attacks"), "what Byzantine clients do, in simulation")
    liars: float = setting(0.3, "share of Byzantine clients in each true group, with an attack", low=0, high=1)
    founders: int = setting(0, "clients to wait for before groups are formed (0: all); later ones are admitted", low=0)
    stable: int = setting(0, "evaluations without gain after which a group stops (0: never)", low=0)
    references: int = setting(
        -1, "rounds of FedAvg to compare with at the end, and with training alone (-1: the run's, 0: neither)", low=-1
    )
    alone_epochs: int = setting(
        0, "most epochs for which a client trains alone as a baseline (0: as many as in the run)", low=0
    )
    serve: str = setting("auto", "the model clients get: auto (best on held-out samples), or", choices=SERVES)
    hold: float = setting(
        0.1, "share of its samples a client holds out to choose by, with cluster=auto", low=0, high=0.5
    )
    retired_settings: ClassVar[Mapping[str, float]] = {"tolerance": GAIN}


def split(config: Config, data: Labelled) -> tuple[list[Any], list[int]]:
    """The samples of each client, and its true group: by its hidden population, or by its classes."""
    from mutirao.systems.groups_lab.populations import draw_populations, partition_populations, true_groups

    draw = rng(config.seed, 0, "partition")
    y = data.y_train
    if config.hidden != "none":
        population = draw_populations(config.clients, config.populations, draw)
        return partition_populations(config.hidden, y, population, draw), population.tolist()
    parts = partition_samples(config, data, draw)
    return parts, true_groups(parts, y)


def task(config: Config) -> Task:
    """Clients of hidden groups, each with test samples of its own distribution."""
    from torch import nn

    from mutirao.experiments.group_client import GroupMember, last_layer
    from mutirao.systems.groups_lab.populations import make_clients
    from mutirao.systems.images.networks import make_network, replace_head
    from mutirao.training.samples import poison
    from mutirao.training.trainer import Trainer

    check_head(config)
    check_network(config.model)
    data = load_for_evaluation(config.data, config.seed, config.judge_by)
    x = data.x_train
    y = data.y_train
    test = data.x_test, data.y_test
    parts, truth = split(config, data)
    noise: tuple[float, ...] = ()
    # Hidden populations take the place of the partition, and of its noise.
    if config.hidden == "none":
        noise = noise_levels(config.partition.name, config.partition.settings, len(parts))
    x = disturb_rows(noise, config.seed, parts, x)
    with_noise_of = partial(disturb_test, noise, config.seed)
    clients = make_clients(
        config.hidden, (x, y), test, parts, truth, config.seed, config.samples, config.judge_samples, with_noise_of
    )
    classes = len(data.names)
    groups = dict(zip(clients, truth, strict=True))

    def network(outputs: int) -> nn.Module:
        if len(data.shape) == 1 or is_dotted(config.model):
            return make_network(config.model, data.shape, config.width, outputs)
        return replace_head(make_network(config.model, data.shape, config.width, classes), outputs)

    trainers = cache(lambda outputs: Trainer.of(config, lambda: network(outputs)))
    head = last_layer(trainers(classes).thread_module())
    signature = signature_of(config)
    privacy = build("privacy", config.privacy)
    hold = config.hold if holds_out_samples(config) else 0.0
    member = GroupMember(trainers, classes, signature, config.warm_epochs, head, privacy, hold)
    malicious: frozenset[ClientId] = frozenset()
    if config.attack.name != "none":
        malicious = malicious_among(groups, config.liars, config.seed)
    # With any other partition, such as Dirichlet's, true groups are not unique.
    clear = config.hidden != "none" or config.partition.name in ("iid", "by_class")
    remaining = {c: clients[c] for c in clients if c not in parse_names(config.exclude)}
    context = DriftContext(remaining, config.seed, classes)
    drift = build("drift", config.drift)
    simulated = GroundTruth(
        member, malicious, groups if clear else None, lambda round: groups_after(drift, groups, round, context)
    )
    return Task(
        handler=Attacked(member, malicious, build("attack", config.attack), poison) if malicious else member,
        population=clients,
        initial=lambda: trainers(classes).initial(config.seed),
        directions=directions_of("accuracy"),
        classes=classes,
        noise=noise,
        basis=lambda: {"data": data.digest},
        opinions=lambda run, samples: member.predictions(run, samples)[0],
        knows=simulated,
        exhibits=Artifacts(
            pictures={
                "partition.png": Picture("partition", lambda run: describe(y, parts)),
                "groups.png": Picture("groups", plane_of),
                "eps_scan.png": Picture("eps_scan", scan_of),
            },
            files=FILES,
            findings=lambda run: {
                **summarise_groups(run, simulated.truth_at(run.round)),
                **references_in(run),
                **group_settings_in(run, config),
            },
            constant=frozenset({"groups", "rand"}),
        ),
    )


def start_of(seed: int, which: int) -> int:
    """The seed of the common initial model, or of another one."""
    if which:
        return derive_seed(seed, 0, f"start {which}")
    return seed


def holds_out_samples(config: Config) -> bool:
    """Whether clients hold out samples to choose the served model: with `auto`, if their data do not drift."""
    chooses = has_references(config) and config.serve == "auto" and config.cluster.name == "auto"
    return chooses and config.hold > 0 and config.drift.name == "none"


def check_head(config: Config) -> None:
    """Refuse reduced heads, which disclose the classes of clients, where only noised values or sums may leave them."""
    if config.head == "full":
        return
    if signature_of(config).epsilon:
        raise ConfigError(
            f"signature.epsilon: head={config.head} discloses the classes of clients, which undoes the noise; "
            "use head=full"
        )
    if config.secure.name != "none":
        raise ConfigError(
            f"secure={config.secure.name}: head={config.head} discloses the classes of a client; use head=full"
        )


@dataclass(frozen=True)
class GroundTruth:
    """Facts about the clients that only a simulation has."""

    member: Any  # a Member
    malicious: frozenset[ClientId]
    truth: dict[ClientId, int] | None  # before drift; None: not unique
    later: Callable[[int], dict[ClientId, int] | None] = lambda round: None  # in a round, with drift

    def truth_at(self, round: int) -> dict[ClientId, int] | None:
        """The true group of each client in that round, if known."""
        if self.truth is None:
            return None
        return self.later(round)


def flow(fleet: Fleet, config: Config, task: Task, run: Run) -> Iterator[Round]:
    """Form groups, then make rounds of all of them at once."""
    truth = task.knows
    member = truth.member
    compare = None
    if has_references(config):
        compare = partial(compare_with_references, settings=references_of(config))
    options = GroupOptions(
        model=lambda outputs, which=0: member.trainers(outputs).initial(start_of(config.seed, which)),
        head=member.head,
        classes=member.classes,
        reduced_heads=config.head == "reduced",
        noise=config.noise,
        initial_clients=config.founders,
        stable=config.stable,
        metrics=("accuracy", "accuracy_known", "loss"),
        true_groups=truth.truth_at,
        malicious=truth.malicious,
        compare=compare,
    )
    yield from federate_groups(fleet, config, task, run, options)


def references_of(config: Config) -> References:
    """The references for groups, fine-tuned as long as one round, and the model that clients get."""
    serve = config.serve
    # Without held-out samples there is nothing to choose by.
    if serve == "auto" and not holds_out_samples(config):
        serve = "groups"
    return References(reference_rounds(config), config.epochs, config.alone_epochs, config.per_round, serve)


def extra_disclosure(config: Config, task: Task) -> Disclosure:
    """With reduced heads the warm-up also discloses the classes of a client.

    A client that joins after its group has settled gets that group's model in a `take` request.
    """
    extras: tuple[str, ...] = ()
    if config.head == "reduced" and grouper_of(config).uses_warm_up:
        extras = ("holdings",)
    metrics = []
    # With local privacy clients report no metrics, see `GroupMember.check_allowed`.
    if config.privacy.name in ("none", "central"):
        metrics.append("accuracy_known")
    if holds_out_samples(config):
        metrics.append("accuracy_held")
    return Disclosure(("take",), extras=extras, metrics=tuple(metrics))


recipe = Recipe(
    Config, task, flow, heeds=frozenset({"privacy", "secure", "compress", "drift", "cluster"}), asks=extra_disclosure
)
