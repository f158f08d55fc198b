"""The in-process fleet behaves as a network would: clients own what they get, and fail alone."""

import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch

from mutirao.core.arrays import Arrays
from mutirao.core.fleet import Reply, Request, Site
from mutirao.simulation.local_fleet import LocalFleet

PEOPLE = {"ana": 1, "bia": 2, "caio": 3}


def requests_for(*clients: str, **config: Any) -> dict[str, Request]:
    return {c: Request("train", {"w": np.zeros(2)}, config) for c in clients}


def plus(request: Request, site: Site) -> Reply:
    return Reply({"w": request.arrays["w"] + site.data}, n=site.data)


def test_each_client_works_on_its_own_data() -> None:
    answers = LocalFleet(plus, PEOPLE).ask(requests_for("caio", "ana"))
    assert {c: r.arrays["w"].tolist() for c, r in answers.replies.items()} == {"ana": [1, 1], "caio": [3, 3]}
    assert list(answers.replies) == ["ana", "caio"]
    assert not answers.failures


def test_clients_are_the_sorted_names_and_the_same_list_each_time() -> None:
    fleet = LocalFleet(plus, {"bia": 1, "ana": 2})
    assert fleet.clients() == ["ana", "bia"]
    assert fleet.clients() is fleet.clients()


def test_asking_nobody_is_fine() -> None:
    answers = LocalFleet(plus, PEOPLE).ask({})
    assert (answers.replies, answers.failures) == ({}, {})


@pytest.mark.parametrize("error", [ValueError("no data"), KeyError("w"), MemoryError(), SystemExit(3)])
@pytest.mark.parametrize("timeout", [None, 5.0])
def test_a_client_that_raises_fails_alone(error: BaseException, timeout: float | None) -> None:
    def handler(request: Request, site: Site) -> Reply:
        if site.id == "bia":
            raise error
        return plus(request, site)

    answers = LocalFleet(handler, PEOPLE, timeout).ask(requests_for(*PEOPLE))
    assert list(answers.replies) == ["ana", "caio"]
    assert answers.failures["bia"].kind == "raised"
    assert type(error).__name__ in answers.failures["bia"].reason


def test_data_that_cannot_be_made_is_a_failure_of_that_client_alone() -> None:
    class Lazy(Mapping[str, int]):
        def __getitem__(self, client: str) -> int:
            if client == "bia":
                raise OSError("disk gone")
            return PEOPLE[client]

        def __iter__(self) -> Any:
            return iter(PEOPLE)

        def __len__(self) -> int:
            return len(PEOPLE)

    answers = LocalFleet(plus, Lazy()).ask(requests_for(*PEOPLE))
    assert list(answers.replies) == ["ana", "caio"]
    assert str(answers.failures["bia"]) == "raised: OSError: disk gone"


@pytest.mark.parametrize("answer", [None, 5, {"w": np.zeros(2)}])
def test_what_is_no_reply_is_a_failure(answer: Any) -> None:
    def handler(request: Request, site: Site) -> Any:
        return answer if site.id == "bia" else plus(request, site)

    answers = LocalFleet(handler, PEOPLE).ask(requests_for(*PEOPLE))
    assert list(answers.replies) == ["ana", "caio"]
    assert answers.failures["bia"].kind == "empty"
    assert type(answer).__name__ in answers.failures["bia"].reason


def test_only_the_client_that_hangs_is_late() -> None:
    """The first in order hangs; those behind it must not suffer for it."""
    release, ended = threading.Event(), threading.Event()

    def handler(request: Request, site: Site) -> Reply:
        if site.id == "ana":
            release.wait(60)
            ended.set()
        return plus(request, site)

    answers = LocalFleet(handler, PEOPLE, timeout=2).ask(requests_for(*PEOPLE))
    assert not ended.is_set()
    release.set()
    assert list(answers.replies) == ["bia", "caio"]
    assert str(answers.failures["ana"]) == "late: no answer within 2 s"


