"""Unlearning by exact retraining: train again without a client, from before its first contribution.

The new run starts from a checkpoint at which the server had received nothing from the client, and excludes it from then
on (`exclude` in its configuration). It is an ordinary run folder: it can be resumed, verified and reported.
"""

import json
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from mutirao.config import dump
from mutirao.core.agreement import AGREED
from mutirao.core.arrays import digest, fingerprint
from mutirao.core.exclusion import parse_names
from mutirao.core.fleet import ClientId
from mutirao.core.roster import Roster
from mutirao.core.rounds import Run
from mutirao.errors import ConfigError, Damaged
from mutirao.experiments.task import find
from mutirao.io import load_arrays, write_whole
from mutirao.privacy import EPSILON, RELEASES
from mutirao.runs.audit_trail import check_chain
from mutirao.runs.csv_tables import CsvTable, metrics_in_row, typed_row
from mutirao.runs.execute import Draw, Report, Watch, check_facts, execute, reopen
from mutirao.runs.run_folder import Folder, versions
from mutirao.runs.trust import Trust, distrust

RECORD = "forget.json"
ROUNDS = "the rounds"  # what a client took part in, unless it was something before the rounds


def forget(
    folder: Path,
    client: ClientId,
    out: Path,
    *,
    watch: Watch | None = None,
    prepare_only: bool = False,
    draw: Draw | None = None,
    report: Report | None = None,
    trust: Trust = distrust,
) -> dict[str, Any]:
    """Train the run in `folder` again in `out` as if `client` had left before its first contribution.

    Called again with the same arguments, it continues where it stopped. The record names the rounds kept and redone,
    and the metrics before and after. With `prepare_only` the new run is only written, to be resumed by a server with
    real sites.
    """
    recipe, config = reopen(None, folder, [], trust)
    if client in parse_names(config.exclude):
        raise ConfigError(f"{folder} already is a run without {client!r}")
    config = replace(config, exclude=",".join(sorted({*parse_names(config.exclude), client})))
    if (out / RECORD).exists():
        record: dict[str, Any] = json.loads((out / RECORD).read_text(encoding="utf-8"))
        if (record["client"], record["run"]) != (client, str(folder)):
            raise ConfigError(f"{out} contains {record['run']} without {record['client']!r}; choose another --out")
    elif out.exists() and any(out.iterdir()):
        raise ConfigError(f"{out} contains something else; choose another --out")
    else:
        record = begin_without(folder, recipe, config, client, out)
    if prepare_only:
        return record
    summary = execute(recipe, config, out, resume=True, watch=watch, draw=draw, report=report)
    best = out / "checkpoints" / "best.safetensors"
    # No repeated round was better than the rounds kept.
    if not best.exists():
        kept = checkpoint_of(Folder(folder), summary["best_round"])
        if kept is not None:
            write_whole(best, kept.read_bytes())
    record |= {
        "rounds_redone": summary["rounds"] - record["rounds_kept"],
        "after": summary["final"],
        "digest_after": summary["digest"],
        "seconds": summary["seconds"],
    }
    write_whole(out / RECORD, json.dumps(record, indent=2) + "\n")
    return record


def checkpoint_of(folder: Folder, number: int) -> Path | None:
    """The file with the model of a round: its checkpoint, or the best model's if that is of this round."""
    if folder.model(number).exists():
        return folder.model(number)
    best = folder.checkpoints / "best.safetensors"
    if best.exists() and load_arrays(best)[1].get("round") == number:
        return best
    return None


def rounds_of(folder: Path, trust: Trust = distrust) -> int:
    """The number of rounds that the run in a folder is to have."""
    return int(reopen(None, folder, [], trust)[1].rounds)


def begin_without(folder: Path, recipe: str, config: Any, client: ClientId, out: Path) -> dict[str, Any]:
    """Write the run folder to continue from: everything up to the last round without the client."""
    source = Folder(folder)
    rows = (row for row in CsvTable(folder / "clients.csv").each() if row["client"] == client)
    first = min((int(row["round"]) for row in rows if row.get("replied") == "1"), default=None)
    before = source.newest()
    task = find(recipe).prepare(config)  # ConfigError if there is no such client
    if source.audit.began.get("facts"):  # nothing else may have changed since the run
        others = ",".join(sorted(parse_names(config.exclude) - {client}))
        check_facts(source, find(recipe).prepare(replace(config, exclude=others)))
    more = task.left_out.get(client, "")
    # What precedes the rounds is made again without the client, so then no checkpoint can be kept.
    start = None
    if not more:
        start = last_without(source, client, first)
    part = out.with_name(f".{out.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    record = {
        "client": client,
        "run": str(folder),
        "head": source.audit.head,
        "first_contribution": first,
        "had_part_in": more or ROUNDS,
        "rounds_kept": start.round if start else 0,
        "rounds_before": before.round,
        "before": metrics_in_row(before.history[-1]) if before.history else {},
        "digest_before": digest(before.arrays),
    }
    with Folder.open(part) as new:
        write_whole(new.path / "config.toml", dump(recipe, config))
        run = start or Run(task.initial(), seed=config.seed)
        run.sites = {k: v for k, v in run.sites.items() if json.loads(k)[0] != client}
        run.roster = roster_without(run.roster, client)
        keep_privacy_spent(run, before, client)
        facts = write_past(new, source, run, dump(recipe, config), record, task.facts)
        new.checkpoint(run, facts, durable=True)
    write_whole(part / RECORD, json.dumps(record, indent=2) + "\n")
    part.replace(out)
    return record


