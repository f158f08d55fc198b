"""A trained ranker, with all that it takes to score documents as they are read: the network and the scale of features.

Every finished run of the ranking recipe leaves one, `ranker.safetensors`.
"""

import io
import json
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from mutirao.core.arrays import Arrays
from mutirao.errors import ConfigError, Damaged
from mutirao.io import load_arrays, save_arrays, write_whole
from mutirao.systems.ranking.feature_scale import Scale, differing, read_scale
from mutirao.systems.ranking.letor import read_raw_letor, stat_file
from mutirao.systems.ranking.letor_parsing import UNJUDGED
from mutirao.systems.ranking.metrics import Metrics, judge, measures_of
from mutirao.systems.ranking.missing_values import fill_missing
from mutirao.systems.ranking.qrels import comments_in
from mutirao.systems.ranking.ranking_data import RankingData
from mutirao.systems.ranking.ranking_sources import widen
from mutirao.systems.ranking.scorers import CHUNK, expected_grade, network_of, score
from mutirao.training.optimizers import one_thread

FILE = "ranker.safetensors"
KIND = "mutirao ranker"
SHAPE = ("loss", "hidden", "layers", "norm")  # settings by which the network is made
MOST_LAYERS = 16
JUDGING = ("metrics", "gain", "empty")  # and by which the run judged it


@dataclass(frozen=True, eq=False)
class Ranker:
    """A model that scores documents by their features as they stand in a file; the higher, the better.

    ranker = mutirao.Ranker.load("runs/ranking")
    scores = ranker.score(x)            # x: documents x features, as read

    >>> import numpy as np
    >>> import mutirao
    >>> settings = {"rounds": 1, "clients": 2, "per_round": 2, "samples": 200}
    >>> _ = mutirao.execute("ranking", settings, "runs/ranking", pictures=False)
    >>> ranker = Ranker.load("runs/ranking")
    >>> ranker.features, ranker.score(np.zeros((3, ranker.features))).shape  # a number for each document
    (136, (3,))
    """

    scale: Scale
    arrays: Arrays
    settings: Mapping[str, Any] = field(default_factory=dict)  # those of SHAPE and JUDGING
    round: int = 0

    @classmethod
    def load(cls, path: Path | str, which: str = "best") -> "Ranker":
        """The ranker of a file, or of a run folder: that of its `best` round, or of the `last` one."""
        place = Path(path).expanduser()
        file = place / FILE if place.is_dir() else place
        if not file.is_file():
            what = "a finished run of the ranking recipe with one model leaves it" if place.is_dir() else "no such file"
            raise ConfigError(f"{file} is not there: {what}")
        arrays, facts = load_arrays(file)
        try:
            if facts["kind"] != KIND:
                raise ValueError("it is something else")
            settings = {key: facts["settings"][key] for key in (*SHAPE, *JUDGING)}
            scale, number = read_scale(json.dumps(facts["scale"]).encode()), int(facts["round"])
        except (KeyError, TypeError, ValueError) as error:
            raise Damaged(f"{file} holds no ranker: {error}") from error
        if which == "last" and place.is_dir():
            newest = max((place / "checkpoints").glob("round_*.safetensors"), default=None, key=round_of)
            if newest is None:
                raise ConfigError(f"{place} has no checkpoint of its last round")
            arrays, number = load_arrays(newest)[0], round_of(newest)
        made = cls(scale, arrays, settings, number)
        made.network, made.metrics  # noqa: B018  # what does not fit is said here
        return made

    def save(self, path: Path | str) -> None:
        """Write a file that `load` reads."""
        facts = {"kind": KIND, "round": self.round, "settings": dict(self.settings)}
        save_arrays(Path(path), self.arrays, facts | {"scale": json.loads(self.scale.content())})

    @property
    def features(self) -> int:
        """How many features a document must have."""
        return self.scale.features

    @property
    def metrics(self) -> Metrics:
        """What the run judged by."""
        text, gain, empty = (str(self.settings[key]) for key in JUDGING)
        return measures_of(text, gain, empty, self.scale.highest)

    @cached_property
    def network(self) -> nn.Module:
        """The network with its weights."""
        shape = {key: self.settings[key] for key in SHAPE}
        try:
            if not 0 <= int(shape["layers"]) <= MOST_LAYERS:
                raise ValueError(f"{shape['layers']} layers")
            with torch.device("meta"):  # it takes no memory until the weights of the file turn out to be its own
                made = network_of(self.scale.features, self.scale.highest + 1, **shape)()
            made.load_state_dict({k: torch.from_numpy(np.array(v)) for k, v in self.arrays.items()}, assign=True)
        except (RuntimeError, TypeError, ValueError, KeyError) as error:
            why = (str(error).splitlines() or [""])[0][:100]
            raise Damaged(f"the ranker's weights are not those of its network: {why}") from error
        return made.eval()

    def score(self, x: npt.ArrayLike) -> npt.NDArray[np.float64]:
        """A number for each document, a row of `x` each."""
        rows = np.asarray(x)
        if rows.ndim != 2:
            raise ConfigError(f"a row a document is needed, with {self.features} features; this has shape {rows.shape}")
        if rows.shape[1] != self.features:
            raise ConfigError(f"documents have {differing(rows.shape[1], self.features)}")
        if not len(rows):
            return np.zeros(0)
        return score(self.network, self.scale(rows))

    def write_onnx(self, path: Path | str) -> None:
        """Write the ranker in ONNX: `features` (float32, N x features, as read) to `scores`; the scale is inside."""
        try:
            import onnx
        except ImportError as error:
            raise ConfigError("ONNX needs a package: install mutirao[onnx]") from error
        out, example = io.BytesIO(), torch.zeros(1, self.features)
        with warnings.catch_warnings(), one_thread():
            warnings.simplefilter("ignore")  # the exporter that needs no further package is called old
            torch.onnx.export(
                WithScale(self.scale, self.network),
                (example,),
                out,  # type: ignore[arg-type]  # a stream is taken too, where the old exporter is asked for
                input_names=["features"],
                output_names=["scores"],
                dynamic_axes={"features": {0: "N"}, "scores": {0: "N"}},
                opset_version=17,
                dynamo=False,
            )
        made = onnx.load_model_from_string(out.getvalue())
        onnx.checker.check_model(made)
        write_whole(Path(path), made.SerializeToString())