def test_a_late_answer_is_not_taken_for_the_next_request() -> None:
    release, ended = threading.Event(), threading.Event()

    def handler(request: Request, site: Site) -> Reply:
        if request.config["round"] == 1:
            release.wait(60)
        site.state["seen"] = np.asarray(request.config["round"])
        if request.config["round"] == 1:
            ended.set()
        return Reply({"w": np.full(2, float(request.config["round"]))}, n=1)

    fleet = LocalFleet(handler, {"ana": None}, timeout=0.05)
    assert fleet.ask(requests_for("ana", round=1)).failures["ana"].kind == "late"
    fleet.timeout = 60
    assert fleet.ask(requests_for("ana", round=2)).replies["ana"].arrays["w"].tolist() == [2, 2]
    release.set()
    assert ended.wait(60)
    time.sleep(0.2)  # its reply is passed on after that; it must not have touched anything
    assert fleet.states["ana"]["seen"] == 2


def counting(request: Request, site: Site) -> Reply:
    site.state.setdefault("visits", np.zeros((), np.int64))
    site.state["visits"] += 1  # in place, as people write it
    if request.config.get("fail") == site.id:
        raise RuntimeError("after the state was touched")
    return Reply({"w": np.full(2, float(site.state["visits"]))}, n=1)


@pytest.mark.parametrize("timeout", [None, 5.0])
def test_state_outlives_the_request_and_stays_at_its_site(timeout: float | None) -> None:
    fleet = LocalFleet(counting, PEOPLE, timeout)
    fleet.ask(requests_for("ana", "bia"))
    answers = fleet.ask(requests_for("ana", "caio"))
    assert {c: r.arrays["w"][0] for c, r in answers.replies.items()} == {"ana": 2, "caio": 1}
    assert {c: int(s["visits"]) for c, s in fleet.states.items()} == {"ana": 2, "bia": 1, "caio": 1}


def test_a_failed_request_leaves_no_trace_in_the_state() -> None:
    fleet = LocalFleet(counting, PEOPLE)
    fleet.ask(requests_for(*PEOPLE))
    fleet.ask(requests_for(*PEOPLE, fail="bia"))
    assert {c: int(s["visits"]) for c, s in fleet.states.items()} == {"ana": 2, "bia": 1, "caio": 2}


def test_a_state_that_is_emptied_is_empty() -> None:
    def handler(request: Request, site: Site) -> Reply:
        site.state = {} if request.config["round"] == 2 else {"x": np.ones(1)}
        return plus(request, site)

    fleet = LocalFleet(handler, {"ana": 1})
    fleet.ask(requests_for("ana", round=1))
    assert fleet.states["ana"]
    fleet.ask(requests_for("ana", round=2))
    assert fleet.snapshot() == {}


def test_states_are_kept_only_of_clients_that_have_one() -> None:
    fleet = LocalFleet(plus, {f"c{i}": i + 1 for i in range(100)})
    fleet.ask(requests_for(*fleet.clients()))
    assert fleet.states == {}


def test_snapshot_and_restore_bring_states_back() -> None:
    one = LocalFleet(counting, PEOPLE)
    one.ask(requests_for(*PEOPLE))
    saved = {k: v.copy() for k, v in one.snapshot().items()}
    one.ask(requests_for("ana"))
    two = LocalFleet(counting, PEOPLE)
    two.restore(saved)
    two.ask(requests_for("ana"))
    assert {k: v.tolist() for k, v in two.snapshot().items()} == {k: v.tolist() for k, v in one.snapshot().items()}


def test_a_handler_that_trains_in_place_changes_neither_the_server_nor_other_clients() -> None:
    def handler(request: Request, site: Site) -> Reply:
        request.arrays["w"] += site.data
        return Reply(request.arrays, n=1)

    asked = requests_for(*PEOPLE)
    shared = asked["ana"].arrays
    asked = {c: Request("train", shared, {}) for c in PEOPLE}
    answers = LocalFleet(handler, PEOPLE).ask(asked)
    assert shared["w"].tolist() == [0, 0]
    assert [r.arrays["w"][0] for r in answers.replies.values()] == [1, 2, 3]


def test_a_handler_that_reuses_its_buffers_does_not_overwrite_earlier_replies() -> None:
    """As one does with a torch module shared by all clients, whose `.numpy()` is a view."""
    buffer: Arrays = {"w": np.zeros(2)}

    def handler(request: Request, site: Site) -> Reply:
        buffer["w"][:] = site.data
        return Reply(buffer, extras={"e": buffer["w"]}, n=1)

    answers = LocalFleet(handler, PEOPLE).ask(requests_for(*PEOPLE))
    assert [r.arrays["w"][0] for r in answers.replies.values()] == [1, 2, 3]
    assert [r.extras["e"][0] for r in answers.replies.values()] == [1, 2, 3]


