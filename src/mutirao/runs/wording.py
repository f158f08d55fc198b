"""Settings and numbers in plain words, on one line."""

from collections.abc import Iterable
from typing import Any

LONGEST = 60  # letters of a value


def count(many: Any, thing: str) -> str:
    """`1 client`, `2 clients`, `1,000 clients`."""
    number = f"{many:,}" if isinstance(many, int) else clip(str(many))
    return f"{number} {thing}{'' if many == 1 else 's'}"


def joined(apart: Iterable[tuple[str, Any]]) -> list[tuple[str, Any]]:
    """Settings with those of a part behind its name, so that each part is told once."""
    out: dict[str, Any] = {}
    for key, value in apart:
        kind, dot, sub = key.partition(".")
        if dot and kind in out:
            out[kind] = (*out[kind], (sub, value)) if isinstance(out[kind], tuple) else (out[kind], (sub, value))
        else:
            out[key] = value
    return list(out.items())


def say(key: str, value: Any) -> str:
    """A setting in words: `lr 0.1`, `screen robust (least 2)`, `no scale`."""
    if isinstance(value, tuple):
        inside = ", ".join(say(k, v) for k, v in value[1:])
        return f"{say(key, value[0])} ({inside})"
    name = clip(key.replace("_", " ").replace(".", " "))
    if value in ("", "none"):
        return f"no {name}"
    return f"{name} {say_value(value)}"


def say_value(value: Any) -> str:
    """A value as one would write it."""
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, float):
        return f"{value:.6g}"
    return f"{value:,}" if isinstance(value, int) else clip(str(value))


def say_share(value: Any) -> str:
    """A share as a percentage."""
    return f"{value:.3%}".replace(".000%", "%") if isinstance(value, int | float) else "some"


def listed(things: list[str]) -> str:
    """`a`, `a and b`, `a, b and c`."""
    return " and ".join([", ".join(things[:-1]), things[-1]] if len(things) > 1 else things)


def clip(text: str) -> str:
    """Text on one line, without what a terminal would obey, and not too long."""
    plain = " ".join("".join(c if c.isprintable() else " " for c in text).split())
    return plain if len(plain) <= LONGEST else f"{plain[: LONGEST - 1]}…"
