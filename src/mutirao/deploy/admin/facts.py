"""The facts about a server or a site, for its admin page and `site status`: state, runs, requests, spending."""

import datetime
import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from mutirao.dashboard.curves import History
from mutirao.dashboard.run_index import Shelf, mark_of
from mutirao.dashboard.run_summary import facts_of_run
from mutirao.deploy import doctor, keys
from mutirao.deploy.doctor import unreachable
from mutirao.deploy.keys import public_key_pem
from mutirao.deploy.layout import Node, Server
from mutirao.deploy.policy.privacy_ledger import Ledger, cost
from mutirao.deploy.policy.rules import Policy, PrivacyRules, load_policy
from mutirao.deploy.processes import Process, certificate_problem, is_answering, is_connected, why_not_admitted
from mutirao.deploy.server import control_calls
from mutirao.deploy.server.control_calls import server_info
from mutirao.deploy.site.pause import paused_since
from mutirao.errors import ConfigError, MutiraoError
from mutirao.report.run_state import last_lines
from mutirao.runs.audit_trail import check_chain, read_events, subtable
from mutirao.runs.reader import Columns, clean

Facts = dict[str, Any]
REFUSED = re.compile(r"refused: (?P<rule>[\w.*-]+): (?P<reason>.*)", re.DOTALL)
TEXT = 300  # characters of a site's message that are shown
SHOWN = 50  # lines of each kind


def overview(place: Server | Node, works: bool) -> Facts:
    """What the page of a server or of a site shows; `works`: it answers, or is connected, at this moment."""
    if isinstance(place, Server):
        facts: Facts = clean(server_facts(place, works))
    else:
        facts = clean(node_facts(place))
    return facts


def why_not_working(place: Server | Node, process: Process) -> str:
    """Why the SuperLink does not answer or the SuperNode is not connected, at this moment; empty if it is."""
    if isinstance(place, Server):
        if is_answering(place):
            return ""
        return certificate_problem(place) or process.reason()
    try:
        info = server_info(place.superlink, place.ca, public_key_pem(place.public_key), SERVER_TIMEOUT)
    except (OSError, ValueError) as error:
        return unreachable(error, place).text
    if not info.get("admitted"):
        return "the server does not know this site's key"
    if is_connected(process):
        return ""
    return why_not_admitted(process) or "it has lost the server, and is about to try again"


def facts_as_lines(facts: Facts) -> list[str]:
    """The facts that matter, in a few lines."""
    lines = [f"{site['name']}: {presence(site)}" for site in facts.get("sites", ())]
    if since := facts.get("paused"):
        lines.append(f"paused since {since}: every request is refused")
    if budget := facts.get("budget"):
        spent = "infinite" if budget["spent"] is None else f"{budget['spent']:.4g}"
        lines.append(f"privacy: epsilon {spent} of {budget['most'] or 'any'} spent")
    soon = [c for c in facts["certificates"] if c["state"] != "ok" and c["days_left"] is not None]
    lines += [f"{c['file']}: {c['days_left']} days left" for c in soon]
    return [*lines, *facts["problems"]]


def presence(site: Facts) -> str:
    """Whether a site is connected, in words."""
    if site["connected"] is None:
        return "unknown, as the SuperLink cannot be asked"
    if not site["admitted"]:
        return "not admitted"
    last = ""
    if latest := site["last_round"]:
        last = f", answered round {latest['round']} of {latest['run']}"
    state = "connected" if site["connected"] else "not connected"
    return f"{state}{site['since'] and ' since ' + site['since'][:19]}{last}"


@dataclass(frozen=True)
class ClientReports:
    """What one run folder records about its clients."""

    last: Mapping[str, Facts] = field(default_factory=dict)  # by client, the last round it answered
    versions: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    refused: Sequence[Facts] = ()


def run_folders(root: Path, submitted: Iterable[Path] = ()) -> list[Path]:
    """The run folders below `root`, and those elsewhere that runs were submitted for."""
    shelf = Shelf(root)
    shelf.walk()
    found = [item.path for item in shelf.items.values() if item.kind == "run"]
    # A run can be submitted with a folder of its own (`out`), anywhere on the machine.
    others = [path for path in submitted if (path / "config.toml").is_file() and (path / "audit.jsonl").is_file()]
    return list(dict.fromkeys(path.resolve() for path in [*found, *others]))


