"""Rosters to select from, for the tests of selectors."""

from typing import Any

import numpy as np

from mutirao.core.roster import Roster


def roster_of(present: list[str], absent: list[str] | None = None) -> Roster:
    roster = Roster()
    roster.meet([*present, *(absent or [])])
    roster.meet(present)
    return roster


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def known_to(losses: list[float], new: int = 0, at: int = 1) -> Roster:
    roster = roster_of([*(f"k{i}" for i in range(len(losses))), *(f"n{i}" for i in range(new))])
    old = [f"k{i}" for i in range(len(losses))]
    roster.mark(at, old, dict.fromkeys(old, 10))
    for c, loss in zip(old, losses, strict=True):
        roster.note(c, {"rms_loss": loss})
    return roster


def selections(select: Any, lie: float, clients: int = 20, rounds: int = 40, seed: int = 0) -> tuple[int, float]:
    """How often a client whose loss is a lie is selected, and how often the others are on average."""
    roster, draw = Roster(), np.random.default_rng(seed)
    names = [f"c{i:02d}" for i in range(clients)]
    roster.meet(names)
    for number in range(1, rounds + 1):
        for c in select.probes(roster, number, draw) if hasattr(select, "probes") else []:
            roster.hear(number, c, {"loss": lie if c == "c00" else float(draw.uniform(0.5, 2))})
            roster.probed(number, {c: 14})
        chosen = select(roster, number, draw)
        roster.mark(number, chosen, dict.fromkeys(chosen, 14))
        for c in chosen:
            told = lie if c == "c00" else float(draw.uniform(0.5, 2) * 0.9 ** (number / 4))
            roster.hear(number, c, {"rms_loss": told, "loss": told, "gradient_norm": told})
    return int(roster.selected[0]), float(roster.selected[1:].mean())
