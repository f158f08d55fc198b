"""A large set of implicit ratings grown from a small one: `python -m research.expansion ml-100k --users 8 --items 4`.

Randomised Kronecker (fractal) expansion: a small matrix with the large one's leading singular values says how many
ratings each of its blocks keeps; every block is the small set itself, shuffled and thinned out. Belletti, Lakshmanan,
Krichene, Chen and Anderson, "Scalable Realistic Recommendation Datasets through Fractal Expansions", 2019.
"""

import argparse
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt

from mutirao.errors import ConfigError
from mutirao.io import write_rows, write_whole
from mutirao.metrics import gini
from mutirao.randomness import rng
from mutirao.report.plots import BRIGHT, STYLES, add_legend, blank, save, tidy
from mutirao.systems.recsys.catalogues import Catalogue
from mutirao.systems.recsys.ratings import Ratings
from mutirao.systems.recsys.readers import read_ratings

Floats = npt.NDArray[np.float64]
Shuffle = Literal["users", "both", "none"]

LEAST, MOST = 0.01, 0.95  # of the ratings that a block may keep, as in the authors' code
SINGULAR = 50  # singular values that are compared
HEAD = 0.1  # the part of the ranks through which a slope is laid


def expand(ratings: Ratings, users: int = 4, items: int = 4, shuffle: Shuffle = "users", seed: int = 0) -> Ratings:
    """Grow ratings to `users` times as many users and `items` times as many items, as implicit feedback.

    Block (i, j) of the result is F(a_ij, R): the ratings R, each kept with probability a_ij, with users and items
    shuffled anew, where a = |A| / max |A| and A = `reduce_matrix(R)`. `shuffle` = "both" is the paper's and leaves no
    item what it was; "users" keeps items: copy j of an item bears its title, so that vectors can be carried over;
    "none" keeps users, too. Within a user, block comes after block, each in its own order. Users left with nothing go.
    """
    if users < 1 or items < 1:
        raise ConfigError(f"users and items are {users} and {items}, but must be 1 or more: how many times as many")
    rates = find_rates(ratings, users, items)
    height, width = len(ratings.users), len(ratings.catalogue)
    if width * items > np.iinfo(np.int32).max:
        raise ConfigError(
            f"{width:,} items cannot be made {items:,} times as many: that is more than 2 thousand million"
        )
    owners = ratings.owners()
    counts, taken = [], []
    for i in range(users):
        who, what = [], []
        for j in range(items):
            chance = rng(seed, i, "expand", str(j))
            keep = chance.random(len(ratings)) < rates[i, j]
            owner, item = owners[keep], ratings.items[keep]
            if shuffle != "none":
                owner = chance.permutation(height)[owner]
            if shuffle == "both":
                item = chance.permutation(width).astype(np.int32)[item]
            who.append(owner)
            what.append(item + np.int32(j * width))
        owner = np.concatenate(who)
        number = np.bincount(owner, minlength=height)
        taken.append(np.concatenate(what)[np.argsort(owner, kind="stable")])
        counts.append(number[number > 0])
    offsets = np.concatenate([[0], np.cumsum(np.concatenate(counts))]).astype(np.int64)
    if not offsets[-1]:
        raise ConfigError(
            f"of {len(ratings):,} ratings none is left after thinning out; right would be more to begin with"
        )
    every = np.concatenate(taken)
    position = np.arange(1, len(every) + 1) - np.repeat(offsets[:-1], np.diff(offsets))  # stands for time
    catalogue = _copies(ratings.catalogue, items, named=shuffle != "both")
    names = tuple(str(k) for k in range(1, len(offsets)))
    return Ratings(names, catalogue, offsets, every, np.ones(len(every), np.float32), position).recount()


def _copies(catalogue: Catalogue, copies: int, named: bool) -> Catalogue:
    """The catalogue several times over, numbered from 1; without titles if a shuffled item is no longer what it was."""
    ids = tuple(str(k) for k in range(1, copies * len(catalogue) + 1))
    titles = catalogue.titles * copies if named else ("",) * len(ids)
    years = np.tile(catalogue.years, copies) if named else np.zeros(len(ids), np.int32)
    return Catalogue(ids, titles, years, np.zeros(len(ids), np.int64))


