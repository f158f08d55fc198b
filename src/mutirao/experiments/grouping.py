"""Groups for any task: whoever trains together is found by a warm-up, and each group has a model of its own.

A task with groups is the task with a handler that signs (`mutirao.clustering.signature_handler`), and its flow is that
of groups (`mutirao.experiments.group_flow`). A group's model is judged by its clients on test data of their own, by the
task's metrics; where they have none, or may not tell, the task's own evaluation judges the model of each group, and a
group counts for as much as it has clients.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar, cast

import numpy as np
import numpy.typing as npt

from mutirao.clustering.base import Grouper, as_grouper
from mutirao.clustering.group_hyperparameters import as_table
from mutirao.clustering.group_state import Grouping
from mutirao.clustering.group_tables import FILES, plane_of, scan_of, summarise_groups, write_evidence
from mutirao.clustering.signature_handler import FIT, SIGNS, WARM, SignatureHandler
from mutirao.config import Part, build, complete_part
from mutirao.core.arrays import part_of
from mutirao.core.parts import AnyHandler, as_handler
from mutirao.core.rounds import Run
from mutirao.errors import ConfigError
from mutirao.experiments.artifacts import Picture
from mutirao.experiments.disclosure import Disclosure
from mutirao.experiments.group_references import directions_of, stored_comparison
from mutirao.experiments.personal_models import COMMON_MODEL_ARTIFACTS, client_metric_names
from mutirao.privacy import build_privacy

T = TypeVar("T")  # a Task, which is made of this
Predictions = Callable[[Run, Any], Mapping[str, npt.NDArray[np.float64]]]
# Settings that say nothing where there are no groups.
OF_GROUPS = ("signature", "warm_epochs", "regroup", "references", "per_group")


def has_groups(config: Any) -> bool:
    """Whether a configuration asks for groups."""
    return bool(config.cluster.name != "none")


def has_one_model(config: Any) -> bool:
    """Whether all clients have the run's one model: no personal ones, and no groups."""
    return bool(config.personal.name == "none" and not has_groups(config))


def check_groups(config: Any) -> None:
    """Refuse what cannot be right with groups, and settings of groups where there are none, before anything is read."""
    if not has_groups(config):
        fields = type(config).__dataclass_fields__
        if fields["cluster"].default.name != "none":
            raise ConfigError("cluster=none: this recipe is about groups; cluster=one has everybody in one")
        for name in OF_GROUPS:
            usual = fields[name].default
            if getattr(config, name) not in (usual, complete_part(name, usual) if isinstance(usual, Part) else usual):
                raise ConfigError(f"{name}: it is of groups, and there are none; set cluster=auto")
        return
    if config.centralised:
        raise ConfigError("centralised: groups have no pooled reference; cluster=one trains a single model")
    if config.secure.name != "none" and config.regroup:
        raise ConfigError(f"secure={config.secure.name}: regroup asks for signatures again and again; use 0")
    if config.personal.settings.get("new"):
        raise ConfigError("personal.new: in groups whoever is new is admitted to one; use 0")
    check_grouper(config)
    check_privacy(config)


def grouper_of(config: Any) -> Grouper:
    """How groups are found."""
    return as_grouper(build("cluster", config.cluster))


def signature_of(config: Any) -> Any:
    """What clients send of their warm-up: what the grouper says, or else the user."""
    return grouper_of(config).signature or build("signature", config.signature)


def check_grouper(config: Any) -> None:
    """Refuse a grouper that sees more of single clients than the signature of a warm-up where that is all it may."""
    grouper, name = grouper_of(config), config.cluster.name
    plain = grouper.uses_warm_up and not (grouper.needs_updates or grouper.requests or grouper.signature)
    for key in ("privacy", "secure"):
        if not plain and getattr(config, key).name != "none":
            raise ConfigError(f"cluster={name}: only the signature of a warm-up is covered; use auto, or {key}=none")
    if config.regroup and (grouper.moves_clients or not grouper.uses_warm_up):
        raise ConfigError(f"cluster={name}: there are no signatures to form groups anew by; use regroup=0")


def check_privacy(config: Any) -> None:
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


def add_signatures(config: Any, own: AnyHandler, plain: AnyHandler) -> AnyHandler:
    """The handler `own` of a task with groups, which signs; `plain` is the same without privacy."""
    provides = as_handler(plain).provides
    if not has_groups(config) or SIGNS in provides:
        return own
    can = {name for name in ("lr", "epochs") if f"config:{name}" in provides}
    usual = type(config).__dataclass_fields__["warm_epochs"].default
    if "epochs" not in can and config.warm_epochs != usual:
        raise ConfigError("warm_epochs: the clients of this task warm up as they train in a round; leave it out")
    told = {"lr": config.lr, "epochs": config.warm_epochs}
    signature, privacy = signature_of(config), build_privacy(config)
    return SignatureHandler(own, plain, signature, {name: told[name] for name in sorted(can)}, privacy)


