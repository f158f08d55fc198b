"""Groups for any task: clients are grouped by a warm-up, and each group has a model of its own.

A task with groups has a handler that also sends signatures (`mutirao.clustering.signature_handler`) and the flow of
`mutirao.experiments.group_flow`. Clients evaluate their group's model on their own test data, with the task's metrics.
Where they have none, or may not report metrics, the task's own evaluation is applied to each group's model, and groups
are weighted by their number of clients.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, cast

import numpy as np
import numpy.typing as npt

from mutirao.clustering.base import Grouper, as_grouper
from mutirao.clustering.group_hyperparameters import as_table
from mutirao.clustering.group_state import Grouping
from mutirao.clustering.group_tables import FILES, plane_of, scan_of, summarise_groups, write_evidence
from mutirao.clustering.signature_handler import FIT, WARM, SignatureHandler
from mutirao.config import Part, build, complete_part
from mutirao.core.arrays import part_of
from mutirao.core.parts import AnyHandler, as_handler
from mutirao.core.rounds import Run
from mutirao.errors import ConfigError
from mutirao.experiments.artifacts import Picture
from mutirao.experiments.disclosure import Disclosure
from mutirao.experiments.group_evaluation import directions_of, stored_comparison
from mutirao.experiments.personal_models import client_metric_names, without_common_model
from mutirao.privacy import build_privacy

T = TypeVar("T")  # a Task; its module imports this one
Predictions = Callable[[Run, Any], Mapping[str, npt.NDArray[np.float64]]]
# Settings that have no meaning without groups.
OF_GROUPS = ("signature", "warm_epochs", "regroup", "references", "per_group")


def has_groups(config: Any) -> bool:
    """Whether a configuration has groups."""
    return bool(config.cluster.name != "none")


def has_one_model(config: Any) -> bool:
    """Whether there is a single model: neither personal models nor groups."""
    return bool(config.personal.name == "none" and not has_groups(config))


def check_groups(config: Any) -> None:
    """Refuse wrong combinations with groups, and settings of groups without groups, before any data are read."""
    if not has_groups(config):
        fields = type(config).__dataclass_fields__
        if fields["cluster"].default.name != "none":
            raise ConfigError("cluster=none is not possible in this recipe; use cluster=one for a single group")
        for name in OF_GROUPS:
            default = fields[name].default
            allowed = [default]
            # A configuration that was resolved has the part's own defaults filled in.
            if isinstance(default, Part):
                allowed.append(complete_part(name, default))
            if getattr(config, name) not in allowed:
                raise ConfigError(f"{name} only applies when clients are clustered; set cluster=auto or remove it")
        return
    if config.centralised:
        raise ConfigError("centralised: groups have no pooled reference; cluster=one trains a single model")
    if config.secure.name != "none" and config.regroup:
        raise ConfigError(f"secure={config.secure.name}: regroup would request signatures repeatedly; use regroup=0")
    if config.personal.settings.get("new"):
        raise ConfigError("personal.new: with groups, new clients are admitted to a group; use 0")
    check_grouper(config)
    check_privacy(config)


def grouper_of(config: Any) -> Grouper:
    """The configured grouper."""
    return as_grouper(build("cluster", config.cluster))


def signature_of(config: Any) -> Any:
    """The signature that clients send of their warm-up: the grouper's, or else the configured one."""
    return grouper_of(config).signature or build("signature", config.signature)


def check_grouper(config: Any) -> None:
    """Refuse a grouper that needs more of single clients than signatures where privacy covers nothing else."""
    grouper = grouper_of(config)
    name = config.cluster.name
    signatures_only = grouper.uses_warm_up and not (grouper.needs_updates or grouper.requests or grouper.signature)
    for key in ("privacy", "secure"):
        if not signatures_only and getattr(config, key).name != "none":
            raise ConfigError(f"cluster={name}: only the signature of a warm-up is covered; use auto, or {key}=none")
    if config.regroup and (grouper.moves_clients or not grouper.uses_warm_up):
        raise ConfigError(f"cluster={name}: it cannot form groups anew by signatures; use regroup=0")


def check_privacy(config: Any) -> None:
    """Refuse privacy for models alone: the signatures of the warm-up need noise as well."""
    if config.privacy.name == "none":
        return
    signature = signature_of(config)
    privacy = build_privacy(config)
    if config.privacy.settings.get("epsilon"):
        raise ConfigError(
            "privacy.epsilon: the noise depends on the size of groups, which is not known beforehand; "
            "set privacy.noise and privacy.budget"
        )
    if signature.repeatable and not privacy.repeatable:
        raise ConfigError(
            "signature.repeatable: the privacy account requires noise that cannot be reproduced; use false"
        )
    if not signature.epsilon:
        raise ConfigError(
            f"privacy={config.privacy.name}: signatures of the warm-up have no noise; set signature.epsilon"
        )


def add_signatures(config: Any, own: AnyHandler, plain: AnyHandler) -> AnyHandler:
    """The handler `own` of a task with groups, which also sends signatures; `plain` is it without privacy."""
    capabilities = as_handler(plain).capabilities
    if not has_groups(config) or "signature" in capabilities.extras:
        return own
    supported = {name for name in ("lr", "epochs") if name in capabilities.config}
    default = type(config).__dataclass_fields__["warm_epochs"].default
    if "epochs" not in supported and config.warm_epochs != default:
        raise ConfigError("warm_epochs: the warm-up of this task is one round of training; remove the setting")
    values = {"lr": config.lr, "epochs": config.warm_epochs}
    warm_up_config = {name: values[name] for name in sorted(supported)}
    signature = signature_of(config)
    privacy = build_privacy(config)
    return SignatureHandler(own, plain, signature, warm_up_config, privacy)


