"""Handwritten digits of 8 x 8 pixels, which come with scikit-learn: real data that needs no files."""

import numpy as np
import numpy.typing as npt

from mutirao.randomness import rng

TEST = 360  # a fifth of the 1,797


def read_digits(
    seed: int,
) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.int64], npt.NDArray[np.float32], npt.NDArray[np.int64]]:
    """Pixels from 0 to 1 and digits: what clients train on, then a fifth, drawn by `seed`, kept as a test set."""
    from sklearn.datasets import load_digits  # late: it takes a while to import

    x, y = load_digits(return_X_y=True)
    x, y = (x / 16).astype(np.float32), y.astype(np.int64)
    order = rng(seed, 0, "test split").permutation(len(y))
    test, rest = order[:TEST], order[TEST:]
    return x[rest], y[rest], x[test], y[test]
