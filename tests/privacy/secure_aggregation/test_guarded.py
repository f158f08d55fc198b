"""A site's policy and secure aggregation: updates are judged in the clear, and leave under masks."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from parties import MODEL, ask, names, update_of

from loopgrid import LoopGrid, identity
from mutirao.config import resolve
from mutirao.core.fleet import FLEETING, Reply, Request, Site, reply_fingerprint
from mutirao.deploy.flower import FlowerFleet, client_app
from mutirao.deploy.flower.client import States
from mutirao.deploy.policy.enforcement import PolicyHandler
from mutirao.deploy.policy.pins import content_hash
from mutirao.deploy.policy.rules import Policy, PrivacyRules, ReplyRules, RequestRules
from mutirao.errors import TooFewReplies
from mutirao.experiments.task import find
from mutirao.privacy import clip_update
from mutirao.privacy.secure_aggregation import SecAggPlus
from mutirao.privacy.secure_aggregation.settings import MASKED, STAGES
from mutirao.privacy.secure_aggregation.summing_fleet import SecureFleet
from mutirao.runs.execute import execute
from mutirao.runs.verify import verify_all
from mutirao.simulation.local_fleet import LocalFleet

_ = identity
SECURE = SecAggPlus()


def work(request: Request, site: Site) -> Reply:
    return update_of(site.id, request.arrays)


def guarded_fleet(folder: Path, **settings: Any) -> LocalFleet:
    """Four sites, each with a policy of its own."""
    settings = {"asked": RequestRules(("train",)), "reply": ReplyRules(("*",), (), ("loss",), remove=True)} | settings

    def handler(request: Request, site: Site) -> Reply:
        policy = Policy(audit=folder / site.id / "audit.jsonl", ledger=folder / site.id / "ledger.json", **settings)
        return PolicyHandler(work, policy, secure=SECURE)(request, site)

    for name in names(4):
        (folder / name).mkdir(parents=True)
    return LocalFleet(handler, dict.fromkeys(names(4)))


def events(folder: Path, client: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / client / "audit.jsonl").read_text().splitlines()]


def test_a_policy_judges_the_update_before_it_is_masked_and_notes_what_left(tmp_path: Path) -> None:
    inside = guarded_fleet(tmp_path, privacy=PrivacyRules(clip=0.1))
    update_noise: dict[str, list[str]] = {name: [] for name in names(4)}

    plain_ask = inside.ask

    def tap(requests: Any) -> Any:
        answers = plain_ask(requests)
        for client, reply in answers.replies.items():
            update_noise[client].append(reply_fingerprint(reply))
        return answers

    inside.ask = tap  # type: ignore[method-assign]
    reply = ask(SecureFleet(inside, SECURE, ("accuracy", "loss")), names(4)).replies[names(1)[0]]
    own = {c: update_of(c, MODEL) for c in names(4)}
    total = sum(r.n for r in own.values())
    short = {c: clip_update(MODEL, r.arrays, 0.1)[0] for c, r in own.items()}
    for name in ("w", "b"):
        mean = sum(own[c].n / total * short[c][name] for c in own)
        np.testing.assert_allclose(reply.arrays[name] - MODEL[name], mean, atol=2e-6)
    assert reply.metrics.keys() == {"loss"}  # the policy took the other one out
    for client in names(4):
        trail = events(tmp_path, client)
        assert [e["do"] for e in trail if e["event"] == "asked"] == list(STAGES)
        assert [e["reply"] for e in trail if e["event"] == "sent"] == update_noise[client]
        masked = next(e for e in trail if e["event"] == "sent" and e["do"] == MASKED)
        assert (masked["arrays"], masked["metrics"], masked["n"]) == (["update", "wide"], [], 1)


@pytest.mark.parametrize(
    ("settings", "rule"),
    [
        ({"asked": RequestRules(("evaluate",))}, "asked.requests"),
        ({"asked": RequestRules(("train",), min_samples=1000)}, "asked.min_samples"),
        ({"reply": ReplyRules((), (), ("*",))}, "reply.arrays"),
    ],
)
def test_what_a_policy_forbids_is_refused_at_the_masked_stage(
    settings: dict[str, Any], rule: str, tmp_path: Path
) -> None:
    answers = ask(SecureFleet(guarded_fleet(tmp_path, **settings), SECURE, ("loss",)), names(4))
    assert all(f.kind == "refused" and f.reason.startswith(rule) for f in answers.failures.values())
    assert not any(e["event"] == "sent" and e["do"] == MASKED for c in names(4) for e in events(tmp_path, c))


def test_a_budget_is_charged_for_the_masked_update_alone(tmp_path: Path) -> None:
    quiet = {
        "reply": ReplyRules(("*",), (), (), remove=True),
        "privacy": PrivacyRules(clip=0.1, noise=1.0, budget=50.0),
    }
    fleet = SecureFleet(guarded_fleet(tmp_path, **quiet), SECURE, ("loss",))
    assert len(ask(fleet, names(4)).replies) == 4
    sent = [e for e in events(tmp_path, names(1)[0]) if e["event"] == "sent"]
    assert [e["do"] for e in sent if "epsilon" in e] == [MASKED]


def test_secrets_of_a_sum_lie_apart_from_the_state_and_go(tmp_path: Path) -> None:
    states = States(tmp_path, "a" * 64)
    states.keep(3, {"speed": np.ones(2), FLEETING + "secagg": np.arange(4, dtype=np.uint8)})
    assert states.before("train", 4) == (3, {"speed": pytest.approx(np.ones(2))})
    assert states.now.stat().st_mode & 0o077 == 0
    assert states.take_fleeting().keys() == {FLEETING + "secagg"}
    assert states.take_fleeting() == {}  # who is asked the same at the same time has nothing to mask with
    states.keep(0, {FLEETING + "secagg": np.arange(4, dtype=np.uint8)})
    assert states.rounds() == [3]
    states.keep(3, {"speed": np.ones(2)})
    assert states.take_fleeting() == {}
    states.now.write_bytes(b"damaged")
    assert states.take_fleeting() == {}
    assert [f.name for f in states.folder.iterdir()] == ["state_000003.safetensors"]


POLICY = """
[recipes]
quickstart = "{hash}"
[settings]
{pinned}
[asked]
requests = ["train", "agree"]
[reply]
arrays = ["*"]
metrics = ["*"]
"""
SETTINGS = {"rounds": 2, "clients": 4, "per_round": 4, "hidden": 8, "epochs": 1}


def sites(folder: Path, secure: str, pinned: str) -> FlowerFleet:
    """Four nodes under policies, in a run that the server has set up with `secure`."""
    words = " ".join(f"{k}={v}" for k, v in (SETTINGS | {"secure": secure}).items())
    grid = LoopGrid(client_app(), recipe="quickstart", set=words)
    for i in range(4):
        (folder / f"c{i}").mkdir(parents=True)
        (folder / f"c{i}" / "policy.toml").write_text(POLICY.format(hash=content_hash("quickstart"), pinned=pinned))
        grid.join(name=f"c{i}", policy=str(folder / f"c{i}" / "policy.toml"))
    return FlowerFleet(grid, timeout=20, greet=20)


def test_sites_under_policies_give_the_model_of_the_local_run_and_their_trails_agree(tmp_path: Path) -> None:
    config = resolve(find("quickstart").config, SETTINGS | {"secure": "secagg+"})
    there = execute("quickstart", config, tmp_path / "there", fleet=sites(tmp_path, "secagg+", 'secure = "secagg+"'))
    assert execute("quickstart", config, tmp_path / "here")["digest"] == there["digest"]
    trails = [tmp_path / f"c{i}" / "audit.jsonl" for i in range(4)]
    good, problems = verify_all(tmp_path / "there", trails)
    assert problems == []
    assert any("agree" in line for line in good)
    assert not list(tmp_path.rglob("now.safetensors"))  # no secret outlives its sum


def test_a_site_that_pins_it_answers_no_server_that_asks_in_the_clear(tmp_path: Path) -> None:
    config = resolve(find("quickstart").config, SETTINGS)
    with pytest.raises(TooFewReplies, match="asks about this client alone, and only sums leave"):
        execute("quickstart", config, tmp_path / "run", fleet=sites(tmp_path, "none", 'secure = "secagg+"'))
    assert {e["do"] for i in range(4) for e in events(tmp_path, f"c{i}") if e["event"] == "sent"} == {"agree"}


def test_a_site_that_pins_its_own_settings_takes_part_in_no_other_sum(tmp_path: Path) -> None:
    config = resolve(find("quickstart").config, SETTINGS | {"secure": "secagg+"})
    pinned = 'secure = "secagg+"\n"secure.threshold" = 0.9'
    with pytest.raises(TooFewReplies, match=r"secure\.settings: this site sums with"):
        execute("quickstart", config, tmp_path / "run", fleet=sites(tmp_path, "secagg+", pinned))
