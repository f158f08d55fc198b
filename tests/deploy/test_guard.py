"""The guard around a handler: each rule by itself, the ledger behind it, and what is written down."""

import fnmatch
import json
import re
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mutirao.accounting import add_releases, epsilon
from mutirao.core.arrays import Arrays
from mutirao.core.fingerprints import reply_fingerprint
from mutirao.core.fleet import Reply, Request, Site
from mutirao.core.parts import AnyHandler
from mutirao.deploy.guard import Asker, guarded
from mutirao.deploy.ledger import Ledger
from mutirao.deploy.policy import Asked, Cover, Leaving, Policy
from mutirao.errors import Damaged, Refused
from mutirao.fleets.local import LocalFleet
from mutirao.privacy import RELEASES
from mutirao.runs.audit import check_chain

MODEL: Arrays = {"w": np.zeros((50, 40)), "steps": np.array(0)}
SECRET = "maria, 1971-03-02"


def answer(request: Request, site: Site) -> Reply:
    if request.do == "fail":
        raise ValueError(f"cannot parse {SECRET!r}")
    if request.do == "evaluate":
        return Reply({}, metrics={"loss": 0.123456}, n=57)
    moved = {"w": request.arrays["w"] + 1.0, "steps": np.array(9)}
    return Reply(moved, {"errors": np.arange(5.0)}, {"loss": 0.123456, "accuracy": 0.5}, 57)


@pytest.fixture
def policy(tmp_path: Path) -> Policy:
    return Policy(
        asked=Asked(requests=("train", "evaluate", "fail"), min_samples=10),
        reply=Leaving(arrays=("*",), extras=("err*",), metrics=("loss", "accuracy"), samples_step=10, decimals=3),
        audit=tmp_path / "audit.jsonl",
        ledger=tmp_path / "ledger.json",
    )


def ask(
    policy: Policy,
    do: str = "train",
    handler: AnyHandler = answer,
    data: Any = None,
    run: str = "1",
    extras: Arrays | None = None,
) -> Reply:
    site = Site("recife", (np.zeros((57, 2)), np.zeros(57)) if data is None else data)
    return guarded(handler, policy, Asker(run, "quickstart"))(Request(do, MODEL, {"round": 3}, extras or {}), site)


def events(policy: Policy) -> list[dict[str, Any]]:
    found, problems = check_chain(policy.audit)
    assert problems == []
    return found


def test_what_is_allowed_leaves_rounded_and_is_written_down(policy: Policy) -> None:
    reply = ask(policy)
    assert reply.metrics == {"loss": 0.123, "accuracy": 0.5}
    assert reply.n == 50
    np.testing.assert_array_equal(reply.arrays["w"], 1.0)
    asked, sent = events(policy)
    assert (asked["event"], asked["do"], asked["round"], asked["recipe"]) == ("asked", "train", 3, "quickstart")
    assert (sent["event"], sent["site"], sent["n"]) == ("sent", "recife", 50)
    assert (sent["arrays"], sent["extras"], sent["metrics"]) == (["steps", "w"], ["errors"], ["accuracy", "loss"])
    assert sent["reply"] == reply_fingerprint(reply)
    assert sent["bytes"] == 8 * (2000 + 1 + 5 + 3)


@pytest.mark.parametrize(
    ("rule", "change"),
    [
        ("asked.requests", {"asked": Asked(requests=("evaluate",))}),
        ("asked.min_samples", {"asked": Asked(requests=("train",), min_samples=58)}),
        ("asked.extras", {"asked": Asked(requests=("train",), extras=("control",))}),
        ("reply.arrays", {"reply": Leaving(arrays=("w",), extras=("*",), metrics=("*",))}),
        ("reply.extras", {"reply": Leaving(arrays=("*",), extras=(), metrics=("*",))}),
        ("reply.metrics", {"reply": Leaving(arrays=("*",), extras=("*",), metrics=("loss",))}),
        ("reply.largest", {"reply": Leaving(arrays=("*",), extras=("*",), metrics=("*",), largest=16_000)}),
        ("privacy.budget", {"privacy": Cover(budget=9.0)}),
    ],
)
def test_each_rule_refuses_by_name_and_nothing_leaves(policy: Policy, rule: str, change: dict[str, Any]) -> None:
    strict = replace(policy, **change) if "privacy" not in change else replace(policy, reply=quiet(), **change)
    extras: Arrays = {"secret": np.zeros(3)} if rule == "asked.extras" else {}
    with pytest.raises(Refused) as caught:
        ask(strict, handler=plain if rule == "privacy.budget" else answer, extras=extras)
    assert caught.value.rule == rule
    *_, last = events(strict)
    assert (last["event"], last["rule"]) == ("refused", rule)
    assert "sent" not in {e["event"] for e in events(strict)}
    fleet = LocalFleet(
        guarded(plain if rule == "privacy.budget" else answer, strict), {"recife": (MODEL["w"], MODEL["w"])}
    )
    failure = fleet.ask({"recife": Request("train", MODEL, extras=extras)}).failures["recife"]
    assert failure.kind == "refused"
    assert failure.reason.startswith(f"{rule}: ") or rule == "asked.min_samples"


