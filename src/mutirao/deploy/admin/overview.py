"""The facts of a folder, whichever it is of, and the lines that tell them to people."""

from mutirao.deploy.admin.run_facts import Facts
from mutirao.deploy.admin.server_facts import server_facts
from mutirao.deploy.admin.site_facts import node_facts
from mutirao.deploy.layout import Node, Server
from mutirao.runs.reader import clean


def overview(place: Server | Node, works: bool) -> Facts:
    """What the page of a server or of a site shows; `works`: it answers, or is connected, at this moment."""
    facts: Facts = clean(server_facts(place, works) if isinstance(place, Server) else node_facts(place))
    return facts


def in_words(facts: Facts) -> list[str]:
    """The same in a few lines."""
    lines = [f"{site['name']}: {presence(site)}" for site in facts.get("sites", ())]
    if since := facts.get("paused"):
        lines.append(f"paused since {since}: every request is refused")
    if budget := facts.get("budget"):
        spent = "more than can be told" if budget["spent"] is None else f"{budget['spent']:.4g}"
        lines.append(f"privacy: epsilon {spent} of {budget['most'] or 'any'} spent")
    soon = [c for c in facts["certificates"] if c["state"] != "ok" and c["days_left"] is not None]
    lines += [f"{c['file']}: {c['days_left']} days left" for c in soon]
    return [*lines, *facts["problems"]]


def presence(site: Facts) -> str:
    """Whether a site is there, in words."""
    if site["connected"] is None:
        return "unknown, as the SuperLink cannot be asked"
    if not site["admitted"]:
        return "not admitted"
    last = f", answered round {told['round']} of {told['run']}" if (told := site["last_round"]) else ""
    state = "connected" if site["connected"] else "not connected"
    return f"{state}{site['since'] and ' since ' + site['since'][:19]}{last}"
