"""Check a run folder against its audit trail, and report exactly what was altered."""

import itertools
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from mutirao.core.arrays import digest, fingerprint
from mutirao.errors import ConfigError, Damaged
from mutirao.io import load_arrays
from mutirao.runs.audit_trail import check_chain, count_heads, cross_check, is_unaltered, read_trail, write_events
from mutirao.runs.csv_tables import CsvTable
from mutirao.runs.run_folder import Folder, hash_of


def verify(path: Path, with_trails: Iterable[str] = ()) -> tuple[list[str], list[str]]:
    r"""Return what is unaltered, and the problems; without problems the folder is as it was written.

    `with_trails` are clients of sites that are known to keep audit trails of their own.

    >>> import mutirao
    >>> _ = mutirao.execute("quickstart", {"rounds": 1, "per_round": 2}, "runs/verify", pictures=False)
    >>> fine, wrong = verify(Path("runs/verify"))
    >>> wrong
    []
    >>> _ = Path("runs/verify/history.csv").write_text("round,accuracy\n1,1.0\n")
    >>> len(verify(Path("runs/verify"))[1]) > 0  # a changed figure is detected
    True
    """
    if not (path / "audit.jsonl").exists() and not (path / "config.toml").exists():
        raise ConfigError(f"{path} holds no run")
    events, problems = check_chain(path / "audit.jsonl")
    good = []
    if not problems:
        good.append(f"audit.jsonl: {len(events)} events, chained")
    # An altered event proves nothing about the files.
    events = [event for event in events if is_unaltered(event)]
    folder = Folder(path)
    rounds = last_of_each_round(events)
    saved = [e for e in events if e["event"] == "saved"]
    # `save_run` writes a history without recording rounds, so there is one hash for all of it.
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
        if not check:
            good.append(f"{name}: as audited")
    heads, missing = count_heads(rounds, CsvTable(path / "clients.csv").each(), with_trails)
    return good + heads, problems + missing


def verify_all(path: Path, sites: Sequence[Path] = (), table: Path | None = None) -> tuple[list[str], list[str]]:
    """Verify a run folder and the sites' own trails, or one trail alone; write all events to a CSV file if asked."""
    if path.is_file():
        name, events, problems = read_trail(path)
        good = []
        if not problems:
            good.append(f"{path.name}: {len(events)} events, chained")
        trails = {name: events}
    else:
        good, problems = verify(path, [read_trail(site)[0] for site in sites])
        trails = {"server": check_chain(path / "audit.jsonl")[0]}
    for site in sites:
        agreed, wrong = cross_check(next(iter(trails.values())), site)
        good += agreed
        problems += wrong
    if table is not None:
        write_events(trails | {name: events for name, events, _ in map(read_trail, sites)}, table)
    return good, problems


def last_of_each_round(events: list[dict[str, Any]]) -> dict[int, dict[str, Any]]:
    """The valid event of each round: after a resume, later rounds are made again."""
    rounds: dict[int, dict[str, Any]] = {}
    for event in events:
        if event["event"] == "resumed":
            rounds = {n: e for n, e in rounds.items() if n <= event["round"]}
        elif event["event"] == "round":
            rounds[event["round"]] = event
    return rounds


def check_config(path: Path, events: list[dict[str, Any]]) -> list[str]:
    """The configuration must be the one that the run was last started or resumed with."""
    recorded = [e["config"] for e in events if e["event"] in ("started", "resumed") and "config" in e]
    file = path / "config.toml"
    if not recorded:
        return []
    if not file.exists():
        return ["config.toml: missing"]
    if fingerprint(file.read_text(encoding="utf-8", errors="replace")) != recorded[-1]:
        return ["config.toml: altered since the run was started"]
    return []


