"""The run folder: what a run writes, and how it is resumed.

A round is committed when its `state_NNN.safetensors` is in place; later rows in the tables are removed on resuming.
"""

import contextlib
import hashlib
import json
import logging
import os
import re
import shutil
import socket
import time
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from mutirao.core.arrays import Arrays, digest, fingerprint
from mutirao.core.roster import Roster
from mutirao.core.rounds import Round, Run
from mutirao.errors import ConfigError, Damaged, TooFewReplies
from mutirao.io import load_arrays, lock, name_path_in_errors, plain_value, save_arrays, write_whole
from mutirao.registry import dotted_in
from mutirao.runs.audit_trail import START, Audit
from mutirao.runs.csv_tables import CsvTable, typed_row
from mutirao.runs.journals import RosterJournal, StateJournal
from mutirao.runs.trust import mark

# So many checkpoints are always kept, so that a damaged one does not end a run.
LAST = 3
Keep = int | Literal["few", "all"]


def rounds_to_drop(sizes: Mapping[int, int], keep: Keep, most: int | None, sparse: bool) -> list[int]:
    """The rounds with checkpoints to remove: those not kept, then the oldest beyond `most` bytes.

    `keep` is a number of last rounds, `all`, or `few`: the last three and, if `sparse`, the rounds 0, 1, 2, 4, 8, ...
    Unlearning starts before a client's first contribution, so it never repeats more than twice the rounds needed.

    >>> rounds_to_drop(dict.fromkeys(range(10), 100), "few", None, sparse=True)
    [3, 5, 6, 7]
    """
    rounds = sorted(sizes)
    last = LAST if isinstance(keep, str) else keep
    # The last ones stay, whatever `most` is. One less than `last`, as the new round's checkpoint comes after this.
    stay: list[int] = []
    if last > 1:
        stay = rounds[1 - last :]
        rounds = rounds[: 1 - last]
    # `not n & (n - 1)` holds for 0 and the powers of two.
    kept = [n for n in rounds if keep == "all" or (keep == "few" and sparse and not n & (n - 1))]
    total = sum(sizes[n] for n in [*kept, *stay])
    while most is not None and total > most and kept:
        total -= sizes[kept.pop(0)]
    return [n for n in rounds if n not in kept]


log = logging.getLogger("mutirao")

SCHEMA = 1
TABLES = ("history.json", "history.csv", "clients.csv")
# history.json is rewritten when a tenth is missing: a long run must not write all of it every second.
LAG = 10
# Seconds between forced writes to the disk: a power cut costs at most that much.
SYNC_EVERY = 1.0


