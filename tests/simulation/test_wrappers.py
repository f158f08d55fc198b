"""No wrapper loses what the fleet inside can do, however they are stacked."""

from collections.abc import Callable, Mapping, MutableMapping
from itertools import permutations
from typing import Any

import numpy as np
import pytest

from mutirao.core.agreement import AgreementFleet
from mutirao.core.arrays import Arrays
from mutirao.core.exclusion import FleetWithout
from mutirao.core.fleet import Answers, Fleet, Reply, Request, Where, Wrapper
from mutirao.core.records import Round
from mutirao.core.roster import Roster
from mutirao.core.rounds import Run
from mutirao.robustness.attacks import Sybils
from mutirao.simulation.availability import Churn, always
from mutirao.simulation.clock import TimedFleet
from mutirao.simulation.devices import FedCSDevices
from mutirao.simulation.drift import DriftFleet, Swap
from mutirao.systems.recsys.item_privacy import SlicedFleet

HOOKS = [name for name in vars(Fleet) if not name.startswith("_")]
MODEL: Arrays = {"items": np.zeros((3, 2), np.float32)}


class Heard(Fleet):
    """The innermost fleet, which notes what arrives."""

    def __init__(self) -> None:
        self.heard: set[str] = set()

    def is_remote(self) -> bool:
        self.heard.add("is_remote")
        return False

    def clients(self) -> list[str]:
        self.heard.add("clients")
        return ["ana", "bia"]

    def ask(self, requests: Mapping[str, Request]) -> Answers:
        self.heard.add("ask")
        extras = {"items": np.array([0, 2])} if {r.do for r in requests.values()} == {"rows"} else {}
        return Answers({c: Reply({}, extras, n=1) for c in sorted(requests)}, {})

    def stagger(self, buffer: int, at_once: int) -> None:
        self.heard.add("stagger")

    def awaited(self) -> frozenset[str]:
        self.heard.add("awaited")
        return frozenset()

    def declare(self, roster: Roster) -> None:
        self.heard.add("declare")

    def record(self, done: Round) -> None:
        self.heard.add("record")

    def keys(self) -> dict[str, str]:
        self.heard.add("keys")
        return {"ana": "1", "bia": "2"}

    def snapshot(self) -> Arrays:
        self.heard.add("snapshot")
        return {"state": np.ones(1)}

    def restore(self, states: Arrays) -> None:
        self.heard.add("restore")

    def use_state_store(self, states: MutableMapping[str, Arrays]) -> None:
        self.heard.add("use_state_store")

    def trail(self, where: Where) -> None:
        self.heard.add("trail")

    def heads(self) -> dict[str, dict[str, Any]]:
        self.heard.add("heads")
        return {"ana": {"seq": 1}}

    def close(self) -> None:
        self.heard.add("close")


WRAPPERS: dict[str, Callable[[Fleet, Run], Fleet]] = {
    "churn": lambda fleet, run: Churn(fleet, always, run),
    "timed": lambda fleet, run: TimedFleet(fleet, FedCSDevices(), run, epochs=1),
    "without": lambda fleet, run: FleetWithout(fleet, {"zoe"}),
    "sliced": lambda fleet, run: SlicedFleet(fleet, "items"),
    "swarm": lambda fleet, run: Sybils(fleet, "ana", names=2),
    "agreement": lambda fleet, run: AgreementFleet(fleet, {"body": "b1"}, ask_clients=False),
    "dated": lambda fleet, run: DriftFleet(fleet, Swap(at=1), run),
    "wrapper": lambda fleet, run: Wrapper(fleet),
}


def test_a_wrapper_passes_on_all_a_fleet_may_do() -> None:
    assert set(HOOKS) == {n for n in vars(Wrapper) if not n.startswith("_")}
    known = {
        "clients",
        "ask",
        "declare",
        "record",
        "keys",
        "snapshot",
        "restore",
        "use_state_store",
        "trail",
        "heads",
        "close",
    }
    assert known | {"is_remote", "stagger", "awaited"} == set(HOOKS)


@pytest.mark.parametrize("names", [*((n,) for n in WRAPPERS), *permutations(WRAPPERS, 2)], ids="-".join)
def test_every_hook_arrives_through_every_pair_of_wrappers(names: tuple[str, ...]) -> None:
    run, inner = Run(MODEL), Heard()
    fleet: Fleet = inner
    for name in names:
        fleet = WRAPPERS[name](fleet, run)
    run.roster.meet(fleet.clients())
    fleet.declare(run.roster)
    assert fleet.awaited() == frozenset()
    answers = fleet.ask({"ana": Request("train", MODEL, {"seed": 0, "round": 1})})
    assert list(answers.replies) == ["ana"]
    row: dict[str, Any] = {}
    fleet.record(Round(row, []))
    assert not fleet.is_remote()
    assert ("sim_seconds" in row) == ("timed" in names)
    assert ("available" in row) == ("churn" in names)
    assert ("drifted" in row) == ("dated" in names)
    assert {c: k for c, k in fleet.keys().items() if "~" not in c} == {"ana": "1", "bia": "2"}
    assert fleet.snapshot().keys() == {"state"}
    fleet.restore({})
    fleet.use_state_store({})
    fleet.trail(dict)
    assert fleet.heads() == {"ana": {"seq": 1}}
    fleet.close()
    if "timed" in names or "sliced" in names:  # a clock sees to it by itself, and rows are not sent so
        inner.stagger(1, 1)
    else:
        fleet.stagger(1, 1)
    assert inner.heard == set(HOOKS)
