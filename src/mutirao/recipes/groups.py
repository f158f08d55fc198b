"""Client groups: find who is alike by one short warm-up, train one model a group, keep liars out, let newcomers in."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

from mutirao.attacks import Attacked, liars_among, verdicts
from mutirao.compression import compress_of
from mutirao.config import Common, Part, build, setting
from mutirao.core.arrays import Arrays, part_of
from mutirao.core.fleet import ClientId, Fleet
from mutirao.core.parts import AnyAggregator, AnySelector, as_aggregator, check_needs
from mutirao.core.rounds import Cohort, Patience, Round, Run
from mutirao.datasets.labelled import DATA, JUDGE_BY, JUDGES, Labelled, load_judged
from mutirao.errors import ConfigError
from mutirao.fleets.without import names_in
from mutirao.groups.flow import Plan, federate_groups
from mutirao.groups.form import NoiseRule
from mutirao.groups.grouper import Grouper, as_grouper
from mutirao.groups.names import HIDDEN
from mutirao.groups.record import FILES, plane_of, scan_of, summarise_groups
from mutirao.groups.signature import noise_of
from mutirao.groups.state import Grouping
from mutirao.images.names import NETWORK_NAMES
from mutirao.partition import describe
from mutirao.partitions.noise import disturb_rows, disturb_test, levels_of
from mutirao.privacy import Outlook, Settings, build_privacy, within_budget
from mutirao.randomness import number, rng
from mutirao.recipes.exchange import Exchange
from mutirao.recipes.exhibits import Exhibits, Picture
from mutirao.recipes.labelled import deal_samples
from mutirao.recipes.staggering import check_waits
from mutirao.recipes.task import Recipe, Task, build_aggregate, build_screen, simulate
from mutirao.secure.kinds import secure_of
from mutirao.training.drift import Around, groups_after


@dataclass(frozen=True, kw_only=True)
class Config(Common):
    """Settings of the groups recipe; warm-up, share a round, epochs and batch are the paper's."""

    rounds: int = setting(15, "how many rounds", low=1)
    clients: int = setting(30, "how many clients", low=1)
    per_round: int | float = setting(0.5, "clients selected a round in each group: a count, or a share", low=1e-9)
    epochs: int = setting(5, "passes over its data a client makes a round", low=1)
    warm_epochs: int = setting(10, "passes over its data a client makes in the warm-up", low=1)
    lr: float = setting(0.05, "learning rate of the clients", low=1e-12)
    momentum: float = setting(0.9, "momentum of the clients' SGD", low=0, high=1)
    data: str = setting("digits", DATA)
    partition: Part = setting(Part("by_class", {"classes": 2}), "how samples are dealt to clients")
    hidden: str = setting("none", "hidden populations instead of a partition", choices=HIDDEN)
    populations: int = setting(5, "how many hidden populations", low=1)
    model: str = setting("small", "the network for pictures", choices=NETWORK_NAMES)
    width: int = setting(64, "width of the hidden layer, for rows of numbers", low=1)
    judge_samples: int = setting(500, "most test samples a client judges by", low=1)
    judge_by: str = setting("test", JUDGE_BY, choices=JUDGES)
    signature: Part = setting(Part("bias", home="mutirao.groups.signature"), "what a client sends of its warm-up")
    cluster: Part = setting(Part("auto", home="mutirao.groups.groupers"), "how groups are found")
    noise: NoiseRule = setting("nearest", "a client in no group: joins the nearest, gets its own, or waits")
    head: str = setting(
        "reduced",
        "outputs of a group's model: its classes, if a warm-up tells them, or all",
        choices=("reduced", "full"),
    )
    attack: Part = setting(Part("none", home="mutirao.attacks"), "what liars do, in simulation")
    liars: float = setting(0.3, "share of each true group that lies, if there is an attack", low=0, high=1)
    founders: int = setting(0, "clients to wait for before groups are formed (0: all); later ones are admitted", low=0)
    regroup: int = setting(0, "rounds after which groups are formed anew, for data that change (0: never)", low=0)
    stable: int = setting(0, "judgements without gain after which a group stops (0: never)", low=0)
    tolerance: float = setting(0.002, "accuracy that counts as gain", low=0)


def split(config: Config, data: Labelled) -> tuple[list[Any], list[int]]:
    """The samples of each client, and the true group of each: its hidden population, or the classes it holds."""
    from mutirao.groups.populations import deal_populations, draw_populations, true_groups

    draw, y = rng(config.seed, 0, "partition"), data.y_train
    if config.hidden != "none":
        population = draw_populations(config.clients, config.populations, draw)
        return deal_populations(config.hidden, y, population, draw), population.tolist()
    parts = deal_samples(config, data, draw)
    return parts, true_groups(parts, y)


