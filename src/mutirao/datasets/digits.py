"""The handwritten digits of scikit-learn, 8 x 8 pixels: real data that needs no download."""

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
    """Pixels from 0 to 1 and labels: the training set, then a fifth, sampled by `seed`, as the test set."""
    table = read_digits_table()
    x = (table[:, :-1] / 16).astype(np.float32)
    y = table[:, -1].astype(np.int64)
    order = rng(seed, 0, "test split").permutation(len(y))
    test = order[:TEST]
    train = order[TEST:]
    return x[train], y[train], x[test], y[test]


def read_digits_table() -> npt.NDArray[np.float64]:
    """One row for each image, 64 numbers from 0 to 16 and the digit, from scikit-learn's file.

    Only the file is read: importing the package also imports scipy and pandas, and takes as long as torch.
    """
    package = find_spec("sklearn")
    for place in (package and package.submodule_search_locations) or ():
        if (file := Path(place) / FILE).is_file():
            return np.loadtxt(file, delimiter=",")
    from sklearn.datasets import load_digits  # if this version keeps the file elsewhere

    return np.column_stack(load_digits(return_X_y=True))


def check_digits(path: Path | str | None) -> list[str]:
    """Describe the digits; ConfigError if a path is given, since they are not read from one."""
    if path is not None:
        raise ConfigError(f"digits are embedded and read no files; leave {str(path)!r} out")
    classes = read_digits_table()[:, -1]
    return [f"embedded in scikit-learn: {len(classes):,} pictures of 8 x 8, {len(set(classes))} classes"]
