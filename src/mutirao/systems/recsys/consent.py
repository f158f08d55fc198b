"""Who consents, as a list says it; what the record keeps of that; and who has withdrawn from more than the rounds."""

import hashlib
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

import numpy as np

from mutirao.errors import ConfigError
from mutirao.io import read_rows, read_text
from mutirao.systems.recsys.ratings import Ratings

POOLED = "those whose pooled ratings the item vectors begin from"
JUDGES = "those who judge the model"


def read_names(path: Path, column: str = "") -> dict[str, int]:
    """The users in a file, each with its line: one a line, or in the `column` of a CSV file with a header."""
    if not path.is_file():
        raise ConfigError(f"{path} is not there; right would be a file with a user a line")
    found: dict[str, int] = {}
    for line, name in cells_of(path, column):
        if name in found:
            raise ConfigError(f"{path}, line {line}: {name!r} stands in line {found[name]} already")
        found[name] = line
    if not found:
        raise ConfigError(f"{path} names nobody; right would be a user a line")
    return found


def cells_of(path: Path, column: str) -> Iterable[tuple[int, str]]:
    """Line and name of each user in the file."""
    text = read_text(path)
    if not column:
        return [(n, name) for n, line in enumerate(text.splitlines(), 1) if (name := line.strip())]
    first = text.partition("\n")[0]
    rows = read_rows(text, path, ";" if ";" in first and "," not in first else ",")
    header = [name.strip() for name in next(rows, (1, []))[1]]
    if column not in header:
        raise ConfigError(f"{path}, line 1: there is no column {column!r}; it has {', '.join(header)[:200] or 'none'}")
    at = header.index(column)
    cells = [(line, row[at].strip() if at < len(row) else "") for line, row in rows if any(row)]
    empty = next((line for line, name in cells if not name), None)
    if empty is not None:
        raise ConfigError(f"{path}, line {empty}: {column} is empty; right would be a user")
    return cells


def digest_names(names: Iterable[str]) -> str:
    """The sha256 of the names, sorted, a line each: what `LC_ALL=C sort FILE | sha256sum` gives of a list."""
    return hashlib.sha256("".join(f"{name}\n" for name in sorted(names)).encode()).hexdigest()


def facts_of(pooled: frozenset[str], listed: frozenset[str], withdrawn: frozenset[str]) -> dict[str, Any]:
    """What the record keeps of whose ratings were pooled: how many and their digest, and the list's own."""
    if not pooled:
        return {}
    facts: dict[str, Any] = {"pooled": len(pooled - withdrawn), "digest": digest_names(pooled - withdrawn)}
    if listed:
        facts |= {"listed": len(listed - withdrawn), "list": digest_names(listed - withdrawn)}
    return {"consent": facts}


def parts_of(withdrawn: Iterable[str], pooled: Collection[str], judges: Collection[str]) -> dict[str, str]:
    """What those who withdrew had part in besides the rounds; nothing of the others."""
    parts = {
        name: " and ".join(what for what, those in ((POOLED, pooled), (JUDGES, judges)) if name in those)
        for name in withdrawn
    }
    return {name: part for name, part in parts.items() if part}


def without(ratings: Ratings, withdrawn: Collection[str]) -> Ratings:
    """The ratings of all who did not withdraw."""
    stays = [row for row, name in enumerate(ratings.users) if name not in withdrawn]
    if ratings.users and not stays:
        raise ConfigError("exclude: nobody is left to evaluate on, or to pool")
    return ratings.of_users(np.array(stays, np.intp))
