"""The settings of thousands of runs, read line by line: most lines are the same in all of them."""

import re
import tomllib
from functools import lru_cache
from typing import Any

from mutirao.config import flatten

Settings = dict[str, Any]
TABLE = re.compile(r"\[([A-Za-z0-9_-]+)\]")


def read_settings(text: str) -> dict[str, Any]:
    """What a configuration says; ValueError if it is not TOML.

    Lines of the form our own files have, `[table]` and `key = value`, are looked up; anything else is read as TOML is.
    """
    out: dict[str, Any] = {}
    table = out
    for line in text.splitlines():
        if not line or line.isspace():
            continue
        if found := TABLE.fullmatch(line):
            if found[1] in out:
                return tomllib.loads(text)
            table = out[found[1]] = {}
            continue
        pair = read_line(line)
        if pair is None or pair[0] in table:
            return tomllib.loads(text)
        table[pair[0]] = pair[1]
    return out


@lru_cache(20_000)
def read_line(line: str) -> tuple[str, Any] | None:
    """`key = value`, if the line is that and whole by itself."""
    try:
        ((key, value),) = tomllib.loads(line).items()
    except (ValueError, RecursionError):
        return None
    if isinstance(value, str | int | float | bool):
        return (key, value)
    return None


def settings_of(config: dict[str, Any]) -> Settings:
    """A configuration as dotted keys; a part's name stands for the part."""
    pairs = ((key.removesuffix(".name"), value) for key, value in flatten(config))
    return {key: value if isinstance(value, int | float | str) else str(value) for key, value in pairs}
