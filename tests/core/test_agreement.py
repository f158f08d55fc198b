from collections.abc import Mapping
from typing import Any

import pytest

from mutirao.core.agreement import (
    Agreed,
    agree_on,
    as_extra,
    digest_of,
    find_odd,
    hold_agreed,
    in_extras,
    tell_agreed,
)
from mutirao.core.fleet import Answers, Failure, Reply, Request, Site, Wrapper
from mutirao.errors import ConfigError, Refused
from mutirao.fleets.local import LocalFleet


def test_what_is_agreed_on_is_told_and_held() -> None:
    told = tell_agreed({"frozen": "a1", "columns": "b2"})
    hold_agreed({"seed": 0, "round": 1, **told}, {"columns": "b2", "frozen": "a1"})
    hold_agreed({"seed": 0, "round": 1}, {"frozen": "a1"})  # a request that speaks of nothing


@pytest.mark.parametrize(("own", "says"), [({"frozen": "c3"}, "here it is c3"), ({}, "there is none here")])
def test_a_site_with_another_one_or_none_refuses_by_name(own: dict[str, str], says: str) -> None:
    with pytest.raises(Refused, match=f"frozen a1 is agreed on, {says}") as refused:
        hold_agreed({"round": 1, **tell_agreed({"frozen": "a1"})}, own)
    assert refused.value.rule == "agreed.frozen"


def lists(held: dict[str, Any]) -> LocalFleet:
    """Clients that tell a list of words, and keep to one that holds all of theirs."""

    def answer(request: Request, site: Site) -> Reply:
        if isinstance(site.data, Exception):
            raise site.data
        if request.do == "profile":
            return Reply({}, as_extra("profile", site.data.encode()), n=1)
        words = in_extras("words", request.extras)
        hold_agreed(request.config, {"words": digest_of(words)})
        if not set(site.data.split()) <= set(words.decode().split()):
            raise Refused("agreed.words", f"{site.data} is not among them")
        return Reply({}, as_extra("came", words), n=1)

    return LocalFleet(answer, held)


def first_three(told: Mapping[str, Reply]) -> bytes:
    words = sorted({w for r in told.values() for w in in_extras("profile", r.extras).decode().split()})
    return " ".join(words[:3]).encode()


def test_clients_agree_on_what_comes_of_their_profiles_and_it_goes_with_every_request() -> None:
    fleet = lists({"ana": "a b", "bia": "b c", "caio": "z"})
    content = agree_on(fleet, "words", {"round": 0}, first_three)
    assert content == b"a b c"
    assert find_odd(fleet, "words", {"round": 0}, content) == ["caio"]
    answers = Agreed(fleet, "words", content).ask({"bia": Request("train", {}, {"round": 1})})
    assert in_extras("came", answers.replies["bia"].extras) == content


def test_too_many_who_differ_end_the_run_and_one_who_is_away_is_no_odd_one() -> None:
    with pytest.raises(ConfigError, match=r"2 of 3 clients have another words.*bia: refused: agreed\.words"):
        find_odd(lists({"ana": "a", "bia": "y", "caio": "z"}), "words", {}, b"a")
    with pytest.raises(ConfigError, match=r"no client told its profile.*; ana: raised: ValueError: lost"):
        agree_on(lists({"ana": ValueError("lost")}), "words", {}, first_three)

    class Late(Wrapper):
        def ask(self, requests: Mapping[str, Request]) -> Answers:
            answers = self.fleet.ask({c: r for c, r in requests.items() if c != "bia"})
            return Answers(answers.replies, {"bia": Failure("late", "no answer in time")})

    assert find_odd(Late(lists({"ana": "a", "bia": "y"})), "words", {}, b"a") == []
