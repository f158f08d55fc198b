"""What the pages and `site status --json` say, from folders as a server and a site leave them."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from mutirao.cli import main
from mutirao.core.fleet import Reply, Request, Site
from mutirao.deploy.admin.facts import facts_as_lines, overview, versions_in
from mutirao.deploy.keys import key_fingerprint
from mutirao.deploy.layout import Node, Server
from mutirao.deploy.policy.enforcement import PolicyHandler, Requester
from mutirao.deploy.policy.privacy_ledger import Ledger, append_event, cost
from mutirao.deploy.policy.rules import load_policy
from mutirao.deploy.provisioning import create_server, create_site, renew, store_key
from mutirao.deploy.server.control_calls import admit, dismiss
from mutirao.deploy.site.pause import set_pause
from mutirao.errors import Refused
from mutirao.runs.audit_trail import Audit, check_chain
from superlinks import FakeLink

SINCE = "2026-01-02T03:04:05+00:00"


@pytest.fixture
def server(tmp_path: Path) -> Server:
    return create_server(tmp_path / "server", ["localhost"])


@pytest.fixture
def sites(server: Server, tmp_path: Path) -> list[Node]:
    named = [("recife", "c0"), ("natal", "c1")]
    return [create_site(tmp_path / n, n, "localhost:9092", server.ca, client=client) for n, client in named]


@pytest.fixture
def link(monkeypatch: pytest.MonkeyPatch) -> FakeLink:
    return FakeLink(monkeypatch)


def make_run(folder: Path, rows: list[str]) -> None:
    folder.mkdir(parents=True)
    (folder / "config.toml").write_text('recipe = "quickstart"\nrounds = 3\n')
    (folder / "clients.csv").write_text(
        "\n".join(["round,client,try,replied,n,weight,age,failure,rejected", *rows]) + "\n"
    )
    (folder / "history.csv").write_text("round,accuracy\n1,0.5\n2,0.6\n")
    trail = Audit(folder / "audit.jsonl")
    trail.append("started", site_versions={"c0": {"mutirao": "1.0", "flwr": "1.2"}})
    for number in (1, 2):
        trail.append("round", round=number)


def test_the_server_knows_who_is_there_since_when_and_what_each_did_last(
    server: Server, sites: list[Node], link: FakeLink
) -> None:
    for site in sites:
        admit(server.folder, store_key(server.folder, site.public_key))
    link.connect(sites[0], SINCE)
    refusal = "refused: asked.requests: 'probe' may not be asked here"
    rows = ["1,c0,1,1,50,0.5,1,,", "1,c1,1,1,50,0.5,1,,", "2,c0,1,1,50,1.0,1,,"]
    make_run(server.runs / "quickstart", [*rows, *(f"2,c1,{i},0,0,0.0,1,{refusal}," for i in (1, 2))])
    facts = overview(server, works=True)
    recife, natal = sorted(facts["sites"], key=lambda s: str(s["client"]))
    assert (recife["name"], recife["connected"], recife["since"]) == ("recife", True, SINCE)
    assert (natal["admitted"], natal["connected"], natal["since"]) == (True, False, "")
    assert recife["versions"] == {"mutirao": "1.0", "flwr": "1.2"}
    assert natal["versions"] == {}
    events = check_chain(server.runs / "quickstart" / "audit.jsonl")[0]
    assert recife["last_round"] == {"run": "quickstart", "round": 2, "time": events[2]["time"]}
    assert natal["last_round"]["round"] == 1
    (refused,) = facts["refused"]
    assert (refused["site"], refused["rule"], refused["times"]) == ("natal", "asked.requests", 2)
    assert refused["reason"] == "'probe' may not be asked here"
    (run,) = facts["run_folders"]
    assert (run["name"], run["recipe"], run["state"], run["rounds"], run["of"]) == (
        *("quickstart", "quickstart", "stopped"),
        *(2, 3),
    )
    assert facts_as_lines(facts)[0] == "natal: not connected, answered round 1 of quickstart"


def test_a_run_that_was_written_elsewhere_is_known_by_the_servers_trail(server: Server, tmp_path: Path) -> None:
    make_run(tmp_path / "elsewhere", [])
    assert overview(server, works=False)["run_folders"] == []
    append_event(server.trail, "submitted", run="7", recipe="quickstart", out=str(tmp_path / "elsewhere"))
    assert [run["name"] for run in overview(server, works=False)["run_folders"]] == [str(tmp_path / "elsewhere")]


def test_while_the_superlink_is_away_nobody_is_called_connected_or_gone(
    server: Server, sites: list[Node], link: FakeLink
) -> None:
    admit(server.folder, store_key(server.folder, sites[0].public_key))
    link.connect(sites[0], SINCE)
    (site,) = overview(server, works=False)["sites"]
    assert (site["connected"], site["admitted"], site["since"]) == (None, None, "")
    link.away = True
    facts = overview(server, works=True)
    assert facts["sites"][0]["connected"] is None
    assert facts["problems"] == ["the SuperLink does not say who is connected: nobody listens"]


def test_what_the_superlink_itself_refused_is_named_by_site(server: Server, sites: list[Node]) -> None:
    key = store_key(server.folder, sites[0].public_key)
    server.logs.mkdir()
    line = "refused: push-messages of the site with the key {}: a message in the name of another\n"
    other = "SHA256:" + "A" * 43
    (server.logs / "superlink.log").write_text("INFO\n" + line.format(key_fingerprint(key)) + line.format(other))
    found = overview(server, works=False)["refused"]
    assert [(r["by"], r["site"], r["rule"]) for r in found] == [
        *(("server", other, "push-messages"), ("server", "recife", "push-messages"))
    ]


def test_admission_and_dismissal_are_chained_and_a_change_shows(
    server: Server, sites: list[Node], link: FakeLink
) -> None:
    admit(server.folder, kept := store_key(server.folder, sites[0].public_key))
    admit(server.folder, kept)  # again does no harm, and is no event
    dismiss(server.folder, "recife")
    shown = overview(server, works=True)
    assert [(e["event"], e["site"]) for e in shown["trail"]] == [("dismissed", "recife"), ("admitted", "recife")]
    assert (shown["sites"], shown["problems"]) == ([], [])
    server.trail.write_text(server.trail.read_text().replace("recife", "natal", 1))
    assert overview(server, works=True)["problems"] == ["audit.jsonl: line 1 (admitted) was altered"]


def test_a_certificate_that_ends_soon_is_a_warning_and_an_ended_one_a_failure(server: Server) -> None:
    assert [c["state"] for c in overview(server, works=False)["certificates"]] == ["ok", "ok"]
    renew(server.folder, days=29)
    (own, _) = overview(server, works=False)["certificates"]
    assert (own["days_left"], own["state"]) == (28, "warn")
    renew(server.folder, days=0)
    assert overview(server, works=False)["certificates"][0]["state"] == "fail"
    server.certificate.write_text("nothing")
    assert "holds no certificate" in overview(server, works=False)["certificates"][0]["problem"]


def test_a_key_that_cannot_be_read_does_not_hide_the_others(server: Server, sites: list[Node]) -> None:
    store_key(server.folder, sites[0].public_key)
    (server.sites / "broken.pub").write_text("?")
    broken, recife = overview(server, works=False)["sites"]
    assert broken["key"].startswith("cannot be read: ")
    assert recife["name"] == "recife"


def test_versions_are_taken_as_text_whatever_a_run_holds() -> None:
    events = [{"site_versions": {"c0": {"flwr": 1}, "c1": "?"}}, {"site_versions": "?"}, {}]
    assert versions_in(events) == {"c0": {"flwr": "1"}}


def answer(request: Request, site: Site) -> Reply:
    return Reply({"w": request.arrays["w"] + 1.0}, n=60)


BUDGET = '[privacy]\nclip = 1.0\nnoise = 4.0\nbudget = 8.0\n[asked]\nrequests = ["train"]\n[reply]\narrays = ["*"]\n'


def ask(node: Node, do: str = "train", number: float = 1, run: str = "7") -> None:
    handler = PolicyHandler(answer, load_policy(node.policy_file), Requester(run, "quickstart", node.name))
    handler(Request(do, {"w": np.zeros(4)}, {"round": number}), Site(node.name, None))


def test_a_site_sees_what_was_asked_what_left_what_was_refused_and_what_is_spent(sites: list[Node]) -> None:
    node = sites[0]
    node.policy_file.write_text(BUDGET)
    ask(node)
    ask(node, number=2)
    with pytest.raises(Refused, match=r"asked\.requests"):
        ask(node, "probe", run="8")
    set_pause(node.folder)
    with pytest.raises(Refused, match="paused"):
        ask(node, number=float("nan"), run="8")
    facts = overview(node, works=False)
    json.dumps(facts, allow_nan=False)  # what a server may have sent as a round is still JSON
    assert facts["paused"].startswith("20")
    assert {k: facts["totals"][k] for k in ("asked", "sent", "refused", "raised", "bytes_out")} == {
        **{"asked": 4, "sent": 2, "refused": 2, "raised": 0},
        "bytes_out": 2 * (4 * 8 + 8),
    }
    assert [(r["run"], r["asked"], r["sent"], r["refused"]) for r in facts["by_run"]] == [
        ("8", 2, 0, 2),
        ("7", 2, 2, 0),
    ]
    assert {(r["rule"], r["times"]) for r in facts["by_rule"]} == {("asked.requests", 1), ("paused", 1)}
    last, first = facts["requests"][0], facts["requests"][-1]
    assert (last["answer"], last["rule"], last["reason"]) == (
        *("refused", "paused"),
        "this site is paused by those who run it",
    )
    assert (first["do"], first["round"], first["answer"], first["arrays"], first["n"]) == ("train", 1, "sent", ["w"], 1)
    policy = load_policy(node.policy_file)
    spent = cost(Ledger(policy.ledger).total(), policy.privacy)
    assert facts["budget"] == {
        **{"spent": spent, "most": 8.0, "run_most": None, "delta": 1e-5},
        "runs": {"7": spent},
    }
    assert 0 < first["epsilon"] < spent < 8


def test_a_request_that_is_still_worked_on_and_one_that_raised_are_told_apart(sites: list[Node]) -> None:
    node = replace(sites[0])
    policy = load_policy(node.policy_file)
    about = {"run": "7", "site": "recife", "do": "train", "round": 1}
    append_event(policy.audit, "asked", bytes=10, **about)
    append_event(policy.audit, "raised", reason="ValueError: no such column", **about)
    append_event(policy.audit, "asked", bytes=10, **about | {"round": 2})
    answers = [(r["round"], r["answer"], r.get("reason")) for r in overview(node, works=False)["requests"]]
    assert answers == [(2, "none yet", None), (1, "raised", "ValueError: no such column")]


def test_broken_records_are_said_and_the_rest_is_shown(sites: list[Node]) -> None:
    node = sites[0]
    node.policy_file.write_text(BUDGET)
    ask(node)
    trail = node.folder / "audit.jsonl"
    trail.write_text(trail.read_text().replace('"n": 1,', '"n": 2,'))
    (node.folder / "ledger.json").write_text("?")
    facts = overview(node, works=False)
    assert facts["totals"]["sent"] == 1
    assert facts["budget"] is None
    assert ["was altered" in p or "the privacy spent is unknown" in p for p in facts["problems"]] == [True, True]
    node.policy_file.write_text("nonsense = 1\n")
    assert "unknown key 'nonsense'" in overview(node, works=False)["problems"][0]


def test_the_status_has_the_same_facts_for_machines(server: Server, sites: list[Node]) -> None:
    store_key(server.folder, sites[0].public_key)
    for place, keys in ((server, {"sites", "certificates", "refused"}), (sites[0], {"totals", "budget", "paused"})):
        done = CliRunner().invoke(main, ["site", "status", str(place.folder), "--json"])
        told = json.loads(done.output)
        assert (done.exit_code, told["runs"], told["works"]) == (1, False, False)
        assert keys <= told.keys()
        assert overview(place, works=False).items() <= told.items()
