"""What ranking data at a path are, for `mutirao data check`."""

from pathlib import Path

import numpy as np

from mutirao.errors import ConfigError
from mutirao.systems.ranking.letor_layouts import LAYOUT
from mutirao.systems.ranking.ranking_data import RankingData
from mutirao.systems.ranking.ranking_sources import every_file, judgements_for, read_one
from mutirao.systems.ranking.synthetic_queries import mslr_like


def check_ranking(path: Path | str | None) -> list[str]:
    """What a file, or each file of a folder, holds; everything is read, nothing is kept."""
    if path is None:
        raise ConfigError(f"ranking data need a path: a file, or {LAYOUT}")
    place = Path(path)
    judged = judgements_for(place)
    return [f"{file}: {_facts(read_one(file, judged, cache=False))}" for file in every_file(place)]


def check_mslr(path: Path | str | None) -> list[str]:
    """The same for MSLR-WEB10K/30K; without a path, what the stand-in looks like."""
    if path is not None:
        return check_ranking(path)
    made = mslr_like(50, np.random.default_rng(0))
    return [f"embedded stand-in, for example: {_facts(made)}"]


def _facts(data: RankingData) -> str:
    counts = np.bincount(data.grades)
    shares = ", ".join(f"{g}: {c / counts.sum():.1%}" for g, c in enumerate(counts) if c)
    return f"{len(data):,} documents of {len(data.query_ids):,} queries, {data.features:,} features, grades {shares}"