def evaluated_by_clients(config: Any, task: Any) -> bool:
    """Whether clients judge the model of their group on test data of their own."""
    from mutirao.training.samples import can_evaluate  # late: it brings torch

    has = "evaluate" in task.provides or can_evaluate(task.population, surely=not getattr(config, "sites", False))
    return bool(has and config.privacy.name in ("none", "central"))  # else nothing but noised updates leaves a client


def has_references(config: Any) -> bool:
    """Whether groups are compared with references at the end: clients must be free to say how single models do."""
    free = config.privacy.name == "none" and config.secure.name == "none"
    return bool(config.references and free and config.personal.name == "none")


def reference_rounds(config: Any) -> int:
    """How long the model is trained that groups are compared with."""
    return int(config.rounds if config.references < 0 else config.references)


def references_in(run: Run) -> dict[str, Any]:
    """The entry of summary.json on references, if there are any."""
    return {"references": told} if (told := stored_comparison(run)) else {}


def make_grouped(given: T, config: Any) -> T:
    """The task with groups, if the configuration asks for any: how its models are judged, and what a run leaves."""
    task = cast("Any", given)
    if not has_groups(config) or SIGNS in task.provides:
        return given
    if by_clients := evaluated_by_clients(config, task):
        judge, metrics = client_metric_names(task, task.handler, summed=config.secure.name != "none")
        task = replace(task, evaluate=None, judge=judge, metrics=metrics)
    elif task.evaluate is None and config.privacy.name in ("none", "central"):
        raise ConfigError("cluster: nobody could judge the models of groups: neither clients nor server have test data")
    check, first, judge = task.check or as_handler(task.handler).check, task.initial, task.judge
    files = {**FILES, "groups.json": partial(write_evidence, judge=judge)}
    pictures = {"groups.png": Picture("groups", plane_of), "eps_scan.png": Picture("eps_scan", scan_of)}
    show, before, higher = task.exhibits, task.exhibits.findings, task.higher_is_better

    def find(run: Run) -> dict[str, Any]:
        who = {"groups_judged_by": "clients" if by_clients else "server"}
        told = {**summarise_groups(run, judge=judge), **group_settings_in(run, config, higher), **references_in(run)}
        return {**(before(run) if before else {}), **told, **(who if told else {})}

    made: T = replace(
        task,
        exhibits=replace(
            show,
            pictures={k: v for k, v in show.pictures.items() if k not in COMMON_MODEL_ARTIFACTS} | pictures,
            files={k: v for k, v in show.files.items() if k not in COMMON_MODEL_ARTIFACTS} | files,
            findings=find,
            constant=show.constant | {"groups", "rand"},
        ),
        directions={**directions_of(judge, higher), **task.directions},
        opinions=task.opinions or predictions_by(task),
        check=lambda arrays, population: check(first(), population),  # the models of groups are like the first
    )
    return made


def group_settings_in(run: Run, config: Any, higher: bool = True) -> dict[str, str]:
    """What each group trained by in the last round, as `per_group=given` takes it, if they differ."""
    tune, state = build("per_group", config.per_group), Grouping.from_memory(run.memory)
    if state is None or not tune.names:
        return {}
    return {"per_group": as_table({g: tune.told(g, run.round, state.scores, higher) for g in state.groups.names})}


def predictions_by(task: Any) -> Predictions | None:
    """What the models of groups say of samples, if the task's clients are a Trainer of classes."""
    from mutirao.experiments.group_client import outputs_of  # late: it brings torch
    from mutirao.training.measurements import CustomLoss
    from mutirao.training.trainer import Trainer

    trainer = task.handler
    if not task.classes or not isinstance(trainer, Trainer) or isinstance(trainer.loss, CustomLoss):
        return None

    def say(run: Run, samples: Any) -> dict[str, npt.NDArray[np.float64]]:
        state, out = Grouping.from_memory(run.memory), {}
        for group in state.groups.names if state else ():
            model = trainer.fill(part_of(run.arrays, group)).eval()  # the next fills the same module
            out[group] = outputs_of(model, samples)[0].double().softmax(1).numpy()
        return out

    return say


def group_disclosure(config: Any, task: Any) -> Disclosure:
    """What leaves clients for the sake of groups: the signature of a warm-up, and how their model does."""
    if not has_groups(config):
        return Disclosure()
    grouper = grouper_of(config)
    sent = Disclosure((WARM,), extras=("signature",)) if grouper.uses_warm_up else Disclosure()
    warm = sent | Disclosure(grouper.requests, extras=grouper.extras, metrics=grouper.metrics)
    if not evaluated_by_clients(config, task):
        return warm
    return warm | Disclosure(("evaluate", *([FIT] if has_references(config) else [])), metrics=(task.judge,))
