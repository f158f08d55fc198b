"""Cervical-cancer screening: hospitals keep their slides, and train the head of a pretrained network together."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from mutirao.config import OPTIMIZERS, Common, Part, setting
from mutirao.core.arrays import Arrays
from mutirao.core.fleet import Fleet
from mutirao.core.rounds import Round, Run
from mutirao.datasets.class_folders import ImageSet
from mutirao.datasets.labelled import JUDGES
from mutirao.errors import ConfigError
from mutirao.experiments.artifacts import Exhibits, Picture
from mutirao.experiments.disclosure import Disclosure, check_validation_share, is_private
from mutirao.experiments.grouping import has_one_model
from mutirao.experiments.task import Recipe, Task, federate
from mutirao.metrics import evaluate_logits
from mutirao.randomness import rng
from mutirao.systems.cytology.slides.slide_sources import find_sources, scale_in
from mutirao.systems.images.choices import (
    AUGMENTS,
    BACKBONE_CHOICES,
    BAG_HEADS,
    HEADS,
    STAINS,
    Trainable,
    check_backbone,
)
from mutirao.systems.images.image_sources import Sources
from mutirao.systems.images.metrics import (
    REPORTED_METRICS,
    Confusion,
    abnormal_classes,
    diagnose,
    diagnose_outputs,
    write_verdict,
)

# The names the paper gives to columns of the history.
PAPERS = {"train_accuracy": "train_acc", "train_val_loss": "val_loss", "train_val_acc": "val_acc"}


@dataclass(frozen=True, kw_only=True)
class Config(Common):
    """Settings of the cytology recipe; the defaults are the paper's, but for the number of rounds."""

    rounds: int = setting(30, "how many rounds", low=1)
    clients: int = setting(3, "how many hospitals", low=1)
    per_round: int | float = setting(1.0, "hospitals a round: a count, or a share", low=1e-9)
    batch_size: int = setting(16, "samples a step", low=1)
    lr: float = setting(1e-3, "learning rate of the hospitals", low=1e-12)
    optimizer: str = setting("adam", "optimiser of the hospitals", choices=OPTIMIZERS)
    keep_optimizer: bool = setting(False, "keep the optimiser's state (Adam's moments) where it is from round to round")
    data: str = setting(
        "synthetic", "'synthetic', a folder of classes, Training/ and Test/, client_*/; 'none': with the sites alone"
    )
    partition: Part = setting(
        Part("even", home="mutirao.systems.images.image_partitions"), "how pictures are dealt to hospitals"
    )
    body: str = setting("efficientnet_lite0", f"the pretrained network: {BACKBONE_CHOICES}")
    weights: str = setting("", "a file with its weights, or 'random' (default: those of an installed package)")
    trainable: Trainable = setting("head", "what is trained, and travels: head, last_block or all")
    views: int = setting(4, "views of each picture: as it is, then flipped and turned", low=1, high=64)
    slide: str = setting(r"^(\d+)-", "a picture's slide: a pattern with a (group), or a table file,slide,laboratory")
    test: float = setting(0.2, "share held out as the global test set, by slide", low=0.02, high=0.5)
    validation: float = setting(0.2, "share a hospital holds out for validation, by slide", low=0, high=0.5)
    judge_by: str = setting(
        "test", "which part judges: test, or vali, what hospitals keep back (to tune by)", choices=JUDGES
    )
    normal: str = setting("normal*", "classes that are not abnormal: patterns, separated by commas")
    classes: str = setting("", "the class list agreed on, separated by commas (default: the server's)")
    only: str = setting("", "train on this hospital alone, such as client_1: what it would reach by itself")
    cache: bool = setting(True, "keep features of the frozen backbone between runs")
    sites: bool = setting(False, "data is this party's own and is not divided; true at a site that names its own data")
    head: str = setting("linear", "what judges: 'linear' a picture; 'mean', 'max', 'abmil' a slide", choices=HEADS)
    tiles: int = setting(500, "whole slides: most tiles of a slide, drawn at random", low=1)
    stain: str = setting("none", "stain normalisation of each picture", choices=STAINS)
    augment: str = setting("none", "'stain': views as other laboratories would stain and scan", choices=AUGMENTS)
    slides: int = setting(
        0, "synthetic: slides a laboratory (default 3, the last for the test; whole slides 16)", low=0
    )
    side: int = setting(4096, "synthetic: pixels of a slide's side", low=1024)


