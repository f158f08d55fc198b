"""Write a record of processing activities (LGPD Art. 37, GDPR Art. 30) from a run, with blanks to fill in.

A run folder shows which requests clients got, what they sent, what is stored and how it was protected. Responsible
persons, legal bases and locations are not in it: those lines are left blank.
"""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from mutirao.core.digests import fingerprint
from mutirao.core.exclusion import parse_names
from mutirao.core.fleet import failure_of
from mutirao.deploy.policy.policy_templates import EXTRAS, METRICS, REQUESTS
from mutirao.deploy.processing_texts import WORDS, Words
from mutirao.errors import ConfigError
from mutirao.experiments.task import NAMES, find
from mutirao.runs.audit_trail import check_chain
from mutirao.runs.execute import reopen
from mutirao.runs.reader import Record
from mutirao.runs.trust import Trust, distrust
from mutirao.runs.unlearning import RECORD

MEASURES = ("privacy", "secure", "compress", "screen")
# Recipes in which a client is a person; of others the run does not know.
PEOPLE = {"recsys": "users", "online": "searchers"}
DATA = {
    "recsys": "ratings",
    "cytology": "slides",
    "ranking": "queries",
    "online": "queries",
    "quickstart": "digits",
    "selection": "digits",
    "cifar10": "digits",
}
WITHDRAWN = ("had_part_in", "first_contribution", "rounds_kept", "rounds_redone", "digest_before", "digest_after")


def record_facts(folder: Path, trust: Trust = distrust) -> dict[str, Any]:
    """The facts of a run folder for the record; None or empty where they are missing."""
    record = Record.begun(folder)
    name, config = reopen(None, folder, [], trust)
    events, faults = check_chain(folder / "audit.jsonl")
    times = [str(event.get("time", "")) for event in events]
    settings = {key: getattr(config, key) for key in MEASURES}
    rounds = [event for event in events if event.get("event") == "round"]
    networked = any(event.get("heads") or event.get("site_versions") for event in rounds)
    data = getattr(config, "data", "")
    return {
        "run": folder.name,
        "recipe": name,
        "about": NAMES[name][1] if name in NAMES else None,
        "begun": times[0] if times else None,
        "last": times[-1] if times else None,
        "rounds": record.rounds,
        "subjects": {"kind": PEOPLE.get(name), "clients": record.population, "replied": len(record.participation()[0])},
        "data": {"kind": DATA.get(name), "source": Path(data).name if isinstance(data, str) and data else None},
        "pooled": record.summary.get("consent") or events[0].get("facts", {}).get("consent") if events else None,
        "leaves": what_leaves(name, config, folder),
        "bytes": {key: record.summary.get(key) for key in ("bytes_up", "bytes_down")},
        "networked": networked,
        "kept": what_is_kept(folder),
        "measures": {key: {"name": part.name, **part.settings} for key, part in settings.items()},
        "download": getattr(config, "download", None),
        "spent": record.summary.get("privacy"),
        "trail": {"events": len(events), "faults": faults},
        "withdrawn": withdrawals(folder, config.exclude),
        "digests": {
            "config": fingerprint(record.text),
            "model": record.summary.get("digest"),
            "trail": events[-1]["hash"] if events else None,
        },
    }


def what_leaves(recipe: str, config: Any, folder: Path) -> dict[str, Any]:
    """All requests to clients and all that they may send with these settings; without the data, why it is unknown."""
    try:
        found = find(recipe)
        task = found.prepare(config)
        exchange = found.disclosure(config, task)
        arrays = {k: list(v.shape) for k, v in task.initial().items()}
    except Exception as error:  # the data may be elsewhere by now, and reading them may raise anything
        return {"unknown": failure_of(error).reason[:200]}
    return {
        "requests": list(exchange.requests),
        "arrays": arrays,
        "extras": list(exchange.extras),
        "metrics": list(exchange.metrics),
    }


def what_is_kept(folder: Path) -> dict[str, Any]:
    """Models of rounds, tables and their sizes: all that somebody would have to erase."""
    models = sorted((folder / "checkpoints").glob("*.safetensors"))
    tables = [f.name for f in sorted(folder.iterdir()) if f.is_file() and not f.name.startswith(".")]
    states = [f for f in (folder / "checkpoints").rglob("*") if f.is_file()]
    return {
        "models": sum(f.name.startswith("round_") for f in models),
        "best": any(f.name == "best.safetensors" for f in models),
        "bytes": sum(f.stat().st_size for f in states),
        "files": tables,
    }


