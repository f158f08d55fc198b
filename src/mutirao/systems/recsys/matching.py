"""Which items of two catalogues are the same: by title and year, by title, then by likeness; one to one.

Likeness of letters alone joins "Dead Heat" with "Dead Meat", so a fuzzy match must also pass the words: what is left
over may stand on one side only (a subtitle, an owner, a number), never on both.
"""

import logging
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from mutirao.errors import ConfigError
from mutirao.io import read_rows, read_text, write_rows, write_whole
from mutirao.systems.recsys.catalogues import Catalogue
from mutirao.systems.recsys.titles import Title, parse_title

STEPS = ("title+year", "title", "fuzzy")
NEAR_YEARS = 2  # publishers differ between festival, cinema and disc
FAR_YEARS = 4  # a long title is seldom used twice
LONG = 3  # words
SHARED = 4  # words to share if others are left over
SPELT_ALIKE = 80.0  # per cent from which two words are one, misspelt
SURE = 90.0  # per cent from which names may be the same though their years are not
PART = 95.0  # likeness of a name and a title of which it is a whole part, as in rapidfuzz's WRatio
SMALL = {"the", "a", "an", "of", "and", "in", "to", "for", "on", "at", "s", "le", "la", "les", "el", "il", "l", "de"}
CHUNK = 4096  # names compared at a time
MOST_NAMESAKES = 200  # a name that more items bear is not looked up: it tells little and makes pairs without number
MOST_LIKE = 20  # names most like a name that are looked at closer

Verdicts = Mapping[tuple[str, str], bool]


class Likeness(NamedTuple):
    """What is found of two titles: whether they count as the same, how sure that is, and a rank among equal scores."""

    step: str
    score: float
    counts: bool
    doubtful: bool
    rank: tuple[int, int] = (9, 9)  # which names were equal, years apart


@dataclass(frozen=True)
class Pair:
    """A row of the first catalogue and one of the second, how they were joined, and whether to look again."""

    a: int
    b: int
    step: str  # one of STEPS, or "review" if a person said so
    score: float
    doubtful: bool


@dataclass(frozen=True)
class Matches:
    """Pairs that count, and near ones that do not but may be worth a look; no item is in two pairs that count."""

    a: Catalogue
    b: Catalogue
    found: tuple[Pair, ...]
    near: tuple[Pair, ...] = ()
    refused: tuple[Pair, ...] = ()  # a person said no
    twice: tuple[int, int] = (0, 0)  # titles that stand more than once, with one year, in a catalogue

    @property
    def pairs(self) -> tuple[tuple[str, str], ...]:
        """Ids of the pairs, in the order of the first catalogue."""
        return tuple((self.a.ids[p.a], self.b.ids[p.b]) for p in self.found)

    def report(self) -> dict[str, Any]:
        """How much of the first catalogue is covered, by which step, and how many pairs are doubtful.

        `rated` counts items with ratings, where those are known, and `ratings` their ratings.
        """
        counts, matched = self.a.counts, np.array([p.a for p in self.found], np.intp)
        rated = {
            "rated": int((counts > 0).sum()),
            "rated_matched": int((counts[matched] > 0).sum()),
            "rated_share": float((counts[matched] > 0).sum() / max(1, (counts > 0).sum())),
            "ratings_share": float(counts[matched].sum() / max(1, counts.sum())),
        }
        return {
            "items": len(self.a),
            "other_items": len(self.b),
            "matched": len(self.found),
            "share": len(self.found) / len(self.a),
            **(rated if counts.any() else {}),
            "steps": {s: n for s in (*STEPS, "review") if (n := sum(p.step == s for p in self.found)) or s in STEPS},
            "doubtful": sum(p.doubtful for p in self.found),
            "near": len(self.near),
            "titles_twice": list(self.twice),
        }


