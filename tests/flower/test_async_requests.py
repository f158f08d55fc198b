"""Over Flower's messages no round waits for all: who is slow counts later, and what is false does no harm."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from flwr.app import Message

from loopgrid import NAMES, LoopGrid, connected, identity, softmax_task
from mutirao.aggregation.fedasync import FedAsync
from mutirao.aggregation.fedbuff import FedBuff
from mutirao.core.agreement import AgreementFleet
from mutirao.core.arrays import digest
from mutirao.core.fleet import Request
from mutirao.core.rounds import Patience, Run, train
from mutirao.deploy.flower import FlowerFleet, client_app
from mutirao.errors import ConfigError
from mutirao.flower.strategy import Strategy
from mutirao.selection import Uniform
from mutirao.simulation.asynchronous import AsynchronousFleet, RefillingSelector
from mutirao.simulation.clock import TimedFleet
from mutirao.simulation.devices import TiFLDevices
from mutirao.simulation.local_fleet import LocalFleet

__all__ = ["identity"]  # a fixture that holds for all tests here, too


class Holding(LoopGrid):
    """A grid that keeps back the answers of some nodes until they are let go."""

    held: dict[int, list[tuple[str, list[Message]]]]

    def hold(self, name: str) -> None:
        self.held = {**getattr(self, "held", {}), self.node_of(name): []}

    def deliver(self, message: Message, node: int) -> None:
        super().deliver(message, node)
        if node in getattr(self, "held", {}) and message.metadata.message_type != "query.name":
            message_id = message.metadata.message_id
            self.held[node].append((message_id, self.answers.pop(message_id)))

    def let_go(self, name: str) -> None:
        for message_id, answers in self.held.pop(self.node_of(name)):
            self.answers[message_id] = answers


def holding(*slow: str, timeout: float = 30.0) -> tuple[Holding, FlowerFleet]:
    grid = Holding(client_app(lambda _: softmax_task()))
    for name in NAMES:
        grid.join(name=name)
    for name in slow:
        grid.hold(name)
    fleet = FlowerFleet(grid, timeout=timeout, greet=2)
    assert fleet.clients() == NAMES
    return grid, fleet


def asked(*names: str, round: int = 1) -> dict[str, Request]:
    start = softmax_task().initial()
    return {name: Request("train", start, {"round": round}) for name in names}


def test_a_round_has_the_first_answers_and_a_slow_one_counts_in_a_later_round() -> None:
    grid, fleet = holding("bia", "eva")
    run = Run(softmax_task().initial(), seed=1)
    staggered = AsynchronousFleet(fleet, run, buffer=3, at_once=5, keeps=False)
    rounds = train(
        run,
        staggered,
        rounds=4,
        select=RefillingSelector(Uniform, staggered),
        aggregate=FedBuff(buffer=3),
        patience=Patience(min_replies=1, wait=2),
    )
    first, second = next(rounds), next(rounds)
    assert [r["client"] for r in first.clients] == [r["client"] for r in second.clients] == ["ana", "caio", "duda"]
    assert fleet.awaited() == {"bia", "eva"}
    assert not any(k.startswith(("staggered.", "flights.")) for k in run.memory)  # other parties are asked anew
    grid.let_go("bia")
    third = next(rounds)
    rows = {r["client"]: r for r in third.clients}
    assert (rows["bia"]["staleness"], rows["bia"]["replied"]) == (2.0, 1)
    assert rows["bia"]["weight"] == pytest.approx(1 / 3 / np.sqrt(3))
    grid.let_go("eva")
    rows |= {r["client"]: r for r in next(rounds).clients}
    assert sorted(rows) == NAMES  # four were there for a buffer of three: the fourth comes first in the next round
    assert rows["eva"]["staleness"] == 3.0


def test_a_late_answer_is_a_failure_once_and_does_no_harm_when_it_comes_after_all() -> None:
    grid, fleet = holding("bia", timeout=0.5)
    fleet.stagger(buffer=2, at_once=2)
    answers = fleet.ask(asked("ana", "bia"))
    assert list(answers.replies) == ["ana"]
    assert answers.failures["bia"].kind == "late"
    assert fleet.awaited() == frozenset()
    old = grid.held[grid.node_of("bia")][0][1]
    grid.let_go("bia")  # the old answer lies there, and nobody asks for it
    changed = {k: v + v.dtype.type(1) for k, v in softmax_task().initial().items()}
    again = fleet.ask({"bia": Request("train", changed, {"round": 2})})
    assert list(again.replies) == ["bia"]
    assert again.replies["bia"].arrays["steps"] == 2
    assert len(old) == 1


def replayed(message: Message, reply: Message) -> list[Message]:
    return [reply, reply]


def of_another(grid: LoopGrid) -> Callable[[Message, Message], list[Message]]:
    def meddle(message: Message, reply: Message) -> list[Message]:
        reply.metadata.__dict__["_src_node_id"] = grid.node_of("ana")
        return [reply]

    return meddle


@pytest.mark.parametrize(("kind", "meddle"), [("twice", lambda _: replayed), ("malformed", of_another)])
def test_an_answer_that_comes_twice_or_from_a_stranger_counts_for_nothing(kind: str, meddle: Any) -> None:
    grid, fleet = holding()
    grid.meddlers[grid.node_of("bia")] = meddle(grid)
    fleet.stagger(buffer=3, at_once=3)
    answers = fleet.ask(asked("ana", "bia", "caio", "duda"))  # whoever is lost makes room for the next
    assert list(answers.replies) == ["ana", "caio", "duda"]
    assert {c: f.kind for c, f in answers.failures.items()} == {"bia": kind}
    assert fleet.awaited() == frozenset()


def test_no_more_are_asked_at_once_and_nobody_twice() -> None:
    grid, fleet = holding(*NAMES)
    fleet.stagger(buffer=1, at_once=2)
    grid.let_go("caio")
    answers = fleet.ask(asked("bia", "caio", "duda", "eva"))
    assert list(answers.replies) == ["caio"]
    assert {n for n, kept in grid.held.items() if kept} == {grid.node_of("bia")}  # the next begins with the next round
    assert fleet.awaited() == {"bia", "duda", "eva"}
    grid.let_go("duda")
    assert list(fleet.ask(asked("bia")).replies) == ["duda"]
    assert len(grid.held[grid.node_of("bia")]) == 1
    grid.let_go("bia")
    assert list(fleet.ask({}).replies) == ["bia"]


def test_those_who_agree_are_heard_of_later_even_if_nobody_else_is_asked() -> None:
    grid, fleet = holding("bia")
    agreement = AgreementFleet(fleet, {}, ask_clients=False)
    agreement.stagger(buffer=1, at_once=2)
    assert list(agreement.ask(asked("ana", "bia")).replies) == ["ana"]
    assert agreement.awaited() == {"bia"}
    grid.let_go("bia")
    assert list(agreement.ask({}).replies) == ["bia"]


def test_who_leaves_while_it_is_at_work_is_no_trouble() -> None:
    grid, fleet = holding("bia", timeout=0.6)
    fleet.stagger(buffer=1, at_once=2)
    assert list(fleet.ask(asked("ana", "bia")).replies) == ["ana"]
    del grid.nodes[grid.node_of("bia")]
    assert "bia" not in fleet.clients()
    answers = fleet.ask(asked("bia"))  # it is awaited still, until its time is up
    assert answers.failures["bia"].kind == "late"
    assert fleet.ask(asked("bia")).failures["bia"].kind == "gone"


@pytest.mark.parametrize("part", [FedBuff(buffer=2), FedAsync()], ids=["fedbuff", "fedasync"])
def test_on_the_simulated_clock_the_wire_changes_no_bit(part: Any) -> None:
    task = softmax_task()
    made = []
    for fleet in (LocalFleet(task.handler, task.population), connected(task)[1]):
        run = Run(task.initial(), seed=3)
        timed = TimedFleet(fleet, TiFLDevices(), run, epochs=1)
        rebases = "models" not in part.needs.server
        staggered = AsynchronousFleet(timed, run, part.buffer_of(4), 4, rebases=rebases)
        select = RefillingSelector(Uniform, staggered)
        rounds = list(train(run, staggered, rounds=6, select=select, aggregate=part, patience=Patience(min_replies=1)))
        made.append(([r.clients for r in rounds], digest(run.arrays)))
    assert made[0] == made[1]
    assert any(row["staleness"] for rows in made[0][0] for row in rows)


def test_a_closed_fleet_waits_no_more() -> None:
    _, fleet = holding("bia")
    fleet.stagger(buffer=1, at_once=1)
    fleet.close()
    assert fleet.ask(asked("bia")).replies == {}


def test_flowers_own_strategies_wait_for_all() -> None:
    with pytest.raises(ConfigError, match=r"FedBuff.* does not wait for all, as Flower's strategies do"):
        Strategy("fedbuff")
