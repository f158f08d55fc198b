"""A small file of every form a line may have, and the readers to read it by."""

import pytest

from mutirao.systems.ranking.letor_parsing import parse_block, parse_lines
from mutirao.systems.ranking.ranking_data import RankingData

READERS = {"quick": parse_block, "by_line": parse_lines}

either = pytest.mark.parametrize("reader", READERS)

EXAMPLE = b"""2 qid:10 1:0.5 2:-3 3:1e2 # doc one
0 qid:10 1:.25 3:7.
# a comment alone

1\tqid:7  2:+4E-1 1:0#close

  3 qid:10 3:1   \r
"""


def put(folder, content, name="some.txt"):
    file = folder / name
    file.write_bytes(content)
    return file


def same(one: RankingData, two: RankingData) -> bool:
    """Bit by bit: signs of zeros count."""
    return all(
        a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
        for a, b in ((getattr(one, f), getattr(two, f)) for f in ("x", "grades", "queries", "query_ids"))
    )
