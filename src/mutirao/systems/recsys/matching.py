"""Match the items of two catalogues, one to one: by title and year, by title, then by similar titles.

Similar letters alone would match "Dead Heat" with "Dead Meat". A fuzzy match therefore compares words, too: words may
be left over in one title (a subtitle, an owner, a number), but not in both.
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

log = logging.getLogger("mutirao")

STEPS = ("title+year", "title", "fuzzy")
COLUMNS = ("a_id", "b_id", "a_title", "a_year", "b_title", "b_year", "step", "score", "doubtful", "verdict")
REQUIRED_COLUMNS = ("a_id", "b_id", "step", "verdict")
NONE = "none"  # the step of a near pair in the table: it does not count
VERDICTS = {"yes": True, "no": False}
NEAR_YEARS = 2  # publishers differ between festival, cinema and disc
FAR_YEARS = 4  # for long titles, which are seldom used twice
LONG = 3  # words
SHARED = 4  # words in common that are needed if others are left over
SAME_WORD = 80.0  # similarity in per cent from which two words are spellings of one
SURE = 90.0  # similarity in per cent from which names may match although their years do not
PART = 95.0  # similarity of a name and a title that contains it as a whole part, as in rapidfuzz's WRatio
SMALL = {"the", "a", "an", "of", "and", "in", "to", "for", "on", "at", "s", "le", "la", "les", "el", "il", "l", "de"}
CHUNK = 4096  # names compared at a time
MAX_NAMESAKES = 200  # names of more items are not looked up: they make too many pairs
MAX_SIMILAR = 20  # most similar names that are compared in detail

Verdicts = Mapping[tuple[str, str], bool]


class Comparison(NamedTuple):
    """The result for two titles: whether they match, with which score, and a rank among equal scores."""

    step: str
    score: float
    counts: bool
    doubtful: bool
    rank: tuple[int, int] = (9, 9)  # which names were equal, years apart


@dataclass(frozen=True)
class Pair:
    """Rows of the first and of the second catalogue, the step that matched them, and whether to check the match."""

    a: int
    b: int
    step: str  # one of STEPS, or "review" for a verdict
    score: float
    doubtful: bool


@dataclass(frozen=True)
class Matches:
    """Matched pairs, and near pairs to check. No item is in two matched pairs."""

    a: Catalogue
    b: Catalogue
    found: tuple[Pair, ...]
    near: tuple[Pair, ...] = ()
    refused: tuple[Pair, ...] = ()  # by verdict
    repeated: tuple[int, int] = (0, 0)  # titles with the same year that each catalogue has more than once

    @property
    def pairs(self) -> tuple[tuple[str, str], ...]:
        """Ids of the pairs, in the order of the first catalogue."""
        return tuple((self.a.ids[p.a], self.b.ids[p.b]) for p in self.found)

    def report(self) -> dict[str, Any]:
        """The matched share of the first catalogue, by step, and the number of doubtful pairs.

        Keys with `rated` count items with ratings, and `ratings_share` counts ratings, where these are known.
        """
        counts = self.a.counts
        matched = np.array([p.a for p in self.found], np.intp)
        steps = Counter(p.step for p in self.found)
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
            "steps": {step: steps[step] for step in (*STEPS, "review") if step in STEPS or steps[step]},
            "doubtful": sum(p.doubtful for p in self.found),
            "near": len(self.near),
            "titles_twice": list(self.repeated),
        }


def match(a: Catalogue, b: Catalogue, threshold: float = 75.0, verdicts: Verdicts | None = None) -> Matches:
    """Match the items of two catalogues, one to one.

    1. `title+year`: two names are equal after normalising, and so are the years.
    2. `title`: two names are equal, and years at most one apart (two for two words, four for more) or one is unknown.
    3. `fuzzy`: rapidfuzz's ratio of two names, 200 M / T per cent for M letters in common and T letters in all, is at
       least `threshold` and their words agree; or one name is a whole part of the other title. See `compare_fuzzy`.

    Earlier steps go first; then higher scores, whole titles before alternative ones, closer years, more ratings, and
    the order of the catalogues. `verdicts` are by ids: pairs that must match, and pairs that must not.

    >>> def films(*titles, years):
    ...     return Catalogue(titles, titles, np.array(years, np.int32), np.zeros(len(titles), np.int64))
    >>> a, b = films("Matrix, The", "Alien", years=[1999, 1979]), films("The Matrix", "Aliens", years=[1999, 1986])
    >>> match(a, b).pairs
    (('Matrix, The', 'The Matrix'),)
    """
    _check_inputs(a, b, threshold)
    found, refused = _apply_verdicts(a, b, verdicts or {})
    compared = {(p.a, p.b) for p in (*found, *refused)}
    titles_a = _parse_titles(a)
    titles_b = _parse_titles(b)
    count_a = Counter((t.names[0], t.year) for t in titles_a if t.names)
    count_b = Counter((t.names[0], t.year) for t in titles_b if t.names)
    free_a = set(range(len(a))) - {p.a for p in found}
    free_b = set(range(len(b))) - {p.b for p in found}
    near: list[Pair] = []
    # Similar titles are only looked for among the items that namesakes left free.
    for candidates in (_namesakes, _similar_titles):
        ranked: list[tuple[tuple[Any, ...], Pair]] = []
        for x, y in candidates(titles_a, titles_b, sorted(free_a), sorted(free_b), threshold):
            if (x, y) in compared:
                continue
            compared.add((x, y))
            title_a = titles_a[x]
            title_b = titles_b[y]
            result = compare(title_a, title_b, threshold)
            repeated = count_a[title_a.names[0], title_a.year] > 1 or count_b[title_b.names[0], title_b.year] > 1
            pair = Pair(x, y, result.step, result.score, result.doubtful or repeated)
            if result.counts:
                ratings = (-int(b.counts[y]), -int(a.counts[x]))
                ranked.append(((STEPS.index(result.step), -result.score, result.rank, *ratings, x, y), pair))
            else:
                near.append(pair)
        for _, pair in sorted(ranked, key=lambda one: one[0]):
            if pair.a in free_a and pair.b in free_b:
                free_a.remove(pair.a)
                free_b.remove(pair.b)
                found.append(pair)
    # In ascending order, so that the best near pair of an item is the one that stays.
    closest: dict[int, Pair] = {}
    for pair in sorted(near, key=lambda p: (p.score, -abs(titles_a[p.a].year - titles_b[p.b].year), -p.b)):
        if pair.a in free_a and pair.b in free_b:
            closest[pair.a] = pair
    return Matches(
        a,
        b,
        found=tuple(sorted(found, key=lambda p: p.a)),
        near=tuple(closest[x] for x in sorted(closest)),
        refused=tuple(refused),
        repeated=(sum(n > 1 for n in count_a.values()), sum(n > 1 for n in count_b.values())),
    )


def _check_inputs(a: Catalogue, b: Catalogue, threshold: float) -> None:
    if not 0 < threshold <= 100:
        raise ConfigError(f"threshold is {threshold!r}, but must be above 0 and at most 100 per cent")
    for catalogue, which in ((a, "first"), (b, "second")):
        if not len(catalogue):
            raise ConfigError(f"the {which} catalogue is empty: there is nothing to match")
    if find_spec("rapidfuzz") is None:
        raise ConfigError("matching titles needs rapidfuzz: pip install 'mutirao[recsys]'")


def _apply_verdicts(a: Catalogue, b: Catalogue, verdicts: Verdicts) -> tuple[list[Pair], list[Pair]]:
    """The pairs with the verdict yes, and those with no."""
    rows_a = a.rows()
    rows_b = b.rows()
    found: list[Pair] = []
    refused: list[Pair] = []
    used: dict[tuple[str, str], str] = {}
    for (x, y), is_match in verdicts.items():
        for name, rows, which in ((x, rows_a, "first"), (y, rows_b, "second")):
            if name not in rows:
                raise ConfigError(f"the review names item {name!r}, which the {which} catalogue does not have")
        pair = Pair(rows_a[x], rows_b[y], "review", 100.0 if is_match else 0.0, False)
        if not is_match:
            refused.append(pair)
            continue
        found.append(pair)
        for side, name, other in (("first", x, y), ("second", y, x)):
            if (side, name) in used:
                raise ConfigError(
                    f"item {name!r} of the {side} catalogue is said to be both {used[side, name]!r} and {other!r}; "
                    f"expected one"
                )
            used[side, name] = other
    return found, refused


def _parse_titles(catalogue: Catalogue) -> list[Title]:
    return [parse_title(title, int(year)) for title, year in zip(catalogue.titles, catalogue.years, strict=True)]


def compare(x: Title, y: Title, threshold: float = 75.0) -> Comparison:
    """Compare two titles by the first step that applies. A film and a season never match.

    >>> compare(parse_title("Matrix, The (1999)"), parse_title("The Matrix", 1999))
    Comparison(step='title+year', score=100.0, counts=True, doubtful=False, rank=(0, 0))
    """
    gap = abs(x.year - y.year) if x.year and y.year else None
    equal = [(i + j, p) for i, p in enumerate(x.names) for j, q in enumerate(y.names) if _key(p) == _key(q)]
    if not equal:
        result = compare_fuzzy(x, y, gap, threshold)
    else:
        words = max(len(name.split()) for _, name in equal)
        rank = (min(equal)[0], 9 if gap is None else gap)
        same_spelling = bool(set(x.names) & set(y.names))  # spaces included
        if gap == 0:
            result = Comparison("title+year", 100.0, True, False, rank)
        elif gap is None:
            result = Comparison("title", 100.0, True, words < LONG, rank)
        else:
            near = gap < NEAR_YEARS or (gap == NEAR_YEARS and same_spelling and words > 1)
            far = words >= LONG and same_spelling and (gap <= FAR_YEARS or x.edition or y.edition)
            result = Comparison("title", 100.0, near or far, gap > 1 or rank[0] > 0, rank)
    # "Victor/Victoria" is one film, although a slash is the sign of several.
    same_kind = x.kind == y.kind or (x.names[:1] == y.names[:1] and "several" in (x.kind, y.kind))
    return result._replace(counts=result.counts and same_kind)


def compare_fuzzy(x: Title, y: Title, gap: int | None, threshold: float) -> Comparison:
    """The fuzzy step for two titles with years `gap` apart.

    A name that is a whole part of the other title (before or after a colon, or without its owner) matches in the same
    year. Otherwise each word of a name is compared with the most similar word of the other, numbers exactly. If no
    words are left over, the names differ in spelling only. Numbers left over on one side need the same year; words on
    one side need the same year and four words in common; words on both sides are two films.
    """
    from rapidfuzz import fuzz

    best = Comparison("fuzzy", 0.0, False, True)
    parts = _shared_parts(x, y)
    if parts and threshold <= PART and gap is not None:
        words = max(len(p.split()) for p in parts)
        best = Comparison("fuzzy", PART, gap == 0, words < 2)
    for p in x.names:
        for q in y.names:
            score = fuzz.ratio(p, q)
            if score < threshold:
                continue
            over_p = _left_over(p, q, x.year)
            over_q = _left_over(q, p, y.year)
            words = min(len(p.split()), len(q.split()))
            if over_p and over_q:
                counts = False
            elif over_p or over_q:
                counts = gap == 0 and (words >= SHARED or all(word.isdigit() for word in over_p | over_q))
            elif gap == 0:
                counts = words > 1 or score >= SURE
            else:
                counts = words > 1 and score >= SURE and (gap is None or gap < NEAR_YEARS)
            doubtful = gap != 0 or words < LONG or score < SURE
            result = Comparison("fuzzy", round(score, 1), counts, doubtful)
            best = max(best, result, key=lambda one: (one.counts, one.score))
    return best


def _left_over(name: str, other: str, year: int) -> set[str]:
    """Words of a name without a similar word in the other, except for small words and the film's own year."""
    from rapidfuzz import fuzz

    other_words = other.split()
    candidates = set(name.split()) - set(other_words) - SMALL - {str(year)}
    left_over = set()
    for word in candidates:
        similar = (fuzz.ratio(word, v) >= SAME_WORD for v in other_words if not v.isdigit())
        if word.isdigit() or not any(similar):
            left_over.add(word)
    return left_over


