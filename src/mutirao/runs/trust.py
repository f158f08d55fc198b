"""Which code a configuration may load: what the user typed, agreed to, or ran before.

A configuration that names code of its own (`package.module:name`) runs that code. The user's own runs carry a
signature in their audit trail, made with a secret key of this user on this machine. Folders from elsewhere have none.
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

from mutirao.core.arrays import fingerprint
from mutirao.errors import ConfigError
from mutirao.registry import dotted_in
from mutirao.runs.audit_trail import check_chain
from mutirao.runs.reader import json_of, text_in

Trust = Callable[[Path, Sequence[str]], bool]  # whether the code that a file names may be run


def distrust(where: Path, names: Sequence[str]) -> bool:
    """Refuse all code: the default where the user cannot be asked."""
    return False


def never() -> bool:
    """The default for files that are in no run folder."""
    return False


def check_trust(
    where: Path, table: Any, trust: Trust, typed: Iterable[Any] = (), own: Callable[[], bool] = never
) -> None:
    """Refuse a file that names code without the user's consent, before any of it is imported.

    `typed` is what the user wrote on the command line; `own` says whether they ran this very file before.
    """
    known = dotted_in(list(typed))
    unknown = [name for name in dotted_in(table) if name not in known]
    if unknown and not own() and not trust(where, unknown):
        advice = "read it first, then add --trust"
        if trust is distrust:
            advice = "it is loaded only from a run of your own"
        raise ConfigError(f"{where} names code to run: {', '.join(unknown)}; {advice}")


def names_in_file(path: Path) -> list[str]:
    """The code that a TOML file names; empty if it cannot be read, which is reported when it is used."""
    try:
        return dotted_in(tomllib.loads(text_in(path)))
    except (ValueError, RecursionError):
        return []


def is_own_run(folder: Path) -> bool:
    """Whether this user ran the folder's configuration on this machine, by an intact audit trail."""
    events, problems = check_chain(folder / "audit.jsonl")
    starts = [e for e in events if e["event"] in ("started", "resumed") and "config" in e]
    text = text_in(folder / "config.toml")
    if problems or not starts or starts[-1]["config"] != fingerprint(text):
        return False
    return is_mark(starts[-1].get("mark"), folder, text)


def is_own_study(folder: Path, text: str) -> bool:
    """Whether this user ran a study with this text, and the settings in its folder, on this machine."""
    plan = json_of(folder / "study.json")
    sets = plan.get("sets")
    return isinstance(sets, list) and is_mark(plan.get("mark"), folder, text, *map(str, sets))


def mark(names: Sequence[str], folder: Path, *texts: str) -> dict[str, str]:
    """The signature of texts that name this code; empty if they name none, or if no key can be kept.

    It is valid in this folder only: otherwise a copied folder could be returned with other code beside it.
    """
    if not names or (key := own_key(make=True)) is None:
        return {}
    return {"mark": signed(key, (str(folder.resolve()), *texts))}


def is_mark(given: Any, folder: Path, *texts: str) -> bool:
    """Whether it is this user's signature for these texts in this folder."""
    # A stranger's file may hold any text, such as a lone surrogate; a mark is hexadecimal.
    if not isinstance(given, str) or not given.isascii() or (key := own_key()) is None:
        return False
    return hmac.compare_digest(given.encode(), signed(key, (str(folder.resolve()), *texts)).encode())


def signed(key: bytes, texts: Sequence[str]) -> str:
    """HMAC-SHA256 over the texts, each with its length, so that no two lists of texts have the same content."""
    content = b""
    for text in texts:
        raw = text.encode("utf-8", "surrogatepass")  # JSON may hold half of a character
        content += len(raw).to_bytes(8, "big") + raw
    return hmac.new(key, b"mutirao:" + content, hashlib.sha256).hexdigest()


def own_key(make: bool = False) -> bytes | None:
    """This user's secret key, created when first needed; None if there is none or it cannot be stored."""
    try:
        # `Path.home` raises RuntimeError for a user without a home, so it is called only if needed.
        home = os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config"
        file = Path(home) / "mutirao" / "key"
        if make and not file.exists():
            file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            part = file.with_name(f".key.{os.getpid()}.{secrets.token_hex(4)}")
            with os.fdopen(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as out:
                out.write(secrets.token_hex(32).encode())
            # Unlike a rename, a link never replaces the key of another process that was first.
            with contextlib.suppress(FileExistsError):
                os.link(part, file)
            part.unlink()
        key = file.read_bytes()
    except (OSError, RuntimeError):
        return None
    if len(key) >= 32:
        return key
    return None
