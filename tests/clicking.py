"""Online learning to rank by slow loops: chances of clicks and of rankings, pairs one by one; and a small log of it."""

import math
from collections.abc import Sequence
from itertools import product
from pathlib import Path

import numpy as np

Scores = Sequence[float]
HEADER = "qid,user_id,timestamp,query,target_doc_id,candidate_doc_ids\n"


def chance_of(pattern: tuple[int, ...], click: list[float], stop: list[float]) -> float:
    """Of a pattern of clicks, place by place: written from the model's description, not from our code."""
    if not pattern:
        return 1.0
    if not pattern[0]:
        return (1 - click[0]) * chance_of(pattern[1:], click[1:], stop[1:])
    goes_on = (1 - stop[0]) * chance_of(pattern[1:], click[1:], stop[1:])
    ends = stop[0] * float(not any(pattern[1:]))
    return click[0] * (goes_on + ends)


def chance_of_ranking(ranking: Sequence[int], scores: Scores) -> float:
    """P(R | f) of the documents shown, as a product of shares of what is left."""
    left, chance = list(range(len(scores))), 1.0
    for document in ranking:
        top = max(scores[d] for d in left)
        chance *= math.exp(scores[document] - top) / sum(math.exp(scores[d] - top) for d in left)
        left.remove(document)
    return chance


def slow_weights(ranking: Sequence[int], scores: Scores, clicks: Sequence[int]) -> dict[int, float]:
    """By document, the sum over pairs: whole rankings are written down with two documents exchanged."""
    weights = dict.fromkeys(ranking, 0.0)
    last = max((place for place, clicked in enumerate(clicks) if clicked), default=-9)
    for a, b in product(range(len(ranking)), repeat=2):
        if clicks[a] and not clicks[b] and b <= last + 1:
            turned = list(ranking)
            turned[a], turned[b] = ranking[b], ranking[a]
            here, there = chance_of_ranking(ranking, scores), chance_of_ranking(turned, scores)
            first, second = math.exp(scores[ranking[a]]), math.exp(scores[ranking[b]])
            weight = there / (here + there) * first * second / (first + second) ** 2
            weights[ranking[a]] += weight
            weights[ranking[b]] -= weight
    return weights


def write_log(folder: Path, queries: int = 40, users: int = 4, documents: int = 6, features: int = 5) -> Path:
    """As the authors' scripts write one: lines by time, candidates as Python prints a set, one of them clicked."""
    draw = np.random.default_rng(0)
    liked = draw.normal(size=features)
    folder.mkdir(exist_ok=True)
    rows, letor = [HEADER], []
    for number in range(queries):
        qid = 1000 + 7 * number
        names = ", ".join(f"'{number}_{i}'" for i in range(documents))
        when = f"2006-03-{1 + number // 24:02d} {number % 24:02d}:00:00"
        x = draw.normal(size=(documents, features))
        target = int((x @ liked).argmax())
        rows.append(f'{qid},{300 + number % users},{when},"a ""query"", or so",{number}_{target},"{{{names}}}"\n')
        for i in range(documents):
            values = " ".join(f"{k + 1}:{v}" for k, v in enumerate(x[i]))
            letor.append(f"{int(i == target)} qid:{qid} {values}\n")
    (folder / "metadata.csv").write_text("".join(rows))
    (folder / "letor.txt").write_text("".join(letor))
    return folder