def test_what_comes_in_besides_the_model_is_counted_and_named(policy: Policy) -> None:
    open_minded = replace(policy, asked=Asked(requests=("train",), extras=("c*",)))

    def use(request: Request, site: Site) -> Reply:
        return Reply({"w": request.arrays["w"] + request.extras["control"].sum()}, n=57)

    assert ask(open_minded, handler=use, extras={"control": np.ones(3)}).arrays["w"].max() == 3.0
    asked = events(open_minded)[0]
    assert (asked["bytes"], asked["extras"]) == (8 * (2000 + 1 + 3), ["control"])


def quiet() -> Leaving:
    return Leaving(arrays=("*",))


def plain(request: Request, site: Site) -> Reply:
    return Reply(answer(request, site).arrays, n=57)


def test_an_empty_policy_lets_nothing_leave(policy: Policy) -> None:
    for do in ("train", "evaluate"):
        with pytest.raises(Refused):
            ask(Policy(audit=policy.audit), do)


def test_the_handler_is_not_even_called_if_the_request_is_refused(policy: Policy) -> None:
    called: list[int] = []

    def note(request: Request, site: Site) -> Reply:
        called.append(1)
        return answer(request, site)

    for change in ({"requests": ()}, {"requests": ("train",), "min_samples": 1000}):
        with pytest.raises(Refused):
            ask(replace(policy, asked=Asked(**change)), handler=note)  # type: ignore[arg-type]
    assert called == []


def test_samples_that_cannot_be_counted_before_are_counted_after(policy: Policy) -> None:
    strict = replace(policy, asked=Asked(requests=("train",), min_samples=58))
    with pytest.raises(Refused, match="were used"):
        ask(strict, data=object())


def test_other_metrics_and_extras_can_be_taken_out_instead(policy: Policy) -> None:
    reply = ask(replace(policy, reply=Leaving(arrays=("*",), metrics=("loss",), remove=True)))
    assert (reply.metrics, reply.extras) == ({"loss": 0.123456}, {})
    with pytest.raises(Refused, match=r"reply\.arrays"):  # a model without some of its arrays would be no model
        ask(replace(policy, reply=Leaving(arrays=("w",), remove=True)))


def test_the_text_of_an_error_stays_at_the_site(policy: Policy) -> None:
    fleet = LocalFleet(guarded(answer, policy), {"recife": (MODEL["w"], MODEL["w"])})
    failure = fleet.ask({"recife": Request("fail", MODEL)}).failures["recife"]
    assert failure.kind == "raised"
    assert "ValueError at the site" in failure.reason
    assert SECRET not in str(failure)
    assert SECRET in events(policy)[-1]["reason"]


def test_the_site_clips_and_noises_by_itself(policy: Policy) -> None:
    clipped = ask(replace(policy, privacy=Cover(clip=2.0)))
    assert np.linalg.norm(clipped.arrays["w"]) == pytest.approx(2.0)
    assert clipped.arrays["steps"] == 9
    assert clipped.n == 50
    noised = ask(replace(policy, privacy=Cover(clip=2.0, noise=1.5)))
    assert np.std(noised.arrays["w"]) == pytest.approx(3.0, rel=0.06)
    assert noised.arrays["steps"] == 0  # a counter has no noise on it, so it stays as it came
    assert noised.n == 1
    another = ask(replace(policy, privacy=Cover(clip=2.0, noise=1.5)))
    assert (another.arrays["w"] != noised.arrays["w"]).all()
    with pytest.raises(Refused, match=r"privacy\.clip"):
        ask(replace(policy, privacy=Cover(clip=2.0)), handler=lambda r, s: Reply({"other": np.zeros(3)}, n=57))


