"""The data sets recipes can read, published ones and forms of one's own, and whether a copy on disk is whole."""

from pathlib import Path

from mutirao.config import load_name, nearest
from mutirao.datasets.published import FORMATS, PUBLISHED
from mutirao.errors import ConfigError

DATA_SETS = PUBLISHED | FORMATS


def check_data_set(name: str, path: Path | str | None = None) -> list[str]:
    """Read a data set as its recipe would; a few lines say what was found.

    >>> check_data_set("digits")
    ['embedded in scikit-learn: 1,797 pictures of 8 x 8, 10 classes']
    """
    if name not in DATA_SETS:
        raise ConfigError(f"no data set is called {name!r}{nearest(name, DATA_SETS)}")
    findings: list[str] = load_name(DATA_SETS[name].check)(path)
    return findings
