"""The facts of a server: its sites, its certificates, its runs, what was refused, and who was admitted."""

import datetime
import re
from pathlib import Path
from typing import Any

from mutirao.deploy import doctor, keys
from mutirao.deploy.admin.run_facts import SHOWN, TEXT, Facts, Told, run_facts, run_folders, told_in
from mutirao.deploy.layout import Server
from mutirao.deploy.server import control_calls
from mutirao.errors import ConfigError, MutiraoError
from mutirao.report.run_state import last_lines
from mutirao.runs.audit_trail import check_chain

IN_LOG = re.compile(r"refused: (?P<call>[\w-]+) of the site with the key (?P<key>SHA256:\S+): (?P<reason>.*)")
LOG_LINES = 5000


def server_facts(server: Server, works: bool) -> Facts:
    """All of it; `works`: whether the SuperLink answers and can be asked who is connected."""
    links, problem = None, ""
    if works:
        try:
            links = control_calls.links(server)
        except (OSError, ValueError, MutiraoError) as error:
            problem = f"the SuperLink does not say who is connected: {error}"
    trail, faults = check_chain(server.trail) if server.trail.exists() else ([], [])
    outs = [Path(str(event.get("out", ""))) for event in trail if event["event"] == "submitted"]
    runs = run_folders(server.runs, outs)
    told = [told_in(path) for path in runs]
    sites = [site_facts(key, links, told) for key in sorted(server.sites.glob("*.pub"))]
    shown = [{k: v for k, v in event.items() if k not in ("prev", "hash")} for event in trail[-SHOWN:]]
    return {
        "sites": sites,
        "certificates": [certificate_facts(server.certificate), certificate_facts(server.ca)],
        "run_folders": sorted((run_facts(path, server.runs) for path in runs), key=by_change, reverse=True)[:SHOWN],
        "refused": refused_facts(server, sites, told),
        "trail": shown[::-1],
        "problems": [*([problem] if problem else []), *faults],
    }


def by_change(run: Facts) -> str:
    """Runs are sorted by when they last changed."""
    return str(run["changed"])


def site_facts(key: Path, links: dict[str, control_calls.Link] | None, told: list[Told]) -> Facts:
    """What is known of the site with this key; `connected` is null where the SuperLink cannot be asked."""
    try:
        client, fingerprint = keys.client_in(key), keys.pem_fingerprint(keys.public_key_pem(key))
    except (OSError, ValueError, ConfigError) as error:
        client, fingerprint = key.stem, f"cannot be read: {error}"
    link = (links or {}).get(fingerprint)
    rounds = [facts for folder in told if (facts := folder.last.get(client))]
    versions: dict[str, str] = {}
    for folder in told:
        versions = dict(folder.versions.get(client, versions))
    return {
        "name": key.stem,
        "client": client,
        "key": fingerprint,
        "admitted": None if links is None else link is not None,
        "connected": None if links is None else bool(link and link.online),
        "since": link.since if link else "",
        "versions": versions,
        "last_round": max(rounds, key=lambda facts: str(facts["time"]), default=None),
    }


def certificate_facts(path: Path) -> Facts:
    """Until when a certificate is good, the days left, and whether that is soon."""
    try:
        ends = keys.certificate_in(path).not_valid_after_utc
        state = doctor.dates("", path, "").state
    except ConfigError as error:
        return {"file": path.name, "days_left": None, "until": "", "state": "fail", "problem": str(error)}
    left = (ends - datetime.datetime.now(datetime.UTC)).days
    return {"file": path.name, "days_left": left, "until": ends.isoformat(), "state": state, "problem": ""}


def refused_facts(server: Server, sites: list[Facts], told: list[Told]) -> list[Facts]:
    """What sites refused, by rule, and what the SuperLink refused them, by call; the latest first."""
    names = {site["client"]: site["name"] for site in sites}
    by_site = [{"by": "site", "site": names.get(r["client"], r["client"]), **r} for t in told for r in t.refused]
    by_site.sort(key=lambda r: (str(r["time"]), r["round"]), reverse=True)
    return [*by_site[:SHOWN], *refused_in_log(server, {site["key"]: site["name"] for site in sites})]


def refused_in_log(server: Server, names: dict[str, str]) -> list[Facts]:
    """What the SuperLink refused since it was started: a site may only call for what is its own."""
    log, found = server.logs / f"{server.process}.log", list[Facts]()
    for line in last_lines(log, LOG_LINES) if log.is_file() else []:
        if match := IN_LOG.search(line):
            about: dict[str, Any] = {"site": names.get(match["key"], match["key"]), "client": "", "run": "", "round": 0}
            about |= {"time": "", "rule": match["call"], "reason": match["reason"][:TEXT], "times": 1}
            found.append({"by": "server", **about})
    return found[-SHOWN:][::-1]
