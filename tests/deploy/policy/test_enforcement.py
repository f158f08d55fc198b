"""The guard around a handler: each rule by itself, the ledger behind it, and what is written down."""

import fnmatch
import json
import math
import re
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mutirao.core.arrays import Arrays
from mutirao.core.fleet import Reply, Request, Site, reply_fingerprint
from mutirao.core.parts import AnyHandler
from mutirao.deploy.policy.enforcement import PolicyHandler, Requester
from mutirao.deploy.policy.pins import architecture_of
from mutirao.deploy.policy.privacy_ledger import Ledger, cost
from mutirao.deploy.policy.rules import Policy, PrivacyRules, ReplyRules, RequestRules
from mutirao.errors import Damaged, Refused
from mutirao.privacy import RELEASES, Local, clip_update
from mutirao.privacy.accounting import add_releases, epsilon
from mutirao.randomness import rng
from mutirao.runs.audit_trail import check_chain
from mutirao.simulation.local_fleet import LocalFleet
from mutirao.training.samples import ClientData, Samples
from mutirao.training.trainer import Trainer

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
        asked=RequestRules(requests=("train", "evaluate", "fail"), min_samples=10),
        reply=ReplyRules(arrays=("*",), extras=("err*",), metrics=("loss", "accuracy"), samples_step=10, decimals=3),
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
    return PolicyHandler(handler, policy, Requester(run, "quickstart"))(
        Request(do, MODEL, {"round": 3}, extras or {}), site
    )


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
        ("asked.requests", {"asked": RequestRules(requests=("evaluate",))}),
        ("asked.min_samples", {"asked": RequestRules(requests=("train",), min_samples=58)}),
        ("asked.extras", {"asked": RequestRules(requests=("train",), extras=("control",))}),
        ("reply.arrays", {"reply": ReplyRules(arrays=("w",), extras=("*",), metrics=("*",))}),
        ("reply.extras", {"reply": ReplyRules(arrays=("*",), extras=(), metrics=("*",))}),
        ("reply.metrics", {"reply": ReplyRules(arrays=("*",), extras=("*",), metrics=("loss",))}),
        ("reply.largest", {"reply": ReplyRules(arrays=("*",), extras=("*",), metrics=("*",), largest=16_000)}),
        ("privacy.budget", {"privacy": PrivacyRules(budget=9.0)}),
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
        PolicyHandler(plain if rule == "privacy.budget" else answer, strict), {"recife": (MODEL["w"], MODEL["w"])}
    )
    failure = fleet.ask({"recife": Request("train", MODEL, extras=extras)}).failures["recife"]
    assert failure.kind == "refused"
    assert failure.reason.startswith(f"{rule}: ") or rule == "asked.min_samples"


def test_what_comes_in_besides_the_model_is_counted_and_named(policy: Policy) -> None:
    open_minded = replace(policy, asked=RequestRules(requests=("train",), extras=("c*",)))

    def use(request: Request, site: Site) -> Reply:
        return Reply({"w": request.arrays["w"] + request.extras["control"].sum()}, n=57)

    assert ask(open_minded, handler=use, extras={"control": np.ones(3)}).arrays["w"].max() == 3.0
    asked = events(open_minded)[0]
    assert (asked["bytes"], asked["extras"]) == (8 * (2000 + 1 + 3), ["control"])


def quiet() -> ReplyRules:
    return ReplyRules(arrays=("*",))


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
            ask(replace(policy, asked=RequestRules(**change)), handler=note)  # type: ignore[arg-type]
    assert called == []


def test_samples_that_cannot_be_counted_before_are_counted_after(policy: Policy) -> None:
    strict = replace(policy, asked=RequestRules(requests=("train",), min_samples=58))
    with pytest.raises(Refused, match="were used"):
        ask(strict, data=object())


