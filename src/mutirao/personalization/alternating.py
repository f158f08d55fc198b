"""Alternating training of personal and shared layers: FedRep keeps the personal ones, FedRecon reconstructs them."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np

from mutirao.core.arrays import Arrays
from mutirao.core.fleet import Reply, Request, Scalar, Site
from mutirao.errors import ConfigError
from mutirao.personalization import FedRecon, Settings
from mutirao.personalization.handler import KeptLayersTrainer, Work, only_failures, restricted_trainer, without_common
from mutirao.randomness import rng
from mutirao.training.measurements import PROBED
from mutirao.training.plain import Outcomes, PlainTrainer, Requests, Sites
from mutirao.training.samples import ClientData, Samples

ON_RECEIVED = PROBED | {"start_loss"}  # metrics of the model as it was received


@dataclass(frozen=True)
class AlternatingTrainer(KeptLayersTrainer):
    """FedRep: train the personal layers with the others frozen, then the others with the new personal layers."""

    backbone: PlainTrainer | None = None

    @classmethod
    def of(cls, trainer: PlainTrainer, kind: Settings) -> Self:
        """Wrap a trainer; personal and shared layers get a trainer each."""
        if trainer.keep_optimizer:
            raise ConfigError(
                f"personal={kind.name} trains in two phases, each with a fresh optimizer; leave keep_optimizer out"
            )
        made = super().of(trainer, kind)
        rest = [name for name in trainer.state_names.shared if name not in made.names]
        return replace(made, backbone=restricted_trainer(trainer, trainer, rest))

    def train(self, work: Work, requests: Requests, sites: Sites) -> Outcomes:
        """Train both phases; metrics are those of the second, except for metrics of the received model."""
        # Collins et al.: first the personal layers with the shared ones frozen at w, then the shared ones with the new
        # personal layers. Metrics of the received model are measured in the first phase, before anything has moved.
        over = {c: self.with_own_layers(r, sites[c]) for c, r in requests.items()}
        first = {
            c: replace(r, config=select_extras(without_common(r.config), r.config, ON_RECEIVED), extras={})
            for c, r in over.items()
        }
        one, two = self.phases(requests, sites)
        heads = work(self.fitter, first, one)
        own_layers = {c: self.own_layers(r.arrays) for c, r in heads.items() if isinstance(r, Reply)}
        then = {
            c: replace(
                r,
                arrays={**over[c].arrays, **own_layers[c]},
                config=select_extras(r.config, r.config, ON_RECEIVED, instead=True),
            )
            for c, r in requests.items()
            if c in own_layers
        }
        out = only_failures(heads)
        for c, reply in work(self.backbone, then, {c: two[c] for c in then}).items():
            if isinstance(reply, Reply):
                head = heads[c]
                if isinstance(head, Reply):
                    received = {k: v for k, v in head.metrics.items() if k in ON_RECEIVED}
                    reply = replace(reply, metrics=reply.metrics | received)
                out[c] = self.finish_reply(reply, own_layers[c], sites[c])
            else:
                out[c] = reply
        return out

    def phases(self, requests: Requests, sites: Sites) -> tuple[Sites, Sites]:
        """The sites of the first phase, which leaves no state, and those of the second."""
        return {c: Site(c, sites[c].data) for c in requests}, sites


@dataclass(frozen=True)
class ReconstructingTrainer(AlternatingTrainer):
    """FedRecon: the personal layers are fitted to a part of the data, the support, the others to the rest.

    Nothing is kept: a client that needs its own layers fits them again from their initial values. For an evaluation it
    fits them to all its data.
    """

    def phases(self, requests: Requests, sites: Sites) -> tuple[Sites, Sites]:
        """The sites with their support only, and with their query only."""
        kind = self.kind
        one = dict[str, Site]()
        two = dict[str, Site]()
        share = kind.support if isinstance(kind, FedRecon) else 1.0
        for c, request in requests.items():
            site = sites[c]
            support, query = split_support(site.data, share, request, c)
            one[c] = Site(c, support)
            two[c] = Site(c, query, site.state)
        return one, two

    def own_model(self, request: Request, site: Site) -> Arrays | None:
        """None: nothing is kept."""
        return None

    def finish_reply(self, reply: Reply, arrays: Arrays, site: Site) -> Reply:
        """The reply without the personal layers, which are discarded."""
        return replace(reply, arrays=self.shared(reply.arrays))

    def answer_as_received(self, work: Work, requests: Requests, sites: Sites) -> Outcomes:
        """Replies for the client's own model, fitted for this request."""
        models, failed = self.fit(work, requests, sites)
        return failed | work(self.trainer, {c: replace(requests[c], arrays=a) for c, a in models.items()}, sites)


def split_support(data: Any, share: float, request: Request, client: str) -> tuple[Any, Any]:
    """A client's support and query, sampled for the round; both are all data for a share of 1 or one sample."""
    samples = Samples.of(data)
    count = len(samples)
    if share >= 1 or count < 2:
        return data, data
    seed = int(request.config["seed"])
    round = int(request.config["round"])
    order = rng(seed, round, "support", client).permutation(count)
    first = support_size(share, count)
    return with_rows(data, samples, np.sort(order[:first])), with_rows(data, samples, np.sort(order[first:]))


def support_size(share: float, count: int) -> int:
    """The number of support samples: the share, but at least one, leaving one for the query."""
    return min(max(1, round(share * count)), count - 1)


def with_rows(data: Any, samples: Samples, rows: Any) -> Any:
    """The client's data with only these samples to train on."""
    some = samples.rows(rows)
    if isinstance(data, ClientData):
        return replace(data, train=some)
    return some


def select_extras(
    config: Mapping[str, Scalar], said: Mapping[str, Scalar], names: Collection[str], instead: bool = False
) -> dict[str, Scalar]:
    """A configuration that requests those extras of `said` that are in `names`, or with `instead` all others."""
    wanted = [name for name in str(said.get("extras", "")).split(",") if name and (name.strip() in names) != instead]
    selected = {k: v for k, v in config.items() if k != "extras"}
    if wanted:
        selected["extras"] = ",".join(wanted)
    return selected
