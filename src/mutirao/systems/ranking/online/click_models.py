"""Simulated clicks: the cascade model, by the grades of the documents shown.

A user examines documents from the top down. A document examined is clicked with a probability that depends on its
grade; after a click the user stops with another one. Guo, Liu and Wang, 2009: Efficient multiple-click models in web
search. The probabilities are those in use since Hofmann, Schuth, Whiteson and de Rijke, 2013 (also by Oosterhuis and de
Rijke, 2018, and by Wang, Liu, Zhuang and Zuccon, 2021).
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from mutirao.errors import ConfigError

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]
Chances = tuple[tuple[float, ...], tuple[float, ...]]  # of a click on a document examined, of stopping after it

# By the highest grade there is: 1, 2 or 4. A set with grades up to 3 has no table of its own: it takes that of 4.
TABLES: dict[str, dict[int, Chances]] = {
    "perfect": {
        1: ((0.0, 1.0), (0.0, 0.0)),
        2: ((0.0, 0.5, 1.0), (0.0, 0.0, 0.0)),
        4: ((0.0, 0.2, 0.4, 0.8, 1.0), (0.0, 0.0, 0.0, 0.0, 0.0)),
    },
    "navigational": {
        1: ((0.05, 0.95), (0.2, 0.9)),
        2: ((0.05, 0.5, 0.95), (0.2, 0.5, 0.9)),
        4: ((0.05, 0.3, 0.5, 0.7, 0.95), (0.2, 0.3, 0.5, 0.7, 0.9)),
    },
    "informational": {
        1: ((0.4, 0.9), (0.1, 0.5)),
        2: ((0.4, 0.7, 0.9), (0.1, 0.3, 0.5)),
        4: ((0.4, 0.6, 0.7, 0.8, 0.9), (0.1, 0.2, 0.3, 0.4, 0.5)),
    },
    "near_random": {
        1: ((0.4, 0.6), (0.5, 0.5)),
        2: ((0.4, 0.5, 0.6), (0.5, 0.5, 0.5)),
        4: ((0.4, 0.45, 0.5, 0.55, 0.6), (0.5, 0.5, 0.5, 0.5, 0.5)),
    },
}
LOGGED = "logged"  # exactly the clicks of a log
MIXED = (
    "perfect",
    "navigational",
    "informational",
)  # each user has one of these, so that clients differ
NAMES = (*TABLES, "mixed", LOGGED)


@dataclass(frozen=True)
class Cascade:
    """A user's click probabilities: `click` and `stop` by grade; with `noise` e a click has (1 - e) p + e / 2.

    >>> Cascade.of("navigational", 2).click
    (0.05, 0.5, 0.95)
    """

    click: tuple[float, ...]
    stop: tuple[float, ...]

    @classmethod
    def of(cls, name: str, highest: int, noise: float = 0.0) -> "Cascade":
        """The click model of that name for grades from 0 to `highest`."""
        if name == LOGGED:
            return cls(tuple(float(grade > 0) for grade in range(highest + 1)), (0.0,) * (highest + 1))
        tables = TABLES[name]
        fitting = [most for most in tables if most >= highest]
        if not fitting:
            raise ConfigError(f"clicks={name}: it supports grades up to 4, but the data have grade {highest}")
        click, stop = tables[min(fitting)]
        return cls(tuple((1 - noise) * p + noise / 2 for p in click), stop)


def click_documents(click: Floats, stop: Floats, draws: Floats) -> Bools:
    """Sample the documents clicked: `click` and `stop` are probabilities by list and place.

    `draws` are uniform numbers, two for each document. A document examined is clicked if the first is below `click`;
    then nothing after it is examined if the second is below `stop`. Padding has probability 0, and is never clicked.

    >>> click_documents(np.array([[1.0, 1.0]]), np.array([[1.0, 0.0]]), np.full((2, 1, 2), 0.5)).tolist()
    [[True, False]]
    """
    would = draws[0] < click
    stops = would & (draws[1] < stop)
    before = np.cumsum(stops, axis=1) - stops  # stops above this place
    return np.asarray(would & (before == 0))
