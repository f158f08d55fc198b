"""Consent and withdrawal: lists of users, what a run records of them, and ratings without those who withdrew."""

import hashlib
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

import numpy as np

from mutirao.errors import ConfigError
from mutirao.io import read_rows, read_text
from mutirao.systems.recsys.ratings import Ratings

# Written into records of withdrawals, which are translated by these texts.
POOLED = "those whose pooled ratings the item vectors begin from"
EVALUATED = "those who judge the model"


def read_names(path: Path, column: str = "") -> dict[str, int]:
    """The users in a file with their line numbers: one on each line, or in the `column` of a CSV file with a header."""
    if not path.is_file():
        raise ConfigError(f"{path} does not exist; expected a file with one user on each line")
    found: dict[str, int] = {}
    for line, name in cells_of(path, column):
        if name in found:
            raise ConfigError(f"{path}, line {line}: {name!r} is in line {found[name]} already")
        found[name] = line
    if not found:
        raise ConfigError(f"{path} names no user; expected one user on each line")
    return found


def cells_of(path: Path, column: str) -> Iterable[tuple[int, str]]:
    """Line number and name of each user in the file."""
    text = read_text(path)
    if not column:
        return [(n, name) for n, line in enumerate(text.splitlines(), 1) if (name := line.strip())]
    first = text.partition("\n")[0]
    separator = ","
    # Spreadsheets of languages with a decimal comma separate cells by semicolons.
    if ";" in first and "," not in first:
        separator = ";"
    rows = read_rows(text, path, separator)
    header = [name.strip() for name in next(rows, (1, []))[1]]
    if column not in header:
        raise ConfigError(f"{path}, line 1: there is no column {column!r}; it has {', '.join(header)[:200] or 'none'}")
    at = header.index(column)
    cells = [(line, row[at].strip() if at < len(row) else "") for line, row in rows if any(row)]
    empty = next((line for line, name in cells if not name), None)
    if empty is not None:
        raise ConfigError(f"{path}, line {empty}: {column} is empty; expected a user")
    return cells


def digest_names(names: Iterable[str]) -> str:
    """The sha256 of the sorted names, one on each line, as `LC_ALL=C sort FILE | sha256sum` prints for a list."""
    return hashlib.sha256("".join(f"{name}\n" for name in sorted(names)).encode()).hexdigest()


def consent_facts(pooled: frozenset[str], listed: frozenset[str], withdrawn: frozenset[str]) -> dict[str, Any]:
    """What a run records of users with pooled ratings: their number and digest, and those of the list."""
    if not pooled:
        return {}
    facts: dict[str, Any] = {"pooled": len(pooled - withdrawn), "digest": digest_names(pooled - withdrawn)}
    if listed:
        facts |= {"listed": len(listed - withdrawn), "list": digest_names(listed - withdrawn)}
    return {"consent": facts}


def roles_of(withdrawn: Iterable[str], pooled: Collection[str], evaluated: Collection[str]) -> dict[str, str]:
    """What users who withdrew were used for besides the rounds."""
    roles: dict[str, str] = {}
    for name in withdrawn:
        found = []
        if name in pooled:
            found.append(POOLED)
        if name in evaluated:
            found.append(EVALUATED)
        if found:
            roles[name] = " and ".join(found)
    return roles


def without(ratings: Ratings, withdrawn: Collection[str]) -> Ratings:
    """The ratings of all users who did not withdraw."""
    rows = [row for row, name in enumerate(ratings.users) if name not in withdrawn]
    if ratings.users and not rows:
        raise ConfigError("exclude: no user is left to evaluate on, or to pool")
    return ratings.of_users(np.array(rows, np.intp))
