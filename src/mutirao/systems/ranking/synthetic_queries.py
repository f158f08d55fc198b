"""Synthetic ranking data that resemble MSLR-WEB10K, for those who do not have it.

Documents have hidden properties (how well each of five streams matches the query, how popular, long and good a page
is); the 136 features are what MSLR measures of such documents, and the grade depends on the hidden properties.
"""

import numpy as np
import numpy.typing as npt

from mutirao.errors import ConfigError
from mutirao.systems.ranking.ranking_data import RankingData

Floats = npt.NDArray[np.float32]

FEATURES = 136
# Documents of each grade in MSLR-WEB10K (Qin and Liu, "Introducing LETOR 4.0 Datasets", 2013; Microsoft Research).
GRADES = np.array([624_263, 386_280, 159_451, 21_317, 8_881])
SHARES = GRADES / GRADES.sum()
QUERIES_AT_ONCE = 250  # part of the definition: other blocks sample other numbers

# The five streams of MSLR: body, anchor, title, URL, whole document.
PRESENT = np.array([1.8, -0.9, 1.7, 9.0, 3.0], np.float32)  # log odds that a document has the stream at all
LENGTH = np.array([6.0, 1.2, 1.8, 2.0, 6.1], np.float32)  # log of its length in words ...
SPREAD = np.array([1.1, 0.9, 0.5, 0.4, 1.0], np.float32)  # ... and how much that varies
COVER = np.array([2.2, 0.6, 0.6, -1.0, 2.6], np.float32)  # how easily it has the words of the query
OFTEN = np.array([1.6, 0.2, -0.1, -0.4, 1.7], np.float32)  # log of how often it has each
OFFSET = 0.45  # how much queries differ in how good their documents are, which is in no feature
WEIGHT = np.array([0.30, 0.25, 0.45, 0.25, 0.10], np.float32)  # what a match in it means for relevance


def mslr_like(queries: int, rng: np.random.Generator, documents: float = 120, difficulty: float = 0.85) -> RankingData:
    """Queries with `documents` documents each in the mean, of 136 heavy-tailed features and grades 0 to 4.

    Grades are given by rank, in MSLR-WEB10K's shares, of u = o + sqrt(1 - difficulty) s + sqrt(difficulty) e: an
    offset o of the query, noise e, and a signal s that weighs matches in the streams, popularity (the more, the more
    navigational the query), two matches that only count together, and a length that is neither short nor long.
    With difficulty 0 almost all can be learnt and with 1 nothing; 0.85 is about as hard as MSLR itself.

    >>> data = mslr_like(20, np.random.default_rng(0))
    >>> data.x.shape[1], len(data.query_ids), np.bincount(data.grades, minlength=5).argmax()
    (136, 20, np.int64(0))
    """
    if queries < 1:
        raise ConfigError(f"queries: {queries!r} is too small, expected at least 1")
    if not 1 <= documents <= 10_000:
        raise ConfigError(f"documents: {documents!r} a query is not between 1 and 10,000")
    if not 0 <= difficulty <= 1:
        raise ConfigError(f"difficulty: {difficulty!r} is not between 0 and 1")
    sizes = np.maximum(1, np.rint(rng.gamma(3.5, documents / 3.5, queries))).astype(np.int64)
    ends = np.concatenate([[0], np.cumsum(sizes)])
    x = np.empty((ends[-1], FEATURES), np.float32)
    u = np.empty(ends[-1], np.float32)
    # In blocks that stay in the processor's cache.
    for first in range(0, queries, QUERIES_AT_ONCE):
        here = sizes[first : first + QUERIES_AT_ONCE]
        rows = slice(ends[first], ends[first + len(here)])
        signal = _documents(here, rng, x[rows])
        noise = rng.standard_normal(len(signal), np.float32)
        offset = np.repeat(OFFSET * rng.standard_normal(len(here), np.float32), here)
        u[rows] = offset + np.sqrt(1 - difficulty) * signal + np.sqrt(difficulty) * noise
    names = np.arange(queries, dtype=np.int64)
    return RankingData(x, _graded(u), np.repeat(names, sizes), names + 1)


def _graded(u: Floats) -> npt.NDArray[np.int64]:
    """Grades by rank, in MSLR's shares."""
    order = np.argsort(u, kind="stable")
    cuts = np.rint(np.cumsum(SHARES)[:-1] * len(u)).astype(np.int64)
    grades = np.empty(len(u), np.int64)
    grades[order] = np.searchsorted(cuts, np.arange(len(u)), "right")
    return grades


def _documents(sizes: npt.NDArray[np.int64], rng: np.random.Generator, x: Floats) -> Floats:
    """Fill the features of some queries' documents; return how relevant they are, mean 0 and variance about 1."""

    def normal(*shape: int) -> Floats:
        return rng.standard_normal(shape, np.float32)

    def of_query(values: npt.NDArray[np.floating]) -> Floats:
        return np.repeat(values.astype(np.float32), sizes, axis=0)

    many = len(sizes)
    n = int(sizes.sum())
    terms = of_query(1 + np.minimum(rng.poisson(1.6, many), 6))[:, None]
    rarity = of_query(np.exp(1.6 + 0.35 * normal(many)))[:, None] * np.array([1, 2, 1.8, 1.9, 1], np.float32)
    navigational = of_query(rng.random(many))
    wording = of_query(0.55 * normal(many, 5))  # how near its words are to those of the streams, whatever they mean

    topic = normal(n)
    fame = normal(n)
    craft = normal(n)
    match = 0.65 * topic[:, None] + 0.75 * normal(n, 5)
    match[:, 4] = 0.8 * match[:, 0] + 0.2 * match[:, 4]  # the whole document is mostly its body
    stretch = normal(n, 5)
    stretch[:, 4] = stretch[:, 0]
    lean = PRESENT + np.array([0, 0.8, 0, 0, 0], np.float32) * fame[:, None]  # popular pages are linked to
    present = rng.random((n, 5), np.float32) < _sigmoid(lean)

    _streams(x, match + wording, stretch, present, terms, rarity, normal(n, 5))
    _pages(x, topic, fame, craft, navigational, rng)

    seen = np.where(present, match, -0.5)
    signal = seen @ WEIGHT
    signal += (0.15 + 0.5 * navigational) * fame + 0.15 * craft
    signal += 0.9 * np.maximum(seen[:, 1], 0) * np.maximum(seen[:, 2], 0)  # anchor and title together
    signal -= 0.4 * np.abs(stretch[:, 0])
    return np.asarray((signal + 0.39) / 1.17, np.float32)