def _key(name: str) -> str:
    """Equal for names that differ only in spaces: "Spider-Man" and "Spiderman"."""
    return name.replace(" ", "")


def _shared_parts(x: Title, y: Title) -> set[str]:
    names_x = set(map(_key, x.names))
    names_y = set(map(_key, y.names))
    return {p for p in x.parts if _key(p) in names_y} | {p for p in y.parts if _key(p) in names_x}


def _namesakes(
    titles_a: Sequence[Title], titles_b: Sequence[Title], rows: Sequence[int], columns: Sequence[int], threshold: float
) -> Iterator[tuple[int, int]]:
    """Rows of titles with a name in common."""
    by_name = _index((y, titles_b[y].names) for y in columns)
    for x in rows:
        for name in titles_a[x].names:
            yield from ((x, y) for y in by_name.get(_key(name), ()))


def _similar_titles(
    titles_a: Sequence[Title], titles_b: Sequence[Title], rows: Sequence[int], columns: Sequence[int], threshold: float
) -> Iterator[tuple[int, int]]:
    """Rows of titles with a name that is a part of the other, or with names at least `threshold` per cent similar.

    Letters are compared within near years only, which saves nine of ten comparisons.
    """
    by_name = _index((y, titles_b[y].names) for y in columns)
    by_part = _index((y, titles_b[y].parts) for y in columns)
    for x in rows:
        for name in titles_a[x].names:
            yield from ((x, y) for y in by_part.get(_key(name), ()))
        for name in titles_a[x].parts:
            yield from ((x, y) for y in by_name.get(_key(name), ()))

    left = _Names.of(titles_a, rows)
    right = _Names.of(titles_b, columns)
    for year in np.unique(left.years).tolist():
        here = np.flatnonzero(left.years == year)
        unknown = right.years == 0
        near = (np.abs(right.years - year) <= NEAR_YEARS) & ~unknown
        if year:
            yield from _similar_letters(left, here, right, np.flatnonzero(near), threshold)
        # If a year is unknown, only names that are SURE match, so that others need not be found.
        yield from _similar_letters(left, here, right, np.flatnonzero(unknown | (year == 0)), max(threshold, SURE))