def test_other_metrics_and_extras_can_be_taken_out_instead(policy: Policy) -> None:
    reply = ask(replace(policy, reply=ReplyRules(arrays=("*",), metrics=("loss",), remove=True)))
    assert (reply.metrics, reply.extras) == ({"loss": 0.123456}, {})
    with pytest.raises(Refused, match=r"reply\.arrays"):  # a model without some of its arrays would be no model
        ask(replace(policy, reply=ReplyRules(arrays=("w",), remove=True)))


def test_the_text_of_an_error_stays_at_the_site(policy: Policy) -> None:
    fleet = LocalFleet(PolicyHandler(answer, policy), {"recife": (MODEL["w"], MODEL["w"])})
    failure = fleet.ask({"recife": Request("fail", MODEL)}).failures["recife"]
    assert failure.kind == "raised"
    assert "ValueError at the site" in failure.reason
    assert SECRET not in str(failure)
    assert SECRET in events(policy)[-1]["reason"]


def test_the_site_clips_and_noises_by_itself(policy: Policy) -> None:
    clipped = ask(replace(policy, privacy=PrivacyRules(clip=2.0)))
    assert np.linalg.norm(clipped.arrays["w"]) == pytest.approx(2.0)
    assert clipped.arrays["steps"] == 0  # a counter cannot be clipped, so it stays as it came
    assert clipped.n == 50
    noised = ask(replace(policy, privacy=PrivacyRules(clip=2.0, noise=1.5)))
    assert np.std(noised.arrays["w"]) == pytest.approx(3.0, rel=0.06)
    assert noised.arrays["steps"] == 0  # a counter has no noise on it, so it stays as it came
    assert noised.n == 1
    another = ask(replace(policy, privacy=PrivacyRules(clip=2.0, noise=1.5)))
    assert (another.arrays["w"] != noised.arrays["w"]).all()
    with pytest.raises(Refused, match=r"privacy\.clip"):
        ask(replace(policy, privacy=PrivacyRules(clip=2.0)), handler=lambda r, s: Reply({"other": np.zeros(3)}, n=57))


def test_the_ledger_counts_over_runs_and_processes_and_stops_hard(policy: Policy) -> None:
    cover = PrivacyRules(clip=1.0, noise=10.0, budget=4.0, run_budget=3.0)
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

    strict = replace(policy, reply=ReplyRules(arrays=("*",), metrics=("epsilon",)), privacy=PrivacyRules(budget=9.0))
    site = Site("recife", (MODEL["w"], MODEL["w"]))
    for _ in range(2):
        PolicyHandler(private, strict)(Request("train", MODEL), site)
    assert Ledger(strict.ledger).total().tolist() == [[2.0, 0.5, 6.0]]


def test_a_damaged_ledger_stops_everything(policy: Policy) -> None:
    policy.ledger.write_text("{")
    with pytest.raises(Damaged, match="the privacy spent is unknown"):
        Ledger(policy.ledger)
    strict = replace(policy, reply=quiet(), privacy=PrivacyRules(clip=1.0, noise=10.0, budget=4.0))
    with pytest.raises(Exception, match="Damaged at the site"):
        ask(strict, handler=plain)
    assert events(strict)[-1]["event"] == "raised"