def run_facts(path: Path, root: Path) -> Facts:
    """How a run stands: state, round, when it began and last changed."""
    name = str(path)
    if path.is_relative_to(root):
        name = path.relative_to(root).as_posix()
    facts = facts_of_run(path, History(path / "history.csv"))
    chosen = ("recipe", "state", "why", "rounds", "of", "began", "changed")
    return {"name": name, **{key: facts[key] for key in chosen}}


def client_reports_in(path: Path) -> ClientReports:
    """What a run folder records about its clients; read again only if it changed."""
    return read_client_reports(path, (mark_of(path / "clients.csv"), mark_of(path / "audit.jsonl")))


@lru_cache(maxsize=64)
def read_client_reports(path: Path, mark: Any) -> ClientReports:
    """The same, cached; `mark` changes with the files."""
    events = read_events(path / "audit.jsonl")[0]
    ends = [event for event in events if event.get("event") in ("round", "failed")]
    times = {n: str(event.get("time", "")) for event in ends if isinstance(n := event.get("round"), int)}
    table = Columns(path / "clients.csv")
    last: dict[str, Facts] = {}
    # One line for each rule of a client in a round: a round that is tried again is refused again.
    refused: dict[tuple[str, int, str], Facts] = {}
    texts = [table.texts(name) for name in ("client", "replied", "failure")]
    for client, replied, failure, number in zip(*texts, table.numbers("round").tolist(), strict=True):
        at = 0
        if number == number:  # not NaN, which stands for an empty cell
            at = int(number)
        about = {"run": path.name, "round": at, "time": times.get(at, "")}
        if replied == "1":
            last[client] = about
        elif match := REFUSED.fullmatch(failure):
            rule = match["rule"]
            reason = match["reason"][:TEXT]
            often = refused.get((client, at, rule), {"times": 0})["times"] + 1
            refused[client, at, rule] = {
                "client": client,
                **about,
                "rule": rule,
                "reason": reason,
                "times": often,
            }
    return ClientReports(last, versions_in(events), list(refused.values()))


def versions_in(events: Iterable[Mapping[str, Any]]) -> dict[str, dict[str, str]]:
    """The latest versions that clients reported, by client, from the run's audit trail."""
    found: dict[str, dict[str, str]] = {}
    for event in events:
        for client, versions in subtable(event, "site_versions").items():
            if isinstance(versions, dict):
                found[str(client)] = {str(k)[:40]: str(v)[:40] for k, v in list(versions.items())[:10]}
    return found


IN_LOG = re.compile(r"refused: (?P<call>[\w-]+) of the site with the key (?P<key>SHA256:\S+): (?P<reason>.*)")
LOG_LINES = 5000


def server_facts(server: Server, works: bool) -> Facts:
    """All of it; `works`: whether the SuperLink answers and can be asked who is connected."""
    links = None
    problems: list[str] = []
    if works:
        try:
            links = control_calls.site_connections(server)
        except (OSError, ValueError, MutiraoError) as error:
            problems.append(f"the SuperLink does not say who is connected: {error}")
    trail, faults = checked_trail(server.trail)
    outs = [Path(str(event.get("out", ""))) for event in trail if event["event"] == "submitted"]
    runs = run_folders(server.runs, outs)
    reports = [client_reports_in(path) for path in runs]
    sites = [facts_of_site(key, links, reports) for key in sorted(server.sites.glob("*.pub"))]
    latest = [without_hashes(event) for event in reversed(trail[-SHOWN:])]
    return {
        "sites": sites,
        "certificates": [certificate_facts(server.certificate), certificate_facts(server.ca)],
        "run_folders": sorted((run_facts(path, server.runs) for path in runs), key=by_change, reverse=True)[:SHOWN],
        "refused": refused_facts(server, sites, reports),
        "trail": latest,
        "problems": [*problems, *faults],
    }


def checked_trail(trail: Path) -> tuple[list[Facts], list[str]]:
    """The events of an audit trail, and its faults; a trail that has not begun yet is no fault."""
    if trail.exists():
        return check_chain(trail)
    return [], []


def without_hashes(event: Facts) -> Facts:
    """An event of an audit trail without the hashes that chain it."""
    return {k: v for k, v in event.items() if k not in ("prev", "hash")}


