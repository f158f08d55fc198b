"""Parts say once what they need; plain functions are parts, too."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import pytest

from mutirao.aggregation import FedAvg, FedProx, Krum
from mutirao.aggregation.fedrisk import FedRisk
from mutirao.core.arrays import Arrays
from mutirao.core.fleet import Reply, Request, Site
from mutirao.core.needs import Capabilities, Needs
from mutirao.core.parts import (
    Merged,
    as_aggregator,
    as_filter,
    as_handler,
    as_selector,
    check_needs,
)
from mutirao.core.roster import Roster
from mutirao.errors import ConfigError
from mutirao.robustness.filters import keep_all
from mutirao.selection import AoIU, PowerOfChoice, everyone


def test_plain_functions_get_every_default() -> None:
    select, screen = as_selector(everyone), as_filter(keep_all)
    assert (select.needs, select.may_be_empty, screen.needs) == (Needs(), False, Needs())
    assert select.probes(Roster(), 1, np.random.default_rng(0)) == []
    assert repr(select) == repr(everyone)

    def handler(request: Request, site: Site) -> Reply:
        return Reply({}, n=1)

    def aggregate(current: Arrays, replies: Mapping[str, Reply], memory: Arrays) -> Merged:
        return Merged(current, {})

    plain = as_handler(handler)
    assert (plain.capabilities, plain.many) == (Capabilities(), None)
    assert plain(Request("train", {}), Site("ana")).n == 1
    with pytest.raises(ConfigError, match="privacy=dpsgd is for tasks whose clients are a Trainer"):
        plain.private_training(None)
    assert (as_aggregator(aggregate).needs, as_aggregator(aggregate).mean_only) == (Needs(), False)


def test_what_a_part_says_of_itself_is_kept_and_completing_twice_changes_nothing() -> None:
    prox = as_aggregator(FedProx(mu=0.25))
    assert (prox.needs, prox.mean_only, as_aggregator(Krum()).mean_only) == (Needs(config={"mu": 0.25}), True, False)
    assert as_aggregator(prox) is prox
    assert repr(prox) == "FedProx(mu=0.25)"
    roster = Roster()
    roster.meet(["ana", "bia"])
    assert as_selector(PowerOfChoice(1)).probes(roster, 1, np.random.default_rng(0)) == ["ana", "bia"]


def test_what_clients_are_sent_follows_from_the_needs() -> None:
    needs = FedProx(mu=0.1).needs | FedRisk().needs | AoIU(2, refresh="share").needs
    assert needs.request_config({*needs.metrics, *needs.extras}) == {
        "mu": 0.1,
        "probe_samples": 100,
        "extras": "entropy,squared_errors",
    }
    assert needs.request_config(needs.probes) == {"mu": 0.1, "probe_samples": 100, "extras": "entropy"}


def test_a_part_that_the_clients_cannot_serve_is_refused_with_the_need_and_the_remedy() -> None:
    wanted = (
        r"FedProx\(mu=0.1\) needs the hyperparameter 'mu', which .* \(they support nothing\); choose another method"
    )
    with pytest.raises(ConfigError, match=wanted):
        check_needs(Capabilities(), as_aggregator(FedAvg()), as_aggregator(FedProx()))


def test_a_part_of_ones_own_needs_no_base_class() -> None:
    @dataclass(frozen=True)
    class Mine:
        needs = Needs(metrics={"pain"})

        def __call__(self, roster: Roster, round: int, rng: np.random.Generator) -> list[str]:
            return roster.ids

    assert as_selector(Mine()).needs == Needs(metrics={"pain"})
    assert not as_selector(Mine()).may_be_empty