def _index(rows: Iterable[tuple[int, Sequence[str]]]) -> dict[str, list[int]]:
    """Rows by the key of each of their names, without names of too many rows."""
    found: dict[str, list[int]] = defaultdict(list)
    for row, names in rows:
        for name in names:
            found[_key(name)].append(row)
    return {key: rows for key, rows in found.items() if len(rows) <= MAX_NAMESAKES}


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


def _similar_letters(
    left: _Names, here: npt.NDArray[np.intp], right: _Names, there: npt.NDArray[np.intp], threshold: float
) -> Iterator[tuple[int, int]]:
    """Rows of names of the same kind with a ratio of at least `threshold`, in chunks that bound the memory."""
    from rapidfuzz import fuzz, process

    others = right.texts[there].tolist()
    if not others:
        return
    for start in range(0, len(here), CHUNK):
        some = here[start : start + CHUNK]
        names = left.texts[some].tolist()
        scores = process.cdist(names, others, scorer=fuzz.ratio, score_cutoff=threshold, dtype=np.uint8, workers=-1)
        for row in np.flatnonzero(np.count_nonzero(scores, axis=1) > MAX_SIMILAR):
            # As int16, because the negative of an unsigned score would wrap around.
            scores[row, np.argsort(-scores[row].astype(np.int16), kind="stable")[MAX_SIMILAR:]] = 0
        i, j = np.nonzero(scores)
        same = left.kinds[some[i]] == right.kinds[there[j]]
        yield from zip(left.rows[some[i[same]]].tolist(), right.rows[there[j[same]]].tolist(), strict=True)


