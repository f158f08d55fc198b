"""A trained ranker that scores documents as they are read: the network with the feature scale.

Every finished run of the ranking recipe writes one, `ranker.safetensors`. `mutirao rank` scores a file by it.
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
from mutirao.systems.ranking.feature_scale import FeatureScale, feature_mismatch, parse_scale
from mutirao.systems.ranking.letor import read_raw_letor, stat_file
from mutirao.systems.ranking.letor_parsing import UNLABELLED, fill_missing
from mutirao.systems.ranking.metrics import Metrics, build_metrics, evaluate_ranking
from mutirao.systems.ranking.qrels import comments_in
from mutirao.systems.ranking.ranking_data import RankingData
from mutirao.systems.ranking.ranking_sources import pad_documents
from mutirao.systems.ranking.scorers import CHUNK, expected_grade, network_factory, score
from mutirao.training.optimizers import one_thread

FILE = "ranker.safetensors"
KIND = "mutirao ranker"
NETWORK_SETTINGS = ("loss", "hidden", "layers", "norm")
MOST_LAYERS = 16
Scores = npt.NDArray[np.float64]
METRIC_SETTINGS = ("metrics", "gain", "empty")


@dataclass(frozen=True, eq=False)
class Ranker:
    """A model that scores documents by their features as they stand in a file; higher is better.

    ranker = mutirao.Ranker.load("runs/ranking")
    scores = ranker.score(x)            # x: documents x features, as read

    >>> import numpy as np
    >>> import mutirao
    >>> settings = {"rounds": 1, "clients": 2, "per_round": 2, "samples": 200}
    >>> _ = mutirao.execute("ranking", settings, "runs/ranking", pictures=False)
    >>> ranker = Ranker.load("runs/ranking")
    >>> ranker.features, ranker.score(np.zeros((3, ranker.features))).shape  # a score for each document
    (136, (3,))
    """

    scale: FeatureScale
    arrays: Arrays
    settings: Mapping[str, Any] = field(default_factory=dict)  # NETWORK_SETTINGS and METRIC_SETTINGS
    round: int = 0

    @classmethod
    def load(cls, path: Path | str, which: str = "best") -> "Ranker":
        """Load a ranker from a file, or from a run folder: of its `best` round, or of the `last` one."""
        place = Path(path).expanduser()
        file = place
        hint = ""
        if place.is_dir():
            file = place / FILE
            hint = "; a finished run of the ranking recipe with one model writes it"
        if not file.is_file():
            raise ConfigError(f"{file} does not exist{hint}")
        arrays, facts = load_arrays(file)
        try:
            if facts["kind"] != KIND:
                raise ValueError("it is something else")
            settings = {key: facts["settings"][key] for key in (*NETWORK_SETTINGS, *METRIC_SETTINGS)}
            scale = parse_scale(json.dumps(facts["scale"]).encode())
            number = int(facts["round"])
        except (KeyError, TypeError, ValueError) as error:
            raise Damaged(f"{file} contains no ranker: {error}") from error
        if which == "last" and place.is_dir():
            newest = max((place / "checkpoints").glob("round_*.safetensors"), default=None, key=round_of)
            if newest is None:
                raise ConfigError(f"{place} has no checkpoint of its last round")
            arrays, _ = load_arrays(newest)
            number = round_of(newest)
        made = cls(scale, arrays, settings, number)
        # A file that does not fit is refused here and not at the first document.
        made.network, made.metrics  # noqa: B018
        return made

    def save(self, path: Path | str) -> None:
        """Write a file that `load` reads."""
        facts = {"kind": KIND, "round": self.round, "settings": dict(self.settings)}
        save_arrays(Path(path), self.arrays, facts | {"scale": json.loads(self.scale.content())})

    @property
    def features(self) -> int:
        """Number of features that a document must have."""
        return self.scale.features

    @property
    def metrics(self) -> Metrics:
        """The metrics of the run."""
        text, gain, empty = (str(self.settings[key]) for key in METRIC_SETTINGS)
        return build_metrics(text, gain, empty, self.scale.highest)

    @cached_property
    def network(self) -> nn.Module:
        """The network with its weights."""
        shape = {key: self.settings[key] for key in NETWORK_SETTINGS}
        try:
            if not 0 <= int(shape["layers"]) <= MOST_LAYERS:
                raise ValueError(f"{shape['layers']} layers")
            # The file may state any width: no memory is taken before the weights are known to fit.
            with torch.device("meta"):
                made = network_factory(self.scale.features, self.scale.highest + 1, **shape)()
            made.load_state_dict({k: torch.from_numpy(np.array(v)) for k, v in self.arrays.items()}, assign=True)
        except (RuntimeError, TypeError, ValueError, KeyError) as error:
            why = str(error).partition("\n")[0][:100]
            raise Damaged(f"the ranker's weights do not fit its network: {why}") from error
        return made.eval()

    def score(self, x: npt.ArrayLike) -> npt.NDArray[np.float64]:
        """A score for each document, a row of `x`."""
        rows = np.asarray(x)
        if rows.ndim != 2:
            raise ConfigError(f"expected an array of documents x {self.features} features, got shape {rows.shape}")
        if rows.shape[1] != self.features:
            raise ConfigError(f"documents have {feature_mismatch(rows.shape[1], self.features)}")
        if not len(rows):
            return np.zeros(0)
        return score(self.network, self.scale(rows))

    def write_onnx(self, path: Path | str) -> None:
        """Write the ranker in ONNX: `features` (float32, N x features, as read) to `scores`; the scale is inside."""
        try:
            import onnx
        except ImportError as error:
            raise ConfigError("ONNX needs a package: install mutirao[onnx]") from error
        out = io.BytesIO()
        example = torch.zeros(1, self.features)
        with warnings.catch_warnings(), one_thread():
            warnings.simplefilter("ignore")  # the exporter that needs no further package is deprecated
            torch.onnx.export(
                ScaledNetwork(self.scale, self.network),
                (example,),
                out,  # type: ignore[arg-type]  # the old exporter takes a stream, too
                input_names=["features"],
                output_names=["scores"],
                dynamic_axes={"features": {0: "N"}, "scores": {0: "N"}},
                opset_version=17,
                dynamo=False,
            )
        made = onnx.load_model_from_string(out.getvalue())
        onnx.checker.check_model(made)
        write_whole(Path(path), made.SerializeToString())


class ScaledNetwork(nn.Module):
    """A network that takes features as they are read, scaled in float64 as in training."""

    def __init__(self, scale: FeatureScale, network: nn.Module) -> None:
        super().__init__()
        self.log = scale.transform == "log"
        self.network = network
        self.mean, self.std = (nn.Parameter(torch.from_numpy(v.copy()), requires_grad=False) for v in scale.arrays)

    def forward(self, x: Tensor) -> Tensor:
        """Scores of documents as they are read."""
        values = x.double()
        if self.log:
            values = torch.sign(values) * torch.log1p(values.abs())
        return expected_grade(self.network(((values - self.mean) / self.std).float()))


def round_of(file: Path) -> int:
    """The round of a checkpoint, from its name."""
    number = file.stem.partition("_")[2]
    if number.isdecimal():
        return int(number)
    return -1


def read_documents(file: Path, features: int, sparse: bool = False) -> RankingData:
    """All documents of a file in its order, with `features` features; `sparse` fills missing ones at the end with 0."""
    stat_file(file)
    data = read_raw_letor(file)
    fill_missing(data.x, data.queries)
    if data.features > features or (data.features < features and not sparse):
        hint = ""
        if data.features < features:
            hint = "; use --sparse if it leaves out zeros"
        raise ConfigError(f"{file} has {feature_mismatch(data.features, features)}{hint}")
    return pad_documents(data, features)


def score_documents(ranker: Ranker, data: RankingData, advance: Callable[[int], None] = lambda done: None) -> Scores:
    """Score documents chunk by chunk; `advance` is called with the size of each."""
    found: list[Scores] = []
    for start in range(0, len(data), CHUNK):
        found.append(ranker.score(data.x[start : start + CHUNK]))
        advance(len(found[-1]))
    return np.concatenate(found)


def evaluate_documents(ranker: Ranker, data: RankingData, scores: Scores) -> dict[str, float]:
    """The metrics of the run over the documents with a grade; empty if none is relevant."""
    labelled = np.flatnonzero(data.grades != UNLABELLED)
    if not len(labelled) or data.grades.max() <= 0:
        return {}
    return evaluate_ranking(scores[labelled], data.take(labelled), ranker.metrics)


def as_lines(scores: Scores) -> str:
    """One score a line, with all its digits."""
    return "".join(f"{score!r}\n" for score in scores.tolist())


def as_trec(file: Path, data: RankingData, scores: Scores, tag: str = "mutirao") -> str:
    """Lines `QUERY Q0 DOCUMENT RANK SCORE TAG`, queries in the file's order; unnamed documents by line.

    Equal scores keep the file's order, as in our metrics; trec_eval itself sorts equal scores by name.
    """
    names = document_names(file)
    lines: list[str] = []
    order = np.lexsort((np.arange(len(scores)), -scores, data.queries))
    rank = 0
    previous = -1
    for i in order.tolist():
        query = int(data.queries[i])
        if query != previous:
            rank = 0
            previous = query
        rank += 1
        lines.append(f"{data.query_ids[query]} Q0 {names[i]} {rank} {float(scores[i])!r} {tag}\n")
    return "".join(lines)


def document_names(file: Path) -> list[str]:
    """Each document's name from its comment, or else its line number."""
    named = comments_in(file)
    return [name.decode("utf-8", "replace") if name else f"line{number}" for number, name in named]
