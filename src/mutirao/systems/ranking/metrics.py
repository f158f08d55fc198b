"""Which metrics judge a ranking, as a setting: `ndcg@5,ndcg@10,mrr@10,map,err@10,p@5`; the first names the best round.

A name and the rank at which it is cut, or none: then it looks at whole rankings. `gain` is nDCG's, and `empty` what a
query without relevant documents counts in all of them.
"""

import inspect
import math
import re
from functools import partial
from typing import Any

from mutirao.config import nearest
from mutirao.errors import ConfigError
from mutirao.metrics import err, mean_average_precision, mrr, ndcg, precision
from mutirao.systems.ranking.ranking_evaluation import Metrics

USUAL = "ndcg@5,ndcg@1,ndcg@10,mrr@5,mrr@1,mrr@10"
FUNCTIONS: dict[str, Any] = {"ndcg": ndcg, "mrr": mrr, "map": mean_average_precision, "err": err, "p": precision}
DIRECTIONS = dict.fromkeys(FUNCTIONS, "higher")
EMPTY = {"0": 0.0, "1": 1.0, "skip": math.nan}
WHOLE = 1 << 31  # no ranking is longer


def metric_names(text: str) -> tuple[str, ...]:
    """The metrics that a setting names; ConfigError for one that does not exist, or comes twice."""
    names = tuple(name.strip() for name in text.split(",") if name.strip())
    if not names:
        raise ConfigError(f"metrics: name at least one, such as {USUAL}")
    for name in names:
        stem, _, cut = name.partition("@")
        if stem not in FUNCTIONS:
            raise ConfigError(f"metrics: no metric is called {stem!r}{nearest(stem, FUNCTIONS)}")
        if ("@" in name and not re.fullmatch("[1-9][0-9]{0,8}", cut)) or (stem == "p" and not cut):
            raise ConfigError(f"metrics: {name!r} is not cut at a rank from 1 on, as {stem}@5 is")
    if twice := [name for name in names if names.count(name) > 1]:
        raise ConfigError(f"metrics: {twice[0]!r} is named twice")
    return names


def measures_of(text: str, gain: str = "exponential", empty: str = "0", highest: int = 4) -> Metrics:
    """The metrics of a setting as functions of scores, grades and queries; `highest` is the scale's highest grade.

    >>> measures_of("p@2,map")["p@2"]([0.1, 0.9, 0.5], [1, 0, 1], [7, 7, 7])
    0.5
    """
    about = {"gain": gain, "empty": EMPTY[empty], "highest": highest}
    made = {}
    for name in metric_names(text):
        stem, _, cut = name.partition("@")
        takes = inspect.signature(FUNCTIONS[stem]).parameters
        told = {key: value for key, value in about.items() if key in takes}
        made[name] = partial(FUNCTIONS[stem], k=int(cut or WHOLE), **told)
    return made
