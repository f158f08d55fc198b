"""Cervical-cancer screening: hospitals keep their slides, and together train the head of a pretrained network."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mutirao.config import OPTIMIZERS, Common, Part, setting
from mutirao.core.arrays import Arrays
from mutirao.core.fleet import Fleet
from mutirao.core.rounds import Round, Run
from mutirao.datasets.image_layouts import GroupRows, ungrouped
from mutirao.datasets.labelled import EVALUATION_SPLITS
from mutirao.datasets.published import find_data
from mutirao.datasets.tile_folders import TileScale, tile_scale_of
from mutirao.errors import ConfigError
from mutirao.experiments.artifacts import Artifacts, Picture
from mutirao.experiments.disclosure import Disclosure, check_validation_share, is_private
from mutirao.experiments.grouping import has_one_model
from mutirao.experiments.task import Recipe, Task, federate
from mutirao.metrics import evaluate_logits
from mutirao.randomness import rng
from mutirao.systems.images.choices import (
    AUGMENTS,
    BACKBONE_CHOICES,
    BAG_HEADS,
    ELSEWHERE,
    HEADS,
    STAINS,
    Trainable,
    check_backbone,
)
from mutirao.systems.images.image_sources import Sources, find_image_sources, read_own, read_prepared
from mutirao.systems.images.metrics import (
    REPORTED_METRICS,
    Confusion,
    abnormal_classes,
    reported_metrics,
    screening_metrics,
    write_verdict,
)

SLIDES = 3  # synthetic slides a laboratory
PLANTED_SLIDES = 16  # the same for heads of whole slides


def find_sources(config: Any, classes: tuple[str, ...] = ()) -> Sources:
    """Read the setting `data`; with `sites` all images belong to one site.

    With a head for whole slides, rows are slides.
    """
    if config.data == ELSEWHERE:
        return read_own(None, config.clients, config.slide, classes)
    rows_of: GroupRows = ungrouped
    if bags := config.head in BAG_HEADS:
        from mutirao.systems.images.bags import as_slides, gather_slides

        rows_of = gather_slides
    root = find_data(config.data)
    if config.data == "synthetic":
        from mutirao.systems.cytology.slides.synthetic_slides import make_laboratories

        slides = config.slides or (PLANTED_SLIDES if bags else SLIDES)
        root = make_laboratories(config.clients, slides, config.side, config.seed, planted=bags)
        found = read_prepared(root, config.clients, config.slide)
    elif config.sites:
        found = read_own(root, config.clients, config.slide, classes)
    else:
        found = find_image_sources(root, config, config.slide, rows_of=rows_of)
    if bags:
        return as_slides(found)
    return found


def scale_in(config: Any) -> TileScale | None:
    """The scale of the images in `data`, if it is known; it is stored with the model for screening."""
    if config.data == "synthetic":
        return TileScale(512, 0.5)  # as `tile_slide` cuts them there
    if config.data == ELSEWHERE:
        return None
    return tile_scale_of(find_data(config.data))


if TYPE_CHECKING:
    from mutirao.systems.images.features import Extractor

# Columns of the history under the paper's names.
PAPER_NAMES = {"train_accuracy": "train_acc", "train_val_loss": "val_loss", "train_val_acc": "val_acc"}


@dataclass(frozen=True, kw_only=True)
class Config(Common):
    """Settings of the cytology recipe; the defaults are the paper's, except for the number of rounds."""

    rounds: int = setting(30, "how many rounds", low=1)
    clients: int = setting(3, "how many hospitals", low=1)
    per_round: int | float = setting(1.0, "hospitals a round: a count, or a share", low=1e-9)
    batch_size: int = setting(16, "samples a step", low=1)
    lr: float = setting(1e-3, "learning rate of the hospitals", low=1e-12)
    optimizer: str = setting("adam", "optimiser of the hospitals", choices=OPTIMIZERS)
    keep_optimizer: bool = setting(False, "keep the optimiser's state (Adam's moments) at the client between rounds")
    data: str = setting(
        "synthetic", "'synthetic', a folder of classes, Training/ and Test/, client_*/; 'none': with the sites alone"
    )
    partition: Part = setting(
        Part("even", home="mutirao.systems.images.image_sources"), "how pictures are partitioned among hospitals"
    )
    body: str = setting("efficientnet_lite0", f"the pretrained network: {BACKBONE_CHOICES}")
    weights: str = setting("", "a file with its weights, or 'random' (default: those of an installed package)")
    trainable: Trainable = setting("head", "what is trained and sent: head, last_block or all")
    views: int = setting(4, "views of each picture: as it is, then flipped and turned", low=1, high=64)
    slide: str = setting(r"^(\d+)-", "a picture's slide: a pattern with a (group), or a table file,slide,laboratory")
    test: float = setting(0.2, "share held out as the global test set, by slide", low=0.02, high=0.5)
    validation: float = setting(0.2, "share a hospital holds out for validation, by slide", low=0, high=0.5)
    judge_by: str = setting(
        "test", "evaluate on: test, or vali, what hospitals hold out (for tuning)", choices=EVALUATION_SPLITS
    )
    normal: str = setting("normal*", "classes that are not abnormal: patterns, separated by commas")
    classes: str = setting("", "the class list agreed on, separated by commas (default: the server's)")
    only: str = setting("", "train on this hospital alone, such as client_1, to see what it reaches by itself")
    cache: bool = setting(True, "keep features of the frozen backbone between runs")
    sites: bool = setting(
        False, "data is this site's own and is not partitioned; true at a site that names its own data"
    )
    head: str = setting("linear", "'linear' classifies a picture; 'mean', 'max', 'abmil' a slide", choices=HEADS)
    tiles: int = setting(500, "whole slides: tiles of a slide at most, sampled at random", low=1)
    stain: str = setting("none", "stain normalization of each picture", choices=STAINS)
    augment: str = setting("none", "'stain': views as other laboratories would stain and scan", choices=AUGMENTS)
    slides: int = setting(
        0, "synthetic: slides a laboratory (default 3, the last for the test; whole slides 16)", low=0
    )
    side: int = setting(4096, "synthetic: pixels of a slide's side", low=1024)


