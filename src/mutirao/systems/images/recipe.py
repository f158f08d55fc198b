"""Image classification: class folders, a CSV of files or a named set; a small network or a pretrained backbone."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache, partial

from mutirao.config import OPTIMIZERS, Common, Part, setting
from mutirao.core.client_evaluation import weighted_client_metrics
from mutirao.core.fleet import Fleet
from mutirao.core.rounds import Round, Run
from mutirao.datasets.labelled import EVALUATION_SPLITS, is_arrays
from mutirao.datasets.published import find_data
from mutirao.errors import ConfigError
from mutirao.experiments.artifacts import Artifacts, Picture
from mutirao.experiments.disclosure import Disclosure, check_validation_share, is_private
from mutirao.experiments.grouping import has_one_model
from mutirao.experiments.task import Recipe, Task, federate
from mutirao.metrics import evaluate_logits
from mutirao.systems.classification import partition_labelled
from mutirao.systems.images.choices import BACKBONE_CHOICES, ELSEWHERE, NETWORK_NAMES, check_backbone
from mutirao.systems.images.image_sources import find_image_sources, read_own
from mutirao.systems.images.metrics import Confusion

METRICS = ("accuracy", "balanced_accuracy", "auc", "f1", "log_loss", "loss")


@dataclass(frozen=True, kw_only=True)
class Config(Common):
    """Settings of the images recipe."""

    rounds: int = setting(10, "how many rounds", low=1)
    clients: int = setting(10, "how many clients; at most, if the data say which client each picture belongs to", low=1)
    per_round: int | float = setting(1.0, "clients selected a round: a count, or a share", low=1e-9)
    batch_size: int = setting(32, "samples a step", low=1)
    lr: float = setting(1e-3, "learning rate of the clients", low=1e-12)
    optimizer: str = setting("adam", "optimiser of the clients", choices=OPTIMIZERS)
    keep_optimizer: bool = setting(False, "keep the optimiser's state (Adam's moments) at the client between rounds")
    data: str = setting(
        "synthetic",
        "a folder by class, a CSV of file,label[,client][,group], a set by name, 'none': with the sites alone",
    )
    partition: Part = setting(
        Part("auto", home="mutirao.systems.images.image_sources"), "how pictures are partitioned among clients"
    )
    body: str = setting(
        "small", f"the network ({', '.join(NETWORK_NAMES)}), or a pretrained backbone: {BACKBONE_CHOICES}"
    )
    weights: str = setting("", "a file with its weights, or 'random' (default: those of an installed package)")
    trainable: str = setting(
        "auto", "which part of a backbone is trained and sent", choices=("auto", "head", "last_block", "all")
    )
    side: int = setting(32, "side in pixels to which pictures are resized, for a network from scratch", low=8, high=512)
    views: int = setting(4, "views of each picture file: as it is, then flipped and turned", low=1, high=64)
    group: str = setting("", "what must not be split, such as a patient: a pattern with a (group) for file names")
    test: float = setting(0.2, "share held out as the common test set, if there is none", low=0.02, high=0.5)
    validation: float = setting(0.2, "share a client holds out for evaluation", low=0, high=0.5)
    judge_by: str = setting(
        "test",
        "evaluate on: test, or vali, what clients hold out, of arrays a fifth of the training part (for tuning)",
        choices=EVALUATION_SPLITS,
    )
    clients_every: int = setting(5, "rounds between evaluations by every client (0: at the end, -1: never)", low=-1)
    classes: str = setting("", "the class list agreed on, separated by commas (default: the server's)")
    cache: bool = setting(True, "keep features of a frozen backbone between runs")
    sites: bool = setting(False, "deployed: data is each site's own; a site trains on it, the server evaluates on it")


def task(config: Config) -> Task:
    """Train on images where they are; a set published as arrays is partitioned among virtual clients."""
    names = tuple(sorted(name.strip() for name in config.classes.split(",") if name.strip()))
    check_backbone(config.body, *NETWORK_NAMES)
    arrays = is_arrays(config.data)
    elsewhere = config.data == ELSEWHERE or (arrays and config.sites)
    if arrays and not config.sites:
        return array_task(config)
    check_validation_share(config, "validation", is_private(config))
    if elsewhere:
        sources = read_own(None, config.clients, config.group, names)
    elif config.sites:
        sources = read_own(find_data(config.data), config.clients, config.group, names)
    else:
        sources = find_image_sources(find_data(config.data), config, config.group, names)
    classes = names or sources.classes
    if len(classes) < 2:
        raise ConfigError(f"data: {config.data} has the class {', '.join(classes)} alone; two are needed")

    from mutirao.systems.images.client import HospitalPopulation, ImageTrainer, pool_hospitals
    from mutirao.systems.images.heads import probabilities
    from mutirao.systems.images.models import TrainingPlan
    from mutirao.training.samples import Samples, agreed_classes

    plan = TrainingPlan.of(config)
    hospitals = HospitalPopulation(
        sources.hospitals,
        plan.extract,
        config.validation,
        config.seed,
        config.samples,
        names,
        grouped=bool(config.group),
        accepts_any_client=sources.is_one_site,
    )
    has_test = sources.has_test and config.judge_by == "test"
    options = plan.training(config) | plan.agreed()
    trainer = ImageTrainer.of(config, lambda: plan.model(len(classes)), figures=evaluate_logits, **options)

    @cache
    def test() -> Samples:
        images = sources.test()
        return Samples(plan.extract(images.files), images.labels)

    def matrix(run: Run) -> Confusion:
        predicted = probabilities(trainer.fill(run.arrays), test().x.numpy())
        return Confusion.of(test().y.numpy(), predicted, classes)

    return Task(
        handler=trainer,
        population=pool_hospitals(hospitals) if config.centralised else hospitals,
        initial=partial(trainer.initial, config.seed),
        evaluate=(lambda arrays: trainer.evaluate(arrays, test())) if has_test else None,
        metrics=METRICS,
        agreed=agreed_classes(classes),
        exhibits=Artifacts({"confusion.png": Picture("confusion", matrix)} if has_test else {}),
        classes=len(classes),
    )


def array_task(config: Config) -> Task:
    """The task of a set published as arrays, with a small network for its sample shape."""
    if config.body not in NETWORK_NAMES:
        right = ", ".join(NETWORK_NAMES)
        raise ConfigError(f"body={config.body} needs image files, and {config.data!r} is arrays; use {right}")
    partitioned = partition_labelled(config, judge_by=config.judge_by)

    from mutirao.systems.images.networks import make_network

    data = partitioned.data
    made = partitioned.task(
        config, lambda: make_network(config.body, data.shape, 64, len(data.names)), figures=evaluate_logits
    )
    return replace(made, metrics=METRICS)


def flow(fleet: Fleet, config: Config, task: Task, run: Run) -> Iterator[Round]:
    """Run the rounds; without a common test set, clients evaluate on their held-out samples."""
    private = is_private(config)
    for done in federate(fleet, config, task, run):
        due = run.round % config.evaluate_every == 0 or run.round == config.rounds
        if task.evaluate is None and due and config.validation and not private and has_one_model(config):
            done.row.update(weighted_client_metrics(fleet, run, task.metrics, config.size_cap))
        yield done


def disclosure(config: Config, task: Task) -> Disclosure:
    """Clients evaluate on their held-out samples if the server has no test images."""
    if config.validation and not is_private(config):
        return Disclosure(("evaluate",))
    return Disclosure()


SUPPORTED = frozenset({"privacy", "secure", "compress", "personal", "cluster"})
recipe = Recipe(Config, task, flow, heeds=SUPPORTED, asks=disclosure)
