"""Whatever comes in, in whatever order: every client asked is in exactly one of replies and failures."""

from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mutirao.core.fleet import Failure, Fleet, Reply, collect, failure_of
from mutirao.simulation.local_fleet import LocalFleet

GOOD = Reply({"w": np.ones(1)}, n=1)
BAD = Failure("raised", "ValueError: no")
clients = st.sampled_from(["ana", "bia", "caio", "dora"])


@given(st.sets(clients), st.lists(st.tuples(clients, st.sampled_from([GOOD, BAD]))))
def test_everyone_asked_is_answered_for_exactly_once(
    asked: set[str], events: list[tuple[str, Reply | Failure]]
) -> None:
    answers = collect(asked, events)
    assert answers.replies.keys() | answers.failures.keys() == asked
    assert not answers.replies.keys() & answers.failures.keys()
    assert list(answers.replies) == sorted(answers.replies)
    assert list(answers.failures) == sorted(answers.failures)
    for client in asked:
        heard = [outcome for c, outcome in events if c == client]
        if not heard:
            assert answers.failures[client].kind == "late"
        elif len(heard) > 1:
            assert answers.failures[client].kind == "twice"
        else:
            assert (answers.replies | answers.failures)[client] is heard[0]


@given(st.lists(st.tuples(clients, st.sampled_from([GOOD, BAD])), unique_by=lambda e: e[0]), st.randoms())
def test_order_of_arrival_changes_nothing(events: list[tuple[str, Reply | Failure]], random: Random) -> None:
    shuffled = events.copy()
    random.shuffle(shuffled)
    everyone = ["ana", "bia", "caio", "dora"]
    assert collect(everyone, events) == collect(everyone[::-1], shuffled)


def test_three_answers_from_one_client_still_count_none() -> None:
    answers = collect(["ana"], [("ana", GOOD)] * 3)
    assert not answers.replies
    assert answers.failures["ana"].kind == "twice"


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (ValueError("two\nlines  of\ttext"), "raised: ValueError: two lines of text"),
        (KeyError(), "raised: KeyError"),
        (RuntimeError("x" * 1000), "raised: RuntimeError: " + "x" * 200),
    ],
)
def test_an_exception_becomes_one_short_line(error: Exception, text: str) -> None:
    assert str(failure_of(error)) == text


def test_local_fleet_is_a_fleet() -> None:
    assert isinstance(LocalFleet(lambda request, site: GOOD, {}), Fleet)
