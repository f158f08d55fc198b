"""What of a run folder must not change: figures, names and the report's structure; no times and no styling."""

import csv
import json
import re
import tomllib
from pathlib import Path
from typing import Any

from safetensors import safe_open


def of_run(folder: Path) -> dict[str, Any]:
    summary = json.loads((folder / "summary.json").read_text())
    return {
        "digest": summary["digest"],
        "summary": sorted(summary),
        "history": table(folder / "history.csv"),
        "clients": table(folder / "clients.csv"),
        "files": sorted(f.name for f in folder.iterdir() if f.is_file() and f.name not in (".lock", "run.log")),
        "columns": {f.name: f.read_text().splitlines()[0].split(",") for f in sorted(folder.glob("*.csv"))},
        "settings": sorted(flat(tomllib.loads((folder / "config.toml").read_text()))),
        "audit": audit(folder / "audit.jsonl"),
        "model": arrays(folder / "checkpoints" / "round_000.safetensors"),
        "state": sorted({name for f in folder.glob("checkpoints/state_*") for name in arrays(f)}),
        "report": report((folder / "report.html").read_text()),
    }


def of_study(folder: Path) -> dict[str, Any]:
    cells = sorted(file.parent for file in folder.rglob("summary.json"))
    return {
        "cells": {str(cell.relative_to(folder)): digest_of(cell) for cell in cells},
        "table": table(folder / "table.csv"),
        "keys": sorted(flat(json.loads((folder / "study.json").read_text()))),
        "report": report((folder / "report.html").read_text()),
    }


def digest_of(folder: Path) -> dict[str, str]:
    return {"digest": json.loads((folder / "summary.json").read_text())["digest"]}


def of_site(folder: Path) -> dict[str, Any]:
    """Names in the folder of a site or of the server, and what the site's trail says has left."""
    policy = folder / "policy.toml"
    return {
        "files": sorted(file.name for file in folder.iterdir()),
        "settings": sorted(flat(tomllib.loads((folder / "site.toml").read_text()))),
        "policy": sorted(flat(tomllib.loads(policy.read_text()))) if policy.exists() else [],
        "audit": audit(folder / "audit.jsonl"),
        "left": left(folder / "audit.jsonl"),
        "state": sorted({name for file in folder.glob("states/*/*.safetensors") for name in arrays(file)}),
    }


def left(file: Path) -> dict[str, list[str]]:
    """The names of all arrays, extras and metrics that were sent."""
    events = [json.loads(line) for line in file.read_text().splitlines()]
    kinds = ("do", "arrays", "extras", "metrics")
    return {kind: sorted({name for event in events for name in listed(event.get(kind, []))}) for kind in kinds}


def listed(names: Any) -> list[str]:
    return [names] if isinstance(names, str) else list(names)


def table(file: Path) -> list[dict[str, Any]]:
    """The rows of a table without the columns of seconds; numbers are rounded to six digits."""
    with file.open(newline="") as lines:
        return [{k: cell(v) for k, v in row.items() if k != "seconds"} for row in csv.DictReader(lines)]


def cell(text: str) -> Any:
    try:
        return float(f"{float(text):.6g}")
    except ValueError:
        return text


def flat(tree: dict[str, Any], before: str = "") -> list[str]:
    return [
        name
        for key, value in tree.items()
        for name in (flat(value, f"{before}{key}.") if isinstance(value, dict) else [before + key])
    ]


def audit(file: Path) -> dict[str, list[str]]:
    """The keys of each kind of event."""
    found: dict[str, set[str]] = {}
    for line in file.read_text().splitlines():
        event = json.loads(line)
        found.setdefault(event["event"], set()).update(event)
    return {event: sorted(keys) for event, keys in sorted(found.items())}


def arrays(file: Path) -> list[str]:
    """Names of arrays; a client's name, c1 or so, is shown as *."""
    with safe_open(file, "numpy") as content:
        return sorted({re.sub(r"^(sites/)[^/]+?(?=[./])", r"\1*", name) for name in content.keys()})  # noqa: SIM118


def report(page: str) -> dict[str, Any]:
    body = re.sub(r"<(script|style)\b.*?</\1>", "", page, flags=re.DOTALL)
    return {
        "headings": [plain(text) for _, text in re.findall(r"<h([1-4])\b[^>]*>(.*?)</h\1>", body, re.DOTALL)],
        "ids": sorted(set(re.findall(r'\bid="([^"]+)"', body))),
        "columns": [plain(text) for text in re.findall(r"<th\b[^>]*>(.*?)</th>", body, re.DOTALL)],
        "charts": body.count("<svg") + body.count("<img"),
    }


def plain(html: str) -> str:
    return " ".join(re.sub(r"<[^>]+>", "", html).split())