def by_change(run: Facts) -> str:
    """Runs are sorted by when they last changed."""
    return str(run["changed"])


def facts_of_site(
    key: Path, links: dict[str, control_calls.SiteConnection] | None, reports: list[ClientReports]
) -> Facts:
    """What is known of the site with this key; `connected` is null where the SuperLink cannot be asked."""
    try:
        client = keys.client_of_key(key)
        fingerprint = keys.pem_fingerprint(keys.public_key_pem(key))
    except (OSError, ValueError, ConfigError) as error:
        client = key.stem
        fingerprint = f"cannot be read: {error}"
    link = (links or {}).get(fingerprint, control_calls.SiteConnection())
    # None is not False: without an answer of the SuperLink the page shows neither.
    admitted: bool | None = None
    connected: bool | None = None
    if links is not None:
        admitted = fingerprint in links
        connected = link.online
    rounds = [facts for folder in reports if (facts := folder.last.get(client))]
    versions: dict[str, str] = {}
    for folder in reports:
        versions = dict(folder.versions.get(client, versions))
    return {
        "name": key.stem,
        "client": client,
        "key": fingerprint,
        "admitted": admitted,
        "connected": connected,
        "since": link.since,
        "versions": versions,
        "last_round": max(rounds, key=lambda facts: str(facts["time"]), default=None),
    }


def certificate_facts(path: Path) -> Facts:
    """Until when a certificate is good, the days left, and whether that is soon."""
    try:
        ends = keys.read_certificate(path).not_valid_after_utc
        state = doctor.check_dates("", path, "").state
    except ConfigError as error:
        return {"file": path.name, "days_left": None, "until": "", "state": "fail", "problem": str(error)}
    left = (ends - datetime.datetime.now(datetime.UTC)).days
    return {"file": path.name, "days_left": left, "until": ends.isoformat(), "state": state, "problem": ""}


def refused_facts(server: Server, sites: list[Facts], reports: list[ClientReports]) -> list[Facts]:
    """What sites refused, by rule, and what the SuperLink refused them, by call; the latest first."""
    names = {site["client"]: site["name"] for site in sites}
    by_site = [{"by": "site", "site": names.get(r["client"], r["client"]), **r} for t in reports for r in t.refused]
    by_site.sort(key=lambda r: (str(r["time"]), r["round"]), reverse=True)
    return [*by_site[:SHOWN], *refused_in_log(server, {site["key"]: site["name"] for site in sites})]


def refused_in_log(server: Server, names: dict[str, str]) -> list[Facts]:
    """What the SuperLink refused since it was started: a site may only call for what is its own."""
    log = server.logs / f"{server.process}.log"
    found: list[Facts] = []
    if not log.is_file():
        return found
    for line in last_lines(log, LOG_LINES):
        if match := IN_LOG.search(line):
            about: dict[str, Any] = {
                "site": names.get(match["key"], match["key"]),
                "client": "",
                "run": "",
                "round": 0,
            }
            about |= {"time": "", "rule": match["call"], "reason": match["reason"][:TEXT], "times": 1}
            found.append({"by": "server", **about})
    return found[-SHOWN:][::-1]


ENDS = ("sent", "refused", "raised")
KINDS = ("arrays", "extras", "metrics")


def node_facts(node: Node) -> Facts:
    """All of it; a policy that cannot be read is a problem, under which the site answers nothing."""
    certificates = [certificate_facts(node.ca)]
    try:
        policy = load_policy(node.policy_file)
        return {"certificates": certificates, **policy_facts(policy)}
    except MutiraoError as error:
        return {"certificates": certificates, "problems": [str(error)]}


def policy_facts(policy: Policy) -> Facts:
    """The facts in the records beside a policy."""
    requests, faults = requests_in(policy.audit, mark_of(policy.audit))
    facts: Facts = {
        "paused": paused_since(policy),
        "allowed": sorted(policy.recipes),
        "totals": totals(requests),
        "by_run": [totals_of_run(run, requests) for run in runs_in(requests)],
        "by_rule": by_rule(requests),
        "requests": requests[-SHOWN:][::-1],
        "problems": list(faults),
    }
    try:
        facts["budget"] = budget(policy)
    except MutiraoError as error:
        facts |= {"budget": None, "problems": [*faults, str(error)]}
    return facts


