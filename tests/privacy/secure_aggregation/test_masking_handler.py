"""What a client refuses: every way in which a server could get at one update by asking otherwise."""

import json
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from parties import MODEL, Lossy, ask, lossy, names

from mutirao.core.fleet import FLEETING, Failure, Reply, Request, Site
from mutirao.privacy.secure_aggregation import SecAggPlus
from mutirao.privacy.secure_aggregation.key_agreement import draw_secret, public_of
from mutirao.privacy.secure_aggregation.masking_handler import MaskingHandler
from mutirao.privacy.secure_aggregation.settings import KEYS, MASKED, SHARES, UNMASK
from mutirao.simulation.local_fleet import LocalFleet

ANA, BIA, CAIO, *REST = names(6)
Meddle = Callable[[Request], Request]


def refusal_of(stage: str, meddle: Meddle, count: int = 6) -> str:
    """How the first client answers when the server asks it something else in a stage."""
    inside, fleet = lossy(count, SecAggPlus(), meddle=lambda c, r: meddle(r) if c == ANA and r.do == stage else r)
    heard: dict[str, Failure] = {}
    plain = Lossy.ask

    def listen(requests: dict[str, Request]) -> object:
        answers = plain(inside, requests)
        heard.update({next(iter(requests.values())).do: f for c, f in answers.failures.items() if c == ANA})
        return answers

    inside.ask = listen  # type: ignore[method-assign,assignment]
    ask(fleet, names(count))
    assert heard[stage].kind == "refused"
    return heard[stage].reason


def told(request: Request, **words: str) -> Request:
    return replace(request, config={**request.config, **{f"secagg.{k}": v for k, v in words.items()}})


def listed(request: Request, name: str) -> list[str]:
    return list(json.loads(str(request.config[f"secagg.{name}"])))


@pytest.mark.parametrize("do", ["train", "evaluate", "probe"])
def test_nothing_is_answered_in_the_clear(do: str) -> None:
    inside, _ = lossy(3, SecAggPlus())
    answers = ask(inside, [ANA], do)
    assert answers.failures[ANA].kind == "refused"
    assert "this client alone" in answers.failures[ANA].reason


def test_of_rows_only_blocks_leave() -> None:
    def work(request: Request, site: object) -> Reply:
        return Reply(MODEL, {"items": np.ones(2), "blocks": np.ones(3)}, {"loss": 1.0}, 77)

    reply = MaskingHandler(work, SecAggPlus())(Request("rows", {}), Site("ana"))
    assert reply.extras.keys() == {"blocks"}
    assert (reply.arrays, reply.metrics, reply.n) == ({}, {}, 1)


def test_of_a_warm_up_only_the_signature_leaves() -> None:
    def work(request: Request, site: object) -> Reply:
        return Reply(MODEL, {"signature": np.ones(2), "holdings": np.ones(3)}, {"loss": 1.0}, 77)

    inside, _ = lossy(3, SecAggPlus(), work)
    reply = ask(inside, [ANA], "warm").replies[ANA]
    assert (reply.arrays, list(reply.extras), reply.metrics, reply.n) == ({}, ["signature"], {}, 1)
    reply = ask(inside, [ANA], "take").replies[ANA]
    assert (reply.arrays, reply.extras, reply.metrics, reply.n) == ({}, {}, {}, 1)


def test_another_model_in_the_same_session_is_not_masked() -> None:
    first: list[Request] = []

    def again(request: Request) -> Request:
        other = {k: v + 1 if v.dtype.kind == "f" else v for k, v in MODEL.items()}
        return replace(first[0], arrays=other)

    def meddle(client: str, request: Request) -> Request:
        if client != ANA:
            return request
        first.extend([request] if request.do == MASKED else [])
        return again(request) if request.do == UNMASK else request

    inside, fleet = lossy(6, SecAggPlus(), meddle=meddle)
    ask(fleet, names(6))
    assert not any(c == ANA and r.do == UNMASK and reply for c, r, reply in inside.seen)


def test_a_session_is_unmasked_once() -> None:
    inside, fleet = lossy(6, SecAggPlus())
    ask(fleet, names(6))
    last = next(r for c, r, _ in inside.seen if c == ANA and r.do == UNMASK)
    lost = told(last, alive=json.dumps(listed(last, "alive")[1:]), lost=json.dumps(listed(last, "alive")[:1]))
    for request in (last, lost):
        assert "not what comes next" in inside.ask({ANA: request}).failures[ANA].reason


def test_both_shares_of_one_neighbour_are_not_given() -> None:
    reason = refusal_of(UNMASK, lambda r: told(r, lost=json.dumps(listed(r, "alive")[:1])))
    assert "either is in the sum or got lost" in reason


def test_a_neighbour_that_is_not_mentioned_is_a_refusal() -> None:
    assert "either" in refusal_of(UNMASK, lambda r: told(r, alive=json.dumps(listed(r, "alive")[1:])))


def test_shares_are_not_given_for_a_sum_of_few() -> None:
    def shrink(request: Request) -> Request:
        alive = listed(request, "alive")
        return told(request, alive=json.dumps(alive[:1]), lost=json.dumps(alive[1:]))

    assert "only 1 neighbours are in the sum" in refusal_of(UNMASK, shrink)


def test_nothing_is_masked_with_few_neighbours() -> None:
    def shrink(request: Request) -> Request:
        extras = {k: v[:2] for k, v in request.extras.items()}
        return replace(told(request, **{"from": json.dumps(listed(request, "from")[:2])}), extras=extras)

    assert "only 2 neighbours are left" in refusal_of(MASKED, shrink)


