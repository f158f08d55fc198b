"""The result of a run: its metrics, curves, model, and the path of everything else."""

import importlib
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from mutirao.core.arrays import Arrays, part_of
from mutirao.errors import ConfigError
from mutirao.io import load_arrays
from mutirao.personalization import KEPT
from mutirao.report import write_report
from mutirao.report.notebook import PIECES, box, points_of
from mutirao.report.plots import make_curves
from mutirao.runs.csv_tables import metrics_in_row
from mutirao.runs.participation import Participation, participation_in
from mutirao.runs.reader import Record
from mutirao.runs.run_folder import Folder
from mutirao.systems.recsys.recommender import Recommender
from mutirao.systems.recsys.trained import embeddings_of_run
from mutirao.templates import macros

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from torch import nn

    from mutirao.systems.cytology.slides.models import ScreeningModel
    from mutirao.systems.ranking.ranker import Ranker


import tempfile

from mutirao.config import nearest
from mutirao.io import write_whole
from mutirao.report.plot_kinds import KINDS, draw


@dataclass(frozen=True)
class Picture:
    """A picture in PNG; a notebook shows it, `save` writes it to a file."""

    kind: str
    content: bytes = field(repr=False)

    def save(self, path: Path | str) -> None:
        """Write the picture to a file."""
        write_whole(Path(path), self.content)

    def _repr_png_(self) -> bytes:
        return self.content


def draw_kind(folder: Path, kind: str, **options: Any) -> Picture:
    """One of the kinds of `mutirao plot`, plotted anew; or else the picture of that name in the folder.

    Of a study that is so for `wins`, too, which has one picture of all its methods.
    """
    left = folder / f"{kind}.png"
    if kind not in KINDS or (kind == "wins" and not options and (folder / "cells").is_dir()):
        if left.parent != folder or not left.is_file():
            known = {*KINDS, *(path.stem for path in folder.glob("*.png"))}
            raise ConfigError(f"{folder} has no picture called {kind!r}{nearest(kind, known)}")
        return Picture(kind, left.read_bytes())
    with tempfile.TemporaryDirectory() as place:
        out = Path(place) if kind == "selection" else Path(place) / f"{kind}.png"
        made = draw(folder, kind, out, **options)
        return Picture(kind, made[-1].read_bytes())


MOST = 6  # curves shown in a notebook


@dataclass(frozen=True)
class Page:
    """A page on disk, usable as a path; a notebook shows it."""

    path: Path

    def __fspath__(self) -> str:
        return str(self.path)

    def __str__(self) -> str:
        return str(self.path)

    def _repr_html_(self) -> str:
        """A link, and the page in a frame, if the folder is below that of the notebook's server."""
        return str(macros(PIECES).frame(os.path.relpath(self.path).replace(os.sep, "/")))


def as_frame(rows: Sequence[Mapping[str, Any]]) -> Any:
    """Rows as a pandas frame where pandas is installed, and as a list of dicts where it is not."""
    try:
        pandas = importlib.import_module("pandas")
    except ImportError:
        return [dict(row) for row in rows]
    return pandas.DataFrame.from_records([dict(row) for row in rows])


