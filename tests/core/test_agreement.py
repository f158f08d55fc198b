from collections.abc import Mapping
from typing import Any

import pytest

from mutirao.core.agreement import (
    AgreementFleet,
    agree_on,
    agreement_config,
    bytes_from_extra,
    bytes_to_extra,
    check_agreed,
    digest_of,
    log_client_report,
)
from mutirao.core.fleet import Answers, Failure, Fleet, Reply, Request, Site, Wrapper
from mutirao.core.records import Round
from mutirao.errors import ConfigError, Refused, TooFewClients
from mutirao.simulation.local_fleet import LocalFleet


def test_what_is_agreed_on_is_told_and_held() -> None:
    told = agreement_config({"frozen": "a1", "columns": "b2"})
    check_agreed({"seed": 0, "round": 1, **told}, {"columns": "b2", "frozen": "a1"})
    check_agreed({"seed": 0, "round": 1}, {"frozen": "a1"})  # a request that speaks of nothing


@pytest.mark.parametrize(("own", "says"), [({"frozen": "c3"}, "here it is c3"), ({}, "there is none here")])
def test_a_site_with_another_one_or_none_refuses_by_name(own: dict[str, str], says: str) -> None:
    with pytest.raises(Refused, match=f"frozen a1 is agreed on, {says}") as refused:
        check_agreed({"round": 1, **agreement_config({"frozen": "a1"})}, own)
    assert refused.value.rule == "agreed.frozen"


def test_a_request_that_does_not_speak_of_what_must_be_agreed_on_is_refused_by_name() -> None:
    with pytest.raises(Refused, match="the request does not say which frozen is agreed on") as refused:
        check_agreed({"seed": 0, "round": 1}, {"frozen": "a1"}, must=["frozen"])
    assert refused.value.rule == "agreed.frozen"


def lists(held: dict[str, Any]) -> LocalFleet:
    """Clients that tell a list of words, and keep to one that holds all of theirs."""

    def answer(request: Request, site: Site) -> Reply:
        if isinstance(site.data, Exception):
            raise site.data
        if request.do == "profile":
            return Reply({}, bytes_to_extra("profile", site.data.encode()), n=1)
        words = bytes_from_extra("words", request.extras)
        check_agreed(request.config, {"words": digest_of(words)})
        if not set(site.data.split()) <= set(words.decode().split()):
            raise Refused("agreed.words", f"{site.data} is not among them")
        return Reply({}, bytes_to_extra("came", words), n=1)

    return LocalFleet(answer, held)


def first_three(told: Mapping[str, Reply]) -> bytes:
    words = sorted({w for r in told.values() for w in bytes_from_extra("profile", r.extras).decode().split()})
    return " ".join(words[:3]).encode()


def agreement(fleet: Fleet, content: bytes, **more: Any) -> AgreementFleet:
    return AgreementFleet(fleet, {"words": digest_of(content)}, bytes_to_extra("words", content), **more)


def test_clients_agree_on_what_comes_of_their_profiles_and_it_goes_with_every_request() -> None:
    fleet = lists({"ana": "a b", "bia": "b c", "caio": "z"})
    content, spent = agree_on(fleet, "words", {"round": 0}, first_three)
    assert content == b"a b c"
    assert spent[1] > 0  # what they told is counted
    agreed = agreement(fleet, content)
    assert agreed.begin() == ["caio"]
    assert agreed.clients() == ["ana", "bia"]
    answers = agreed.ask({c: Request("train", {}, {"round": 1}) for c in ("bia", "caio")})
    assert bytes_from_extra("came", answers.replies["bia"].extras) == content
    assert answers.failures["caio"].reason.startswith("agreed.words")  # it was not even sent


def test_too_many_who_differ_end_the_run() -> None:
    with pytest.raises(ConfigError, match=r"2 of 3 clients do not agree on words.*bia: refused: agreed\.words"):
        agreement(lists({"ana": "a", "bia": "y", "caio": "z"}), b"a").begin()
    with pytest.raises(ConfigError, match=r"no client sent its profile.*; ana: raised: ValueError: lost"):
        agree_on(lists({"ana": ValueError("lost")}), "words", {}, first_three)


def test_a_policy_that_forbids_the_question_says_nothing_of_who_is_right_and_its_site_takes_no_part() -> None:
    forbids = Refused("asked.requests", "'agree' may not be asked here")
    agreed = agreement(lists({"ana": "a", "bia": forbids, "caio": forbids}), b"a")
    assert agreed.begin() == ["bia", "caio"]
    assert agreed.clients() == ["ana"]
    with pytest.raises(TooFewClients, match=r"none of 2 clients takes part: bia: refused: asked\.requests"):
        agreement(lists({"bia": forbids, "caio": forbids}), b"a").begin()


class Coming(Wrapper):
    """A fleet whose clients come and go, with keys; some are late."""

    def __init__(self, fleet: Fleet) -> None:
        super().__init__(fleet)
        self.here, self.key, self.late, self.gone = fleet.clients(), dict[str, str](), set[str](), set[str]()
        self.seen: list[tuple[str, str]] = []

    def clients(self) -> list[str]:
        return self.here

    def keys(self) -> dict[str, str]:
        return dict(self.key)

    def ask(self, requests: Mapping[str, Request]) -> Answers:
        self.seen += [(c, r.do) for c, r in requests.items()]
        answers = self.fleet.ask({c: r for c, r in requests.items() if c not in self.late | self.gone})
        away = {c: Failure("late", "no answer in time") for c in requests if c in self.late}
        away |= {c: Failure("gone", "is not connected") for c in requests if c in self.gone}
        return Answers(answers.replies, {**answers.failures, **away})