def test_a_neighbourhood_below_the_least_is_refused() -> None:
    def shrink(request: Request) -> Request:
        extras = {k: v[:1] for k, v in request.extras.items()}
        return replace(told(request, peers=json.dumps(listed(request, "peers")[:1])), extras=extras)

    assert "a sum has at least 3 clients" in refusal_of(SHARES, shrink)


@pytest.mark.parametrize("kind", ["letters", "masks"])
def test_two_neighbours_with_one_key_are_refused(kind: str) -> None:
    def double(request: Request) -> Request:
        rows = request.extras[f"secagg.{kind}"].copy()
        rows[1] = rows[0]
        return replace(request, extras={**request.extras, f"secagg.{kind}": rows})

    assert "two have one key" in refusal_of(SHARES, double)


def test_a_neighbour_named_twice_or_the_site_itself_is_refused() -> None:
    assert "different names" in refusal_of(SHARES, lambda r: told(r, peers=json.dumps([BIA] * 5)))
    assert "this site itself" in refusal_of(SHARES, lambda r: told(r, peers=json.dumps([ANA, *listed(r, "peers")[1:]])))


def test_a_key_that_is_none_is_refused() -> None:
    def spoil(request: Request) -> Request:
        rows = request.extras["secagg.letters"].copy()
        rows[0] = 255
        return replace(request, extras={**request.extras, "secagg.letters": rows})

    assert "public key is invalid" in refusal_of(SHARES, spoil)


def test_letters_that_were_altered_or_exchanged_are_refused() -> None:
    def alter(request: Request) -> Request:
        rows = request.extras["secagg.sealed"].copy()
        rows[0, 40] ^= 1
        return replace(request, extras={**request.extras, "secagg.sealed": rows})

    def exchange(request: Request) -> Request:
        return replace(request, extras={**request.extras, "secagg.sealed": request.extras["secagg.sealed"][::-1]})

    assert "not written by its sender" in refusal_of(MASKED, alter)
    assert "not written by its sender" in refusal_of(MASKED, exchange)


def test_a_clients_own_letter_is_not_taken_for_its_neighbours_answer() -> None:
    inside, fleet = lossy(6, SecAggPlus())

    def reflect(client: str, request: Request) -> Request:
        if client != ANA or request.do != MASKED:
            return request
        mine = next(reply for c, r, reply in inside.seen if c == ANA and r.do == SHARES)
        asked = next(r for c, r, _ in inside.seen if c == ANA and r.do == SHARES)
        assert mine is not None
        at, place = listed(asked, "peers").index(BIA), listed(request, "from").index(BIA)
        rows = request.extras["secagg.sealed"].copy()
        rows[place] = mine.extras["sealed"][at]  # the two have one key, so that it can be read
        return replace(request, extras={**request.extras, "secagg.sealed": rows})

    inside.meddle = reflect
    answers = ask(fleet, names(6))
    assert "of another session, or for another client" in answers.failures[ANA].reason


def test_what_is_not_summed_is_not_masked() -> None:
    assert "is not summed" in refusal_of(MASKED, lambda r: told(r, do="probe"))


def test_another_session_or_another_stage_is_refused() -> None:
    for stage in (SHARES, MASKED, UNMASK):
        assert "not what comes next" in refusal_of(stage, lambda r: told(r, session="0" * 32))
    assert "not what comes next" in refusal_of(SHARES, lambda r: replace(r, do=UNMASK))


def test_other_settings_than_the_sites_own_are_refused() -> None:
    reason = refusal_of(KEYS, lambda r: told(r, settings=str(r.config["secagg.settings"]).replace("0.6", "0.5")))
    assert '"threshold": 0.6' in reason


def test_a_new_session_forgets_the_one_before() -> None:
    inside, fleet = lossy(6, SecAggPlus(), after={ANA: MASKED})
    ask(fleet, names(6))
    old = next(r for c, r, _ in inside.seen if c == BIA and r.do == UNMASK)
    local = inside.fleet
    assert isinstance(local, LocalFleet)
    assert any(name.startswith(FLEETING) for name in local.states[ANA])
    keys = next(r for c, r, _ in inside.seen if c == ANA and r.do == KEYS)
    first = local.ask({ANA: told(keys, session="f" * 32)}).replies[ANA]
    second = local.ask({ANA: told(keys, session="e" * 32)}).replies[ANA]
    assert first.extras["masks"].tobytes() != second.extras["masks"].tobytes()
    assert "not what comes next" in local.ask({ANA: old}).failures[ANA].reason


def test_secrets_are_gone_after_the_sum_and_never_in_a_checkpoint() -> None:
    inside, fleet = lossy(6, SecAggPlus(), after={ANA: MASKED})
    ask(fleet, names(6))
    local = inside.fleet
    assert isinstance(local, LocalFleet)
    assert {c for c, s in local.states.items() if any(k.startswith(FLEETING) for k in s)} == {ANA}
    assert not any(FLEETING in key for key in fleet.snapshot())
    assert any("visits" in key for key in fleet.snapshot())


def test_between_upload_and_unmasking_a_client_holds_none_of_its_own_secrets() -> None:
    inside, fleet = lossy(6, SecAggPlus(), after={ANA: MASKED})
    ask(fleet, names(6))
    local = inside.fleet
    assert isinstance(local, LocalFleet)
    kept = json.loads(local.states[ANA][FLEETING + "secagg"].tobytes())
    assert kept.keys() == {"next", "session", "needed", "mine", "received"}


def test_secrets_are_never_repeated() -> None:
    drawn = {draw_secret() for _ in range(200)}
    assert len(drawn) == 200
    assert len({public_of(s) for s in drawn}) == 200
