"""The data sets recipes can read: what they are, who publishes them, and whether a copy on disk is whole.

Nothing is imported to list them: how a set is checked is a dotted path to a function
`(path or None) -> findings`, which raises ConfigError if the set cannot be used.
"""

from dataclasses import dataclass
from pathlib import Path

from mutirao.config import load_name, nearest
from mutirao.errors import ConfigError


@dataclass(frozen=True)
class DataSet:
    """A set by what it holds, where to get it, how it lies on disk, and the function that checks it."""

    about: str
    source: str
    layout: str
    check: str


DATA_SETS = {
    "digits": DataSet(
        about="1,797 handwritten digits of 8 x 8 pixels in 10 classes",
        source="embedded: it comes with scikit-learn (from the UCI Machine Learning Repository)",
        layout="no files",
        check="mutirao.data:check_digits",
    ),
    "cifar10": DataSet(
        about="60,000 colour pictures of 32 x 32 pixels in 10 classes; 'synthetic' is an embedded stand-in",
        source="University of Toronto, Alex Krizhevsky's page on CIFAR-10: the binary or the Python version",
        layout="a folder cifar-10-batches-bin or cifar-10-batches-py with data_batch_1 to 5 and test_batch in it",
        check="mutirao.images.cifar10:check",
    ),
}


def check(name: str, path: Path | str | None = None) -> list[str]:
    """Read a data set as its recipe would; a few lines say what was found."""
    if name not in DATA_SETS:
        raise ConfigError(f"no data set is called {name!r}{nearest(name, DATA_SETS)}")
    findings: list[str] = load_name(DATA_SETS[name].check)(path)
    return findings


def check_digits(path: Path | str | None) -> list[str]:
    """The digits need no files, so a path can only be a mistake."""
    if path is not None:
        raise ConfigError(f"digits are embedded and read no files; leave {str(path)!r} out")
    from sklearn.datasets import load_digits

    digits = load_digits()
    return [f"embedded in scikit-learn: {len(digits.images):,} pictures of 8 x 8, {len(digits.target_names)} classes"]
