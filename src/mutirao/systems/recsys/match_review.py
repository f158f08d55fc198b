"""Matches as a table that a person corrects: `write` gives it out, `verdicts` and `pairs` take it back."""

import logging
from collections.abc import Iterator
from pathlib import Path

from mutirao.errors import ConfigError
from mutirao.io import read_rows, read_text, write_rows, write_whole
from mutirao.systems.recsys.catalogues import Catalogue
from mutirao.systems.recsys.matching import Matches, Pair

log = logging.getLogger("mutirao")

COLUMNS = ("a_id", "b_id", "a_title", "a_year", "b_title", "b_year", "step", "score", "doubtful", "verdict")
NEEDED = ("a_id", "b_id", "step", "verdict")
NONE = "none"  # the step of a near pair, which does not count
VERDICTS = {"yes": True, "no": False}


def write_matches(matches: Matches, path: Path) -> None:
    """Write all pairs, those to look at first: doubtful ones, near ones, then the rest.

    An empty verdict leaves a pair as the matcher judged it; a person writes yes or no.
    """
    doubtful, rest = ([p for p in matches.found if p.doubtful == which] for which in (True, False))
    near, refused = set(matches.near), set(matches.refused)
    pairs = (*doubtful, *matches.near, *rest, *matches.refused)
    rows = (_cells(matches, pair, NONE if pair in near else pair.step, pair in refused) for pair in pairs)
    write_whole(path, write_rows([COLUMNS, *rows]))


def _cells(matches: Matches, pair: Pair, step: str, refused: bool) -> list[str]:
    a, b = matches.a, matches.b
    verdict = "" if pair.step != "review" else "no" if refused else "yes"
    years = [str(y) if (y := int(c.years[row])) else "" for c, row in ((a, pair.a), (b, pair.b))]
    return [
        *(a.ids[pair.a], b.ids[pair.b], a.titles[pair.a], years[0], b.titles[pair.b], years[1]),
        *(step, f"{pair.score:g}", "yes" if pair.doubtful else "", verdict),
    ]


def read_verdicts(path: Path) -> dict[tuple[str, str], bool]:
    """The pairs a person said yes or no to."""
    return {ids: verdict for ids, _, verdict in _rows(path) if verdict is not None}


def pairs(path: Path) -> tuple[tuple[str, str], ...]:
    """The pairs that count: those the matcher joined and nobody refused, and those a person joined."""
    found = tuple(ids for ids, step, verdict in _rows(path) if (step != NONE if verdict is None else verdict))
    for side, which in ((0, "first"), (1, "second")):
        seen: set[str] = set()
        for ids in found:
            if ids[side] in seen:
                raise ConfigError(
                    f"{path}: item {ids[side]!r} of the {which} catalogue is in two pairs; right would be one"
                )
            seen.add(ids[side])
    return found


def pairs_between(path: Path, a: Catalogue, b: Catalogue) -> tuple[tuple[str, str], ...]:
    """The pairs that count, of items that both catalogues have: vectors may be known of the rated items alone."""
    every, mine, theirs = pairs(path), set(a.ids), set(b.ids)
    found = tuple((x, y) for x, y in every if x in mine and y in theirs)
    if every and not found:
        raise ConfigError(f"{path} has no pair of items that both catalogues have; is it the table of two others?")
    if len(found) < len(every):
        log.warning("%d of %d pairs are of items that one of the catalogues lacks", len(every) - len(found), len(every))
    return found


def _rows(path: Path) -> Iterator[tuple[tuple[str, str], str, bool | None]]:
    """Ids, step and verdict of each row; None where nobody judged."""
    text = read_text(path)
    first = text.partition("\n")[0]
    rows = read_rows(text, path, ";" if ";" in first and "," not in first else ",")
    header = [name.strip().lower() for name in next(rows, (1, []))[1]]
    missing = [name for name in NEEDED if name not in header]
    if missing:
        raise ConfigError(f"{path}, line 1: column {missing[0]!r} is missing; right would be {','.join(COLUMNS)}")
    seen: dict[tuple[str, str], int] = {}
    for line, cells in rows:
        if not any(cells):
            continue
        row = dict(zip(header, (cell.strip() for cell in cells), strict=False))
        ids, said = (row.get("a_id", ""), row.get("b_id", "")), row.get("verdict", "").lower()
        where = f"{path}, line {line}"
        if not all(ids):
            raise ConfigError(f"{where}: a_id or b_id is missing")
        if said not in ("", *VERDICTS):
            raise ConfigError(f"{where}: verdict is {said!r}; right would be yes, no or nothing")
        if ids in seen:
            raise ConfigError(f"{where}: the pair {ids[0]!r}, {ids[1]!r} stands in line {seen[ids]} already")
        seen[ids] = line
        yield ids, row.get("step", ""), VERDICTS.get(said)