def task(config: Config) -> Task:
    """Compute features of images at each hospital; only the trained part of the model is sent."""
    from mutirao.systems.images.bags import BagExtractor
    from mutirao.systems.images.client import Hospital, HospitalPopulation, pool_hospitals
    from mutirao.systems.images.heads import probabilities
    from mutirao.systems.images.models import TrainingPlan
    from mutirao.training.samples import agreed_classes

    check_backbone(config.body)
    check_validation_share(config, "validation", is_private(config))
    plan = TrainingPlan.of(config).prepared(config.stain, config.augment, config.head)
    # This loads the backbone. It comes before slides are generated, since the weights may be missing.
    trainer_options: dict[str, Any] = plan.agreed() | plan.training(config)
    extract: Extractor | BagExtractor = plan.extract
    if config.head in BAG_HEADS:
        extract = BagExtractor(plan.extract, config.tiles, config.seed)
    scale = scale_in(config)
    agreed = tuple(sorted(name.strip() for name in config.classes.split(",") if name.strip()))
    sources = find_sources(config, agreed)
    hospitals = HospitalPopulation(
        sources.hospitals,
        extract,
        config.validation,
        config.seed,
        config.samples,
        agreed,
        accepts_any_client=sources.is_one_site,
    )
    if config.only and config.only not in sources.hospitals:
        raise ConfigError(f"only: there is no hospital {config.only!r}; there are {', '.join(hospitals)}")
    classes = agreed or sources.classes
    abnormal = abnormal_classes(classes, config.normal)
    metrics: tuple[str, ...] = ()
    # With personal models or groups all evaluations are those of the hospitals.
    if not has_one_model(config):
        trainer_options["figures"] = evaluate_logits
        metrics = ("accuracy", "balanced_accuracy", "loss")
    elif config.judge_by == "vali":
        trainer_options["figures"] = partial(reported_metrics, classes, abnormal)
        metrics = REPORTED_METRICS
    has_test = sources.has_test and config.judge_by == "test"
    hospital = Hospital.of(config, lambda: plan.model(len(classes)), **trainer_options)
    test_inputs = cache(lambda: extract.inputs(sources.test()))
    predicted: dict[str, Any] = {}  # the probabilities of the last evaluation, for the files of the run

    def evaluate(arrays: Arrays) -> dict[str, float]:
        predicted["test"] = probabilities(hospital.fill(arrays), test_inputs())
        found = screening_metrics(predicted["test"], sources.test().labels, classes, abnormal)
        return found | {"global_loss": found["loss"], "global_acc": found["accuracy"]}

    def verdict(run: Run, path: Path) -> None:
        test = sources.test()
        about: dict[str, Any] = {}
        # Stored for screening: on tiles of another scale the model would be wrong without an error.
        if scale:
            about = {"tile": scale.size, "mpp": scale.mpp}
        unit = "slides" if config.head in BAG_HEADS else "pictures"
        draw = rng(config.seed, 0, "auc")
        write_verdict(path, predicted["test"], test.labels, test.slides, classes, abnormal, draw, unit, **about)

    def matrix(run: Run) -> Confusion:
        return Confusion.of(sources.test().labels, predicted["test"], classes)

    population: Mapping[str, Any] = hospitals
    if config.centralised:
        population = pool_hospitals(hospitals)
    elif config.only:
        population = replace(hospitals, images={config.only: sources.hospitals[config.only]})
    exhibits = Artifacts()
    if has_test:
        exhibits = Artifacts({"confusion.png": Picture("confusion", matrix)}, {"verdict.json": verdict})
    return Task(
        handler=hospital,
        population=population,
        initial=partial(hospital.initial, config.seed),
        evaluate=evaluate if has_test else None,
        judge="balanced_accuracy" if has_test or config.judge_by == "vali" else "distributed_accuracy",
        metrics=metrics,
        agreed=agreed_classes(classes),
        exhibits=exhibits,
        classes=len(classes),
    )


def flow(fleet: Fleet, config: Config, task: Task, run: Run) -> Iterator[Round]:
    """Run the rounds; after each one the hospitals evaluate the new model on their held-out samples."""
    from mutirao.systems.images.client import evaluate_at_hospitals

    private = is_private(config)
    for done in federate(fleet, config, task, run):
        if config.validation and not private and has_one_model(config):
            done.row.update(evaluate_at_hospitals(fleet, run, task.metrics, config.size_cap))
        for name, paper_name in PAPER_NAMES.items():
            if name in done.row:
                done.row[paper_name] = done.row.pop(name)
        yield done


def disclosure(config: Config, task: Task) -> Disclosure:
    """Hospitals evaluate each round's model on their held-out samples."""
    if config.validation and not is_private(config):
        return Disclosure(("evaluate",))
    return Disclosure()


SUPPORTED = frozenset({"privacy", "secure", "compress", "personal", "cluster"})
recipe = Recipe(Config, task, flow, heeds=SUPPORTED, asks=disclosure)