class Folder:
    """One run on disk. Open it with `Folder.open`, `begin` or `resume`, `commit` each round, then `finish`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.checkpoints = path / "checkpoints"
        self.history = CsvTable(path / "history.csv")
        self.clients = CsvTable(path / "clients.csv")
        self.audit = Audit(path / "audit.jsonl")
        self.journal = RosterJournal(self.checkpoints / "roster.journal")
        self.sites = StateJournal(self.checkpoints)
        self.elapsed = 0.0
        self.keep: Keep = "all"  # checkpoints: see `thinning`
        self.keep_bytes: int | None = None  # of checkpoints, beyond which the oldest go; None: any number
        self._began = self._synced = time.monotonic()
        self._sizes: dict[int, int] = {}
        self._written = 0  # rounds in history.json

    @classmethod
    @contextlib.contextmanager
    def open(cls, path: Path) -> Iterator["Folder"]:
        """The folder with a lock: two processes must not write the same run."""
        with locked_folder(path):
            yield cls(path)

    def begin(
        self, run: Run, config: str, known: Mapping[str, Any] | None = None, about: Mapping[str, Any] | None = None
    ) -> None:
        """Write the configuration and the checkpoint of round 0.

        The audit trail records the `known` facts, which a resumed run must share, and more `about` the configuration.
        """
        write_whole(self.path / "config.toml", config)
        facts = self.facts(run)
        entry = {"config": fingerprint(config), "model": facts["model"], "state": fingerprint(facts)}
        if known:
            entry["facts"] = dict(known)
        entry |= about or {}
        self.audit.append("started", **entry, versions=versions(), **self._mark(config))
        self.checkpoint(run, facts, durable=True)

    def take_back(self) -> None:
        """Remove what `begin` wrote, when no round can be run."""
        for file in (self.path / "config.toml", self.audit.path, self.model(0), self.state(0)):
            file.unlink(missing_ok=True)
        shutil.rmtree(self.sites.home, ignore_errors=True)
        self.checkpoints.rmdir()

    def resume(self, config: str) -> Run | None:
        """The run as of the last intact round, or None if none was ever committed."""
        rounds = self.committed()
        if not rounds:
            if self.history.read():
                raise Damaged(
                    f"{self.checkpoints} has no checkpoint, although rounds were made; start in another folder"
                )
            return None
        for number in rounds:
            try:
                run, facts = self.load(number, states=False)
                if "sites" in facts:
                    self.sites.check(facts["sites"])
            except Damaged as error:
                log.warning("%s; going back to an earlier round", error)
                continue
            self.history.go_on_after(facts["history"])
            self.clients.go_on_after(facts["clients"])
            self.journal.go_on_after(facts.get("roster"), run.roster)
            self.elapsed = float(facts["elapsed"])
            self._sizes = {n: self._size(n) for n in rounds if n <= number}
            self.sites.go_on_after(facts.get("sites"), min(self._sizes))
            for replaced, _, size in self.sites.index.past:
                self._sizes[max(n for n in self._sizes if n < replaced)] += size
            # Left in place, a damaged state would count as a later round, as `committed` goes by the files' names.
            if number < rounds[0]:
                for damaged in (n for n in rounds if n > number):
                    self._set_aside(damaged)
            write_whole(self.path / "config.toml", config)
            self.audit.append("resumed", round=number, config=fingerprint(config), **self._mark(config))
            return run
        raise Damaged(f"no checkpoint in {self.checkpoints} is intact; start in another folder")

    def committed(self) -> list[int]:
        """Rounds with a state file, newest first."""
        found = (re.fullmatch(r"state_(\d+)\.safetensors", f.name) for f in self.checkpoints.glob("state_*"))
        return sorted((int(m[1]) for m in found if m), reverse=True)

    def commit(
        self,
        run: Run,
        done: Round,
        best: bool = False,
        heads: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        """Record a round: tables, audit trail, checkpoint. The state file is written last and commits the round.

        `heads` are the heads of the sites' own trails, as they reported them with their last replies.
        """
        durable = time.monotonic() - self._synced > SYNC_EVERY
        if best:
            save_arrays(self.checkpoints / "best.safetensors", run.arrays, {"round": run.round}, durable)
        rows = self.history.append([done.row])
        names = self.clients.append(done.clients)
        self.journal.save(run.roster)
        self._sizes[max(self._sizes)] += self.sites.save(run.round, durable)  # removed with that checkpoint
        rest = self._beside(run)
        # Each checkpoint keeps the files of client states alive, so few are kept if there are such files.
        old = rounds_to_drop(self._sizes, self.keep, self.keep_bytes, sparse=not self.sites.is_used)
        facts = self.facts(run, rest)
        further: dict[str, Any] = {}
        if heads:
            further["heads"] = {c: dict(h) for c, h in sorted(heads.items())}
        if done.versions:
            further["site_versions"] = done.versions
        self.audit.append(
            "round",
            round=run.round,
            model=facts["model"],
            state=fingerprint(facts),
            history=fingerprint(rows),
            clients=fingerprint(names),
            best=best,
            dropped=old,
            **further,
        )
        self.checkpoint(run, facts, durable, rest)
        for number in old:
            del self._sizes[number]
            self.state(number).unlink(missing_ok=True)
            self.model(number).unlink(missing_ok=True)
        self.sites.forget(min(self._sizes))
        if durable:
            if LAG * (len(run.history) - self._written) >= self._written:
                self._write_history(run)
            self._synced = time.monotonic()

    def fail(self, run: Run, error: Exception) -> None:
        """Record why the run ended. The rows of the failed round remain until the run is resumed."""
        if isinstance(error, TooFewReplies):
            self.clients.append(error.rows)
        self._write_history(run)
        reason = str(plain_value(str(error)))
        self.audit.append("failed", round=run.round + 1, reason=reason, files=self._hashes(TABLES))

    def finish(self, run: Run, summary: Mapping[str, Any], files: Iterable[str] = ()) -> dict[str, Any]:
        """Write the summary and close the audit trail, which records the hashes of these `files` too."""
        self._write_history(run)
        full = {"schema": SCHEMA, **summary, "checkpoints": self.stock(), "seconds": round(self._seconds(), 3)}
        write_whole(self.path / "summary.json", json.dumps(full, indent=2) + "\n")
        entry = {"summary": fingerprint(full), "files": self._hashes([*TABLES, *files])}
        self.audit.append("finished", round=run.round, model=digest(run.arrays), **entry)
        return full

    def summary(self) -> dict[str, Any] | None:
        """The summary of a finished run; None until everything is written."""
        path = self.path / "summary.json"
        if self.audit.last.get("event") != "finished" or not path.exists():
            return None
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
        except (ValueError, RecursionError):
            return None
        if isinstance(content, dict) and fingerprint(content) == self.audit.last["summary"]:
            return content
        return None

    def holds_run(self) -> bool:
        """Whether the folder contains a run."""
        return (self.path / "config.toml").exists() or (self.path / "audit.jsonl").exists() or bool(self.committed())

    def model(self, number: int) -> Path:
        """The file with the model of a round."""
        return self.checkpoints / f"round_{number:03d}.safetensors"

    def state(self, number: int) -> Path:
        """The file with everything else that is needed to resume after a round."""
        return self.checkpoints / f"state_{number:03d}.safetensors"

    def stock(self) -> dict[str, Any]:
        """The rounds with checkpoints, the number of removed ones, and the bytes of all checkpoint files."""
        kept = sorted(self._sizes)
        files = (f for f in self.checkpoints.rglob("*") if f.is_file())
        return {"kept": kept, "removed": max(kept) + 1 - len(kept), "bytes": sum(f.stat().st_size for f in files)}

    def facts(self, run: Run, rest: Arrays | None = None) -> dict[str, Any]:
        """The facts of a state file that the audit trail records; `rest` is its content."""
        facts = {
            "schema": SCHEMA,
            "seed": run.seed,
            "round": run.round,
            "model": digest(run.arrays),
            "rest": digest(self._beside(run) if rest is None else rest),
            "history": self.history.rows,
            "clients": self.clients.rows,
        }
        if self.journal.is_used:
            facts["roster"] = self.journal.mark
        if self.sites.is_used:
            facts["sites"] = self.sites.journal.mark
        facts["elapsed"] = self._seconds()
        return facts

    def checkpoint(self, run: Run, facts: Mapping[str, Any], durable: bool, rest: Arrays | None = None) -> None:
        """Write everything needed to resume after the run's round; the audit trail's last event records the `facts`."""
        size = save_arrays(self.model(run.round), run.arrays, {"round": run.round}, durable)
        full = {**facts, "trail": [self.audit.first, self.audit.head]}
        full["check"] = fingerprint(full)
        rest = self._beside(run) if rest is None else rest
        # The state file comes last, because its presence is what commits the round.
        self._sizes[run.round] = size + save_arrays(self.state(run.round), rest, full, durable)

    def load(self, number: int, states: bool = True) -> tuple[Run, dict[str, Any]]:
        """The run and the facts of one checkpoint; raises Damaged if any part of it is not intact.

        Without `states`, client states in files of their own are not read.
        """
        arrays, rest, facts = self.examine(number)
        parts: dict[str, Arrays] = {"memory": {}, "roster": {}, "sites": {}}
        for name, value in rest.items():
            part, _, key = name.partition("/")
            parts[part][key] = value
        history = [typed_row(row) for row in self.history.first(facts["history"])]
        try:
            mark = facts.get("roster")
            roster = self.journal.read(mark) if mark else Roster.from_arrays(parts["roster"])
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise Damaged(f"{self.state(number)} contains no readable roster") from error
        if states and "sites" in facts:
            parts["sites"] = self.sites.read(facts["sites"])
        run = Run(arrays, facts["seed"], number, roster, history, parts["memory"], sites=parts["sites"])
        return run, facts

    def examine(self, number: int) -> tuple[Arrays, Arrays, dict[str, Any]]:
        """The model, the other arrays and the facts of one checkpoint; raises Damaged if any part is not intact."""
        rest, facts = load_arrays(self.state(number))
        check = facts.pop("check", "")
        if fingerprint(facts) != check or digest(rest) != facts["rest"]:
            raise Damaged(f"{self.state(number)} was altered")
        if facts["trail"][0] != self.audit.first and self.audit.head != START:
            raise Damaged(f"{self.state(number)} belongs to another run")
        arrays, _ = load_arrays(self.model(number))
        if digest(arrays) != facts["model"]:
            raise Damaged(f"{self.model(number)} was altered or belongs to another run")
        self.history.check(facts["history"])
        self.clients.check(facts["clients"])
        if "roster" in facts:
            self.journal.check(facts["roster"])
        return arrays, rest, facts

    def newest(self, states: bool = True) -> Run:
        """The run as of the last intact round; nothing is changed on disk."""
        for number in self.committed():
            try:
                return self.load(number, states)[0]
            except Damaged as error:
                log.warning("%s; going back to an earlier round", error)
        raise Damaged(f"{self.path} has no intact checkpoint")

    def _beside(self, run: Run) -> Arrays:
        """The content of a state file: all of a run except its model and what is in journals."""
        parts: dict[str, Arrays] = {"memory": run.memory, "roster": {}, "sites": run.sites}
        if not self.journal.is_used:
            parts["roster"] = run.roster.to_arrays()
        content: Arrays = {}
        for part, values in parts.items():
            content |= {f"{part}/{key}": value for key, value in values.items()}
        return content

    def _size(self, number: int) -> int:
        return sum(f.stat().st_size for f in (self.model(number), self.state(number)) if f.exists())

    def _set_aside(self, number: int) -> None:
        for path in (self.model(number), self.state(number)):
            if path.exists():
                path.replace(path.with_name(path.name + ".damaged"))

    def _mark(self, config: str) -> dict[str, str]:
        return mark(dotted_in(tomllib.loads(config)), self.path, config)

    def _hashes(self, names: Iterable[str]) -> dict[str, str]:
        return {name: hash_of(self.path / name) for name in names if (self.path / name).is_file()}

    def _write_history(self, run: Run) -> None:
        rows = [plain_row(row) for row in run.history]
        write_whole(self.path / "history.json", json.dumps(rows, indent=1) + "\n")
        self._written = len(rows)

    def _seconds(self) -> float:
        return self.elapsed + time.monotonic() - self._began


def plain_row(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row with Python's own numbers and texts, for JSON."""
    return {key: plain_value(value) for key, value in row.items()}


