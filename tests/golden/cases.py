"""The golden cases: small runs, as a user would type them, that together use every recipe and every kind of round."""

from dataclasses import dataclass, field
from typing import Any, Literal

Kind = Literal["run", "resumed", "study", "deployed"]


@dataclass(frozen=True)
class Case:
    """A recipe with settings; an option of the command, such as `--fleet`, may stand among them."""

    recipe: str = "quickstart"
    settings: dict[str, Any] = field(default_factory=dict)
    kind: Kind = "run"


SMALL = {"rounds": 2, "clients": 6, "per_round": 3, "epochs": 1}
ALL = {**SMALL, "per_round": 6}
DOZEN = {**SMALL, "clients": 12, "per_round": 12}
DEVICES = {"devices": "fedcs"}
AUTO = {"cluster": "auto", "warm_epochs": 2}
REPEATABLE = {"privacy": "central", "privacy.noise": 1.0, "privacy.repeatable": True}
SIGNATURES = {"signature.epsilon": 50, "signature.repeatable": True}


def quickstart(settings: dict[str, Any], **more: Any) -> Case:
    return Case("quickstart", {**settings, **more})


CASES = {
    # Every recipe.
    "quickstart": quickstart(SMALL),
    "cifar10": Case("cifar10", {**SMALL, "model": "small", "samples": 20}),
    "ranking": Case("ranking", {**SMALL, "queries": 60}),
    "online": Case("online", SMALL),
    "selection": Case("selection", SMALL),
    "groups": Case("groups", {**SMALL, "clients": 10, "per_round": 10, "warm_epochs": 2}),
    "recsys": Case("recsys", {"rounds": 2, "per_round": 10}),
    "tabular": Case("tabular", {**SMALL, "data": "TABLE", "target": "y", "client": "site"}),
    "images": Case("images", {**SMALL, "data": "PICTURES", "clients": 3, "per_round": 3, "side": 8}),
    "cytology": Case("cytology", {"rounds": 2, "data": "PICTURES", "clients": 3, "weights": "random", "views": 1}),
    # Every engine; `auto` is the default.
    "engine-plain": quickstart(SMALL, engine="plain"),
    "engine-fused": quickstart(SMALL, engine="fused"),
    "engine-stacked": quickstart(SMALL, engine="stacked"),
    "engine-threads": quickstart(SMALL, engine="threads"),
    "engine-processes": quickstart(SMALL, engine="processes"),
    "engine-convolution": Case("cifar10", {**SMALL, "model": "small", "samples": 20, "engine": "stacked"}),
    # Aggregation, with what clients keep for it.
    "scaffold": quickstart(SMALL, aggregate="scaffold"),
    "feddyn": quickstart(SMALL, aggregate="feddyn"),
    "fednova": quickstart(SMALL, aggregate="fednova"),
    "fedadam": quickstart(SMALL, aggregate="fedadam"),
    "fedrisk": quickstart(SMALL, aggregate="fedrisk"),
    "qfedavg": quickstart(SMALL, aggregate="qfedavg"),
    "krum": quickstart(ALL, aggregate="krum"),
    "fedbuff": quickstart(SMALL, **DEVICES, aggregate="fedbuff"),
    "fedasync": quickstart(SMALL, **DEVICES, aggregate="fedasync"),
    # Selection and filters.
    "aoiu": quickstart(SMALL, select="aoiu"),
    "oort": quickstart(SMALL, select="oort"),
    "screen": quickstart(ALL, screen="robust"),
    # One model for each group, or parts of a model for each client.
    "clustered": quickstart(ALL, **AUTO),
    "kmeans": quickstart(DOZEN, cluster="kmeans", **{"cluster.groups": 2}),
    "ifca": quickstart(DOZEN, cluster="ifca"),
    "personal-fedper": quickstart(SMALL, personal="fedper"),
    "personal-fedrep": quickstart(SMALL, personal="fedrep"),
    "personal-ditto": quickstart(SMALL, personal="ditto"),
    "personal-fedrecon": quickstart(SMALL, personal="fedrecon"),
    # Layers around a round, alone and two together.
    "drift": quickstart(SMALL, drift="swap", **{"drift.at": 2}),
    "topk": quickstart(SMALL, compress="topk"),
    "compress-devices": quickstart(SMALL, **DEVICES, compress="int8"),
    "secure": quickstart(ALL, secure="secagg+"),
    "secure-groups": quickstart(DOZEN, cluster="kmeans", secure="secagg+", **{"cluster.groups": 2}),
    "privacy": quickstart(ALL, **REPEATABLE),
    "privacy-groups": quickstart(DOZEN, **AUTO, **REPEATABLE, **SIGNATURES),
    # Other ways to make a run.
    "flower": quickstart(SMALL, clients=3, **{"--fleet": "flower"}),
    "resumed": Case("quickstart", {**SMALL, "aggregate": "scaffold"}, "resumed"),
    "study": Case("quickstart", {**SMALL, "samples": 20}, "study"),
    "deployed": Case("quickstart", {"hidden": 8, "samples": 20, "aggregate": "scaffold"}, "deployed"),
}
QUICK = ("quickstart", "scaffold", "topk", "fedbuff", "clustered", "personal-fedper", "ranking", "tabular")