class WithScale(nn.Module):
    """A network behind the scale of its features, worked out in float64 as in training."""

    def __init__(self, scale: Scale, network: nn.Module) -> None:
        super().__init__()
        self.log, self.network = scale.transform == "log", network
        self.mean, self.std = (nn.Parameter(torch.from_numpy(v.copy()), requires_grad=False) for v in scale.arrays)

    def forward(self, x: Tensor) -> Tensor:
        """Scores of documents as they are read."""
        values = x.double()
        if self.log:
            values = torch.sign(values) * torch.log1p(values.abs())
        return expected_grade(self.network(((values - self.mean) / self.std).float()))


def round_of(file: Path) -> int:
    """The round of a checkpoint, by its name."""
    number = file.stem.partition("_")[2]
    return int(number) if number.isdecimal() else -1


Scores = npt.NDArray[np.float64]


def read_documents(file: Path, features: int, sparse: bool = False) -> RankingData:
    """All documents of a file in its order, with equally many features as a ranker has; `sparse`: the rest are 0."""
    stat_file(file)
    data = read_raw_letor(file)
    fill_missing(data.x, data.queries)
    if data.features > features or (data.features < features and not sparse):
        hint = "; --sparse if it leaves out zeros" if data.features < features else ""
        raise ConfigError(f"{file} has {differing(data.features, features)}{hint}")
    return widen(data, features)


def score_documents(ranker: Ranker, data: RankingData, advance: Callable[[int], None] = lambda done: None) -> Scores:
    """The scores, a chunk of documents after the other."""
    found = []
    for start in range(0, len(data), CHUNK):
        found.append(ranker.score(data.x[start : start + CHUNK]))
        advance(len(found[-1]))
    return np.concatenate(found)


def judge_documents(ranker: Ranker, data: RankingData, scores: Scores) -> dict[str, float]:
    """What the run judged by, over the documents that have a grade; nothing if none is relevant."""
    judged = np.flatnonzero(data.grades != UNJUDGED)
    if not len(judged) or data.grades.max() <= 0:
        return {}
    return judge(scores[judged], data.take(judged), ranker.metrics)


def as_lines(scores: Scores) -> str:
    """A score a line, with all its digits."""
    return "".join(f"{score!r}\n" for score in scores.tolist())


def as_trec(file: Path, data: RankingData, scores: Scores, tag: str = "mutirao") -> str:
    """Lines `QUERY Q0 DOCUMENT RANK SCORE TAG`, queries in the file's order; documents without a name go by their line.

    Equal scores keep the file's order, and so they rank as we do; trec_eval itself sorts equal scores by name.
    """
    names, lines = document_names(file), []
    order = np.lexsort((np.arange(len(scores)), -scores, data.queries))
    place, before = 0, -1
    for i in order.tolist():
        query = int(data.queries[i])
        place, before = (place + 1 if query == before else 1), query
        lines.append(f"{data.query_ids[query]} Q0 {names[i]} {place} {float(scores[i])!r} {tag}\n")
    return "".join(lines)


def document_names(file: Path) -> list[str]:
    """What the comments call each document; its line's number where there is none."""
    named = comments_in(file)
    return [name.decode("utf-8", "replace") if name else f"line{number}" for number, name in named]
