"""Data sets that recipes can read: published ones, formats for data of your own, and checks of copies on disk."""

from pathlib import Path

from mutirao.config import load_name, nearest
from mutirao.datasets.published import FORMATS, PUBLISHED
from mutirao.errors import ConfigError

DATA_SETS = PUBLISHED | FORMATS


def check_data_set(name: str, path: Path | str | None = None) -> list[str]:
    """Read a data set as its recipe would; return a description of a few lines.

    >>> check_data_set("digits")
    ['embedded in scikit-learn: 1,797 pictures of 8 x 8, 10 classes']
    """
    if name not in DATA_SETS:
        raise ConfigError(f"no data set is called {name!r}{nearest(name, DATA_SETS)}")
    findings: list[str] = load_name(DATA_SETS[name].check)(path)
    return findings
