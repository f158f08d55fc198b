"""Whose code a file may name: what the user typed, what they agreed to, and what they ran themselves before.

A configuration that names code of its own (`package.module:name`) runs that code. Such a run carries a mark in its
trail, made with a secret of this user on this machine; a folder or study from elsewhere has none.
"""

import contextlib
import hashlib
import hmac
import os
import secrets
import tomllib
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from mutirao.core.digests import fingerprint
from mutirao.errors import ConfigError
from mutirao.registry import dotted_in
from mutirao.runs.audit_trail import check_chain
from mutirao.runs.reader import json_of, text_in

Trust = Callable[[Path, Sequence[str]], bool]  # whether the code that a file names may be run


def distrust(where: Path, names: Sequence[str]) -> bool:
    """Nobody was asked, so nothing is run."""
    return False


def never() -> bool:
    """Of a file that no trail vouches for."""
    return False


def check_trust(
    where: Path, table: Any, trust: Trust, typed: Iterable[Any] = (), own: Callable[[], bool] = never
) -> None:
    """Refuse a file whose table names code that nobody agreed to run, before any of it is imported.

    `typed` is what the user wrote on the command line, `own` whether they ran the very file before.
    """
    known = dotted_in(list(typed))
    strange = [name for name in dotted_in(table) if name not in known]
    if strange and not own() and not trust(where, strange):
        right = "it is loaded only from a run of your own" if trust is distrust else "read it first, then add --trust"
        raise ConfigError(f"{where} names code to run: {', '.join(strange)}; {right}")


def names_in_file(path: Path) -> list[str]:
    """The code that a TOML file names; nothing if it cannot be read, which whoever needs it will say."""
    try:
        return dotted_in(tomllib.loads(text_in(path)))
    except (ValueError, RecursionError):
        return []


def is_own_run(folder: Path) -> bool:
    """Whether this user ran the configuration in the folder on this machine, by a trail that holds."""
    events, problems = check_chain(folder / "audit.jsonl")
    told = [e for e in events if e["event"] in ("started", "resumed") and "config" in e]
    text = text_in(folder / "config.toml")
    if problems or not told or told[-1]["config"] != fingerprint(text):
        return False
    return is_mark(told[-1].get("mark"), folder, text)


def is_own_study(folder: Path, text: str) -> bool:
    """Whether this user ran a study with this text, and the settings its folder tells, on this machine."""
    plan = json_of(folder / "study.json")
    sets = plan.get("sets")
    return isinstance(sets, list) and is_mark(plan.get("mark"), folder, text, *map(str, sets))


def mark(names: Sequence[str], folder: Path, *texts: str) -> dict[str, str]:
    """The mark of texts that name this code; nothing if they name none, or where no secret can be kept.

    It holds in this folder only: who is given the folder cannot send it back with other code beside it.
    """
    if not names or (key := own_key(make=True)) is None:
        return {}
    return {"mark": signed(key, (str(folder.resolve()), *texts))}


def is_mark(given: Any, folder: Path, *texts: str) -> bool:
    """Whether it is this user's mark for these texts in this folder."""
    if not isinstance(given, str) or (key := own_key()) is None:
        return False
    return hmac.compare_digest(given.encode(), signed(key, (str(folder.resolve()), *texts)).encode())


def signed(key: bytes, texts: Sequence[str]) -> str:
    """HMAC-SHA256 over the texts, each with its length."""
    content = b"".join(len(raw).to_bytes(8, "big") + raw for raw in (text.encode() for text in texts))
    return hmac.new(key, b"mutirao:" + content, hashlib.sha256).hexdigest()


def own_key(make: bool = False) -> bytes | None:
    """This user's secret, made when it is first needed; None where there is none or it cannot be kept."""
    try:
        home = os.environ.get("XDG_CONFIG_HOME", "")
        file = (Path(home) if home else Path.home() / ".config") / "mutirao" / "key"
        if make and not file.exists():
            file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            part = file.with_name(f".key.{os.getpid()}.{secrets.token_hex(4)}")
            with os.fdopen(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as out:
                out.write(secrets.token_hex(32).encode())
            with contextlib.suppress(FileExistsError):  # another process was first: then its key counts
                os.link(part, file)
            part.unlink()
        key = file.read_bytes()
    except (OSError, RuntimeError):
        return None
    return key if len(key) >= 32 else None
