"""The fleet of Flower's nodes: their names, their answers in time or late, and the server app over them."""

import json
import logging
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from iris import iris
from loopgrid import NAMES, LoopGrid, Meddle, connected, honest, identity, softmax_task
from mutirao.config import resolve
from mutirao.core.fleet import Answers, Request
from mutirao.core.validation import fault, sift
from mutirao.deploy.flower import FlowerFleet, client_app, server_app
from mutirao.deploy.flower.server_app import keepers_here
from mutirao.errors import ConfigError, TooFewClients
from mutirao.flower import flower_fleet as server
from mutirao.flower.messages import clean_line, node_tag, pack
from mutirao.report import execute
from mutirao.runs.audit_trail import Audit

__all__ = ["identity"]  # a fixture that holds for all tests here, too


def test_the_model_of_a_round_is_packed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    task = softmax_task()
    _, fleet = connected(task)
    fleet.clients()
    start, packed = task.initial(), []
    monkeypatch.setattr(server, "pack_together", lambda arrays: packed.append(arrays is start) or pack(arrays))
    fleet.ask({name: Request("train", start) for name in NAMES})
    assert sum(packed) == 1


def test_a_reply_of_an_earlier_round_counts_for_nothing_when_it_comes_again() -> None:
    def rounds(meddle: Meddle) -> list[Any]:
        task = softmax_task()
        grid, fleet = connected(task)
        grid.meddlers[grid.node_of("bia")] = meddle
        fleet.timeout = 0.3
        assert fleet.clients() == NAMES
        made = []
        for round in (1, 2):
            start = {name: array + array.dtype.type(round) for name, array in task.initial().items()}
            asked = {name: Request("train", start, {"round": round}) for name in NAMES}
            made.append(sift(fleet.ask(asked), lambda reply: fault(task.initial(), reply)))
        return made

    kept: list[Message] = []

    def again(message: Message, reply: Message) -> list[Message]:
        kept.append(reply)
        return [kept[0], reply] if len(kept) > 1 else [reply]

    def instead(message: Message, reply: Message) -> list[Message]:
        kept.append(reply)
        return [kept[0]]

    plain, replayed = rounds(honest), rounds(again)
    assert not replayed[1].failures
    for name in NAMES:
        for key, array in plain[1].replies[name].arrays.items():
            np.testing.assert_array_equal(replayed[1].replies[name].arrays[key], array)
    kept.clear()
    alone = rounds(instead)[1]
    assert alone.failures["bia"].kind == "late"
    assert list(alone.replies) == [n for n in NAMES if n != "bia"]


def test_an_answer_of_an_earlier_round_is_not_taken_for_the_current_one() -> None:
    task = softmax_task()
    grid, fleet = connected(task, ["ana", "bia"])
    held: list[Message] = []
    fleet.timeout = 0.2
    fleet.clients()
    grid.meddlers[grid.node_of("bia")] = lambda message, reply: held.append(reply) or []
    first = fleet.ask({n: Request("train", task.initial(), {"round": 1}) for n in ("ana", "bia")})
    assert first.failures["bia"].kind == "late"
    grid.meddlers[grid.node_of("bia")] = lambda message, reply: [held[0]]  # a SuperLink that mixes up answers
    second = fleet.ask({n: Request("train", task.initial(), {"round": 2}) for n in ("ana", "bia")})
    assert list(second.replies) == ["ana"]
    assert second.failures["bia"].kind == "late"


def test_a_slow_upload_does_not_hold_up_the_others() -> None:
    task = softmax_task()
    grid, fleet = connected(task)
    stuck = grid.node_of("bia")
    pull, arrived, ended = grid.pull_messages, threading.Event(), threading.Event()

    def slow(message_ids: Iterable[str]) -> Iterable[Message]:
        found = list(pull(message_ids))
        if any(m.metadata.src_node_id == stuck and m.metadata.message_type == "train" for m in found):
            arrived.wait(60)
            ended.set()
        return found

    grid.pull_messages = slow  # type: ignore[method-assign]
    fleet.clients()
    fleet.timeout = 0.5
    answers = fleet.ask({n: Request("train", task.initial()) for n in NAMES})
    assert not ended.is_set()  # nobody waited for the upload
    arrived.set()
    assert {c: f.kind for c, f in answers.failures.items()} == {"bia": "late"}


def test_a_client_that_left_is_gone() -> None:
    task = softmax_task()
    grid, fleet = connected(task, ["ana", "bia"])
    assert fleet.clients() == ["ana", "bia"]
    del grid.nodes[grid.node_of("bia")]
    answers = fleet.ask({n: Request("train", task.initial()) for n in ("ana", "bia", "zoe")})
    assert list(answers.replies) == ["ana"]
    assert {c: f.kind for c, f in answers.failures.items()} == {"bia": "gone", "zoe": "gone"}
    assert fleet.clients() == ["ana"]