class Together:
    """A handler that takes all clients at once."""

    def __init__(self, fails: str = "", forgets: str = "", invents: str = "") -> None:
        self.fails, self.forgets, self.invents = fails, forgets, invents
        self.calls: list[int] = []

    def __call__(self, request: Request, site: Site) -> Reply:
        self.calls.append(1)
        if site.id == self.fails:
            raise RuntimeError("this one")
        return counting(request, site)

    def many(self, requests: Mapping[str, Request], sites: Mapping[str, Site]) -> dict[str, Reply]:
        self.calls.append(len(sites))
        replies = {c: counting(requests[c], sites[c]) for c in sites if c != self.forgets}
        if self.fails in sites:
            raise RuntimeError("someone failed, after all states were touched")
        return replies | ({self.invents: Reply({}, n=1)} if self.invents else {})


def test_many_gets_everyone_in_one_call_and_gives_the_same_as_one_by_one() -> None:
    handler = Together()
    fleet, alone = LocalFleet(handler, PEOPLE), LocalFleet(counting, PEOPLE)
    for _ in range(2):
        one, two = fleet.ask(requests_for(*PEOPLE)), alone.ask(requests_for(*PEOPLE))
        assert {c: r.arrays["w"].tolist() for c, r in one.replies.items()} == {
            c: r.arrays["w"].tolist() for c, r in two.replies.items()
        }
    assert handler.calls == [3, 3]
    assert {c: int(s["visits"]) for c, s in fleet.states.items()} == dict.fromkeys(PEOPLE, 2)


def test_if_many_fails_the_culprit_is_found_one_by_one_and_nobody_is_counted_twice() -> None:
    handler = Together(fails="bia")
    fleet = LocalFleet(handler, PEOPLE)
    answers = fleet.ask(requests_for(*PEOPLE))
    assert handler.calls == [3, 1, 1, 1]
    assert {c: r.arrays["w"][0] for c, r in answers.replies.items()} == {"ana": 1, "caio": 1}
    assert str(answers.failures["bia"]) == "raised: RuntimeError: this one"
    assert {c: int(s["visits"]) for c, s in fleet.states.items()} == {"ana": 1, "caio": 1}


def test_whom_many_forgets_is_late_and_whom_it_invents_is_ignored() -> None:
    answers = LocalFleet(Together(forgets="bia", invents="eve"), PEOPLE).ask(requests_for(*PEOPLE))
    assert list(answers.replies) == ["ana", "caio"]
    assert {c: f.kind for c, f in answers.failures.items()} == {"bia": "late"}


def test_with_a_timeout_clients_are_asked_one_by_one() -> None:
    handler = Together()
    LocalFleet(handler, PEOPLE, timeout=5.0).ask(requests_for(*PEOPLE))
    assert handler.calls == [1, 1, 1]


@pytest.mark.parametrize("timeout", [None, 30.0])
@pytest.mark.parametrize("together", [False, True])
def test_a_handler_that_runs_torch_has_one_thread_of_it_and_gives_it_back(
    timeout: float | None, together: bool
) -> None:
    seen = []

    class Own:
        def __call__(self, request: Request, site: Site) -> Reply:
            seen.append(torch.get_num_threads())
            if site.id == "bia":
                raise ValueError("even then")
            return Reply({}, n=1)

        def many(self, requests: Mapping[str, Request], sites: Mapping[str, Site]) -> dict[str, Reply]:
            return {c: self(requests[c], sites[c]) for c in requests}  # raises, so that they are asked one by one

    own = Own()
    fleet = LocalFleet(own if together else own.__call__, PEOPLE, timeout)
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        assert list(fleet.ask(requests_for(*PEOPLE)).failures) == ["bia"]
        after = torch.get_num_threads()
    finally:
        torch.set_num_threads(before)
    assert len(seen) == (5 if together and timeout is None else 3)
    assert set(seen) == {1}
    assert after == 3


def test_a_fleet_without_torch_does_not_import_it() -> None:
    code = (
        "import sys; from mutirao import LocalFleet, Reply; from mutirao.core.fleet import Request\n"
        "fleet = LocalFleet(lambda request, site: Reply({}, n=1), {'ana': 0})\n"
        "assert fleet.ask({'ana': Request('train', {})}).replies and 'torch' not in sys.modules"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