def task(config: Config) -> Task:
    """Clients of groups that the server has to find, each with test samples like its own."""
    from torch import nn

    from mutirao.groups.member import Member, last_layer
    from mutirao.groups.populations import furnish
    from mutirao.images.networks import make_network, replace_head
    from mutirao.training.samples import poison
    from mutirao.training.trainer import Trainer

    if config.centralised:
        raise ConfigError("centralised: groups have no pooled reference; cluster=one trains a single model")
    check_grouper(config)
    check_signature(config)
    check_privacy(config)
    check_secure(config)
    data = load_judged(config.data, config.seed, config.judge_by)
    x, y, test = data.x_train, data.y_train, (data.x_test, data.y_test)
    parts, truth = split(config, data)
    noise = levels_of(config.partition.name, config.partition.settings, len(parts)) if config.hidden == "none" else ()
    x, sees = disturb_rows(noise, config.seed, parts, x), partial(disturb_test, noise, config.seed)
    most, judge = config.samples, config.judge_samples
    clients = furnish(config.hidden, (x, y), test, parts, truth, config.seed, most, judge, sees)
    classes, groups = len(data.names), dict(zip(clients, truth, strict=True))

    def network(outputs: int) -> nn.Module:
        if len(data.shape) == 1:
            return make_network(config.model, data.shape, config.width, outputs)
        return replace_head(make_network(config.model, data.shape, config.width, classes), outputs)

    trainers = cache(lambda outputs: Trainer.of(config, lambda: network(outputs)))
    head = last_layer(trainers(classes).blank())
    signature, privacy = signature_of(config), build("privacy", config.privacy)
    member = Member(trainers, classes, signature, config.warm_epochs, head, privacy)
    liars = liars_among(groups, config.liars, config.seed) if config.attack.name != "none" else frozenset()
    clear = config.hidden != "none" or config.partition.name in ("iid", "by_class")  # else there is no one true answer
    left = {c: clients[c] for c in clients if c not in names_in(config.exclude)}
    around, drift = Around(left, config.seed, classes), build("drift", config.drift)
    knows = Known(member, liars, groups if clear else None, lambda round: groups_after(drift, groups, round, around))
    return Task(
        handler=Attacked(member, liars, build("attack", config.attack), poison) if liars else member,
        population=clients,
        initial=lambda: trainers(classes).initial(config.seed),
        classes=classes,
        noise=noise,
        basis=lambda: {"data": data.digest},
        knows=knows,
        exhibits=Exhibits(
            pictures={
                "partition.png": Picture("partition", lambda run: describe(y, parts)),
                "groups.png": Picture("groups", plane_of),
                "eps_scan.png": Picture("eps_scan", scan_of),
            },
            files=FILES,
            findings=lambda run: summarise_groups(run, knows.truth_at(run.round)),
            constant=frozenset({"groups", "rand"}),
        ),
    )


def grouper_of(config: Config) -> Grouper:
    """How groups are found."""
    return as_grouper(build("cluster", config.cluster))


def signature_of(config: Config) -> Any:
    """What clients send of their warm-up: what the grouper says, or else the user."""
    return grouper_of(config).signature or build("signature", config.signature)


def start_of(seed: int, which: int) -> int:
    """The seed of the common first model, or of another one."""
    return number(seed, 0, f"start {which}") if which else seed


def check_grouper(config: Config) -> None:
    """Refuse a grouper that sees more of single clients than the signature of a warm-up where that is all it may."""
    grouper, name = grouper_of(config), config.cluster.name
    plain = grouper.warms and not (grouper.hears or grouper.asks or grouper.signature)
    for key in ("privacy", "secure"):
        if not plain and getattr(config, key).name != "none":
            raise ConfigError(f"cluster={name}: only the signature of a warm-up is covered; use auto, or {key}=none")
    if config.regroup and (grouper.moves or not grouper.warms):
        raise ConfigError(f"cluster={name}: there are no signatures to form groups anew by; use regroup=0")


def check_signature(config: Config) -> None:
    """Refuse noise on a signature beside which the classes a client holds leave in clear."""
    if signature_of(config).epsilon and config.head != "full":
        raise ConfigError(
            f"signature.epsilon: with head={config.head} clients tell in clear which classes they hold, which undoes "
            "the noise; use head=full"
        )


def check_privacy(config: Config) -> None:
    """Refuse privacy that covers the models alone, while the warm-up tells of clients what it likes."""
    if config.privacy.name == "none":
        return
    signature, privacy = signature_of(config), build_privacy(config)
    if config.privacy.settings.get("epsilon"):
        raise ConfigError(
            "privacy.epsilon: how large groups will be is not known beforehand, nor then the noise that they need; "
            "set privacy.noise and privacy.budget"
        )
    if signature.repeatable and not privacy.repeatable:
        raise ConfigError("signature.repeatable: the account counts on noise that nobody knows; use false")
    if not signature.epsilon:
        raise ConfigError(
            f"privacy={config.privacy.name}: the warm-up's signatures have no noise; set signature.epsilon"
        )


def check_regroup(config: Config, aggregate: AnyAggregator) -> None:
    """Refuse to form groups anew where clients keep what belongs to the model of the group they are in."""
    if config.regroup and any(need.startswith("config:correct=") for need in as_aggregator(aggregate).needs):
        raise ConfigError(
            f"aggregate={config.aggregate.name}: what clients keep for it is of the groups before; use regroup=0"
        )