def hash_of(file: Path) -> str:
    """The sha256 of a file's bytes."""
    with file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()


def is_plain(name: str) -> bool:
    """Whether a name can be that of a folder: one path component, visible and printable."""
    return bool(name) and name.isprintable() and not name.startswith(".") and not {"/", "\\"} & set(name)


@contextlib.contextmanager
def locked_folder(path: Path) -> Iterator[None]:
    """Lock a folder, creating it if needed; the lock file names the host and process at work.

    A new folder is removed again if the block fails before anything is written.
    """
    made = [folder for folder in (path, *path.parents) if not folder.exists()]
    try:
        path.mkdir(parents=True, exist_ok=True)
        handle = os.open(path / ".lock", os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise ConfigError(f"cannot write to {path}: {error.strerror}") from error
    try:
        lock(handle, path)
        with name_path_in_errors(path / ".lock"):
            os.ftruncate(handle, 0)
            os.write(handle, f"{socket.gethostname()} {os.getpid()}\n".encode())
        try:
            yield
        except BaseException:
            if made and {file.name for file in path.iterdir()} <= {".lock", "run.log"}:
                remove_empty(made)
            raise
        finally:
            with contextlib.suppress(OSError):  # a failing disk has been reported already
                os.ftruncate(handle, 0)
    finally:
        os.close(handle)


def remove_empty(folders: Sequence[Path]) -> None:
    """Remove a folder that contains only what every start writes, and the new folders around it."""
    with contextlib.suppress(OSError):  # it is in use meanwhile, or open and this is Windows
        for name in (".lock", "run.log"):
            (folders[0] / name).unlink(missing_ok=True)
        for folder in folders:
            folder.rmdir()


def versions() -> dict[str, str]:
    """The versions that the run is made with."""
    import platform
    from importlib.metadata import PackageNotFoundError, version

    found = {"python": platform.python_version(), "machine": platform.machine()}
    for name in ("mutirao", "torch", "numpy", "flwr"):
        with contextlib.suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def save_run(run: Run, path: Path | str) -> None:
    """Write a run for `load_run`, without a recipe; a run saved there before is replaced.

    >>> import numpy as np
    >>> save_run(Run({"w": np.ones(2)}, seed=3), "runs/kept")
    >>> load_run("runs/kept").arrays["w"], load_run("runs/kept").seed
    (array([1., 1.]), 3)
    """
    with Folder.open(Path(path)) as folder:
        if (folder.path / "config.toml").exists():
            raise ConfigError(f"{path} already contains the record of a run; choose another folder")
        for number in folder.committed():
            folder.state(number).unlink()
            folder.model(number).unlink(missing_ok=True)
        folder.history.go_on_after(0)
        rows = folder.history.append(run.history)
        facts = folder.facts(run)
        entry = {"history": fingerprint(rows), "state": fingerprint(facts), "versions": versions()}
        folder.audit.append("saved", round=run.round, model=facts["model"], **entry)
        folder.checkpoint(run, facts, durable=True)


def load_run(path: Path | str) -> Run:
    """The run of a folder as of its last intact round; nothing is changed on disk.

    >>> import numpy as np
    >>> save_run(Run({"w": np.ones(2)}, round=4), "runs/again")
    >>> load_run("runs/again").round
    4
    """
    return Folder(Path(path)).newest()