def match(a: Catalogue, b: Catalogue, threshold: float = 75.0, verdicts: Verdicts | None = None) -> Matches:
    """Join the items of two catalogues, one to one.

    1. `title+year`: two names are equal after normalising, and so are the years.
    2. `title`: two names are equal, and years at most one apart (two for two words, four for more) or one is unknown.
    3. `fuzzy`: rapidfuzz's ratio of two names, 200 M / T per cent for M letters in common and T letters in all, is at
       least `threshold` and their words agree; or one name is a whole part of the other title. See `alike`.

    Earlier steps go first; then higher scores, whole titles before alternative ones, closer years, more ratings, and
    the order of the catalogues. `verdicts` are a person's, by ids: pairs that hold, and pairs that must not be.

    >>> def films(*titles, years):
    ...     return Catalogue(titles, titles, np.array(years, np.int32), np.zeros(len(titles), np.int64))
    >>> a, b = films("Matrix, The", "Alien", years=[1999, 1979]), films("The Matrix", "Aliens", years=[1999, 1986])
    >>> match(a, b).pairs
    (('Matrix, The', 'The Matrix'),)
    """
    if not 0 < threshold <= 100:
        raise ConfigError(f"threshold is {threshold!r}, but must be above 0 and at most 100 per cent")
    for catalogue, which in ((a, "first"), (b, "second")):
        if not len(catalogue):
            raise ConfigError(f"the {which} catalogue is empty: there is nothing to match")
    if find_spec("rapidfuzz") is None:
        raise ConfigError("matching titles needs rapidfuzz: pip install 'mutirao[recsys]'")
    found, refused = _judged(a, b, verdicts or {})
    known = {(p.a, p.b) for p in (*found, *refused)}
    mine, theirs = ([parse_title(t, int(y)) for t, y in zip(c.titles, c.years, strict=True)] for c in (a, b))
    often = [Counter((t.names[0], t.year) for t in titles if t.names) for titles in (mine, theirs)]
    free_a = set(range(len(a))) - {p.a for p in found}
    free_b = set(range(len(b))) - {p.b for p in found}
    near: list[Pair] = []
    for candidates in (_namesakes, _lookalikes):
        ranked: list[tuple[tuple[Any, ...], Pair]] = []
        for x, y in candidates(mine, theirs, sorted(free_a), sorted(free_b), threshold):
            if (x, y) in known:
                continue
            known.add((x, y))
            like = compare(mine[x], theirs[y], threshold)
            again = any(n[t.names[0], t.year] > 1 for n, t in zip(often, (mine[x], theirs[y]), strict=True))
            pair = Pair(x, y, like.step, like.score, like.doubtful or again)
            if like.counts:
                order = (STEPS.index(like.step), -like.score, like.rank, -int(b.counts[y]), -int(a.counts[x]), x, y)
                ranked.append((order, pair))
            else:
                near.append(pair)
        for _, pair in sorted(ranked, key=lambda one: one[0]):
            if pair.a in free_a and pair.b in free_b:
                free_a.remove(pair.a)
                free_b.remove(pair.b)
                found.append(pair)
    closest: dict[int, Pair] = {}
    for pair in sorted(near, key=lambda p: (p.score, -abs(mine[p.a].year - theirs[p.b].year), -p.b)):
        if pair.a in free_a and pair.b in free_b:
            closest[pair.a] = pair
    repeated = (sum(n > 1 for n in often[0].values()), sum(n > 1 for n in often[1].values()))
    joined = tuple(sorted(found, key=lambda p: p.a))
    return Matches(a, b, joined, tuple(closest[x] for x in sorted(closest)), tuple(refused), repeated)