def check_secure(config: Config) -> None:
    """Refuse what shows the server more of a client than the signature of its one warm-up."""
    if config.secure.name == "none":
        return
    if config.head != "full":
        raise ConfigError(
            f"secure={config.secure.name}: head={config.head} tells which classes a client holds; use full"
        )
    if config.regroup:
        raise ConfigError(f"secure={config.secure.name}: regroup asks for signatures again and again; use 0")


@dataclass(frozen=True)
class Known:
    """What only a simulation knows of its clients."""

    member: Any  # a Member
    liars: frozenset[ClientId]
    truth: dict[ClientId, int] | None  # as the run begins; None: there is no one true answer
    later: Callable[[int], dict[ClientId, int] | None] = lambda round: None  # and in a round, if data drift

    def truth_at(self, round: int) -> dict[ClientId, int] | None:
        """Who is alike by that round, if that is known."""
        return None if self.truth is None else self.later(round)


def flow(fleet: Fleet, config: Config, task: Task, run: Run) -> Iterator[Round]:
    """Form groups, then make rounds of all of them at once."""
    fleet, churns, knows = simulate(fleet, config, run), config.available.name != "always", task.knows
    secure, member = secure_of(config), knows.member
    fleet = compress_of(config).at_server(secure.at_server(fleet, task.provides | {"metrics:accuracy_known"}))
    privacy = build_privacy(config)
    screen = build_screen(config, head=member.head)

    def parts(clients: int) -> tuple[AnySelector, AnyAggregator]:
        select = build("select", config.select, count=config.per_round, classes=task.classes)
        aggregate = build_aggregate(config, task, clients)
        check_waits(config, aggregate, "groups do")
        check_regroup(config, aggregate)
        secure.check(config, select, aggregate, len(task.population))
        return privacy.at_server(select, aggregate, clients, config)

    def inherit(before: Sequence[Arrays]) -> Arrays:
        return privacy.inherit(before, noise_of(member.signature)) if isinstance(privacy, Settings) else {}

    check_needs(task.provides, *Cohort(*parts(len(task.population)), filters=screen).parts)
    first = task.initial()
    plan = Plan(
        model=lambda outputs, which=0: member.trainers(outputs).initial(start_of(config.seed, which)),
        classes=member.classes,
        parts=parts,
        cluster=build("cluster", config.cluster),
        noise=config.noise,
        directions=member.signature.directions,
        size=len(member.signature(first, first, member.head)) if member.signature.trains else 0,
        reduced=config.head == "reduced",
        filters=screen,
        head=member.head,
        regroup=config.regroup,
        stable=config.stable,
        tolerance=config.tolerance,
        patience=Patience(min_replies=config.min_replies or None, wait=0.0 if churns else config.wait),
        truth=knows.truth_at,
        honest=lambda client: client not in knows.liars,
        judged=config.privacy.name in ("none", "central"),  # else nothing but noised updates leaves a client
        clients_every=config.clients_every,
        inherit=inherit,
        size_cap=config.size_cap,
        metrics=task.told,
    )
    expect = config.founders or (1 if churns else len(task.population))
    rounds = federate_groups(run, fleet, plan, config.rounds, config.evaluate_every, expect)
    for done in within_budget(rounds, run, config.rounds, privacy, lambda: look_ahead(run, plan)):
        if config.screen.name != "none":
            done.row.update(verdicts(done.clients, knows.liars, run.history[:-1]))
        yield done


def look_ahead(run: Run, plan: Plan) -> Outlook:
    """What the next round adds to: the account of each group, or of those that the round is about to form."""
    state = Grouping.from_memory(run.memory)
    members = state.groups.members() if state else {}
    memories = {g: part_of(run.memory, g) for g in members}
    if state is None or (plan.regroup and run.round and run.round % plan.regroup == 0):
        return [(plan.inherit(list(memories.values())), plan.parts(1)[1])]  # at worst, a group of one
    return [(memories[g], plan.parts(len(who))[1]) for g, who in members.items()]


def asks(config: Config, task: Task) -> Exchange:
    """A warm-up tells who is alike, and which classes a client has if heads are cut to them; then clients judge.

    One that comes when its group has settled is handed that group's model to take.
    """
    grouper = grouper_of(config)
    sent = ("signature", *(("holdings",) if config.head == "reduced" else ())) if grouper.warms else ()
    warm = Exchange((*(("warm",) if grouper.warms else ()), "take", *grouper.asks), extras=(*sent, *grouper.extras))
    warm |= Exchange(metrics=grouper.metrics)
    if config.privacy.name not in ("none", "central"):
        return warm
    return warm | Exchange(("evaluate",), metrics=("accuracy_known",))


recipe = Recipe(Config, task, flow, heeds=frozenset({"privacy", "secure", "compress", "drift"}), asks=asks)
