"""How well readers agree beyond chance: Cohen's kappa of two, Fleiss' of more, with intervals over slides."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from mutirao.datasets.class_folders import read_content
from mutirao.datasets.image_files import UnreadableError, picture
from mutirao.errors import ConfigError
from mutirao.metrics import confusion
from mutirao.research_notice import NOTICE
from mutirao.systems.cytology.slides.readers import encode
from mutirao.templates import data_uri, render

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
DRAWS = 2000


def cohen(counts: npt.ArrayLike) -> Floats:
    """Cohen's kappa of tables of counts (... x K x K): (p_o - p_e) / (1 - p_e), NaN where chance alone agrees always.

    p_o is the share on the diagonal, p_e = sum_k p_k. p_.k what it would be by chance (Cohen, 1960).

    Two readers agree on 8 of 10 tiles, of which 5 would be by chance:

    >>> float(cohen([[4, 1], [1, 4]]).round(2))
    0.6
    """
    n = np.asarray(counts, np.float64)
    total = n.sum((-2, -1))
    with np.errstate(divide="ignore", invalid="ignore"):
        seen = np.trace(n, axis1=-2, axis2=-1) / total
        chance = (n.sum(-1) * n.sum(-2)).sum(-1) / total**2
        kappa: Floats = np.where(chance < 1, (seen - chance) / (1 - chance), np.nan)
    return kappa


def fleiss(votes: npt.ArrayLike) -> Floats:
    """Fleiss' kappa from (... x (K + 2)): the votes for each of K classes, the sum of all P_i, and the tiles.

    P_i = (sum_k n_ik^2 - r) / (r (r - 1)) is the share of pairs of the r readers that agree on tile i, and
    p_e = sum_k p_k^2 what it would be by chance (Fleiss, 1971).
    """
    v = np.asarray(votes, np.float64)
    by_class, agreeing, tiles = v[..., :-2], v[..., -2], v[..., -1]
    with np.errstate(divide="ignore", invalid="ignore"):
        seen = agreeing / tiles
        chance = ((by_class / by_class.sum(-1, keepdims=True)) ** 2).sum(-1)
        kappa: Floats = np.where(chance < 1, (seen - chance) / (1 - chance), np.nan)
    return kappa


def votes_of(given: Ints, classes: int) -> Floats:
    """What `fleiss` needs of each tile, from the readers' classes (tiles x readers); rows can be added up."""
    counts = np.stack([(given == k).sum(1) for k in range(classes)], axis=1).astype(np.float64)
    r = given.shape[1]
    pairs = ((counts**2).sum(1) - r) / (r * (r - 1))
    return np.concatenate([counts, pairs[:, None], np.ones((len(given), 1))], axis=1)


@dataclass(frozen=True)
class Kappa:
    """A kappa with its interval; both NaN where everybody chose one and the same class."""

    value: float
    low: float
    high: float

    def facts(self) -> dict[str, float | None]:
        """The three figures for machines; None where one is not defined."""
        told = {"value": self.value, "low": self.low, "high": self.high}
        return {k: None if np.isnan(v) else v for k, v in told.items()}

    def __str__(self) -> str:
        if np.isnan(self.value):
            return "not defined: all labels are of one class"
        return f"{self.value:.3f} (95% {self.low:.3f} to {self.high:.3f})"


def with_interval(
    rows: Floats, groups: Ints, kappa: Callable[[npt.ArrayLike], Floats], rng: np.random.Generator
) -> Kappa:
    """Kappa of rows that add up (one a tile), with the percentile interval of drawing whole groups anew.

    Tiles of a slide are alike, so that drawing tiles would make the interval too narrow.
    """
    sums = np.zeros((groups.max() + 1, *rows.shape[1:]))
    np.add.at(sums, groups, rows)
    draws = np.empty(DRAWS)
    for i in range(DRAWS):
        draws[i] = kappa(sums[rng.integers(0, len(sums), len(sums))].sum(0))
    known = draws[~np.isnan(draws)]
    low, high = np.quantile(known, [0.025, 0.975]) if len(known) and len(sums) > 1 else (np.nan, np.nan)
    return Kappa(float(kappa(sums.sum(0))), float(low), float(high))


