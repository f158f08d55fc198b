"""The facts of a site: what it was asked, what left, what was refused by which rule, what privacy that cost."""

import math
from collections import Counter
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path
from typing import Any

from mutirao.dashboard.run_index import mark_of
from mutirao.deploy.admin.run_facts import SHOWN, TEXT, Facts
from mutirao.deploy.admin.server_facts import certificate_facts
from mutirao.deploy.layout import Node
from mutirao.deploy.policy.privacy_ledger import Ledger, cost
from mutirao.deploy.policy.rules import Cover, Policy, load_policy
from mutirao.deploy.site.pause import paused_since
from mutirao.errors import MutiraoError
from mutirao.runs.audit_trail import check_chain

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
    """What the records beside a policy tell."""
    requests, faults = requests_in(policy.audit, mark_of(policy.audit))
    facts: Facts = {
        "paused": paused_since(policy),
        "allowed": sorted(policy.recipes),
        "totals": totals(requests),
        "by_run": [{"run": run, **totals(r for r in requests if r["run"] == run)} for run in runs_in(requests)],
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
    events, faults = check_chain(trail) if trail.exists() else ([], [])
    open_ones: dict[tuple[str, ...], Facts] = {}
    found: list[Facts] = []
    for event in events:
        kind = event["event"]
        if kind not in ("asked", *ENDS):
            continue
        who = tuple(str(event.get(key, "")) for key in ("run", "site", "do", "round"))
        request = open_ones.pop(who, None) if kind in ENDS else None
        if request is None:
            about = {"run": who[0], "recipe": event.get("recipe", ""), "do": who[2], "round": event.get("round", 0)}
            request = {"time": event.get("time", ""), **about, "bytes_in": event.get("bytes", 0), "answer": "none yet"}
            found.append(request)
        if kind == "asked":
            open_ones[who] = request
        else:
            request |= {"answer": kind, "answered": event.get("time", ""), **came_of(event)}
    return found, faults


def came_of(event: Facts) -> Facts:
    """What left, or why nothing did."""
    if event["event"] != "sent":
        rule, reason, detail = (str(event.get(key, ""))[:TEXT] for key in ("rule", "reason", "detail"))
        return {"rule": rule, "reason": reason.removeprefix(f"{rule}: "), "detail": detail}
    names = {kind: list(map(str, event.get(kind) or ())) for kind in KINDS}
    return {"bytes_out": event.get("bytes", 0), "n": event.get("n", 0), "epsilon": event.get("epsilon"), **names}


def totals(requests: Iterable[Facts]) -> Facts:
    """How many were asked and answered, how many bytes left, the recipe, and when it was last."""
    every = list(requests)
    counts = {end: sum(r["answer"] == end for r in every) for end in ENDS}
    sent = sum(r.get("bytes_out", 0) for r in every)
    recipe, last = (every[-1]["recipe"], every[-1]["time"]) if every else ("", "")
    return {"asked": len(every), **counts, "bytes_out": sent, "recipe": recipe, "last": last}


def runs_in(requests: list[Facts]) -> list[str]:
    """The runs that asked, the latest first."""
    return list(dict.fromkeys(r["run"] for r in reversed(requests)))[:SHOWN]


def by_rule(requests: list[Facts]) -> list[Facts]:
    """How often each rule refused, and when it did last."""
    refused = [r for r in requests if r["answer"] == "refused"]
    last, times = {r["rule"]: r for r in refused}, Counter(r["rule"] for r in refused)
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
def spending(ledger: Path, cover: Cover, mark: Any) -> tuple[float, dict[str, float]]:
    """The epsilon of all releases and of each run's; `mark`: of the file."""
    account = Ledger(ledger)
    return cost(account.total(), cover), {run: cost(table, cover) for run, table in account.runs.items()}


def finite(value: float) -> float | None:
    """A number as JSON can have it."""
    return value if math.isfinite(value) else None
