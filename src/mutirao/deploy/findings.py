"""What a check found: its state, what there is to say, and a remedy."""

from dataclasses import dataclass
from typing import Literal

Health = Literal["ok", "warn", "fail", "skip"]


@dataclass(frozen=True)
class Finding:
    """What one check found."""

    check: str
    state: Health
    text: str
    remedy: str = ""


def look(check: str, trouble: str, remedy: str, good: str) -> Finding:
    """A finding of trouble, or of none."""
    return Finding(check, "fail", trouble, remedy) if trouble else Finding(check, "ok", good)


def measure(check: str, left: float, least: float, little: float, text: str, remedy: str) -> Finding:
    """Whether enough is left of something."""
    state: Health = "fail" if left < least else "warn" if left < little else "ok"
    return Finding(check, state, text, "" if state == "ok" else remedy)