def evaluated_by_clients(config: Any, task: Any) -> bool:
    """Whether clients evaluate their group's model on test data of their own."""
    from mutirao.training.samples import can_evaluate  # late: it brings torch

    has = "evaluate" in task.capabilities.requests
    has = has or can_evaluate(task.population, surely=not getattr(config, "sites", False))
    # With any other privacy only noised updates may leave a client, and metrics are not among them.
    return bool(has and config.privacy.name in ("none", "central"))


def has_references(config: Any) -> bool:
    """Whether groups are compared with references at the end, for which clients must be free to report metrics."""
    free = config.privacy.name == "none" and config.secure.name == "none"
    return bool(config.references and free and config.personal.name == "none")


def reference_rounds(config: Any) -> int:
    """The number of rounds of the FedAvg model that groups are compared with."""
    return int(config.rounds if config.references < 0 else config.references)


def references_in(run: Run) -> dict[str, Any]:
    """The entry of summary.json on references, if there are any."""
    comparison = stored_comparison(run)
    if comparison:
        return {"references": comparison}
    return {}


def make_grouped(given: T, config: Any) -> T:
    """The task with groups, if they are configured: how models are evaluated, and which artifacts a run has."""
    task = cast("Any", given)
    if not has_groups(config) or "signature" in task.capabilities.extras:
        return given
    by_clients = evaluated_by_clients(config, task)
    if by_clients:
        judge, metrics = client_metric_names(task, task.handler, summed=config.secure.name != "none")
        task = replace(task, evaluate=None, judge=judge, metrics=metrics)
    elif task.evaluate is None and config.privacy.name in ("none", "central"):
        raise ConfigError("cluster: neither clients nor the server have test data to evaluate the models of groups")
    check = task.check or as_handler(task.handler).check
    first = task.initial
    metric = task.judge
    higher_is_better = task.higher_is_better
    files: dict[str, Callable[[Run, Path], None]] = {**FILES, "groups.json": partial(write_evidence, metric=metric)}
    pictures = {"groups.png": Picture("groups", plane_of), "eps_scan.png": Picture("eps_scan", scan_of)}
    artifacts = without_common_model(task.exhibits)

    def findings(run: Run) -> dict[str, Any]:
        found = summarise_groups(run, metric=metric)
        found |= group_settings_in(run, config, higher_is_better) | references_in(run)
        if found:
            found["groups_judged_by"] = "clients" if by_clients else "server"
        if artifacts.findings is None:
            return found
        return {**artifacts.findings(run), **found}

    made: T = replace(
        task,
        exhibits=replace(
            artifacts,
            pictures={**artifacts.pictures, **pictures},
            files={**artifacts.files, **files},
            findings=findings,
            constant=artifacts.constant | {"groups", "rand"},
        ),
        directions={**directions_of(metric, higher_is_better), **task.directions},
        opinions=task.opinions or predictions_by(task),
        check=lambda arrays, population: check(first(), population),  # the models of groups are like the first
    )
    return made


def group_settings_in(run: Run, config: Any, higher_is_better: bool = True) -> dict[str, str]:
    """The hyperparameters of each group in the last round, in the form of `per_group=given`, if groups can differ."""
    tune = build("per_group", config.per_group)
    state = Grouping.from_memory(run.memory)
    if state is None or not tune.names:
        return {}
    rows = {g: tune.config_for(g, run.round, state.scores, higher_is_better) for g in state.groups.names}
    return {"per_group": as_table(rows)}


def predictions_by(task: Any) -> Predictions | None:
    """The class probabilities of each group's model, if the task's handler is a Trainer of a classifier."""
    from mutirao.experiments.group_client import outputs_of  # late: it brings torch
    from mutirao.training.measurements import CustomLoss
    from mutirao.training.trainer import Trainer

    trainer = task.handler
    if not task.classes or not isinstance(trainer, Trainer) or isinstance(trainer.loss, CustomLoss):
        return None

    def predict(run: Run, samples: Any) -> dict[str, npt.NDArray[np.float64]]:
        state = Grouping.from_memory(run.memory)
        out: dict[str, npt.NDArray[np.float64]] = {}
        if state is None:
            return out
        for group in state.groups.names:
            # Every group fills the same module, so its outputs are computed before the next one is filled in.
            model = trainer.fill(part_of(run.arrays, group)).eval()
            out[group] = outputs_of(model, samples)[0].double().softmax(1).numpy()
        return out

    return predict


def group_disclosure(config: Any, task: Any) -> Disclosure:
    """What groups add to the disclosure: signatures of the warm-up, and metrics of the group's model."""
    if not has_groups(config):
        return Disclosure()
    grouper = grouper_of(config)
    found = Disclosure(grouper.requests, extras=grouper.extras, metrics=grouper.metrics)
    if grouper.uses_warm_up:
        found |= Disclosure((WARM,), extras=("signature",))
    if evaluated_by_clients(config, task):
        found |= Disclosure(("evaluate",), metrics=(task.judge,))
        if has_references(config):
            found |= Disclosure((FIT,))
    return found