@dataclass(frozen=True)
class Agreement:
    """What readers chose for the tiles that all of them labelled, and how well they agree."""

    readers: tuple[str, ...]
    classes: tuple[str, ...]
    tiles: tuple[str, ...]
    given: Ints  # tiles x readers
    kind: str  # of the kappa
    kappa: Kappa
    pairs: Mapping[tuple[str, str], Kappa]
    drawn: str  # what the interval is drawn over
    partly: int  # tiles that only some labelled

    @property
    def differing(self) -> Ints:
        """The tiles on which readers differ."""
        return np.flatnonzero((self.given != self.given[:, :1]).any(1)).astype(np.int64)

    def table(self, a: str, b: str) -> Ints:
        """What one reader chose (rows) against what another did (columns)."""
        i, j = self.readers.index(a), self.readers.index(b)
        return confusion(self.given[:, i], self.given[:, j], len(self.classes))


def compare_readers(
    labels: Mapping[str, Mapping[str, str]], slides: Mapping[str, str], classes: Sequence[str], rng: np.random.Generator
) -> Agreement:
    """Agreement on the tiles of `slides` (tile to slide, "" if unknown) that all readers labelled.

    >>> labels = {"ana": {"t1": "NILM", "t2": "HSIL"}, "bia": {"t1": "NILM", "t2": "NILM"}}
    >>> found = compare_readers(labels, {"t1": "", "t2": ""}, ["NILM", "HSIL"], np.random.default_rng(0))
    >>> found.table("ana", "bia"), found.differing
    (array([[1, 0],
           [1, 0]]), array([1]))
    """
    readers = tuple(labels)
    if len(readers) < 2:
        raise ConfigError(f"agreement needs two readers at least; there is only {readers[0] if readers else 'nobody'}")
    both = [tile for tile in slides if all(tile in given for given in labels.values())]
    some = sum(any(tile in given for given in labels.values()) for tile in slides)
    if not both:
        raise ConfigError(f"{', '.join(readers)} have no tile in common yet")
    number = {name: k for k, name in enumerate(classes)}
    if strange := sorted({g[t] for g in labels.values() for t in both} - number.keys()):
        raise ConfigError(f"the class {strange[0]!r} is none of {', '.join(classes)}")
    given = np.array([[number[labels[r][t]] for r in readers] for t in both], np.int64)
    known = [slides[tile] for tile in both]
    by_slide = all(known) and len(set(known)) > 1
    names = known if by_slide else list(map(str, range(len(both))))
    groups = np.unique(names, return_inverse=True)[1].astype(np.int64)
    hot = np.eye(len(classes))[given]
    tables = {(i, j): hot[:, i, :, None] * hot[:, j, None, :] for i, j in combinations(range(len(readers)), 2)}
    pairs = {(readers[i], readers[j]): with_interval(t, groups, cohen, rng) for (i, j), t in tables.items()}
    if len(readers) == 2:
        kind, kappa = "Cohen's kappa", pairs[readers[0], readers[1]]
    else:
        kind, kappa = "Fleiss' kappa", with_interval(votes_of(given, len(classes)), groups, fleiss, rng)
    drawn = f"{len(set(known))} slides" if by_slide else f"{len(both)} tiles, since fewer than two slides are known"
    return Agreement(readers, tuple(classes), tuple(both), given, kind, kappa, pairs, drawn, some - len(both))


MOST = 300  # tiles on the page
THUMB = 160


def page_of(found: Agreement, paths: Mapping[str, Path], folder: str) -> str:
    """One page that needs no other file: kappas, tables, and each tile on which readers differ with what each chose."""
    differing = found.differing
    return render(
        "systems/cytology/slides/assets/agreement.html",
        found=found,
        folder=folder,
        notice=NOTICE,
        hidden=len(differing) - MOST,
        tiles=[tile_on_page(found, int(i), paths) for i in differing[:MOST]],
    )


def tile_on_page(found: Agreement, i: int, paths: Mapping[str, Path]) -> dict[str, Any]:
    """A tile with what each reader chose for it; without a picture if it cannot be read."""
    name = found.tiles[i]
    chosen = (found.classes[k] for k in found.given[i].tolist())
    try:
        small = picture(read_content(paths[name]))
        small.thumbnail((THUMB, THUMB))
        address = data_uri(encode(small, quality=85), "image/jpeg")
    except (OSError, UnreadableError):
        address = ""
    return {"name": name, "picture": address, "given": dict(zip(found.readers, chosen, strict=True))}
