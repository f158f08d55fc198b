"""Image classification: class folders, a CSV of files or a named set; a small network or a pretrained backbone."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache, partial

from mutirao.config import OPTIMIZERS, Common, Part, setting
from mutirao.core.client_evaluation import weighted_client_metrics
from mutirao.core.fleet import Fleet
from mutirao.core.rounds import Round, Run
from mutirao.datasets.labelled import JUDGES, is_arrays
from mutirao.datasets.locations import find_data
from mutirao.errors import ConfigError
from mutirao.experiments.artifacts import Exhibits, Picture
from mutirao.experiments.disclosure import Disclosure, check_validation_share, is_private
from mutirao.experiments.grouping import has_one_model
from mutirao.experiments.task import Recipe, Task, federate
from mutirao.metrics import evaluate_logits
from mutirao.systems.classification import partition_labelled
from mutirao.systems.images.choices import BACKBONE_CHOICES, ELSEWHERE, NETWORK_NAMES, check_backbone
from mutirao.systems.images.image_sources import find_image_sources, read_own
from mutirao.systems.images.metrics import Confusion

FIGURES = ("accuracy", "balanced_accuracy", "auc", "f1", "log_loss", "loss")


@dataclass(frozen=True, kw_only=True)
class Config(Common):
    """Settings of the images recipe."""

    rounds: int = setting(10, "how many rounds", low=1)
    clients: int = setting(10, "how many clients; at most, if the data say whose pictures they are", low=1)
    per_round: int | float = setting(1.0, "clients selected a round: a count, or a share", low=1e-9)
    batch_size: int = setting(32, "samples a step", low=1)
    lr: float = setting(1e-3, "learning rate of the clients", low=1e-12)
    optimizer: str = setting("adam", "optimiser of the clients", choices=OPTIMIZERS)
    keep_optimizer: bool = setting(False, "keep the optimiser's state (Adam's moments) where it is from round to round")
    data: str = setting(
        "synthetic",
        "a folder by class, a CSV of file,label[,client][,group], a set by name, 'none': with the sites alone",
    )
    partition: Part = setting(
        Part("auto", home="mutirao.systems.images.image_partitions"), "how pictures are dealt to clients"
    )
    body: str = setting(
        "small", f"the network ({', '.join(NETWORK_NAMES)}), or a pretrained backbone: {BACKBONE_CHOICES}"
    )
    weights: str = setting("", "a file with its weights, or 'random' (default: those of an installed package)")
    trainable: str = setting(
        "auto", "what of a backbone is trained, and travels", choices=("auto", "head", "last_block", "all")
    )
    side: int = setting(32, "side in pixels to which pictures are resized, for a network from scratch", low=8, high=512)
    views: int = setting(4, "views of each picture file: as it is, then flipped and turned", low=1, high=64)
    group: str = setting("", "what must not be split, such as a patient: a pattern with a (group) for file names")
    test: float = setting(0.2, "share held out as the common test set, if there is none", low=0.02, high=0.5)
    validation: float = setting(0.2, "share a client holds out for evaluation", low=0, high=0.5)
    judge_by: str = setting(
        "test",
        "which part judges: test, or vali, what clients keep back, of arrays a fifth of the training part (to tune by)",
        choices=JUDGES,
    )
    clients_every: int = setting(5, "rounds between evaluations by every client (0: at the end, -1: never)", low=-1)
    classes: str = setting("", "the class list agreed on, separated by commas (default: the server's)")
    cache: bool = setting(True, "keep features of a frozen backbone between runs")
    sites: bool = setting(False, "deployed: data is each party's own; a site trains on it, the server evaluates on it")


def task(config: Config) -> Task:
    """Pictures where they are; a set that is published as arrays is dealt to virtual clients."""
    names = tuple(sorted(name.strip() for name in config.classes.split(",") if name.strip()))
    check_backbone(config.body, *NETWORK_NAMES)
    arrays, place = is_arrays(config.data), find_data(config.data)
    elsewhere = config.data == ELSEWHERE or (arrays and config.sites)
    if arrays and not config.sites:
        return array_task(config)
    check_validation_share(config, "validation", is_private(config))
    if config.sites or elsewhere:
        found = read_own(None if elsewhere else place, config.clients, config.group, names)
    else:
        found = find_image_sources(place, config, config.group, names)
    classes = names or found.classes
    if len(classes) < 2:
        raise ConfigError(f"data: {config.data} has the class {', '.join(classes)} alone; two are needed")

    from mutirao.systems.images.client import HospitalPopulation, Party, pool_hospitals
    from mutirao.systems.images.heads import probabilities
    from mutirao.systems.images.models import Plan
    from mutirao.training.samples import Samples, agreed_classes

    plan = Plan.of(config)
    hospitals = HospitalPopulation(
        *(found.hospitals, plan.extract, config.validation, config.seed, config.samples, names),
        grouped=bool(config.group),
        anybody=found.own,
    )
    has_test = found.has_test and config.judge_by == "test"
    told = plan.training(config) | plan.agreed()
    party = Party.of(config, lambda: plan.model(len(classes)), figures=evaluate_logits, **told)

    @cache
    def test() -> Samples:
        return Samples(plan.extract(found.test().files), found.test().labels)

    def matrix(run: Run) -> Confusion:
        likely = probabilities(party.fill(run.arrays), test().x.numpy())
        return Confusion.of(test().y.numpy(), likely, classes)

    return Task(
        handler=party,
        population=pool_hospitals(hospitals) if config.centralised else hospitals,
        initial=partial(party.initial, config.seed),
        evaluate=(lambda arrays: party.evaluate(arrays, test())) if has_test else None,
        metrics=FIGURES,
        agreed=agreed_classes(classes),
        exhibits=Exhibits({"confusion.png": Picture("confusion", matrix)} if has_test else {}),
        classes=len(classes),
    )


def array_task(config: Config) -> Task:
    """A set by name, or as its publisher ships it, with a small network by its shape."""
    if config.body not in NETWORK_NAMES:
        right = ", ".join(NETWORK_NAMES)
        raise ConfigError(f"body={config.body} looks at files of pictures, and {config.data!r} is arrays; use {right}")
    dealt = partition_labelled(config, judge_by=config.judge_by)

    from mutirao.systems.images.networks import make_network

    data = dealt.data
    made = dealt.task(
        config, lambda: make_network(config.body, data.shape, 64, len(data.names)), figures=evaluate_logits
    )
    return replace(made, metrics=FIGURES)


def flow(fleet: Fleet, config: Config, task: Task, run: Run) -> Iterator[Round]:
    """Rounds; where no common test set judges, clients do by what they kept back."""
    private = is_private(config)
    for done in federate(fleet, config, task, run):
        due = run.round % config.evaluate_every == 0 or run.round == config.rounds
        if task.evaluate is None and due and config.validation and not private and has_one_model(config):
            done.row.update(weighted_client_metrics(fleet, run, task.metrics, config.size_cap))
        yield done


def asks(config: Config, task: Task) -> Disclosure:
    """Sites judge by what they kept back, where the server's pictures do not."""
    return Disclosure(("evaluate",)) if config.validation and not is_private(config) else Disclosure()


HEEDS = frozenset({"privacy", "secure", "compress", "personal", "cluster"})
recipe = Recipe(Config, task, flow, heeds=HEEDS, asks=asks)