def compare(x: Title, y: Title, threshold: float = 75.0) -> Likeness:
    """How alike two titles are, by the first step that applies; a film and a season never count as the same.

    >>> compare(parse_title("Matrix, The (1999)"), parse_title("The Matrix", 1999))
    Likeness(step='title+year', score=100.0, counts=True, doubtful=False, rank=(0, 0))
    """
    gap = abs(x.year - y.year) if x.year and y.year else None
    equal = [(i + j, p) for i, p in enumerate(x.names) for j, q in enumerate(y.names) if _key(p) == _key(q)]
    if not equal:
        like = alike(x, y, gap, threshold)
    else:
        words = max(len(name.split()) for _, name in equal)
        rank = (min(equal)[0], 9 if gap is None else gap)
        spelt = bool(set(x.names) & set(y.names))  # to the space
        if gap == 0:
            like = Likeness("title+year", 100.0, True, False, rank)
        elif gap is None:
            like = Likeness("title", 100.0, True, words < LONG, rank)
        else:
            near = gap < NEAR_YEARS or (gap == NEAR_YEARS and spelt and words > 1)
            far = words >= LONG and spelt and (gap <= FAR_YEARS or x.edition or y.edition)
            like = Likeness("title", 100.0, near or far, gap > 1 or rank[0] > 0, rank)
    whole = x.names[:1] == y.names[:1] and "several" in (x.kind, y.kind)  # "Victor/Victoria" is one film
    return like._replace(counts=like.counts and (x.kind == y.kind or whole))


def alike(x: Title, y: Title, gap: int | None, threshold: float) -> Likeness:
    """The fuzzy step for two titles whose years are `gap` apart.

    A name that is a whole part of the other title (before or behind a colon, or without its owner) counts in the same
    year. Else the words of two names are compared, each with the one most like it, numbers exactly, and what is left
    over decides: nothing is a matter of spelling; numbers on one side need the same year; words on one side need the
    same year and four words shared; words on both sides are two films.
    """
    from rapidfuzz import fuzz

    best = Likeness("fuzzy", 0.0, False, True)
    parts = _shared_parts(x, y)
    if parts and threshold <= PART and gap is not None:
        words = max(len(p.split()) for p in parts)
        best = Likeness("fuzzy", PART, gap == 0, words < 2)
    for p in x.names:
        for q in y.names:
            score = fuzz.ratio(p, q)
            if score < threshold:
                continue
            over = (_left_over(p, q, x.year), _left_over(q, p, y.year))
            words = min(len(p.split()), len(q.split()))
            if all(over):
                counts = False
            elif not any(over):
                near = gap is None or gap < NEAR_YEARS
                counts = (words > 1 or score >= SURE) if gap == 0 else words > 1 and score >= SURE and near
            else:
                counts = gap == 0 and (words >= SHARED or all(word.isdigit() for word in over[0] | over[1]))
            doubtful = gap != 0 or words < LONG or score < SURE
            best = max(best, Likeness("fuzzy", round(score, 1), counts, doubtful), key=lambda b: (b.counts, b.score))
    return best


def _left_over(name: str, other: str, year: int) -> set[str]:
    """Words of a name without a likeness in the other; small words and the film's own year do not count."""
    from rapidfuzz import fuzz

    there = other.split()
    odd = set(name.split()) - set(there) - SMALL - {str(year)}
    words = [v for v in there if not v.isdigit()]
    return {w for w in odd if w.isdigit() or not any(fuzz.ratio(w, v) >= SPELT_ALIKE for v in words)}


def _key(name: str) -> str:
    """The same for names that differ in spaces alone: "Spider-Man" and "Spiderman"."""
    return name.replace(" ", "")


def _shared_parts(x: Title, y: Title) -> set[str]:
    mine, theirs = set(map(_key, x.names)), set(map(_key, y.names))
    return {p for p in x.parts if _key(p) in theirs} | {p for p in y.parts if _key(p) in mine}


def _namesakes(
    mine: Sequence[Title], theirs: Sequence[Title], rows: Sequence[int], columns: Sequence[int], threshold: float
) -> Iterator[tuple[int, int]]:
    """Rows of titles that share a name."""
    by_name = _index((y, theirs[y].names) for y in columns)
    for x in rows:
        for name in mine[x].names:
            yield from ((x, y) for y in by_name.get(_key(name), ()))