def withdrawals(folder: Path, exclude: str) -> dict[str, Any]:
    """How many clients withdrew, and what the last withdrawal changed; their names stay in the folder."""
    try:
        forgotten = json.loads((folder / RECORD).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        forgotten = None
    last = None
    if isinstance(forgotten, Mapping) and forgotten:
        last = {key: forgotten.get(key) for key in WITHDRAWN}
    return {"excluded": len(parse_names(exclude)), "last": last}


def write_record(facts: Mapping[str, Any], lang: str) -> str:
    """The record as Markdown, in English (`en`) or Portuguese (`pt`)."""
    if lang not in WORDS:
        raise ConfigError(f"lang: {lang!r} is none of {', '.join(WORDS)}")
    words = WORDS[lang]
    return "\n".join([*heading(facts, words), *sections(facts, words), ""])


def heading(facts: Mapping[str, Any], w: Words) -> Iterable[str]:
    """The title, the notice and the period."""
    yield f"# {w['title']}: {facts['run']}"
    yield ""
    yield w["notice"]
    yield ""
    yield f"{w['period']}: {facts['begun'] or '?'} – {facts['last'] or '?'}, {facts['rounds']} {w['rounds']}"


def sections(facts: Mapping[str, Any], w: Words) -> Iterable[str]:
    """A section for each item that the articles require."""
    blank = w["blank"]
    content = {
        "responsible": [f"{w[who]}: {blank}" for who in ("controller", "operator", "officer")],
        "purpose": [
            f"{w['stated']}: {blank}",
            f"{w['basis']}: {blank}",
            f"{w['recipe']}: `{facts['recipe']}`" + (f" ({facts['about']})" if facts["about"] else ""),
        ],
        "subjects": subjects(facts, w),
        "leaves": leaves(facts["leaves"], facts["bytes"], w),
        "recipients": [
            f"{w['server']}: {blank}",
            w["model_goes"],
            f"{w['abroad']}: {blank}" + ("" if facts["networked"] else f" ({w['simulated']})"),
        ],
        "retention": retention(facts["kept"], w),
        "measures": measures(facts, w),
        "withdrawals": withdrawn(facts["withdrawn"], w),
        "digests": [f"{w[key]}: `{value}`" if value else f"{w[key]}: –" for key, value in facts["digests"].items()],
    }
    for name, lines in content.items():
        yield ""
        yield f"## {w[f'# {name}']}"
        yield ""
        yield from (f"- {line}" for line in lines)


def subjects(facts: Mapping[str, Any], w: Words) -> list[str]:
    """Data subjects, and categories of data."""
    people = facts["subjects"]
    data = facts["data"]
    pooled = facts["pooled"]
    kind = w[people["kind"]] if people["kind"] else f"{w['blank']} ({w['client_is']})"
    lines = [f"{w['subjects_are']}: {kind}", w["clients"].format(**people)]
    source = f" (`{data['source']}`)" if data["source"] else ""
    lines.append(f"{w['which']}: {w[data['kind']] if data['kind'] else w['blank']}{source}")
    lines.append(f"{w['sensitive']}: {w['blank']}")
    if pooled:
        lines.append(w["pooled"].format(**pooled))
    return lines


def leaves(found: Mapping[str, Any], sent: Mapping[str, Any], w: Words) -> list[str]:
    """The requests to clients, and what they send."""
    if "unknown" in found:
        return [f"{w['not_known']}: {found['unknown']}"]
    lines = [w["stays"]]
    for key, table in (("requests", REQUESTS), ("extras", EXTRAS), ("metrics", METRICS)):
        for name in found[key]:
            lines.append(f"{w[key]} `{name}`: {w.get(f'{key}.{name}') or table.get(name) or w['unsaid']}")
    shapes = ", ".join(f"`{name}` {'×'.join(map(str, shape))}" for name, shape in found["arrays"].items())
    lines.append(f"{w['arrays']}: {shapes}")
    if sent["bytes_up"] is not None:
        lines.append(w["bytes"].format(**sent))
    return lines


def retention(kept: Mapping[str, Any], w: Words) -> list[str]:
    """What is stored in the folder, and until when."""
    return [
        w["kept"].format(models=kept["models"], best=w["yes"] if kept["best"] else w["no"], bytes=kept["bytes"]),
        f"{w['files']}: {', '.join(f'`{name}`' for name in kept['files'])}",
        w["named"],
        f"{w['until']}: {w['blank']}",
    ]


def measures(facts: Mapping[str, Any], w: Words) -> list[str]:
    """What protected the run, as far as its configuration and its trail say."""
    lines = []
    for kind, part in facts["measures"].items():
        own = ", ".join(f"{k}={v}" for k, v in part.items() if k != "name")
        lines.append(f"{w[kind]}: `{part['name']}`" + (f" ({own})" if own else ""))
    if facts["spent"]:
        spent = ", ".join(f"{k}={v}" for k, v in facts["spent"].items())
        lines.append(f"{w['spent']}: {spent}")
    if facts["download"]:
        lines.append(f"{w['download']}: `{facts['download']}`")
    whole = w["whole"] if not facts["trail"]["faults"] else w["altered"].format(faults=len(facts["trail"]["faults"]))
    lines.append(w["trail_is"].format(events=facts["trail"]["events"], whole=whole))
    lines.append(f"{w['transport']}: {w['blank'] if facts['networked'] else w['simulated']}")
    lines.append(f"{w['access']}: {w['blank']}")
    return lines


def withdrawn(found: Mapping[str, Any], w: Words) -> list[str]:
    """How many withdrew and what was done."""
    lines = [w["excluded"].format(**found)]
    if found["last"]:
        lines += [f"{w[key]}: {w.get(str(value)) or value}" for key, value in found["last"].items()]
    return lines