def test_the_ledger_counts_over_runs_and_processes_and_stops_hard(policy: Policy) -> None:
    cover = Cover(clip=1.0, noise=10.0, budget=4.0, run_budget=3.0)
    strict = replace(policy, reply=quiet(), privacy=cover)
    ended = []
    for run in ("1", "2"):
        for _ in range(60):
            try:
                ask(strict, run=run, handler=plain)
            except Refused as refused:
                ended.append(refused.rule)
                break
    assert ended == ["privacy.run_budget", "privacy.budget"]
    content = json.loads(strict.ledger.read_text())
    times = {run: rows[0][2] for run, rows in content["runs"].items()}
    total = int(times["1"] + times["2"])
    assert content["runs"]["1"][0][:2] == [5.0, 1.0]  # two updates may lie 2 clip apart: half the noise counts
    assert content["epsilon"] == pytest.approx(epsilon(add_releases(None, 5.0, 1.0, total), 1e-5))
    assert content["epsilon"] <= 4.0 < epsilon(add_releases(None, 5.0, 1.0, total + 1), 1e-5)
    assert sum(e["event"] == "sent" for e in events(strict)) == total
    assert [e["epsilon"] for e in events(strict) if e["event"] == "sent"][-1] == content["epsilon"]


def test_noise_that_the_run_adds_by_itself_is_counted(policy: Policy) -> None:
    def private(request: Request, site: Site) -> Reply:
        site.state[RELEASES] = add_releases(site.state.get(RELEASES), 2.0, 0.5, 3)
        return Reply(answer(request, site).arrays, metrics={"epsilon": 1.0}, n=57)

    strict = replace(policy, reply=Leaving(arrays=("*",), metrics=("epsilon",)), privacy=Cover(budget=9.0))
    site = Site("recife", (MODEL["w"], MODEL["w"]))
    for _ in range(2):
        guarded(private, strict)(Request("train", MODEL), site)
    assert Ledger(strict.ledger).total().tolist() == [[2.0, 0.5, 6.0]]


def test_a_damaged_ledger_stops_everything(policy: Policy) -> None:
    policy.ledger.write_text("{")
    with pytest.raises(Damaged, match="nobody knows what was spent"):
        Ledger(policy.ledger)
    strict = replace(policy, reply=quiet(), privacy=Cover(clip=1.0, noise=10.0, budget=4.0))
    with pytest.raises(Exception, match="Damaged at the site"):
        ask(strict, handler=plain)
    assert events(strict)[-1]["event"] == "raised"


def test_two_requests_at_once_lose_neither_events_nor_spending(policy: Policy) -> None:
    strict = replace(policy, reply=quiet(), privacy=Cover(clip=1.0, noise=50.0, budget=9.0))
    threads = [threading.Thread(target=lambda: [ask(strict, handler=plain) for _ in range(5)]) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(events(strict)) == 40
    assert Ledger(strict.ledger).total()[0, 2] == 20


NAME = st.text("abw_*?[]", min_size=1, max_size=4)
VALUES = st.dictionaries(NAME, st.integers(0, 3).map(lambda n: np.zeros(n)), max_size=3)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    arrays=VALUES,
    extras=VALUES,
    metrics=st.dictionaries(NAME, st.floats(-9, 9), max_size=3),
    n=st.integers(0, 30),
    rules=st.builds(
        Leaving,
        arrays=st.lists(NAME, max_size=3).map(tuple),
        extras=st.lists(NAME, max_size=3).map(tuple),
        metrics=st.lists(NAME, max_size=3).map(tuple),
        remove=st.booleans(),
        largest=st.integers(0, 120),
        decimals=st.integers(0, 17),
        samples_step=st.integers(1, 9),
    ),
    least=st.integers(0, 20),
)
def test_whatever_a_handler_gives_only_what_is_allowed_leaves(
    policy: Policy, arrays: Any, extras: Any, metrics: Any, n: int, rules: Leaving, least: int
) -> None:
    strict = replace(policy, asked=Asked(requests=("train",), min_samples=least), reply=rules)
    policy.audit.unlink(missing_ok=True)
    try:
        reply = ask(strict, handler=lambda request, site: Reply(arrays, extras, metrics, n), data=object())
    except Refused:
        assert [e["event"] for e in events(strict)] == ["asked", "refused"]
        return
    kinds = {"arrays": reply.arrays, "extras": reply.extras, "metrics": reply.metrics}
    for kind, values in kinds.items():
        patterns = [re.compile(fnmatch.translate(p)) for p in getattr(rules, kind)]
        assert all(any(p.match(name) for p in patterns) for name in values)
    assert set(reply.arrays) == set(arrays)
    assert n >= least
    numbers = sum(a.size for a in [*reply.arrays.values(), *reply.extras.values()]) + len(reply.metrics)
    assert 8 * numbers < rules.largest
    assert events(strict)[-1]["event"] == "sent"
