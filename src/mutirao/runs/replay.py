"""Whom would another policy have selected? A finished run's record played again, without training.

In each round the roster holds what it held in the run, and the policy is asked with the randomness of that round: the
run's own policy gives the run's own selection. With `own` the policy lives with its own choices instead: ages follow
from them, and a client it selects tells what it told the run nearest before, or else after, that round.
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
from mutirao.experiments.async_flow import is_asynchronous
from mutirao.experiments.simulated_parts import build_select
from mutirao.experiments.task import find
from mutirao.randomness import rng
from mutirao.runs.column_names import client_figures
from mutirao.runs.participation import Participation, all_clients
from mutirao.runs.reader import Record
from mutirao.runs.trust import Trust, check_trust, distrust, is_own_run
from mutirao.simulation.availability import next_available


@dataclass(frozen=True, eq=False)
class Replay:
    """What was selected and what would have been: `actual` and `other` by round."""

    clients: list[ClientId]
    actual: list[list[ClientId]]
    other: list[list[ClientId]]
    own: bool  # whether `other` lived with its own choices

    @property
    def overlap(self) -> list[float]:
        """The share of each round's choice that is the same, |A n B| / |A u B|."""
        pairs = zip(self.actual, self.other, strict=True)
        return [len({*a} & {*b}) / max(1, len({*a} | {*b})) for a, b in pairs]

    def participation(self, which: Sequence[Sequence[ClientId]]) -> Participation:
        """Who was selected when, in `actual` or in `other`."""
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
    """Play the rows of a run of so many clients again for another policy; `available` is who was there if not all."""
    by_round: dict[int, list[Mapping[str, Any]]] = {}
    for row in rows:
        by_round.setdefault(row["round"], []).append(row)
    names = all_clients(sorted({r["client"] for r in rows}), clients)
    told = replies_by_client(rows)
    roster, mask, time, memory = Roster(), None, 0, dict[str, Array]()
    select = as_selector(policy)
    roster.meet(names)
    actual, other = [], []
    for t in sorted(by_round):
        if available is not None:
            mask, time = next_available(available, names, time + 1, mask, seed)
            roster.meet([c for c, there in zip(names, mask, strict=True) if there])
        asked = check_selection(select, select.probes(roster, t, rng(seed, t, "probe")), roster)
        roster.probed(t, {c: max(1, int(roster.n[roster.row(c)])) for c in asked})  # with what is known of them
        other.append(run_selector(select, roster, t, rng(seed, t, "select"), memory))
        first = [r["client"] for r in by_round[t] if r.get("try", 1) == 1]
        actual.append(sorted(first))
        if own:
            update_from_choice(roster, t, other[-1], told)
        else:
            update_as_recorded(roster, t, by_round[t])
    return Replay(names, actual, other, own)


def update_as_recorded(roster: Roster, t: int, rows: Sequence[Mapping[str, Any]]) -> None:
    """Let the roster learn what it learnt in the run."""
    last = max(r.get("try", 1) for r in rows)
    for attempt in range(1, last + 1):
        tried = [r for r in rows if r.get("try", 1) == attempt]
        good = [r for r in tried if attempt == last and r.get("replied") == 1 and not r.get("rejected")]
        roster.sent(t, [r["client"] for r in tried])
        roster.mark(t, [r["client"] for r in tried], {r["client"]: int(r["n"]) for r in good})
        for r in good:
            roster.hear(t, r["client"], client_figures(r))


def update_from_choice(roster: Roster, t: int, chosen: Sequence[ClientId], told: Mapping[ClientId, Any]) -> None:
    """Let the roster learn what it would have, as far as the run can tell."""
    known = {c: told[c] for c in chosen if c in told}
    nearest = {c: rows[max(0, bisect.bisect_right(rounds, t) - 1)] for c, (rounds, rows) in known.items()}
    roster.sent(t, chosen)
    roster.mark(t, chosen, {c: int(row["n"]) for c, row in nearest.items()})
    for c, row in nearest.items():
        roster.hear(t, c, client_figures(row))


def replies_by_client(rows: Sequence[Mapping[str, Any]]) -> dict[ClientId, tuple[list[int], list[Mapping[str, Any]]]]:
    """What each client told, with the rounds in which it did."""
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
    """Play the run in a folder again with `select` and its settings changed by `sets`."""
    record, table = Record.begun(folder), read_toml(folder / "config.toml")
    check_trust(folder / "config.toml", table, trust, (value for _, value in sets), lambda: is_own_run(folder))
    recipe = str(table.pop("recipe", ""))
    for key, _ in sets:
        if key.partition(".")[0] not in ("select", "per_round", "seed"):
            raise ConfigError(f"{key}: only select, its settings, per_round and seed can be changed in a replay")
    config: Any = resolve(find(recipe).config, table, sets)
    if is_asynchronous(build("aggregate", config.aggregate)):
        raise ConfigError(f"aggregate={config.aggregate.name}: who was free when is not in the record, so no replay")
    churns = config.available.name != "always"
    select = build_select(config, record.summary.get("classes"))
    available = build("available", config.available) if churns else None
    found = replay(record.asked, record.population, select, config.seed, own, available)
    return complete_part("select", config.select), found