def test_the_list_of_clients_changes_only_when_the_clients_do() -> None:
    grid, fleet = connected(softmax_task(), ["bia", "ana"])
    first = fleet.clients()
    assert first == ["ana", "bia"]
    assert fleet.clients() is first
    grid.join(name="caio")
    second = fleet.clients()
    assert (first, second) == (["ana", "bia"], ["ana", "bia", "caio"])
    assert fleet.clients() is second
    assert grid.greetings == 3


def test_a_name_that_is_taken_is_refused_until_its_node_is_gone(caplog: pytest.LogCaptureFixture) -> None:
    grid, fleet = connected(softmax_task(), ["ana", "bia"])
    fleet.clients()
    old = grid.node_of("ana")
    new = grid.join(name="ana")  # a SuperNode restarted; the SuperLink has not yet noticed that the old one is dead
    for _ in range(3):
        assert fleet.clients() == ["ana", "bia"]
    assert [r.getMessage() for r in caplog.records if "'ana'" in r.getMessage()] == [
        "'ana' is connected already: another node of that name is refused for now"
    ]
    assert fleet._nodes["ana"] == old
    del grid.nodes[old]
    assert fleet.clients() == ["ana", "bia"]
    assert fleet._nodes["ana"] == new
    assert grid.greetings == 3


def test_a_node_may_not_take_the_name_of_an_absent_one(caplog: pytest.LogCaptureFixture) -> None:
    grid, fleet = connected(softmax_task(), ["ana", "bia"])
    thief = grid.node_of("bia")
    fleet.is_entitled = lambda name, node: name != "bia" or node != thief
    for _ in range(3):
        assert fleet.clients() == ["ana"]
    assert [r.getMessage() for r in caplog.records] == [
        f"node {node_tag(thief)} calls itself 'bia', and its key is another's: refused"
    ]
    assert str(thief) not in caplog.text
    own = grid.join(name="bia")
    assert fleet.clients() == ["ana", "bia"]
    assert fleet._nodes["bia"] == own


def test_heads_are_expected_of_every_site_of_a_made_server_and_else_of_those_the_run_knows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Audit(tmp_path / "run" / "audit.jsonl").append("round", round=1, heads={"ana": {"seq": 1}})
    monkeypatch.delenv("MUTIRAO_SITE", raising=False)
    known = keepers_here(tmp_path / "run")
    assert (known("ana"), known("bia"), keepers_here(tmp_path / "new")("ana")) == (True, False, False)
    (tmp_path / "server" / "sites").mkdir(parents=True)
    monkeypatch.setenv("MUTIRAO_SITE", str(tmp_path / "server"))
    assert keepers_here(tmp_path / "new")("bia")


def test_numbers_by_which_one_could_speak_for_others_stay_out_of_logs() -> None:
    said = f"Failed to pull object with ID '{'0a' * 32}' of node {2**64 - 1}\nin run -{2**62}: no. 12 of 345678"
    assert clean_line(said) == "Failed to pull object with ID '...' of node ... in run -...: no. 12 of 345678"


def test_two_newcomers_with_one_name_are_both_refused(caplog: pytest.LogCaptureFixture) -> None:
    grid, fleet = connected(softmax_task(), ["ana", "bia", "bia"])
    for _ in range(3):
        assert fleet.clients() == ["ana"]
    assert [r.getMessage() for r in caplog.records] == ["2 nodes call themselves 'bia': refused until only one is left"]
    del grid.nodes[grid.node_of("bia")]
    assert fleet.clients() == ["ana", "bia"]


@pytest.mark.parametrize(
    "content",
    [RecordDict(), RecordDict({"name": MetricRecord({"name": 1})}), RecordDict({"name": ConfigRecord({"name": [1]})})],
)
def test_a_node_that_answers_the_question_for_its_name_with_nonsense_is_refused(content: RecordDict) -> None:
    app = ClientApp()
    app.query("name")(lambda message, context: Message(content, reply_to=message))
    grid = LoopGrid(app)
    grid.join()
    assert FlowerFleet(grid, greet=0.2).clients() == []