def find_rates(ratings: Ratings, rows: int, columns: int) -> Floats:
    """The share of ratings that each block keeps: |A| / max |A|, within 1% and 95%."""
    small = np.abs(reduce_matrix(ratings, rows, columns))
    return np.asarray(np.clip(small / small.max(), LEAST, MOST), np.float64)


def reduce_matrix(ratings: Ratings, rows: int, columns: int) -> Floats:
    """A small matrix A = U' S V'^T with the leading singular values S of the set of ratings R = U S V^T.

    U' and V' are the orthonormal matrices closest to U and V with neighbouring rows averaged (the paper's algorithm 2).
    """
    if rows >= len(ratings.users) or columns >= len(ratings.catalogue):
        raise ConfigError(
            f"{rows} x {columns} blocks need more than {rows} users and {columns} items, "
            f"there are {len(ratings.users):,} and {len(ratings.catalogue):,}"
        )
    u, s, v = leading(ratings, min(rows, columns))
    small: Floats = _orthonormal(_averaged(u, rows)) * s @ _orthonormal(_averaged(v, columns)).T
    return small


def leading(ratings: Ratings, rank: int) -> tuple[Floats, Floats, Floats]:
    """Left vectors, singular values and right vectors of the 0/1 matrix of ratings, largest values first."""
    from scipy.sparse import csr_matrix
    from scipy.sparse.linalg import svds

    shape = (len(ratings.users), len(ratings.catalogue))
    matrix = csr_matrix((np.ones(len(ratings)), ratings.items, ratings.offsets), shape=shape)
    start = np.full(min(shape), 1 / np.sqrt(min(shape)))  # a fixed one: the same data give the same bits
    u, s, vt = svds(matrix, k=rank, v0=start)
    order = np.argsort(-s)
    return np.asarray(u[:, order], np.float64), np.asarray(s[order], np.float64), np.asarray(vt[order].T, np.float64)


def _averaged(matrix: Floats, rows: int) -> Floats:
    """The matrix with its rows averaged into `rows` groups of neighbours."""
    edges = np.linspace(0, len(matrix), rows + 1).astype(np.intp)
    means: Floats = np.add.reduceat(matrix, edges[:-1]) / np.diff(edges)[:, None]
    return means


def _orthonormal(matrix: Floats) -> Floats:
    """The closest matrix with orthonormal columns: its polar factor."""
    left, _, right = np.linalg.svd(matrix, full_matrices=False)
    polar: Floats = left @ right
    return polar


@dataclass(frozen=True)
class Laws:
    """What is said to follow power laws in ratings, each in falling order."""

    activity: Floats  # ratings of each user
    popularity: Floats  # ratings of each item that has any
    spectrum: Floats  # leading singular values of the 0/1 matrix

    @classmethod
    def of(cls, ratings: Ratings) -> "Laws":
        """Measure a set of ratings."""
        counts = np.bincount(ratings.items)
        least = min(len(ratings.users), len(ratings.catalogue))
        _, spectrum, _ = leading(ratings, min(SINGULAR, least - 1))
        return cls(
            np.sort(ratings.counts()[ratings.counts() > 0])[::-1].astype(np.float64),
            np.sort(counts[counts > 0])[::-1].astype(np.float64),
            spectrum,
        )

    def figures(self) -> dict[str, float]:
        """Slopes of log value by log rank (of the first tenth of ranks; of the spectrum from the second), and Ginis."""
        found = {}
        for name, values in (("activity", self.activity), ("popularity", self.popularity)):
            found[f"{name}_slope"] = _slope(values, 1, max(2, int(HEAD * len(values))))
            found[f"{name}_gini"] = gini(values)
        return found | {"spectrum_slope": _slope(self.spectrum, 2, len(self.spectrum))}