def check_tables(path: Path, rounds: dict[int, dict[str, Any]]) -> list[str]:
    """Every round's rows must have the hash in the trail."""
    problems = []
    for name in ("history", "clients"):
        by_round: dict[str, str] = {}
        for round, rows in itertools.groupby(CsvTable(path / f"{name}.csv").each(), lambda row: row.get("round", "?")):
            # A run writes all rows of a round at once: a second group of them was added later.
            if round in by_round:
                by_round[round] = "in two places"
            else:
                by_round[round] = fingerprint(list(rows))
        for number, event in rounds.items():
            found = by_round.pop(str(number), fingerprint([]))
            if found == event[name]:
                continue
            how = "were altered"
            if found == fingerprint([]):
                how = "are missing"
            problems.append(f"{name}.csv: the rows of round {number} {how}")
        # Rows of the next round may exist: it was interrupted before its commit.
        unknown = [r for r in by_round if not (r.isdecimal() and int(r) == max(rounds, default=0) + 1)]
        problems += [f"{name}.csv: rows of round {number} that was never audited" for number in unknown]
    return problems


def check_saved(path: Path, event: dict[str, Any]) -> list[str]:
    """The history of a run saved by `save_run` must have the hash in the trail."""
    rows = CsvTable(path / "history.csv").read()
    if fingerprint(rows) == event["history"]:
        return []
    return ["history.csv: altered since the run was saved"]


def check_checkpoints(folder: Folder, events: list[dict[str, Any]], rounds: dict[int, dict[str, Any]]) -> list[str]:
    """Every model must be the audited one; none may be missing except those removed by the run."""
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
    """The best model must be that of the last round marked as best in the trail; any round's if none is marked."""
    path = folder.checkpoints / "best.safetensors"
    marked = [e for e in rounds.values() if e.get("best")]
    if marked:
        return check_model(folder, path, [marked[-1]["model"]], marked[-1]["round"])
    if path.exists():
        return check_model(folder, path, models)
    return []


def check_states(folder: Folder, events: list[dict[str, Any]]) -> list[str]:
    """Every state must be intact and audited, and the trail must still contain its events up to then."""
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
            # Damage in other files is reported by their own checks.
            continue
        event = by_hash.get(facts["trail"][1])
        if event is None:
            problems.append(f"audit.jsonl: events known to {name} are gone")
        else:
            found = fingerprint({key: value for key, value in facts.items() if key != "trail"})
            if event.get("state", found) != found:
                problems.append(f"{name}: it is not the audited one")
    # Each only once: a journal that is cut off affects every later state.
    return list(dict.fromkeys(problems))


def check_model(folder: Folder, path: Path, digests: list[str], round: int | None = None) -> list[str]:
    """A model file must have one of these digests, and name its round."""
    name = path.relative_to(folder.path)
    try:
        arrays, facts = load_arrays(path)
        found = digest(arrays)
    except Damaged as error:
        return [f"{name}: {str(error).removeprefix(str(path)).strip()}"]
    if found not in digests:
        return [f"{name}: its arrays are not the audited ones"]
    if round in (None, facts.get("round")):
        return []
    return [f"{name}: it does not say that it is of round {round}"]


def check_files(path: Path, events: list[dict[str, Any]]) -> list[str]:
    """Files recorded at the end of the run must be unaltered; before the end, history.json may lag behind."""
    ends = [e for e in events if e["event"] in ("started", "resumed", "round", "finished", "failed")]
    recorded: dict[str, str] = ends[-1].get("files", {}) if ends else {}
    problems = []
    for name, audited in recorded.items():
        if not (path / name).is_file():
            problems.append(f"{name}: missing")
        elif hash_of(path / name) != audited:
            problems.append(f"{name}: altered since the run ended")
    file = path / "history.json"
    if "history.json" not in recorded and file.exists() and not lags(file, CsvTable(path / "history.csv").read()):
        problems.append("history.json: it does not say what history.csv does")
    return problems


def lags(file: Path, rows: list[dict[str, str]]) -> bool:
    """Whether history.json has the rows of the table, or the first of them."""
    texts: list[dict[str, str]] = []
    try:
        for row in json.loads(file.read_text(encoding="utf-8")):
            texts.append({key: str(value) for key, value in row.items() if str(value) != ""})
    except (ValueError, AttributeError, TypeError, RecursionError):
        return False
    return texts == rows[: len(texts)]


def check_summary(path: Path, events: list[dict[str, Any]]) -> list[str]:
    """The summary and its digest must be those recorded at the end of the run."""
    ends = [e for e in events if e["event"] == "finished"]
    file = path / "summary.json"
    if not ends:
        if file.exists():
            return ["summary.json: there, though the run never finished"]
        return []
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
