"""Check a run folder against its own audit trail, and say exactly what was altered."""

import itertools
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from mutirao.core.arrays import digest
from mutirao.core.digests import fingerprint
from mutirao.errors import ConfigError, Damaged
from mutirao.io import load_arrays
from mutirao.runs.audit_trail import check_chain, is_unaltered
from mutirao.runs.csv_tables import CsvTable
from mutirao.runs.linked_trails import count_heads, cross_check, read_trail, write_events
from mutirao.runs.run_folder import Folder, hash_of


def verify(path: Path, keepers: Iterable[str] = ()) -> tuple[list[str], list[str]]:
    r"""What was found in order, and what was not; an empty second list means the folder is as it was written.

    `keepers` are clients whose sites are known to keep trails of their own.

    >>> import mutirao
    >>> _ = mutirao.execute("quickstart", {"rounds": 1, "per_round": 2}, "runs/verify", pictures=False)
    >>> fine, wrong = verify(Path("runs/verify"))
    >>> wrong
    []
    >>> _ = Path("runs/verify/history.csv").write_text("round,accuracy\n1,1.0\n")
    >>> len(verify(Path("runs/verify"))[1]) > 0  # whoever changes a figure is found out
    True
    """
    if not (path / "audit.jsonl").exists() and not (path / "config.toml").exists():
        raise ConfigError(f"{path} holds no run")
    events, problems = check_chain(path / "audit.jsonl")
    good = [f"audit.jsonl: {len(events)} events, chained"] if not problems else []
    events = [event for event in events if is_unaltered(event)]  # one that was altered says nothing of the files
    folder = Folder(path)
    rounds = last_of_each_round(events)
    saved = [e for e in events if e["event"] == "saved"]
    tables = check_saved(path, saved[-1]) if saved else check_tables(path, rounds)
    for name, check in (
        ("config.toml", check_config(path, events)),
        ("history.csv, clients.csv", tables),
        (
            "history.json",
            [p for p in check_files(path, events) if p.partition(":")[0] not in str(tables)],
        ),
        ("checkpoints", check_checkpoints(folder, events, rounds)),
        ("summary.json", check_summary(path, events)),
    ):
        problems += check
        good += [] if check else [f"{name}: as audited"]
    heads, missing = count_heads(rounds, CsvTable(path / "clients.csv").each(), keepers)
    return good + heads, problems + missing


def verify_all(path: Path, sites: Sequence[Path] = (), table: Path | None = None) -> tuple[list[str], list[str]]:
    """The same with the sites' own trails compared, and all events written to a CSV file; or one trail by itself."""
    if path.is_file():
        name, events, problems = read_trail(path)
        good = [f"{path.name}: {len(events)} events, chained"] if not problems else []
        trails = {name: events}
    else:
        good, problems = verify(path, [read_trail(site)[0] for site in sites])
        trails = {"server": check_chain(path / "audit.jsonl")[0]}
    for site in sites:
        agreed, wrong = cross_check(next(iter(trails.values())), site)
        good, problems = good + agreed, problems + wrong
    if table is not None:
        write_events(trails | {name: events for name, events, _ in map(read_trail, sites)}, table)
    return good, problems


def last_of_each_round(events: list[dict[str, Any]]) -> dict[int, dict[str, Any]]:
    """The event that counts for each round: after a resume, later rounds are made again."""
    rounds: dict[int, dict[str, Any]] = {}
    for event in events:
        if event["event"] == "resumed":
            rounds = {n: e for n, e in rounds.items() if n <= event["round"]}
        elif event["event"] == "round":
            rounds[event["round"]] = event
    return rounds


def check_config(path: Path, events: list[dict[str, Any]]) -> list[str]:
    """The configuration must be the one the run was last started or resumed with."""
    told = [e["config"] for e in events if e["event"] in ("started", "resumed") and "config" in e]
    file = path / "config.toml"
    if not told:
        return []
    if not file.exists():
        return ["config.toml: missing"]
    if fingerprint(file.read_text(encoding="utf-8", errors="replace")) != told[-1]:
        return ["config.toml: altered since the run was started"]
    return []


def check_tables(path: Path, rounds: dict[int, dict[str, Any]]) -> list[str]:
    """Every round's rows must hash to what the trail says."""
    problems = []
    for name in ("history", "clients"):
        by_round: dict[str, str] = {}
        for round, rows in itertools.groupby(CsvTable(path / f"{name}.csv").each(), lambda row: row.get("round", "?")):
            by_round[round] = fingerprint(list(rows)) if round not in by_round else "in two places"
        for number, event in rounds.items():
            found = by_round.pop(str(number), fingerprint([]))
            if found == event[name]:
                continue
            how = "are missing" if found == fingerprint([]) else "were altered"
            problems.append(f"{name}.csv: the rows of round {number} {how}")
        strangers = [r for r in by_round if not (r.isdecimal() and int(r) == max(rounds, default=0) + 1)]
        problems += [f"{name}.csv: rows of round {number} that was never audited" for number in strangers]
    return problems


def check_saved(path: Path, event: dict[str, Any]) -> list[str]:
    """The history of a run that was saved by itself must hash to what the trail says."""
    rows = CsvTable(path / "history.csv").read()
    return [] if fingerprint(rows) == event["history"] else ["history.csv: altered since the run was saved"]