def _lookalikes(
    mine: Sequence[Title], theirs: Sequence[Title], rows: Sequence[int], columns: Sequence[int], threshold: float
) -> Iterator[tuple[int, int]]:
    """Rows of titles one of which is named like a part of the other, or whose letters are alike by `threshold`.

    Letters are compared within near years only, which spares nine comparisons of ten.
    """
    by_name = _index((y, theirs[y].names) for y in columns)
    by_part = _index((y, theirs[y].parts) for y in columns)
    for x in rows:
        for name in mine[x].names:
            yield from ((x, y) for y in by_part.get(_key(name), ()))
        for name in mine[x].parts:
            yield from ((x, y) for y in by_name.get(_key(name), ()))

    left, right = _Names.of(mine, rows), _Names.of(theirs, columns)
    for year in np.unique(left.years).tolist():
        here, unknown = np.flatnonzero(left.years == year), right.years == 0
        near = (np.abs(right.years - year) <= NEAR_YEARS) & ~unknown
        if year:
            yield from _letters(left, here, right, np.flatnonzero(near), threshold)
        yield from _letters(left, here, right, np.flatnonzero(unknown | (year == 0)), max(threshold, SURE))


def _index(rows: Iterable[tuple[int, Sequence[str]]]) -> dict[str, list[int]]:
    """Rows by the key of each of their names, save for names of the multitude."""
    found: dict[str, list[int]] = defaultdict(list)
    for row, names in rows:
        for name in names:
            found[_key(name)].append(row)
    return {key: rows for key, rows in found.items() if len(rows) <= MOST_NAMESAKES}


class _Names(NamedTuple):
    """All names of some titles, with the row, year and kind of each."""

    texts: npt.NDArray[np.object_]
    rows: npt.NDArray[np.int64]
    years: npt.NDArray[np.int64]
    kinds: npt.NDArray[np.object_]

    @classmethod
    def of(cls, titles: Sequence[Title], rows: Sequence[int]) -> "_Names":
        table = [(name, row) for row in rows for name in titles[row].names]
        return cls(
            np.array([name for name, _ in table], object),
            np.array([row for _, row in table], np.int64),
            np.array([titles[row].year for _, row in table], np.int64),
            np.array([titles[row].kind for _, row in table], object),
        )


def _letters(
    left: _Names, here: npt.NDArray[np.intp], right: _Names, there: npt.NDArray[np.intp], threshold: float
) -> Iterator[tuple[int, int]]:
    """Rows of names of one kind whose ratio is at least `threshold`; chunks and a most for each bound the memory."""
    from rapidfuzz import fuzz, process

    others = right.texts[there].tolist()
    for start in range(0, len(here) if others else 0, CHUNK):
        some = here[start : start + CHUNK]
        names = left.texts[some].tolist()
        scores = process.cdist(names, others, scorer=fuzz.ratio, score_cutoff=threshold, dtype=np.uint8, workers=-1)
        for row in np.flatnonzero(np.count_nonzero(scores, axis=1) > MOST_LIKE):
            scores[row, np.argsort(-scores[row].astype(np.int16), kind="stable")[MOST_LIKE:]] = 0
        i, j = np.nonzero(scores)
        kin = left.kinds[some[i]] == right.kinds[there[j]]
        yield from zip(left.rows[some[i[kin]]].tolist(), right.rows[there[j[kin]]].tolist(), strict=True)


def _judged(a: Catalogue, b: Catalogue, verdicts: Verdicts) -> tuple[list[Pair], list[Pair]]:
    """The pairs a person said yes and no to."""
    rows_a, rows_b = a.rows(), b.rows()
    found: list[Pair] = []
    refused: list[Pair] = []
    used: dict[tuple[str, str], str] = {}
    for (x, y), holds in verdicts.items():
        for name, rows, which in ((x, rows_a, "first"), (y, rows_b, "second")):
            if name not in rows:
                raise ConfigError(f"the review names item {name!r}, which the {which} catalogue does not have")
        pair = Pair(rows_a[x], rows_b[y], "review", 100.0 if holds else 0.0, False)
        (found if holds else refused).append(pair)
        if not holds:
            continue
        for side, name, other in (("first", x, y), ("second", y, x)):
            if (side, name) in used:
                raise ConfigError(
                    f"item {name!r} of the {side} catalogue is said to be both {used[side, name]!r} and {other!r}; "
                    f"right would be one"
                )
            used[side, name] = other
    return found, refused


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