def _streams(
    x: Floats,
    match: Floats,
    stretch: Floats,
    present: npt.NDArray[np.bool_],
    terms: Floats,
    rarity: Floats,
    jitter: Floats,
) -> None:
    """Features 1 to 125: 25 figures, each for the five streams."""
    figures = x[:, :125].reshape(len(x), 25, 5)  # a view: what is written here is in x

    length = np.where(present, np.ceil(np.exp(LENGTH + SPREAD * stretch)), 0)
    covered = np.where(present, np.rint(terms * _sigmoid(COVER + 1.4 * match - 0.2 * terms)), 0)
    ratio = covered / terms
    uneven = np.exp(0.5 * jitter)
    mean = ratio * np.exp(OFTEN + 0.5 * match + 0.5 * SPREAD * stretch)
    mean = np.ceil(mean * terms) / terms
    least = np.where(ratio == 1, np.floor(mean / (1 + uneven)), 0)
    most = np.ceil(mean * (1 + 0.4 * uneven * (terms > 1)))
    variance = np.where(terms > 1, (0.5 * uneven * mean) ** 2, 0)
    share = 1 / np.maximum(length, 1)
    each = rarity * (1 + 0.1 * jitter)
    idf = rarity * terms

    figures[:, 0] = covered
    figures[:, 1] = ratio
    figures[:, 2] = length
    figures[:, 3] = idf
    for k, (value, power) in enumerate([(mean * terms, 1), (least, 1), (most, 1), (mean, 1), (variance, 2)]):
        figures[:, 4 + k] = value
        figures[:, 9 + k] = value * (share if power == 1 else share * share)
        figures[:, 14 + k] = value * (each if power == 1 else each * each)
    figures[:, 19] = ratio == 1
    figures[:, 20] = np.sqrt(ratio) * _sigmoid(1.5 + match + 0.3 * jitter)
    figures[:, 21] = idf * ratio * 2.2 * mean / (mean + 1.2)
    surprise = -idf * np.array([0.55, 0.6, 0.5, 0.7, 0.55], np.float32)
    for k, (smooth, gain) in enumerate([(1.0, 0.18), (1.2, 0.05), (1.0, 0.2)]):
        figures[:, 22 + k] = np.minimum(0, smooth * surprise * (1 - gain * ratio * (1 + match)) + 0.3 * jitter)


def _pages(
    x: Floats, topic: Floats, fame: Floats, craft: Floats, navigational: Floats, rng: np.random.Generator
) -> None:
    """Features 126 to 136: figures of the page itself, most of them with very heavy tails."""
    n = len(x)

    def normal() -> Floats:
        return rng.standard_normal(n, np.float32)

    def count(level: float, spread: float, by: Floats) -> Floats:
        value: Floats = np.floor(np.exp(level + spread * by))
        return value

    x[:, 125] = 1 + count(0.5, 0.6, normal())  # slashes in the URL
    x[:, 126] = 6 + count(3.5, 0.5, normal())  # its length
    x[:, 127] = np.minimum(count(1.2, 3.2, 0.8 * fame + 0.6 * normal()), 1e9)  # links to it
    x[:, 128] = count(-0.2, 1.4, normal())  # links from it
    x[:, 129] = 115 + np.minimum(count(9.0, 1.1, 0.8 * fame + 0.6 * normal()), 65_420)  # rank of the page
    x[:, 130] = np.rint(65_535 * _sigmoid(0.6 * fame + 0.2 + 1.4 * normal()))  # of the site
    x[:, 131] = np.minimum(1 + count(1.6, 1.3, 0.3 * normal() - 0.9 * craft), 254)  # two figures of poor quality
    x[:, 132] = np.minimum(1 + count(1.8, 1.4, 0.5 * normal() - 0.8 * craft), 254)
    clicked = rng.random(n, np.float32) < _sigmoid(-4.6 + 1.2 * topic + (0.5 + navigational) * fame)
    x[:, 133] = np.where(clicked, 1 + count(2.5, 1.8, 0.6 * topic + 0.8 * normal()), 0)  # clicks for this query
    visited = rng.random(n, np.float32) < _sigmoid(-1.3 + 1.0 * fame)
    x[:, 134] = np.where(visited, 1 + count(3.0, 2.2, 0.6 * fame + 0.8 * normal()), 0)  # clicks for any query
    x[:, 135] = np.where(visited, np.exp(3.2 + 0.9 * (0.5 * craft + 0.85 * normal())), 0)  # seconds they stay


def _sigmoid(value: Floats) -> Floats:
    odds: Floats = np.exp(-value)
    return np.asarray(1 / (1 + odds), np.float32)