def check_checkpoints(folder: Folder, events: list[dict[str, Any]], rounds: dict[int, dict[str, Any]]) -> list[str]:
    """Every model kept must be the one that was audited; none may be missing but those thinned out."""
    expected = {n: e["model"] for n, e in rounds.items()}
    begun = [e["model"] for e in events if e["event"] == "started"]
    if begun:
        expected[0] = begun[-1]
    expected |= {e["round"]: e["model"] for e in [e for e in events if e["event"] == "saved"][-1:]}
    dropped = {n for e in events for n in e.get("dropped", [])}
    models = dict.fromkeys(expected.values())
    problems = []
    for number, model in sorted(expected.items()):
        path = folder.model(number)
        if not path.exists() and number in dropped:
            continue
        problems += check_model(folder, path, [model], number)
        if path.exists() and not folder.state(number).exists():
            problems.append(f"{folder.state(number).relative_to(folder.path)}: missing")
    problems += check_states(folder, events)
    return problems + check_best(folder, rounds, list(models))


def check_best(folder: Folder, rounds: dict[int, dict[str, Any]], models: list[str]) -> list[str]:
    """The best model must be that of the last round the trail calls the best so far, or any if it calls none so."""
    path = folder.checkpoints / "best.safetensors"
    called = [e for e in rounds.values() if e.get("best")]
    if called:
        return check_model(folder, path, [called[-1]["model"]], called[-1]["round"])
    return check_model(folder, path, models) if path.exists() else []


def check_states(folder: Folder, events: list[dict[str, Any]]) -> list[str]:
    """Every state kept must be whole and the one audited, and the trail must still hold what it held back then."""
    problems = []
    by_hash = {e["hash"]: e for e in events}
    for number in folder.committed():
        name = folder.state(number).relative_to(folder.path)
        try:
            _, _, facts = folder.examine(number)
            if "sites" in facts:
                folder.sites.check(facts["sites"])
        except Damaged as error:
            for place in (folder.state(number), folder.journal.path, folder.sites.journal.path, folder.sites.home):
                if str(place) in str(error):
                    file, _, what = str(error).removeprefix(f"{folder.path}/").partition(" ")
                    problems.append(f"{file}: {what}")
            continue  # damage elsewhere is reported where it is
        event = by_hash.get(facts["trail"][1])
        if event is None:
            problems.append(f"audit.jsonl: events known to {name} are gone")
        elif event.get("state", told := fingerprint({k: v for k, v in facts.items() if k != "trail"})) != told:
            problems.append(f"{name}: it is not the audited one")
    return list(dict.fromkeys(problems))  # a journal that is cut off is missed by every state after that


def check_model(folder: Folder, path: Path, digests: list[str], round: int | None = None) -> list[str]:
    """One model file against the digests it may have, and the round it must say it is of."""
    name = path.relative_to(folder.path)
    try:
        arrays, facts = load_arrays(path)
        found = digest(arrays)
    except Damaged as error:
        return [f"{name}: {str(error).removeprefix(str(path)).strip()}"]
    if found not in digests:
        return [f"{name}: its arrays are not the audited ones"]
    return [] if round in (None, facts.get("round")) else [f"{name}: it does not say that it is of round {round}"]


def check_files(path: Path, events: list[dict[str, Any]]) -> list[str]:
    """Files the end of the run vouches for must be as they were; until then history.json may only lag behind."""
    ends = [e for e in events if e["event"] in ("started", "resumed", "round", "finished", "failed")]
    told: dict[str, str] = ends[-1].get("files", {}) if ends else {}
    problems = []
    for name, right in told.items():
        if not (path / name).is_file():
            problems.append(f"{name}: missing")
        elif hash_of(path / name) != right:
            problems.append(f"{name}: altered since the run ended")
    file = path / "history.json"
    if "history.json" not in told and file.exists() and not lags(file, CsvTable(path / "history.csv").read()):
        problems.append("history.json: it does not say what history.csv does")
    return problems


def lags(file: Path, rows: list[dict[str, str]]) -> bool:
    """Whether a history.json holds the rows of the table, or the first of them."""
    try:
        told = json.loads(file.read_text(encoding="utf-8"))
        texts = [{k: str(v) for k, v in row.items() if str(v) != ""} for row in told]
    except (ValueError, AttributeError, TypeError, RecursionError):
        return False
    return texts == rows[: len(texts)]


def check_summary(path: Path, events: list[dict[str, Any]]) -> list[str]:
    """The summary and its digest must be those of the end of the run."""
    ends = [e for e in events if e["event"] == "finished"]
    file = path / "summary.json"
    if not ends:
        return ["summary.json: there, though the run never finished"] if file.exists() else []
    if not file.exists():
        return ["summary.json: missing"]
    try:
        summary = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError):
        return ["summary.json: not valid JSON"]
    problems = []
    if not isinstance(summary, dict) or summary.get("digest") != ends[-1]["model"]:
        problems.append("summary.json: its digest is not that of the final model")
    if fingerprint(summary) != ends[-1]["summary"]:
        problems.append("summary.json: altered since the run finished")
    return problems
