"""Inter-rater agreement: Cohen's kappa of two readers, Fleiss' kappa of more, with intervals over slides."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from mutirao.datasets.class_folders import UnreadableError, picture, read_content
from mutirao.errors import ConfigError
from mutirao.metrics import confusion
from mutirao.research_notice import NOTICE
from mutirao.systems.cytology.slides.readers import encode_image
from mutirao.templates import data_uri, render

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
DRAWS = 2000


def cohen(counts: npt.ArrayLike) -> Floats:
    """Cohen's kappa of tables of counts (... x K x K): (p_o - p_e) / (1 - p_e), NaN if p_e is 1.

    p_o is the share on the diagonal, and p_e = sum_k p_k. p_.k that share by chance (Cohen, 1960).

    Two readers agree on 8 of 10 tiles, where 5 are expected by chance:

    >>> float(cohen([[4, 1], [1, 4]]).round(2))
    0.6
    """
    n = np.asarray(counts, np.float64)
    total = n.sum((-2, -1))
    with np.errstate(divide="ignore", invalid="ignore"):
        observed = np.trace(n, axis1=-2, axis2=-1) / total
        chance = (n.sum(-1) * n.sum(-2)).sum(-1) / total**2
        kappa: Floats = np.where(chance < 1, (observed - chance) / (1 - chance), np.nan)
    return kappa


def fleiss(votes: npt.ArrayLike) -> Floats:
    """Fleiss' kappa from (... x (K + 2)): the votes for each of K classes, the sum of all P_i, and the tiles.

    P_i = (sum_k n_ik^2 - r) / (r (r - 1)) is the share of pairs of the r readers that agree on tile i, and
    p_e = sum_k p_k^2 that share by chance (Fleiss, 1971).
    """
    v = np.asarray(votes, np.float64)
    by_class = v[..., :-2]
    agreeing = v[..., -2]
    tiles = v[..., -1]
    with np.errstate(divide="ignore", invalid="ignore"):
        observed = agreeing / tiles
        chance = ((by_class / by_class.sum(-1, keepdims=True)) ** 2).sum(-1)
        kappa: Floats = np.where(chance < 1, (observed - chance) / (1 - chance), np.nan)
    return kappa


def votes_of(given: Ints, classes: int) -> Floats:
    """The rows that `fleiss` takes, one for each tile, from the readers' classes (tiles x readers)."""
    counts = np.stack([(given == k).sum(1) for k in range(classes)], axis=1).astype(np.float64)
    r = given.shape[1]
    pairs = ((counts**2).sum(1) - r) / (r * (r - 1))
    return np.concatenate([counts, pairs[:, None], np.ones((len(given), 1))], axis=1)


@dataclass(frozen=True)
class Kappa:
    """A kappa with its interval; NaN if all readers chose a single class."""

    value: float
    low: float
    high: float

    def facts(self) -> dict[str, float | None]:
        """Value and interval for JSON; None where one is not defined."""
        values = {"value": self.value, "low": self.low, "high": self.high}
        return {name: None if np.isnan(value) else value for name, value in values.items()}

    def __str__(self) -> str:
        if np.isnan(self.value):
            return "not defined: all labels are of one class"
        return f"{self.value:.3f} (95% {self.low:.3f} to {self.high:.3f})"


def with_interval(
    rows: Floats, groups: Ints, kappa: Callable[[npt.ArrayLike], Floats], rng: np.random.Generator
) -> Kappa:
    """Kappa of the summed rows (one for each tile), with a cluster bootstrap interval over groups.

    Tiles of one slide are correlated: resampling tiles would make the interval too narrow.
    """
    sums = np.zeros((groups.max() + 1, *rows.shape[1:]))
    np.add.at(sums, groups, rows)
    draws = np.empty(DRAWS)
    for i in range(DRAWS):
        draws[i] = kappa(sums[rng.integers(0, len(sums), len(sums))].sum(0))
    known = draws[~np.isnan(draws)]
    low = high = np.nan
    if len(known) and len(sums) > 1:
        low, high = np.quantile(known, [0.025, 0.975])
    return Kappa(float(kappa(sums.sum(0))), float(low), float(high))


