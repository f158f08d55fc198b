"""A user's round: each click moves its model before the next query; side by side with others nothing changes."""

import numpy as np
import pytest

from clicking import slow_weights
from mutirao.core.arrays import digest
from mutirao.core.fleet import Failure, Reply, Request, Site
from mutirao.randomness import rng
from mutirao.systems.ranking.online.click_models import Cascade
from mutirao.systems.ranking.online.fpdgd_noise import Shares
from mutirao.systems.ranking.online.pdgd import make_ranker
from mutirao.systems.ranking.online.shown_lists import QueryLists, User, normalize_per_query
from mutirao.systems.ranking.online.users import SearchHandler
from mutirao.systems.ranking.query_partition import by_query
from mutirao.systems.ranking.synthetic_queries import mslr_like

DATA = normalize_per_query(mslr_like(30, np.random.default_rng(0), documents=14))
LISTS, OWNED = QueryLists.of(DATA, by_query(DATA.grades, DATA.queries, 6, np.random.default_rng(1)), shown=10)
CLICKS = Cascade.of("informational", 4)
USERS = {f"u{i}": User(LISTS, own, CLICKS) for i, own in enumerate(OWNED)}


def asked(searching: SearchHandler, number: int = 3) -> Request:
    return Request("train", searching.ranker.initial(0), {"seed": 5, "round": number})


@pytest.mark.parametrize("hidden", [0, 6])
@pytest.mark.parametrize("shares", [None, Shares(repeatable=True, sensitivity=0.05)])
def test_users_side_by_side_are_users_one_by_one_to_the_last_bit(hidden: int, shares: Shares | None) -> None:
    searching = SearchHandler(make_ranker(136, hidden), interactions=5, parties=6, shares=shares)
    requests = dict.fromkeys(USERS, asked(searching))
    together = searching.many(requests, {c: Site(c, user) for c, user in USERS.items()})
    for client, user in USERS.items():
        alone = searching(requests[client], Site(client, user))
        assert digest(alone.arrays) == digest(together[client].arrays)
        assert (alone.metrics, alone.n) == (together[client].metrics, 5)
        assert digest(alone.arrays) != digest(requests[client].arrays)


def test_an_interaction_moves_the_model_by_the_sum_over_pairs() -> None:
    """The draws are taken as the user takes them; all that follows is done by slow loops."""
    searching = SearchHandler(make_ranker(136, 0), lr=0.5, interactions=2)
    request, user = asked(searching), USERS["u2"]
    reply = searching(request, Site("u2", user))
    draw = rng(5, 3, "interactions", "u2")
    w = request.arrays["weight"].astype(float)
    seen = []
    for query in user.queries[draw.integers(len(user), size=2)]:
        x, grades = LISTS.features(query), LISTS.grades_of(query)
        u = draw.random(len(x) + 20)
        scores = [float(sum(a * b for a, b in zip(row, w, strict=True))) for row in x]
        keys = [s - np.log(-np.log(v)) for s, v in zip(scores, u, strict=False)]
        ranking = sorted(range(len(x)), key=lambda d: -keys[d])[:10]
        clicks, looks = [], True
        for place, document in enumerate(ranking):
            clicks.append(int(looks and u[len(x) + place] < CLICKS.click[grades[document]]))
            looks = looks and not (clicks[-1] and u[len(x) + 10 + place] < CLICKS.stop[grades[document]])
        gain = [(2.0**g - 1) / np.log2(r + 2) for r, g in enumerate(grades[ranking])]
        best = [(2.0**g - 1) / np.log2(r + 2) for r, g in enumerate(sorted(grades, reverse=True)[:10])]
        seen.append(sum(gain) / sum(best))
        for document, weight in slow_weights(ranking, scores, clicks).items():
            w = w + 0.5 * weight * x[document]
    assert reply.arrays["weight"] == pytest.approx(w, rel=1e-5, abs=1e-7)
    assert reply.metrics["shown_ndcg"] == pytest.approx(np.mean(seen))
    assert reply.metrics["shown_loss"] == pytest.approx(1 - np.mean(seen))


def test_a_log_is_asked_in_its_order_and_begins_anew() -> None:
    user = User(LISTS, np.array([4, 2, 9]), Cascade.of("logged", 4), is_log=True)
    searching, site = SearchHandler(make_ranker(136, 0), interactions=2), Site("u0", user)
    turns = [searching.begin(asked(searching, number), site).queries.tolist() for number in (1, 2, 3)]
    assert turns == [[4, 2], [9, 4], [2, 9]]


def test_who_holds_something_else_fails_alone() -> None:
    searching = SearchHandler(make_ranker(136, 0))
    request = asked(searching)
    wrong = {
        "u0": Site("u0", USERS["u0"]),
        "u1": Site("u1", "text"),
        "u2": Site("u2", User(LISTS, OWNED[0][:0], CLICKS)),
    }
    found = searching.many(dict.fromkeys(wrong, request), wrong)
    assert isinstance(found["u0"], Reply)
    assert [isinstance(found[c], Failure) and found[c].reason for c in ("u1", "u2")] == [
        "ValueError: expected a user with lists of documents, got str",
        "ValueError: the user has no queries",
    ]
    with pytest.raises(ValueError, match="can only answer 'train', not 'probe'"):
        searching(Request("probe", request.arrays, request.config), wrong["u0"])
