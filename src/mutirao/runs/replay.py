"""Which clients another selector would have selected: a finished run's record replayed without training.

In each round the roster contains what it contained in the run, and the selector gets that round's random generator, so
the run's own selector reproduces the run's selection. With `own`, the roster follows the other selector's choices
instead: ages follow from them, and a selected client reports what it reported in the run's nearest earlier round, or
else in the first later one.
"""

import bisect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mutirao.config import Part, build, complete_part, read_toml, resolve
from mutirao.core.arrays import Array
from mutirao.core.fleet import ClientId
from mutirao.core.group import check_selection, run_selector
from mutirao.core.parts import AnySelector, as_selector
from mutirao.core.roster import Roster
from mutirao.errors import ConfigError
from mutirao.experiments.simulated_parts import build_select, is_asynchronous
from mutirao.experiments.task import find
from mutirao.randomness import rng
from mutirao.runs.csv_tables import client_figures
from mutirao.runs.participation import Participation, all_clients
from mutirao.runs.reader import Record
from mutirao.runs.trust import Trust, check_trust, distrust, is_own_run
from mutirao.simulation.availability import next_available


@dataclass(frozen=True, eq=False)
class Replay:
    """The clients selected in each round: `actual` by the run, `other` by the other selector."""

    clients: list[ClientId]
    actual: list[list[ClientId]]
    other: list[list[ClientId]]
    own: bool  # whether the roster followed the choices of `other`

    @property
    def overlap(self) -> list[float]:
        """The Jaccard index of each round's two selections, |A n B| / |A u B|."""
        shares: list[float] = []
        for actual, other in zip(self.actual, self.other, strict=True):
            union = {*actual, *other}
            shares.append(len({*actual} & {*other}) / max(1, len(union)))
        return shares

    def participation(self, which: Sequence[Sequence[ClientId]]) -> Participation:
        """The participation in `actual` or in `other`."""
        place = {c: i for i, c in enumerate(self.clients)}
        who = [place[c] for names in which for c in names]
        when = [t for t, names in enumerate(which) for _ in names]
        return Participation.of(self.clients, len(which), who, when)


def replay(
    rows: Sequence[Mapping[str, Any]],
    clients: int,
    policy: AnySelector,
    seed: int = 0,
    own: bool = False,
    available: Any = None,
) -> Replay:
    """Replay the rows of a run with `clients` clients; `available` is the model of their availability, if any."""
    by_round: dict[int, list[Mapping[str, Any]]] = {}
    for row in rows:
        by_round.setdefault(row["round"], []).append(row)
    names = all_clients(sorted({r["client"] for r in rows}), clients)
    replies = replies_by_client(rows)
    roster = Roster()
    memory: dict[str, Array] = {}
    mask = None
    time = 0
    select = as_selector(policy)
    roster.meet(names)
    actual: list[list[ClientId]] = []
    other: list[list[ClientId]] = []
    for t in sorted(by_round):
        if available is not None:
            mask, time = next_available(available, names, time + 1, mask, seed)
            roster.meet([c for c, there in zip(names, mask, strict=True) if there])
        asked = check_selection(select, select.probes(roster, t, rng(seed, t, "probe")), roster)
        # The record has no answers to other probes: the clients' known sample counts stand in for them.
        roster.probed(t, {c: max(1, int(roster.n[roster.row(c)])) for c in asked})
        other.append(run_selector(select, roster, t, rng(seed, t, "select"), memory))
        first = [r["client"] for r in by_round[t] if r.get("try", 1) == 1]
        actual.append(sorted(first))
        if own:
            update_from_choice(roster, t, other[-1], replies)
        else:
            update_as_recorded(roster, t, by_round[t])
    return Replay(names, actual, other, own)


def update_as_recorded(roster: Roster, t: int, rows: Sequence[Mapping[str, Any]]) -> None:
    """Update the roster as the run did."""
    last = max(r.get("try", 1) for r in rows)
    for attempt in range(1, last + 1):
        tried = [r for r in rows if r.get("try", 1) == attempt]
        good = [r for r in tried if attempt == last and r.get("replied") == 1 and not r.get("rejected")]
        roster.sent(t, [r["client"] for r in tried])
        roster.mark(t, [r["client"] for r in tried], {r["client"]: int(r["n"]) for r in good})
        for r in good:
            roster.hear(t, r["client"], client_figures(r))


def update_from_choice(roster: Roster, t: int, chosen: Sequence[ClientId], replies: Mapping[ClientId, Any]) -> None:
    """Update the roster with the replies that the chosen clients gave in the nearest rounds of the run."""
    nearest: dict[ClientId, Mapping[str, Any]] = {}
    for client in chosen:
        if client in replies:
            rounds, rows = replies[client]
            nearest[client] = rows[max(0, bisect.bisect_right(rounds, t) - 1)]
    roster.sent(t, chosen)
    roster.mark(t, chosen, {c: int(row["n"]) for c, row in nearest.items()})
    for c, row in nearest.items():
        roster.hear(t, c, client_figures(row))


def replies_by_client(rows: Sequence[Mapping[str, Any]]) -> dict[ClientId, tuple[list[int], list[Mapping[str, Any]]]]:
    """Each client's replies, with the rounds of them."""
    found: dict[ClientId, tuple[list[int], list[Mapping[str, Any]]]] = {}
    for row in rows:
        if row.get("replied") == 1:
            rounds, lines = found.setdefault(row["client"], ([], []))
            rounds.append(row["round"])
            lines.append(row)
    return found


def replay_folder(
    folder: Path, sets: Sequence[tuple[str, Any]] = (), own: bool = False, trust: Trust = distrust
) -> tuple[Part, Replay]:
    """Replay the run in a folder with `select` and its settings changed by `sets`."""
    record = Record.begun(folder)
    table = read_toml(folder / "config.toml")
    check_trust(folder / "config.toml", table, trust, (value for _, value in sets), lambda: is_own_run(folder))
    recipe = str(table.pop("recipe", ""))
    for key, _ in sets:
        if key.partition(".")[0] not in ("select", "per_round", "seed"):
            raise ConfigError(f"{key}: only select, its settings, per_round and seed can be changed in a replay")
    config: Any = resolve(find(recipe).config, table, sets)
    if is_asynchronous(build("aggregate", config.aggregate)):
        raise ConfigError(
            f"aggregate={config.aggregate.name}: asynchronous runs cannot be replayed; which clients were free is not "
            "recorded"
        )
    select = build_select(config, record.summary.get("classes"))
    available = None
    if config.available.name != "always":
        available = build("available", config.available)
    found = replay(record.asked, record.population, select, config.seed, own, available)
    return complete_part("select", config.select), found