@dataclass(frozen=True)
class Agreement:
    """The classes that readers chose for the tiles that all of them labelled, and their agreement."""

    readers: tuple[str, ...]
    classes: tuple[str, ...]
    tiles: tuple[str, ...]
    given: Ints  # tiles x readers
    kind: str  # of the kappa
    kappa: Kappa
    pairs: Mapping[tuple[str, str], Kappa]
    resampled: str  # what the interval resamples
    partly: int  # tiles that only some readers labelled

    @property
    def differing(self) -> Ints:
        """The tiles on which readers differ."""
        return np.flatnonzero((self.given != self.given[:, :1]).any(1)).astype(np.int64)

    def table(self, a: str, b: str) -> Ints:
        """The classes of one reader (rows) against those of another (columns)."""
        i = self.readers.index(a)
        j = self.readers.index(b)
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
        raise ConfigError(f"agreement needs at least two readers; found only {readers[0] if readers else 'none'}")
    both = []
    partly = 0
    for tile in slides:
        readings = sum(tile in given for given in labels.values())
        if readings == len(readers):
            both.append(tile)
        elif readings:
            partly += 1
    if not both:
        raise ConfigError(f"{', '.join(readers)} have no tile in common yet")
    number = {name: k for k, name in enumerate(classes)}
    chosen = {given[tile] for given in labels.values() for tile in both}
    if unknown := sorted(chosen - number.keys()):
        raise ConfigError(f"the class {unknown[0]!r} is none of {', '.join(classes)}")
    columns = [[number[labels[reader][tile]] for tile in both] for reader in readers]
    given = np.array(columns, np.int64).T
    known = [slides[tile] for tile in both]
    by_slide = all(known) and len(set(known)) > 1
    names = known if by_slide else list(map(str, range(len(both))))
    groups = np.unique(names, return_inverse=True)[1].astype(np.int64)
    hot = np.eye(len(classes))[given]
    pairs = {}
    for i, j in combinations(range(len(readers)), 2):
        tables = hot[:, i, :, None] * hot[:, j, None, :]
        pairs[readers[i], readers[j]] = with_interval(tables, groups, cohen, rng)
    if len(readers) == 2:
        kind = "Cohen's kappa"
        kappa = pairs[readers[0], readers[1]]
    else:
        kind = "Fleiss' kappa"
        kappa = with_interval(votes_of(given, len(classes)), groups, fleiss, rng)
    resampled = f"{len(both)} tiles, since fewer than two slides are known"
    if by_slide:
        resampled = f"{len(set(known))} slides"
    return Agreement(readers, tuple(classes), tuple(both), given, kind, kappa, pairs, resampled, partly)


# ---- the page of tiles on which readers differ -----------------------------------------------------------------------

SHOWN = 300  # tiles on the page
THUMB = 160


def agreement_page(found: Agreement, paths: Mapping[str, Path], folder: str) -> str:
    """Render a self-contained page: kappas, tables, and the tiles on which readers differ."""
    differing = found.differing
    return render(
        "systems/cytology/slides/assets/agreement.html",
        found=found,
        folder=folder,
        notice=NOTICE,
        hidden=len(differing) - SHOWN,
        tiles=[tile_on_page(found, int(i), paths) for i in differing[:SHOWN]],
    )


def tile_on_page(found: Agreement, i: int, paths: Mapping[str, Path]) -> dict[str, Any]:
    """A tile with the class of each reader; without its image if that cannot be read."""
    name = found.tiles[i]
    chosen = (found.classes[k] for k in found.given[i].tolist())
    try:
        small = picture(read_content(paths[name]))
        small.thumbnail((THUMB, THUMB))
        address = data_uri(encode_image(small, quality=85), "image/jpeg")
    except (OSError, UnreadableError):
        address = ""
    return {"name": name, "picture": address, "given": dict(zip(found.readers, chosen, strict=True))}