# The table of matches, for review by a person


def write_matches(matches: Matches, path: Path) -> None:
    """Write all pairs, those to check first: doubtful ones, near ones, then the rest.

    A person writes yes or no into the column `verdict`. Without a verdict, a pair is kept as it was matched.
    """
    doubtful = [p for p in matches.found if p.doubtful]
    certain = [p for p in matches.found if not p.doubtful]
    near = set(matches.near)
    rows: list[Sequence[str]] = [COLUMNS]
    for pair in (*doubtful, *matches.near, *certain, *matches.refused):
        step = pair.step
        if pair in near:
            step = NONE
        verdict = ""
        if pair.step == "review":
            verdict = "no" if pair in matches.refused else "yes"
        rows.append(_cells(matches, pair, step, verdict))
    write_whole(path, write_rows(rows))


def _cells(matches: Matches, pair: Pair, step: str, verdict: str) -> list[str]:
    cells = [matches.a.ids[pair.a], matches.b.ids[pair.b]]
    for catalogue, row in ((matches.a, pair.a), (matches.b, pair.b)):
        year = int(catalogue.years[row])
        cells += [catalogue.titles[row], str(year or "")]
    return [*cells, step, f"{pair.score:g}", "yes" if pair.doubtful else "", verdict]


def read_verdicts(path: Path) -> dict[tuple[str, str], bool]:
    """The pairs with a verdict in a reviewed table."""
    return {ids: verdict for ids, _, verdict in _rows(path) if verdict is not None}