@lru_cache(maxsize=4)
def requests_in(trail: Path, mark: Any) -> tuple[list[Facts], list[str]]:
    """What was asked, each with what came of it, and where the chain of the trail is broken; `mark`: of the file.

    A refusal before a request is read (a recipe that is not allowed, a pause) has no `asked` before it.
    """
    events, faults = checked_trail(trail)
    open_ones: dict[tuple[str, ...], Facts] = {}
    found: list[Facts] = []
    for event in events:
        kind = event["event"]
        if kind not in ("asked", *ENDS):
            continue
        # Requests have no number in the trail: an end belongs to the open request of the same run, kind and round.
        who = tuple(str(event.get(key, "")) for key in ("run", "site", "do", "round"))
        request = None
        if kind in ENDS:
            request = open_ones.pop(who, None)
        if request is None:
            about = {
                "run": who[0],
                "recipe": event.get("recipe", ""),
                "do": who[2],
                "round": event.get("round", 0),
            }
            request = {
                "time": event.get("time", ""),
                **about,
                "bytes_in": event.get("bytes", 0),
                "answer": "none yet",
            }
            found.append(request)
        if kind == "asked":
            open_ones[who] = request
        else:
            request |= {"answer": kind, "answered": event.get("time", ""), **request_outcome(event)}
    return found, faults


def request_outcome(event: Facts) -> Facts:
    """What left, or why nothing did."""
    if event["event"] != "sent":
        rule, reason, detail = (str(event.get(key, ""))[:TEXT] for key in ("rule", "reason", "detail"))
        return {"rule": rule, "reason": reason.removeprefix(f"{rule}: "), "detail": detail}
    names = {kind: list(map(str, event.get(kind) or ())) for kind in KINDS}
    return {"bytes_out": event.get("bytes", 0), "n": event.get("n", 0), "epsilon": event.get("epsilon"), **names}


def totals(requests: Iterable[Facts]) -> Facts:
    """How many were asked and answered, how many bytes left, the recipe, and when it was last."""
    every = list(requests)
    answers = Counter(request["answer"] for request in every)
    counts = {end: answers[end] for end in ENDS}
    sent = sum(r.get("bytes_out", 0) for r in every)
    latest = next(reversed(every), {"recipe": "", "time": ""})
    return {"asked": len(every), **counts, "bytes_out": sent, "recipe": latest["recipe"], "last": latest["time"]}


def totals_of_run(run: str, requests: Iterable[Facts]) -> Facts:
    """The totals of the requests of one run."""
    return {"run": run, **totals(request for request in requests if request["run"] == run)}


def runs_in(requests: list[Facts]) -> list[str]:
    """The runs that asked, the latest first."""
    return list(dict.fromkeys(r["run"] for r in reversed(requests)))[:SHOWN]


def by_rule(requests: list[Facts]) -> list[Facts]:
    """How often each rule refused, and when it did last."""
    refused = [r for r in requests if r["answer"] == "refused"]
    last = {r["rule"]: r for r in refused}
    times = Counter(r["rule"] for r in refused)
    return [{"rule": k, "times": times[k], "last": r["answered"], "reason": r["reason"]} for k, r in last.items()]


def budget(policy: Policy) -> Facts | None:
    """Epsilon spent of the budget, in all and by run; null where the policy sets none, or where it is infinite."""
    cover = policy.privacy
    if not (cover.budget or cover.run_budget):
        return None
    spent, runs = spending(policy.ledger, cover, mark_of(policy.ledger))
    most = {"most": cover.budget or None, "run_most": cover.run_budget or None, "delta": cover.delta}
    return {"spent": finite(spent), **most, "runs": {run: finite(value) for run, value in runs.items()}}


@lru_cache(maxsize=4)
def spending(ledger: Path, cover: PrivacyRules, mark: Any) -> tuple[float, dict[str, float]]:
    """The epsilon of all releases and of each run's; `mark`: of the file."""
    account = Ledger(ledger)
    return cost(account.total(), cover), {run: cost(table, cover) for run, table in account.runs.items()}


def finite(value: float) -> float | None:
    """A number as JSON can have it."""
    if math.isfinite(value):
        return value
    return None


SERVER_TIMEOUT = 5.0  # for the server to answer
