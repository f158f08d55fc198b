"""NULL, documents without a judgement and orders are settled as published, compared with plain loops."""

import doctest
import logging
import random

import numpy as np
import pytest
from letor_files import READERS, either, put

from mutirao.errors import ConfigError
from mutirao.systems.ranking import letor, letor_parsing
from mutirao.systems.ranking.letor import read_letor


@pytest.fixture
def _by(reader, monkeypatch):
    monkeypatch.setattr(letor, "parse_block", READERS[reader])


def test_the_example_in_the_docstring_holds():
    assert doctest.testmod(letor_parsing).failed == 0


def plainly(content):
    """Each NULL becomes the smallest number in its column among lines of the same query, or 0."""
    lines = [line.partition("#")[0].split() for line in content.decode().splitlines()]
    rows = [(int(w[0]), w[1], [p.split(":")[1] for p in w[2:]]) for w in lines]
    out = []
    for grade, query, values in rows:
        if grade == -1:
            continue
        filled = []
        for k, value in enumerate(values):
            there = [float(v[k]) for _, q, v in rows if q == query and v[k] != "NULL"]
            filled.append(float(value) if value != "NULL" else min(there, default=0.0))
        out.append((grade, filled))
    return out


@either
@pytest.mark.usefixtures("_by")
def test_null_is_the_smallest_of_its_query_and_unlabelled_documents_are_left_out(tmp_path, reader):
    draw = random.Random(1)
    content = "".join(
        f"{draw.choice([-1, 0, 1, 2])} qid:{1 + k // 7} "
        + " ".join(f"{i}:{'NULL' if draw.random() < 0.4 else draw.choice([-3, 0, 0.25, 1e-5, 8])}" for i in range(1, 6))
        + f" #docid = GX-{k}\n"
        for k in range(42)
    ).encode()
    data, expected = read_letor(put(tmp_path, content), cache=False), plainly(content)
    assert data.grades.tolist() == [grade for grade, _ in expected]
    assert np.array_equal(data.x, np.array([row for _, row in expected], np.float32))
    assert np.isfinite(data.x).all()


@either
@pytest.mark.usefixtures("_by")
def test_istellas_largest_number_is_no_value(tmp_path, reader):
    data = read_letor(put(tmp_path, b"1 qid:1 1:1.79769313486e+308 2:4\n0 qid:1 1:7 2:5\n"), cache=False)
    assert data.x.tolist() == [[7, 4], [7, 5]]


@either
@pytest.mark.usefixtures("_by")
def test_a_file_without_labels_is_refused(tmp_path, reader):
    with pytest.raises(ConfigError, match="none of its documents has a label"):
        read_letor(put(tmp_path, b"-1 qid:1 1:1\n-1 qid:2 1:NULL\n"), cache=False)


@either
@pytest.mark.usefixtures("_by")
def test_an_order_becomes_fifths_and_says_so(tmp_path, reader, caplog):
    draw = random.Random(2)
    sizes, lines, expected = [300, 203, 4], [], []
    for query, size in enumerate(sizes):
        places = list(range(1, size + 1))
        draw.shuffle(places)
        lines += [f"{place} qid:{query} 1:{place}\n" for place in places]
        expected += [sum(other < place for other in places) * 5 // size for place in places]
    with caplog.at_level(logging.WARNING, "mutirao"):
        data = read_letor(put(tmp_path, "".join(lines).encode()), cache=False)
    assert data.grades.tolist() == expected
    assert "has an order of each query's documents; it is divided into 5 grades" in caplog.text


def test_large_grades_that_are_no_order_are_refused(tmp_path):
    content = b"".join(b"%d qid:1 1:1\n" % grade for grade in [*range(300), 299])
    with pytest.raises(ConfigError, match=r"some\.txt: grade 299 cannot be used; expected .* 0 to 255, or an or"):
        read_letor(put(tmp_path, content), cache=False)
    graded = read_letor(
        put(tmp_path, b"".join(b"%d qid:%d 1:1\n" % (k, q) for q in range(50) for k in range(5))), False
    )
    assert sorted(set(graded.grades.tolist())) == [0, 1, 2, 3, 4]  # all different in a query, and yet grades