@dataclass(frozen=True, repr=False)
class Result:
    """A finished run, or one that has begun: what its folder says.

    >>> import mutirao as mu
    >>> _ = mu.execute("quickstart", {"rounds": 2}, "runs/result", pictures=False)
    >>> result = mu.load("runs/result")
    >>> len(result.history), result.final["accuracy"] > 0.2, type(result.model()).__name__
    (2, True, 'Sequential')
    """

    folder: Path
    make: Callable[[], "nn.Module"] | None = field(default=None, compare=False)  # a module to hold the weights
    summary: Mapping[str, Any] = field(default_factory=dict, compare=False)

    @cached_property
    def record(self) -> Record:
        """The folder, read once."""
        return Record.of(self.folder)

    @property
    def final(self) -> dict[str, float]:
        """The metrics after the last round."""
        return numbers_in(self.summary.get("final"))

    @property
    def best(self) -> dict[str, float]:
        """The metrics of the best round by the primary metric."""
        return numbers_in(self.summary.get("best"))

    @property
    def best_round(self) -> int:
        """Which round that was."""
        best_round = self.summary.get("best_round")
        if isinstance(best_round, int):
            return best_round
        return 0

    @property
    def digest(self) -> str:
        """sha256 of the final arrays: the same model, data, settings and seed give the same."""
        return str(self.summary.get("digest", ""))

    @property
    def history(self) -> Any:
        """A row a round, as a pandas frame if there is pandas."""
        return as_frame(self.record.rows)

    @property
    def clients(self) -> Any:
        """A row for each client selected in a round, likewise."""
        return as_frame(self.record.asked)

    @property
    def participation(self) -> Participation:
        """Who was selected when, of all clients there are: `times`, `gini`, and `figures` such as `never`."""
        return participation_in(self.record)

    @property
    def report(self) -> Page:
        """The run on one page; it is written if it is not there."""
        if not (self.folder / "report.html").is_file():
            write_report(self.folder)
        return Page(self.folder / "report.html")

    def curves(self, *metrics: str) -> "Figure":
        """The metrics by round, or these of them, as a matplotlib figure."""
        rows = self.record.rows
        figure = make_curves(rows, metrics or list(dict.fromkeys(k for row in rows for k in metrics_in_row(row))))
        return shown(figure)

    def plot(self, kind: str, **options: Any) -> Picture:
        """A picture of the run: a kind of `mutirao plot` with its options, or one from its folder, such as `groups`.

        `against` may be another result, for `wins`.
        """
        against = options.get("against")
        if isinstance(against, Result):
            options["against"] = str(against.folder)
        return draw_kind(self.folder, kind, **options)

    def model(self, round: int | Literal["best", "last"] = "best", group: str = "") -> "nn.Module":
        """The module with the weights of the best round, of another one, or of the `last`, ready to predict.

        Of a run with groups it is the model of one `group`.
        """
        kept = self.record.config.get("personal")
        if isinstance(kept, Mapping) and kept.get("name") in KEPT:
            raise ConfigError(f"model: of personal={kept['name']} a part stayed with each client; see Result.arrays()")
        if self.make is None:
            right = "give it: mutirao.load(folder, model=...)"
            raise ConfigError(f"{self.folder}: which torch module its weights belong to is not known; {right}")
        groups = list(self.record.groups())
        arrays = self.arrays(round)
        if groups and group not in groups:
            known = f"give group={groups[0]!r}; there are {', '.join(groups)}"
            raise ConfigError(f"model: the run has a model for each group; {known}")
        if group and not groups:
            raise ConfigError("model: the run has no groups; leave group out")
        if group:
            arrays = part_of(arrays, group)
        return fill(self.make(), arrays)

    def arrays(self, round: int | Literal["best", "last"] = "best") -> Arrays:
        """The weights of a round by name."""
        folder = Folder(self.folder)
        best = folder.checkpoints / "best.safetensors"
        if round == "best" and best.exists():
            return load_arrays(best)[0]
        if round in ("best", "last"):
            return folder.newest(states=False).arrays
        kept = sorted(folder.committed())
        if round not in kept:
            raise ConfigError(
                f"round {round!r}: its weights are not in {self.folder}; kept are {span(kept)}; keep=all keeps all"
            )
        return folder.load(int(round))[0].arrays

    def recommender(self, round: Literal["best", "last"] = "best") -> Recommender:
        """For a run of recsys: recommends items to any user from a few ratings, which are not stored."""
        return Recommender(embeddings_of_run(self.folder, round))

    def ranker(self, round: Literal["best", "last"] = "best") -> "Ranker":
        """Of a run of ranking: what scores documents as they stand in a file."""
        # Imported late, because it imports torch.
        from mutirao.systems.ranking.ranker import Ranker

        return Ranker.load(self.folder, round)

    def network(self, round: Literal["best", "last"] = "best") -> "ScreeningModel":
        """The network of a cytology run, backbone and head, from a tile to probabilities. For research only."""
        # Imported late, because it imports torch.
        from mutirao.systems.cytology.trained import network_of_run

        return network_of_run(self.folder, round)

    def __repr__(self) -> str:
        """One line."""
        judge = self.record.monitor
        best = f"{judge} {self.best[judge]:.4f} in round {self.best_round} of " if judge in self.best else ""
        return f"Result({self.folder}: {best}{self.record.rounds} rounds)"

    def _repr_html_(self) -> str:
        """The figures and small curves; self-contained, in the notebook's own colours."""
        names = self.record.metrics
        head = ("metric", "final", f"best (round {self.best_round})")
        rows = [(name, number(self.final.get(name)), number(self.best.get(name))) for name in names]
        curves = [box(n, points_of(self.record.rows, n), self.record.direction(n)) for n in names[:MOST]]
        return str(macros(PIECES).result(str(self.folder), head, rows, curves))


def numbers_in(metrics: Any) -> dict[str, float]:
    """The metrics in a summary; it is a file, so its content is checked."""
    if isinstance(metrics, Mapping):
        return {str(k): v for k, v in metrics.items() if isinstance(v, int | float)}
    return {}


def number(value: Any) -> str:
    """A figure as a table shows it."""
    if isinstance(value, int | float):
        return f"{value:.4f}"
    return "-"


def span(rounds: Sequence[int]) -> str:
    """The rounds there are, in a few words."""
    if len(rounds) > 1 and len(rounds) == rounds[-1] - rounds[0] + 1:
        return f"{rounds[0]} to {rounds[-1]}"
    return ", ".join(map(str, rounds)) or "none"


def shown(figure: "Figure") -> "Figure":
    """The figure, which a notebook shows even if pyplot was not imported."""

    def png() -> bytes:
        content = BytesIO()
        figure.savefig(content, format="png", dpi=110)
        return content.getvalue()

    figure._repr_png_ = png  # type: ignore[attr-defined]
    return figure


def fill(module: "nn.Module", arrays: Arrays) -> "nn.Module":
    """The module with these arrays, for predicting; what does not travel stays as it is in the module."""
    import torch

    # All shapes are checked before anything is copied, so that no module is left with a part of the arrays.
    own = module.state_dict()
    for name, array in arrays.items():
        if name not in own or tuple(own[name].shape) != array.shape:
            there = f"it has {tuple(own[name].shape)}" if name in own else "it has none"
            raise ConfigError(f"model: the run's {name!r} has shape {array.shape}, and {there}; give the same module")
    with torch.no_grad():
        for name, array in arrays.items():
            own[name].copy_(torch.from_numpy(array.copy()))
    return module.eval()