def last_without(source: Folder, client: ClientId, first: int | None) -> Run | None:
    """The newest checkpoint at which the server had received nothing from the client.

    Probed clients report figures before they contribute, and all clients take part in an agreement. None if no such
    checkpoint is left, or only that of round 0, from which the recipe can start by itself.
    """
    for number in source.committed():
        if first is not None and number >= first:
            continue
        try:
            run, _ = source.load(number)
        except Damaged:
            continue
        if number and not has_contact(run.roster, client) and not any(k.startswith(AGREED) for k in run.memory):
            return run
    return None


def has_contact(roster: Roster, client: ClientId) -> bool:
    """Whether the server has received anything from a client."""
    if client not in roster:
        return False
    i = roster.row(client)
    has_figures = any(not np.isnan(column[i]) for column in roster.figures.values())
    return bool(has_figures or roster.replied[i] or roster.last_probed[i])


def roster_without(roster: Roster, client: ClientId) -> Roster:
    """The roster without the client."""
    arrays = roster.to_arrays()
    ids = json.loads(arrays["ids"].tobytes())
    keep = np.array([name != client for name in ids], np.bool_)
    names = json.dumps([name for name in ids if name != client]).encode()
    columns = {k: v[keep] for k, v in arrays.items() if k != "ids"}
    return Roster.from_arrays(columns | {"ids": np.frombuffer(names, np.uint8).copy()})


def keep_privacy_spent(run: Run, before: Run, client: ClientId) -> None:
    """Keep the privacy budget that other clients have spent, although those rounds are repeated."""
    if RELEASES in before.memory:
        run.memory = run.memory | {RELEASES: before.memory[RELEASES]}
    # Clients account for their own budget, by the number of requests.
    if EPSILON in before.roster.figures:
        run.roster.meet([c for c in before.roster.ids if c != client])
        for c in run.roster.ids:
            run.roster.asked[run.roster.row(c)] = before.roster.asked[before.roster.row(c)]
    for key, value in before.sites.items():
        name, what = json.loads(key)
        if what == RELEASES and name != client:
            run.sites[key] = value


def write_past(
    new: Folder, source: Folder, run: Run, config: str, record: Mapping[str, Any], known: Mapping[str, Any]
) -> Any:
    """Copy the kept rounds without the client's rows, and record them in a new audit trail.

    Returns the facts of the last round's state file, which the trail records.
    """
    client = record["client"]
    events = check_chain(source.audit.path)[0]
    rounds = {e["round"]: e for e in events if e["event"] == "round"}
    started = [e["model"] for e in events if e["event"] == "started"]
    facts = {"client": client, "run": record["run"], "head": record["head"], "round": run.round}
    current = digest(run.arrays)
    model = current
    dropped = []
    # Only the checkpoint of the last kept round is written. If it is not of round 0, the first model counts as dropped.
    if run.round:
        model = (started or [""])[-1]
        dropped = [0]
    entry = {"config": fingerprint(config), "model": model, "versions": versions()}
    if not run.round:
        state_facts = new.facts(run)
        entry["state"] = fingerprint(state_facts)
    if known:
        entry["facts"] = dict(known)
    new.audit.append("started", **entry, forgot=facts, dropped=dropped)
    history = [r for r in source.history.read() if int(r["round"]) <= run.round]
    clients = [r for r in source.clients.read() if int(r["round"]) <= run.round and r["client"] != client]
    for number in range(1, run.round + 1):
        mine = new.history.append([r for r in history if int(r["round"]) == number])
        names = new.clients.append([r for r in clients if int(r["round"]) == number])
        event: dict[str, Any] = {"model": current, "history": fingerprint(mine), "clients": fingerprint(names)}
        event["dropped"] = []
        if number < run.round:
            event |= {"model": rounds[number]["model"], "dropped": [number]}
        else:
            state_facts = new.facts(run)
            event["state"] = fingerprint(state_facts)
        new.audit.append("round", round=number, **event)
    run.history = [typed_row(row) for row in new.history.read()]
    return state_facts