def test_two_requests_at_once_lose_neither_events_nor_spending(policy: Policy) -> None:
    strict = replace(policy, reply=quiet(), privacy=PrivacyRules(clip=1.0, noise=50.0, budget=9.0))
    threads = [threading.Thread(target=lambda: [ask(strict, handler=plain) for _ in range(5)]) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(events(strict)) == 40
    assert Ledger(strict.ledger).total()[0, 2] == 20


def linear(**settings: Any) -> Trainer:
    from torch import nn

    return Trainer(lambda: nn.Linear(6, 3), **settings)


@pytest.fixture
def hospital() -> Site:
    draw = np.random.default_rng(3)
    x, y = draw.normal(size=(130, 6)).astype(np.float32), np.arange(130) % 3
    return Site("recife", ClientData((x[:120], y[:120]), (x[120:], y[120:])))  # type: ignore[arg-type]


def without_seeded_noise(request: Request, reply: Reply, deviation: float, site: str) -> Arrays:
    """What a server that knows the seed makes of a noised reply."""
    draw = rng(int(request.config["seed"]), int(request.config["round"]), "privacy", site)
    return {k: reply.arrays[k] - draw.normal(0.0, deviation, reply.arrays[k].shape) for k in sorted(reply.arrays)}


def test_noise_from_the_seed_is_taken_off_by_the_server_and_counts_as_none(policy: Policy, hospital: Site) -> None:
    strict = replace(
        policy,
        reply=ReplyRules(arrays=("*",), metrics=("epsilon", "epsilon_next")),
        privacy=PrivacyRules(budget=1000.0),
    )
    private = Local(noise=1.0, clip=0.5, repeatable=True).at_client(linear())
    request = Request("train", linear().initial(0), {"seed": 7, "round": 1})
    told = private(request, replace(hospital, state={}))
    update, _ = clip_update(request.arrays, linear()(request, hospital).arrays, 0.5)
    for name, found in without_seeded_noise(request, told, 0.5, "recife").items():
        np.testing.assert_allclose(found - request.arrays[name], update[name], atol=1e-6)  # the attack: nothing is left
    with pytest.raises(Refused) as caught:
        PolicyHandler(private, strict, Requester(repeatable=True))(request, hospital)
    assert (caught.value.rule, str(caught.value)[-33:]) == (
        "privacy.budget",
        "epsilon would be inf, 1000 is the most"[-33:],
    )
    assert not strict.ledger.exists()
    assert events(strict)[-1]["rule"] == "privacy.budget"
    honest = Local(noise=1.0, clip=0.5).at_client(linear())
    assert PolicyHandler(honest, strict)(request, hospital).metrics["epsilon"] < 1000.0


@pytest.mark.parametrize("noise", [0.0, 1e-200, 1e-310, 1e-9])
def test_noise_too_small_to_count_is_no_way_around_the_budget(policy: Policy, noise: float) -> None:
    for accountant in ("rdp", "prv"):
        cover = PrivacyRules(budget=1e6, accountant=accountant)  # type: ignore[arg-type]
        assert cost(add_releases(None, noise, 1.0, 1), cover) > 1e6
        with pytest.raises(Refused, match=r"privacy\.budget"):
            Ledger(policy.ledger).charge(cover, "1", add_releases(None, noise, 1.0, 1))


@pytest.mark.parametrize("most", [1, 2, 99, 101, -1, 0, True, "100", 100.0, 1e9])
@pytest.mark.parametrize("do", ["probe", "train"])
def test_no_probe_shrinks_to_single_samples(policy: Policy, hospital: Site, do: str, most: Any) -> None:
    strict = replace(policy, asked=RequestRules(requests=("train", "probe"), min_samples=50))
    told = replace(strict, reply=ReplyRules(arrays=("*",), metrics=("*",)))
    config = {"seed": 0, "round": 1, "extras": "rms_loss", "probe_samples": most}
    with pytest.raises(Refused) as caught:
        PolicyHandler(linear(), told)(Request(do, linear().initial(0), config), hospital)
    assert caught.value.rule == "asked.probe_samples"
    assert (
        "loss"
        in PolicyHandler(linear(), told)(
            Request(do, linear().initial(0), config | {"probe_samples": 100}), hospital
        ).metrics
    )


def test_two_probes_would_tell_the_loss_of_one_sample(hospital: Site) -> None:
    """What the rule is for: without it the loss of sample 60 is 61 times one mean less 60 times the other."""
    arrays = linear().initial(0)
    means = [
        linear()(Request("probe", arrays, {"probe_samples": most}), hospital).metrics["loss"] * most
        for most in (60, 61)
    ]
    alone = Site("x", Samples(hospital.data.train.x[60:61], hospital.data.train.y[60:61]))
    assert means[1] - means[0] == pytest.approx(linear()(Request("probe", arrays), alone).metrics["loss"], abs=1e-4)


def test_a_probe_on_fewer_than_the_least_samples_is_refused(policy: Policy, hospital: Site) -> None:
    strict = replace(
        policy,
        asked=RequestRules(requests=("train", "probe"), min_samples=110),
        reply=ReplyRules(arrays=("*",), metrics=("*",)),
    )
    arrays, config = linear().initial(0), {"seed": 0, "round": 1}
    for do, more in (("probe", {}), ("train", {"extras": "gradient_norm"})):
        with pytest.raises(Refused, match="a probe uses 100 samples"):
            PolicyHandler(linear(), strict)(Request(do, arrays, config | more), hospital)
    assert PolicyHandler(linear(), strict)(Request("train", arrays, config), hospital).n == 120
    every = replace(strict, reply=ReplyRules(("*",), ("*",), ("*",)))  # errors are of all samples: that is no probe
    asked = Request("train", arrays, config | {"extras": "squared_errors"})
    assert len(PolicyHandler(linear(), every)(asked, hospital).extras["squared_errors"]) == 120


def test_the_least_number_of_samples_holds_for_those_that_are_judged_by(policy: Policy, hospital: Site) -> None:
    strict = replace(policy, asked=RequestRules(requests=("evaluate",), min_samples=50))
    with pytest.raises(Refused, match=r"asked\.min_samples: fewer than 50 samples were used"):
        PolicyHandler(linear(), strict)(
            Request("evaluate", linear().initial(0)), hospital
        )  # 120 to train on, 10 to judge by


@pytest.mark.parametrize(("used", "said"), [(5, "were used"), (100, "were left out"), (70, ""), (120, "")])
def test_what_a_request_leaves_out_must_not_be_few_either(policy: Policy, hospital: Site, used: int, said: str) -> None:
    strict = replace(policy, asked=RequestRules(requests=("train",), min_samples=50))

    def some(request: Request, site: Site) -> Reply:  # as a head of groups that has only some classes
        return Reply({}, n=used)

    request = Request("train", MODEL)
    if not said:
        assert PolicyHandler(some, strict)(request, hospital).n == used // 10 * 10
        return
    with pytest.raises(Refused, match=rf"asked\.min_samples: fewer than 50 .*{said}"):
        PolicyHandler(some, strict)(request, hospital)


@pytest.mark.parametrize("do", ["train", "probe", "evaluate"])
def test_a_head_of_few_classes_does_not_shrink_what_is_told_of(policy: Policy, do: str) -> None:
    """A server of groups names the classes of a head, and so which samples are trained on or judged by."""
    from mutirao.clustering.signatures import Bias
    from mutirao.experiments.group_client import GroupMember

    def trainers(outputs: int) -> Trainer:
        from torch import nn

        return Trainer(lambda: nn.Linear(6, outputs))

    draw, y = np.random.default_rng(0), np.array([0] * 60 + [1] * 60 + [2] * 3)
    data = Samples(draw.normal(size=(123, 6)).astype(np.float32), y)
    site = Site("recife", ClientData(data, data))
    member = GroupMember(trainers, 3, Bias(), 1, "weight")
    strict = replace(
        policy, asked=RequestRules(requests=(do,), min_samples=50), reply=ReplyRules(arrays=("*",), metrics=("*",))
    )

    def told(classes: str) -> Reply:
        config = {"seed": 0, "round": 1, "classes": classes}
        return PolicyHandler(member, strict)(Request(do, trainers(len(classes.split(","))).initial(0), config), site)

    assert told("0,1,2").n == 123
    assert told("0").n == 60
    with pytest.raises(Refused, match=r"asked\.min_samples"):
        told("2")  # three samples
    with pytest.raises(Refused, match=r"asked\.min_samples"):
        told("0,1")  # all but three samples


def test_figures_of_few_samples_kept_back_do_not_leave_with_an_update(policy: Policy, hospital: Site) -> None:
    from torch import nn

    from mutirao.systems.images.client import Hospital

    strict = replace(
        policy, asked=RequestRules(requests=("train",), min_samples=50), reply=ReplyRules(("*",), (), ("*",))
    )
    trainer = Hospital(lambda: nn.Linear(6, 3))
    request = Request("train", trainer.initial(0), {"seed": 0, "round": 1})
    assert "val_acc" in trainer(request, hospital).metrics  # found on ten
    with pytest.raises(Refused, match="samples were kept back to validate on"):
        PolicyHandler(trainer, strict)(request, hospital)


def test_a_model_of_whole_numbers_does_not_escape_the_clip(policy: Policy, hospital: Site) -> None:
    cover = replace(policy, reply=quiet(), privacy=PrivacyRules(clip=1e-3))
    trainer, config = linear(lr=1.0), {"seed": 0, "round": 1}
    sent = {k: np.round(v * 10).astype(np.int64) for k, v in trainer.initial(0).items()}
    moved = trainer(Request("train", sent, config), hospital).arrays
    assert math.sqrt(sum(float(np.square(moved[k] - sent[k]).sum()) for k in sent)) > 0.1  # the update as it is
    plain = replace(policy, reply=ReplyRules(arrays=("*",), metrics=("*",)), privacy=cover.privacy)
    with pytest.raises(Refused, match=r"privacy\.clip: an array of the update is of another kind"):
        PolicyHandler(trainer, plain)(Request("train", sent, config), hospital)
    floats = {k: v.astype(np.float32) for k, v in sent.items()}
    reply = PolicyHandler(trainer, plain)(Request("train", floats, config), hospital)
    assert math.sqrt(sum(float(np.square(reply.arrays[k] - sent[k]).sum()) for k in sent)) < 1.1e-3
    assert {k: v.dtype for k, v in reply.arrays.items()} == {k: v.dtype for k, v in floats.items()}


def test_an_update_of_another_shape_is_not_stretched_around_the_clip(policy: Policy) -> None:
    def wider(request: Request, site: Site) -> Reply:
        return Reply({"w": np.ones((50, 40)), "steps": np.array(1)}, n=57)

    narrow = {"w": np.zeros((1, 40)), "steps": np.array(0)}
    site = Site("recife", (np.zeros((57, 2)), np.zeros(57)))
    with pytest.raises(Refused, match=r"privacy\.clip"):
        PolicyHandler(wider, replace(policy, privacy=PrivacyRules(clip=1.0)))(Request("train", narrow), site)


def test_another_architecture_than_pinned_is_refused_before_the_handler_is_called(policy: Policy) -> None:
    strict = replace(policy, pinned={"quickstart": {"architecture": architecture_of(MODEL)}})
    assert ask(strict).n == 50
    for wrong in (
        {"w": np.zeros((50, 4000)), "steps": np.array(0)},
        {"w": np.zeros((50, 40), np.float32), "steps": np.array(0)},
        {"v": np.zeros((50, 40)), "steps": np.array(0)},
        {"w": np.zeros((50, 40))},
        {},
    ):
        with pytest.raises(Refused) as caught:
            PolicyHandler(never, strict, Requester("1", "quickstart"))(
                Request("train", wrong), Site("recife", (np.zeros(57), np.zeros(57)))
            )
        assert caught.value.rule == "pinned.architecture"


@pytest.mark.parametrize(("key", "agreed", "told"), [("lr", 0.1, 5.0), ("epochs", 5, 1), ("batch_size", 16, 100_000)])
@pytest.mark.parametrize("where", ["pinned", "settings"])
def test_what_is_pinned_or_insisted_on_cannot_be_told_otherwise(
    policy: Policy, hospital: Site, key: str, agreed: float, told: float, where: str
) -> None:
    """Or one step on all samples, with which an update is easily read, would be a word in a request."""
    pins = {"quickstart": {key: agreed}} if where == "pinned" else {}
    strict = replace(policy, pinned=pins, settings={key: agreed} if where == "settings" else {})
    trainer = linear()

    def asked(handler: AnyHandler, **config: Any) -> Reply:
        request = Request("train", trainer.initial(0), {"seed": 0, "round": 1, **config})
        return PolicyHandler(handler, strict, Requester("1", "quickstart"))(request, hospital)

    with pytest.raises(Refused) as caught:
        asked(never, **{key: told})
    assert caught.value.rule == f"pinned.{key}"
    assert asked(trainer).n == asked(trainer, **{key: agreed}).n
    assert events(strict)[1]["rule"] == f"pinned.{key}"


def test_no_pull_that_the_server_chooses_leaves_one_sample_alone_in_an_update(policy: Policy, hospital: Site) -> None:
    """With mu = 1 / lr each step first takes back all that was before it: y <- y - lr g(y) - (y - x) = x - lr g(y)."""
    trainer = linear(lr=0.1, epochs=2, batch_size=17)  # of 120 samples one is left for the last step
    model = trainer.initial(0)

    def nearest_sample(arrays: Arrays) -> float:
        moved = {k: arrays[k] - model[k] for k in model}
        found = moved["weight"][0] / moved["bias"][0]
        away = np.linalg.norm(hospital.data.train.x.numpy() - found, axis=1)
        return float(away.min() / np.linalg.norm(found))

    def asked(strict: Policy, **config: Any) -> Arrays:
        return PolicyHandler(trainer, strict)(
            Request("train", model, {"seed": 0, "round": 1, **config}), hospital
        ).arrays

    assert nearest_sample(asked(policy)) > 0.1
    crafted = Request("train", model, {"seed": 0, "round": 1, "mu": 10.0})
    assert nearest_sample(trainer(crafted, hospital).arrays) < 1e-4  # the attack
    agreed = replace(policy, asked=replace(policy.asked, told=("mu=0.1", "correct=feddyn")))
    assert nearest_sample(asked(agreed, mu=0.1)) > 0.1
    for strict, told in ((policy, {"mu": 10.0}), (agreed, {"mu": 10.0}), (policy, {"correct": "feddyn"})):
        with pytest.raises(Refused) as caught:
            asked(strict, **told)
        assert caught.value.rule == "asked.told"
    assert events(policy)[-2]["told"] == ["correct=feddyn"]


def never(request: Request, site: Site) -> Reply:
    raise AssertionError("this must not be done")


NAME = st.text("abw_*?[]", min_size=1, max_size=4)
VALUES = st.dictionaries(NAME, st.integers(0, 3).map(lambda n: np.zeros(n)), max_size=3)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    arrays=VALUES,
    extras=VALUES,
    metrics=st.dictionaries(NAME, st.floats(-9, 9), max_size=3),
    n=st.integers(0, 30),
    rules=st.builds(
        ReplyRules,
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
    policy: Policy, arrays: Any, extras: Any, metrics: Any, n: int, rules: ReplyRules, least: int
) -> None:
    strict = replace(policy, asked=RequestRules(requests=("train",), min_samples=least), reply=rules)
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


def test_whoever_agrees_says_no_more_than_its_policy_lets_it(policy: Policy) -> None:
    def agrees(request: Request, site: Site) -> Reply:
        extras = {"versions": np.zeros(9, np.uint8), "counts": np.zeros(5, np.uint8)}
        return Reply(MODEL, extras, {"loss": 0.5}, 57)

    asked = replace(policy.asked, requests=("agree",))
    for reply, cover, leaves in (
        (ReplyRules(), PrivacyRules(), []),  # `remove` is false, and it is no reason to refuse
        (ReplyRules(extras=("counts",)), PrivacyRules(), ["counts"]),
        (ReplyRules(extras=("*",)), PrivacyRules(), ["counts", "versions"]),
        (ReplyRules(extras=("*",)), PrivacyRules(budget=1.0), []),  # what is not noised would be on no account
    ):
        out = ask(replace(policy, asked=asked, reply=reply, privacy=cover), "agree", agrees)
        assert (out.arrays, sorted(out.extras), out.metrics, out.n) == ({}, leaves, {}, 1)
    with pytest.raises(Refused, match="takes no part: add 'agree' to requests") as refused:
        ask(policy, "agree", agrees)
    assert refused.value.rule == "asked.requests"