def task(config: Config) -> Task:
    """Pictures turned into features where they are; only the trained part of the model is the federation's."""
    from mutirao.systems.images.bags import BagExtractor
    from mutirao.systems.images.client import Hospital, HospitalPopulation, pool_hospitals
    from mutirao.systems.images.heads import probabilities
    from mutirao.systems.images.models import Plan
    from mutirao.training.samples import agreed_classes

    check_backbone(config.body)
    check_validation_share(config, "validation", is_private(config))
    plan = Plan.of(config).prepared(config.stain, config.augment, config.head)
    told: dict[str, Any] = plan.agreed() | plan.training(config)  # before slides are made: weights may be missing
    look = BagExtractor(plan.extract, config.tiles, config.seed) if config.head in BAG_HEADS else plan.extract
    scale = scale_in(config)
    agreed = tuple(sorted(name.strip() for name in config.classes.split(",") if name.strip()))
    found: Sources = find_sources(config, agreed)
    hospitals = HospitalPopulation(
        *(found.hospitals, look, config.validation, config.seed, config.samples, agreed), anybody=found.own
    )
    if config.only and config.only not in found.hospitals:
        raise ConfigError(f"only: there is no hospital {config.only!r}; there are {', '.join(hospitals)}")
    classes = agreed or found.classes
    abnormal = abnormal_classes(classes, config.normal)
    metrics: tuple[str, ...] = ()
    if not has_one_model(config):  # then hospitals' own judgements are all there is
        told["figures"], metrics = evaluate_logits, ("accuracy", "balanced_accuracy", "loss")
    elif config.judge_by == "vali":
        told["figures"], metrics = partial(diagnose_outputs, classes, abnormal), REPORTED_METRICS
    has_test = found.has_test and config.judge_by == "test"
    hospital = Hospital.of(config, lambda: plan.model(len(classes)), **told)
    seen: dict[str, Any] = {}

    def evaluate(arrays: Arrays) -> dict[str, float]:
        if "x" not in seen:
            seen["x"] = look.inputs(found.test())
        seen["p"] = probabilities(hospital.fill(arrays), seen["x"])
        figures = diagnose(seen["p"], found.test().labels, classes, abnormal)
        return figures | {"global_loss": figures["loss"], "global_acc": figures["accuracy"]}

    def verdict(run: Run, path: Path) -> None:
        pictures: ImageSet = found.test()
        about = {"tile": scale.size, "mpp": scale.mpp} if scale else {}
        draw, judged = rng(config.seed, 0, "auc"), "slides" if config.head in BAG_HEADS else "pictures"
        write_verdict(path, seen["p"], pictures.labels, pictures.slides, classes, abnormal, draw, judged, **about)

    def matrix(run: Run) -> Confusion:
        return Confusion.of(found.test().labels, seen["p"], classes)

    population: Mapping[str, Any] = hospitals
    if config.centralised:
        population = pool_hospitals(hospitals)
    elif config.only:
        population = replace(hospitals, pictures={config.only: found.hospitals[config.only]})
    return Task(
        handler=hospital,
        population=population,
        initial=partial(hospital.initial, config.seed),
        evaluate=evaluate if has_test else None,
        judge="balanced_accuracy" if has_test or config.judge_by == "vali" else "distributed_accuracy",
        metrics=metrics,
        agreed=agreed_classes(classes),
        exhibits=Exhibits({"confusion.png": Picture("confusion", matrix)}, {"verdict.json": verdict})
        if has_test
        else Exhibits(),
        classes=len(classes),
    )


def flow(fleet: Fleet, config: Config, task: Task, run: Run) -> Iterator[Round]:
    """Rounds; after each one the hospitals judge the new model on what they kept back."""
    from mutirao.systems.images.client import evaluate_at_hospitals

    private = is_private(config)
    for done in federate(fleet, config, task, run):
        if config.validation and not private and has_one_model(config):
            done.row.update(evaluate_at_hospitals(fleet, run, task.metrics, config.size_cap))
        for ours, papers in PAPERS.items():
            if ours in done.row:
                done.row[papers] = done.row.pop(ours)
        yield done


def asks(config: Config, task: Task) -> Disclosure:
    """Hospitals judge each round's model on what they kept back."""
    return Disclosure(("evaluate",)) if config.validation and not is_private(config) else Disclosure()


HEEDS = frozenset({"privacy", "secure", "compress", "personal", "cluster"})
recipe = Recipe(Config, task, flow, heeds=HEEDS, asks=asks)
