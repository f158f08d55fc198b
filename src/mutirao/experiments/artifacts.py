"""Artifacts of a run: recipes provide data for pictures and files, which the report draws and writes."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mutirao.core.rounds import Run


@dataclass(frozen=True)
class Picture:
    """A kind of picture, by its name in `mutirao.report.run_plots`, and the data it shows; None if there are none.

    >>> from mutirao.partitioning import describe
    >>> picture = Picture("partition", lambda run: describe([0, 0, 1, 1], [[0, 1], [2, 3]]))
    >>> picture.data(Run({})).sizes
    array([2, 2])
    """

    kind: str
    data: Callable[[Run], Any]


@dataclass(frozen=True)
class Artifacts:
    """Pictures and files by their names in the run folder, and additional entries of the summary.

    >>> from mutirao.partitioning import describe
    >>> picture = Picture("partition", lambda run: describe([0, 0, 1, 1], [[0, 1], [2, 3]]))
    >>> exhibits = Artifacts(pictures={"partition.png": picture}, findings=lambda run: {"arrays": len(run.arrays)})
    >>> sorted(exhibits.pictures), exhibits.findings(Run({}))
    (['partition.png'], {'arrays': 0})
    """

    pictures: Mapping[str, Picture] = field(default_factory=dict)
    files: Mapping[str, Callable[[Run, Path], None]] = field(default_factory=dict)
    findings: Callable[[Run], Mapping[str, Any]] | None = None  # entries of summary.json
    constant: frozenset[str] = frozenset()  # metrics that hardly change and get no curve


def partition_of(describe: Callable[[], Any]) -> Artifacts:
    """The picture that most recipes have: the class counts of each client, by `mutirao.partitioning.describe`."""
    return Artifacts({"partition.png": Picture("partition", lambda run: describe())})