def read_pairs(path: Path) -> tuple[tuple[str, str], ...]:
    """The matched pairs of a table: those with the verdict yes, and those without a verdict that were matched."""
    # A person's verdict overrules the step that the matcher wrote.
    pairs = tuple(ids for ids, step, verdict in _rows(path) if verdict or (verdict is None and step != NONE))
    for side, which in ((0, "first"), (1, "second")):
        seen: set[str] = set()
        for ids in pairs:
            if ids[side] in seen:
                raise ConfigError(f"{path}: item {ids[side]!r} of the {which} catalogue is in two pairs; expected one")
            seen.add(ids[side])
    return pairs


def pairs_between(path: Path, a: Catalogue, b: Catalogue) -> tuple[tuple[str, str], ...]:
    """The matched pairs of items that both catalogues have. A file of vectors may have the rated items only."""
    pairs = read_pairs(path)
    ids_a = set(a.ids)
    ids_b = set(b.ids)
    found = tuple((x, y) for x, y in pairs if x in ids_a and y in ids_b)
    if pairs and not found:
        raise ConfigError(f"{path} has no pair of items that both catalogues have; is it the table of two others?")
    if len(found) < len(pairs):
        log.warning("%d of %d pairs are of items that one of the catalogues lacks", len(pairs) - len(found), len(pairs))
    return found


def _rows(path: Path) -> Iterator[tuple[tuple[str, str], str, bool | None]]:
    """Ids, step and verdict of each row; None without a verdict."""
    text = read_text(path)
    first = text.partition("\n")[0]
    separator = ","
    # Spreadsheets of languages with a decimal comma save the table with semicolons.
    if ";" in first and "," not in first:
        separator = ";"
    rows = read_rows(text, path, separator)
    header = [name.strip().lower() for name in next(rows, (1, []))[1]]
    missing = [name for name in REQUIRED_COLUMNS if name not in header]
    if missing:
        raise ConfigError(f"{path}, line 1: column {missing[0]!r} is missing; expected {','.join(COLUMNS)}")
    seen: dict[tuple[str, str], int] = {}
    for line, cells in rows:
        if not any(cells):
            continue
        row = dict(zip(header, (cell.strip() for cell in cells), strict=False))
        ids = (row.get("a_id", ""), row.get("b_id", ""))
        verdict = row.get("verdict", "").lower()
        where = f"{path}, line {line}"
        if not all(ids):
            raise ConfigError(f"{where}: a_id or b_id is missing")
        if verdict not in ("", *VERDICTS):
            raise ConfigError(f"{where}: verdict is {verdict!r}; expected yes, no or nothing")
        if ids in seen:
            raise ConfigError(f"{where}: the pair {ids[0]!r}, {ids[1]!r} is in line {seen[ids]} already")
        seen[ids] = line
        yield ids, row.get("step", ""), VERDICTS.get(verdict)