def train(fleet: Fleet, *names: str) -> Answers:
    return fleet.ask({c: Request("train", {}, {"round": 1}) for c in names})


def test_who_comes_back_agrees_again_before_it_is_asked_for_anything_else() -> None:
    words = {"ana": "a", "bia": "a"}
    fleet = Coming(lists(words))
    agreed = agreement(fleet, b"a")
    assert agreed.begin() == []
    fleet.seen.clear()
    agreed.clients()
    train(agreed, "ana", "bia")
    assert fleet.seen == [("ana", "train"), ("bia", "train")]  # nobody is asked twice
    fleet.here = ["ana"]
    assert agreed.clients() == ["ana"]
    words["bia"] = "z"
    fleet.here = ["ana", "bia"]
    fleet.seen.clear()
    assert agreed.clients() == ["ana"]
    assert fleet.seen == [("bia", "agree")]
    words["bia"] = "a"
    fleet.key = {"bia": "another node"}  # of the same name
    assert agreed.clients() == ["ana", "bia"]
    fleet.gone = {"bia"}
    train(agreed, "bia")
    fleet.seen.clear()
    agreed.clients()
    assert fleet.seen == [("bia", "agree")]


def test_who_is_away_when_asked_is_no_odd_one_and_is_asked_again_after_the_round() -> None:
    fleet = Coming(lists({"ana": "a", "bia": "a"}))
    agreed, fleet.late = agreement(fleet, b"a"), {"bia"}
    assert agreed.begin() == ["bia"]  # it is not waited for
    assert agreed.clients() == ["ana"]
    fleet.late = set()
    assert agreed.clients() == ["ana"]
    agreed.record(Round({"round": 1}, []))
    assert agreed.clients() == ["ana", "bia"]


def test_who_refuses_a_round_takes_no_part_from_then_on_and_the_record_says_why() -> None:
    words = {"ana": "a", "bia": "a", "caio": "z"}
    agreed = agreement(lists(words), b"a")
    agreed.begin()
    words["bia"] = "y"
    train(agreed, "ana", "bia")
    assert agreed.clients() == ["ana"]
    done = Round({"round": 1}, [{"client": "ana"}, {"client": "bia", "failure": "refused: agreed.words: ..."}])
    agreed.record(done)
    assert [row["client"] for row in done.clients] == ["ana", "bia", "caio"]
    assert done.clients[2]["failure"] == "refused: agreed.words: z is not among them"
    agreed.record(later := Round({"round": 2}, []))
    assert later.clients == []  # once is enough


def test_a_site_that_is_paused_when_a_run_begins_joins_it_later() -> None:
    fleet = lists({"ana": "a", "bia": Refused("paused", "this site is paused by those who run it")})
    agreed = agreement(fleet, b"a b")
    assert (agreed.begin(), agreed.clients()) == (["bia"], ["ana"])
    fleet.population["bia"] = "b"
    agreed.record(done := Round({"round": 1}, []))
    assert agreed.clients() == ["ana", "bia"]
    failures = [(row["client"], row["failure"]) for row in done.clients]
    assert failures == [("bia", "refused: paused: this site is paused by those who run it")]


def test_the_versions_that_a_client_tells_are_part_of_the_rounds_record_once() -> None:
    told = bytes_to_extra("versions", b'{"flwr": "1.0", "secret": "x", "mutirao": 3}')
    agreed = AgreementFleet(LocalFleet(lambda request, site: Reply({}, told, n=1), {"ana": 0}), {"words": "a1"})
    agreed.begin()
    first, second = Round({"round": 1}, []), Round({"round": 2}, [])
    agreed.record(first)
    agreed.record(second)
    assert first.versions == {"ana": {"mutirao": "3", "flwr": "1.0"}}
    assert second.versions == {}


def test_clients_of_this_process_are_not_asked_but_told() -> None:
    fleet = Coming(lists({"ana": "a"}))
    agreed = agreement(fleet, b"a", ask_clients=False)
    assert agreed.begin() == []
    assert fleet.seen == []
    assert list(train(agreed, "ana").replies) == ["ana"]


def test_other_versions_are_a_warning_and_counts_a_line(caplog: pytest.LogCaptureFixture) -> None:
    absurd = b', "vast": ' + b"9" * 4000 + b', "less": -1}'
    told = bytes_to_extra("versions", b'{"torch": "0.1", "python": 7}')
    told |= bytes_to_extra("counts", b'{"normal": 3, "odd": "many"' + absurd)
    with caplog.at_level("WARNING", "mutirao"):
        log_client_report("ana", told)
        log_client_report("bia", bytes_to_extra("versions", b"[" * 100_000))
    assert "ana has other versions" in caplog.text
    assert "torch '0.1' (" in caplog.text
    assert "ana has 3 samples: 'normal' 3" in caplog.text
    assert "9999" not in caplog.text
    assert "less" not in caplog.text
    assert "bia" not in caplog.text
