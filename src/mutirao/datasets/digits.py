"""Handwritten digits of 8 x 8 pixels, which come with scikit-learn: real data that needs no files."""

from importlib.util import find_spec
from pathlib import Path

import numpy as np
import numpy.typing as npt

from mutirao.errors import ConfigError
from mutirao.randomness import rng

TEST = 360  # a fifth of the 1,797
FILE = Path("datasets", "data", "digits.csv.gz")  # in scikit-learn's folder


def read_digits(
    seed: int,
) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.int64], npt.NDArray[np.float32], npt.NDArray[np.int64]]:
    """Pixels from 0 to 1 and digits: what clients train on, then a fifth, drawn by `seed`, kept as a test set."""
    table = read_table()
    x, y = (table[:, :-1] / 16).astype(np.float32), table[:, -1].astype(np.int64)
    order = rng(seed, 0, "test split").permutation(len(y))
    test, rest = order[:TEST], order[TEST:]
    return x[rest], y[rest], x[test], y[test]


def read_table() -> npt.NDArray[np.float64]:
    """A row a picture, 64 numbers from 0 to 16 and the digit, from scikit-learn's file.

    The file alone is read: importing the package brings scipy and pandas, and takes as long as torch.
    """
    package = find_spec("sklearn")
    for place in (package and package.submodule_search_locations) or ():
        if (file := Path(place) / FILE).is_file():
            return np.loadtxt(file, delimiter=",")
    from sklearn.datasets import load_digits  # wherever this version has them

    return np.column_stack(load_digits(return_X_y=True))


def check_digits(path: Path | str | None) -> list[str]:
    """The digits need no files, so a path can only be a mistake."""
    if path is not None:
        raise ConfigError(f"digits are embedded and read no files; leave {str(path)!r} out")
    classes = read_table()[:, -1]
    return [f"embedded in scikit-learn: {len(classes):,} pictures of 8 x 8, {len(set(classes))} classes"]