class Clock:
    """The fleet's clock, which a test puts ahead: on a loaded machine no pause is short."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.ahead = 0.0
        monkeypatch.setattr(server, "time", self)

    def monotonic(self) -> float:
        return time.monotonic() + self.ahead


def test_a_silent_node_is_asked_again_later_and_blocks_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    grid, fleet = connected(softmax_task(), ["ana"])
    fleet.greet = 0.3
    silent = grid.join(name="bia")
    deliver, listen = grid.deliver, fleet._listen
    awaited: list[float] = []

    def listened(ids: Iterable[str], seconds: float, read: Any) -> Any:
        asked = list(ids)
        awaited.extend([seconds] * len(asked))
        return listen(asked, seconds, read)

    monkeypatch.setattr(fleet, "_listen", listened)
    monkeypatch.setattr(grid, "deliver", lambda m, node: None if node == silent else deliver(m, node))
    for _ in range(10):
        assert fleet.clients() == ["ana"]
    assert awaited == [0.3, 0.3] + [0.0] * 10  # ana and bia were waited for once
    monkeypatch.setattr(grid, "deliver", deliver)
    clock.ahead = server.NAME_TIMEOUT
    assert fleet.clients() == ["ana", "bia"]


def test_a_node_whose_app_fails_is_asked_again_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    grid, fleet = connected(softmax_task(), ["ana"])
    clock = Clock(monkeypatch)
    node = grid.join()  # it has no name yet
    assert fleet.clients() == ["ana"]
    grid.nodes[node].node_config["name"] = "bia"
    assert fleet.clients() == ["ana"]
    clock.ahead = server.RETRY_AFTER_ERROR
    assert fleet.clients() == ["ana", "bia"]


def test_a_name_that_comes_late_is_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    grid, fleet = connected(softmax_task(), ["ana", "bia"])
    fleet.greet, slow = 0.1, grid.node_of("bia")
    held: list[tuple[Message, int]] = []
    deliver = grid.deliver
    monkeypatch.setattr(grid, "deliver", lambda m, node: held.append((m, node)) if node == slow else deliver(m, node))
    assert fleet.clients() == ["ana"]
    deliver(*held[0])
    assert fleet.clients() == ["ana", "bia"]
    assert len(held) == 1


def test_a_closed_fleet_waits_for_nobody() -> None:
    task = softmax_task()
    grid, fleet = connected(task, ["ana"])
    fleet.clients()
    grid.meddlers[grid.node_of("ana")] = lambda message, reply: []
    fleet.timeout = 3600
    fleet.close()
    answers: list[Answers] = []
    asking = threading.Thread(
        target=lambda: answers.append(fleet.ask({"ana": Request("train", task.initial())})), daemon=True
    )
    asking.start()
    asking.join(60)
    assert [found.failures["ana"].kind for found in answers] == ["late"]


def served(out: Path, nodes: dict[int, Context] | None = None, **run_config: Any) -> LoopGrid:
    """Run the server app over six clients, or over the nodes of an earlier run."""
    grid = LoopGrid(client_app(), **{"recipe": "iris:iris", "out": str(out), "timeout": 5.0, **run_config})
    for i in range(0 if nodes else 6):
        grid.join(name=f"c{i}")
    grid.nodes |= nodes or {}
    server_app()(grid, Context(7, 1, {}, RecordDict(), grid.run_config))
    return grid


def digest_in(folder: Path) -> str:
    return str(json.loads((folder / "summary.json").read_text())["digest"])


def test_the_server_app_writes_the_run_folder_of_a_local_run(tmp_path: Path) -> None:
    served(tmp_path / "there", rounds=3, set="aggregate=fedavgm seed=5")
    config = resolve(iris.config, {"rounds": 3, "aggregate": "fedavgm", "seed": 5})
    here = execute("iris:iris", config, tmp_path / "here")
    assert digest_in(tmp_path / "there") == here["digest"]
    for file in ("config.toml", "clients.csv"):
        assert (tmp_path / "there" / file).read_text() == (tmp_path / "here" / file).read_text()


def test_a_run_goes_on_only_if_it_is_asked_to_and_with_the_same_settings(tmp_path: Path) -> None:
    grid = served(tmp_path / "there", rounds=2)
    with pytest.raises(ConfigError, match="already holds a run"):
        served(tmp_path / "there", rounds=4)
    with pytest.raises(ConfigError, match="seed cannot change"):
        served(tmp_path / "there", rounds=4, resume=True, seed=1)
    served(tmp_path / "there", grid.nodes, rounds=4, resume=True)
    here = execute("iris:iris", resolve(iris.config, {"rounds": 4}), tmp_path / "here")
    assert digest_in(tmp_path / "there") == here["digest"]


def test_the_server_app_says_in_one_line_who_is_missing(tmp_path: Path) -> None:
    with pytest.raises(TooFewClients, match="6 came: c0, c1, c2, c3, c4, c5"):
        served(tmp_path, set="clients=7 wait=0.1")


@pytest.mark.parametrize(
    ("run_config", "text"), [({"timeout": "long"}, "timeout: 'long'"), ({"resume": 1}, "resume: 1")]
)
def test_the_server_app_refuses_wrong_values(tmp_path: Path, run_config: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        served(tmp_path, **run_config)


def test_a_warning_is_logged_under_the_projects_name(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "mutirao"):
        connected(softmax_task(), ["ana", "ana"])[1].clients()
    assert {r.name for r in caplog.records} == {"mutirao"}
