"""A ranking file scored by a ranker: line by line as it stands, or as a run that TREC's tools read."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt

from mutirao.errors import ConfigError
from mutirao.systems.ranking import file_blocks
from mutirao.systems.ranking.feature_profile import differing
from mutirao.systems.ranking.letor_parsing import UNJUDGED
from mutirao.systems.ranking.missing_values import fill_missing
from mutirao.systems.ranking.qrels import comments_in
from mutirao.systems.ranking.ranker import Ranker
from mutirao.systems.ranking.ranking_data import RankingData
from mutirao.systems.ranking.ranking_evaluation import judge
from mutirao.systems.ranking.ranking_sources import widen
from mutirao.systems.ranking.scorers import CHUNK

Scores = npt.NDArray[np.float64]


def read_documents(file: Path, features: int, sparse: bool = False) -> RankingData:
    """All documents of a file in its order, with equally many features as a ranker has; `sparse`: the rest are 0."""
    file_blocks.stat_of(file)
    data = file_blocks.read_file(file)
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