def _slope(values: Floats, first: int, last: int) -> float:
    """The slope b of log value = a + b log rank by least squares, at ranks evenly spaced on the logarithmic axis."""
    ranks = np.unique(np.geomspace(first, max(first, min(last, len(values))), 100).round().astype(np.intp))
    if len(ranks) < 2:
        return 0.0
    return float(np.polyfit(np.log(ranks), np.log(values[ranks - 1]), 1)[0])


def write_ratings(ratings: Ratings, folder: Path) -> None:
    """Write ratings as a folder in the layout of MovieLens 20M: ratings.csv and movies.csv, with the year apart."""
    c = ratings.catalogue
    rows = zip(c.ids, c.titles, [y or "" for y in c.years.tolist()], strict=True)
    write_whole(folder / "movies.csv", write_rows([["movieId", "title", "year"], *rows]))
    part = folder / ".ratings.csv.part"
    with part.open("w", encoding="utf-8") as file:  # user by user: a thousand million lines are no one piece of text
        file.write("userId,movieId,rating,timestamp\n")
        for user, (begin, end) in zip(ratings.users, pairwise(ratings.offsets.tolist()), strict=True):
            own = (column[begin:end].tolist() for column in (ratings.items, ratings.values, ratings.times))
            file.writelines(f"{user},{c.ids[i]},{v:g},{t}\n" for i, v, t in zip(*own, strict=True))
    part.replace(folder / "ratings.csv")


def draw_laws(sets: Mapping[str, Laws], path: Path) -> None:
    """Draw the laws of several sets over each other, ranks as shares and values in means: sizes do not matter."""
    figure, (users, items, spectrum) = blank(3.9 * 3, 3.5, 1, 3)
    users.set(title="activity of users", xlabel="rank of the user, as a share", ylabel="ratings / mean")
    items.set(title="popularity of items", xlabel="rank of the item, as a share", ylabel="ratings / mean")
    spectrum.set(title="singular values", xlabel="number", ylabel="value / largest")
    for i, (name, laws) in enumerate(sets.items()):
        for axes, y in ((users, laws.activity), (items, laws.popularity), (spectrum, laws.spectrum)):
            some = np.unique(np.geomspace(1, len(y), 300).round().astype(np.intp))  # evenly spaced on the axis
            x, unit = (some, y[0]) if axes is spectrum else (some / len(y), y.mean())
            look = {"color": BRIGHT[i % len(BRIGHT)], "linestyle": STYLES[i % 3], "linewidth": 1.8}
            axes.plot(x, y[some - 1] / unit, label=name, **look)
    for axes in (users, items, spectrum):
        axes.set(xscale="log", yscale="log")
        tidy(axes, grid="both")
        add_legend(axes, loc="lower left")
    save(figure, path)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m research.expansion", description=__doc__)
    parser.add_argument("data", type=Path, help="a folder of MovieLens or Netflix, or a file of ratings")
    parser.add_argument("--columns", default="", help="columns of your own file, as in `mutirao catalogue pretrain`")
    parser.add_argument("--users", type=int, default=4, help="how many times as many users (default: 4)")
    parser.add_argument("--items", type=int, default=4, help="how many times as many items (default: 4)")
    parser.add_argument("--shuffle", choices=("users", "both", "none"), default="users")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("expanded"), help="the folder to write (default: expanded)")
    args = parser.parse_args()
    if args.out.exists() and (not args.out.is_dir() or any(args.out.iterdir())):
        parser.error(f"{args.out} exists and is not empty; name a new folder")
    small = read_ratings(args.data.expanduser(), args.columns)
    large = expand(small, args.users, args.items, args.shuffle, args.seed)
    write_ratings(large, args.out)
    laws = {"before": Laws.of(small), "after": Laws.of(large)}
    draw_laws(laws, args.out / "laws.png")
    for name, ratings in (("before", small), ("after", large)):
        print(f"{name}: {len(ratings.users):,} users, {len(ratings.catalogue):,} items, {len(ratings):,} ratings")
    after = laws["after"].figures()
    for key, value in laws["before"].figures().items():
        print(f"{key:<18} {value:>9.3f} {after[key]:>9.3f}")
    print(f"written: {args.out}/ratings.csv, movies.csv and laws.png")


if __name__ == "__main__":
    main()
