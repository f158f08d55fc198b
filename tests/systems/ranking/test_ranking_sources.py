"""Files with group sizes, one file cut into folds, judgements apart: each against plain loops."""

import itertools
import random
import sys
import types
from collections import namedtuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mutirao.datasets import check_data_set
from mutirao.errors import ConfigError
from mutirao.systems.ranking.letor import read_letor
from mutirao.systems.ranking.ranking_sources import read_splits

Qrel = namedtuple("Qrel", "query_id doc_id relevance iteration")


def write_grouped(folder, name, sizes, seed=0, ending=".query", first=0):
    """A file as LightGBM's example is; what it says, by query: grades and features by index."""
    draw, said, lines = random.Random(seed), [], []
    for size in sizes:
        query = []
        for _ in range(size):
            grade = draw.randrange(5)
            values = {i: round(draw.random(), 2) for i in sorted(draw.sample(range(first, 12), 4))}
            lines.append(f"{grade} " + " ".join(f"{i}:{v}" for i, v in values.items()) + "\n")
            query.append((grade, values))
        said.append(query)
    (folder / name).write_text("".join(lines))
    (folder / (name + ending)).write_text("".join(f"{size}\n" for size in sizes))
    return said


def unroll(data):
    """The same by query, of what was read."""
    out = [[] for _ in data.query_ids]
    for row, grade, query in zip(data.x, data.grades.tolist(), data.queries.tolist(), strict=True):
        out[query].append((grade, {i: round(float(v), 2) for i, v in enumerate(row) if v}))
    return out


def nonzero(said):
    return [[(grade, {i: v for i, v in values.items() if v}) for grade, values in query] for query in said]


@pytest.mark.parametrize("ending", [".query", ".group"])
@pytest.mark.parametrize("first", [0, 1])
def test_lightgbms_layout_is_read_as_lightgbm_reads_it(tmp_path, ending, first):
    train = write_grouped(tmp_path, "rank.train", [3, 1, 5, 2, 4, 6], 1, ending, first)
    test = write_grouped(tmp_path, "rank.test", [2, 7], 2, ending, first)
    for place in (tmp_path, tmp_path / "rank"):
        a, b, c = read_splits(place)
        assert unroll(b) == nonzero(train[4:5])  # every fifth query is held out
        assert unroll(a) == nonzero(train[:4] + train[5:])
        assert unroll(c) == nonzero(test)
        assert a.features == b.features == c.features == 12


def test_one_file_with_group_sizes_is_cut_into_folds(tmp_path):
    said = write_grouped(tmp_path, "rank.train", [3, 1, 5, 2, 4])
    assert [unroll(part) for part in read_splits(tmp_path / "rank.train", 2)] == [
        nonzero(said[1:4]),
        nonzero(said[4:]),
        nonzero(said[:1]),
    ]


@pytest.mark.parametrize(
    ("name", "content", "what"),
    [
        ("rank.train.query", "3\n1\n", r"counts 4 documents, but .*rank\.train has 15"),
        ("rank.train.query", "3\nx\n", r"rank\.train\.query, line 2: 'x' is not a number of documents"),
        ("rank.train.query", "3\n0\n12\n", "line 2: '0' is not a number of documents"),
        ("rank.train.query", "", r"rank\.train\.query is empty"),
        ("rank.train", "1 2:x\n" * 15, r"rank\.train cannot be read \(.*\); expected 'GRADE INDEX:VALUE"),
        ("rank.train", "1 2:1 1:1\n" * 15, "indices from 0 ascending"),
        ("rank.train", "1 2:nan\n" * 15, "not finite float32 numbers"),
        ("rank.train", "0.5 2:1\n" * 15, "grades that are not whole numbers from 0 to 255"),
        ("rank.train", "inf 2:1\n" * 15, "grades that are not whole numbers from 0 to 255"),
        ("rank.train", "nan 2:1\n" * 15, "grades that are not whole numbers from 0 to 255"),
        ("rank.train", "-1 2:1\n" * 15, "grades that are not whole numbers from 0 to 255"),
        ("rank.train", "1 99999:1\n" * 15, "feature 99,999 is above 10,000"),
    ],
)
def test_wrong_groups_are_named(tmp_path, name, content, what):
    write_grouped(tmp_path, "rank.train", [3, 1, 5, 2, 4])
    write_grouped(tmp_path, "rank.test", [2, 7])
    (tmp_path / name).write_text(content)
    with pytest.raises(ConfigError, match=what) as caught:
        read_splits(tmp_path)
    assert "\n" not in str(caught.value)
    with pytest.raises(ConfigError, match=r"counts documents; expected the file they are in, .*rank\.train$"):
        read_splits(tmp_path / "rank.train.query")


def test_queries_in_the_lines_come_before_a_file_of_sizes(tmp_path):
    (tmp_path / "a.txt").write_text("".join(f"1 qid:{q} 1:1\n" for q in range(5) for _ in range(2)))
    (tmp_path / "a.txt.query").write_text("10\n")
    assert [len(part.query_ids) for part in read_splits(tmp_path / "a.txt", cache=False)] == [3, 1, 1]


def test_the_queries_of_one_file_are_cut_into_five_folds(tmp_path):
    (tmp_path / "one.txt").write_text("".join(f"{k} qid:q{q} 1:{k}\n" for q in range(11) for k in range(1 + q % 3)))
    seen = []
    for fold in range(1, 6):
        parts = [set(part.query_ids.tolist()) for part in read_splits(tmp_path / "one.txt", fold, cache=False)]
        assert sum(map(len, parts)) == len(set.union(*parts)) == 11
        seen += parts[2]
    assert sorted(seen) == sorted(f"q{q}" for q in range(11))  # each query is in one test part
    first = [part.query_ids.tolist() for part in read_splits(tmp_path / "one.txt", cache=False)]
    assert first == [part.query_ids.tolist() for part in read_splits(tmp_path / "one.txt", 1, cache=False)]


FEATURES = """9 qid:301 1:0.5 2:NULL # FT-1 some words
0 qid:301 1:0.25 2:4 #docid = FT-2 inc = 1
0 qid:301 2:3 #FT-3
1 qid:302 1:7 2:1 # docid: FT-1
0 qid:7 1:1 2:2 # é9
0 qid:8 1:1 2:2 # a
0 qid:9 1:1 2:2 # b
"""
QRELS = "301 0 FT-1 2\n301 0 FT-2 -2\n\n302 Q0 FT-1 1\n7 0 é9 3\n8\t0\ta\t1\n9 0 b 0\n9 0 never-seen 4\n"


def check_joined(parts):
    rows = {
        (str(p.query_ids[q]), tuple(x.tolist())): int(g)
        for p in parts
        for x, g, q in zip(p.x, p.grades, p.queries, strict=True)
    }
    assert rows == {
        ("301", (0.5, 3.0)): 2,  # NULL is the smallest of the query
        ("301", (0.25, 4.0)): 0,  # grade below 0
        ("301", (0.0, 3.0)): 0,  # no judgement
        ("302", (7.0, 1.0)): 1,
        ("7", (1.0, 2.0)): 3,
        ("8", (1.0, 2.0)): 1,
        ("9", (1.0, 2.0)): 0,
    }


def test_judgements_apart_are_joined_by_query_and_document(tmp_path):
    (tmp_path / "features.txt").write_text(FEATURES)
    (tmp_path / "judged.txt").write_text(QRELS)
    check_joined(read_splits(tmp_path / "features.txt", qrels=str(tmp_path / "judged.txt"), cache=False))
    (tmp_path / "judged.txt").rename(tmp_path / "qrels.robust04.txt")
    check_joined(read_splits(tmp_path, cache=False))
    assert check_data_set("trec", tmp_path)[0].endswith("7 documents of 5 queries, 2 features, grades " + SHARES)
    (tmp_path / "other.txt").write_text(FEATURES)
    with pytest.raises(ConfigError, match=r"features in features\.txt, other\.txt; expected one file"):
        read_splits(tmp_path)


SHARES = "0: 42.9%, 1: 28.6%, 2: 14.3%, 3: 14.3%"


def test_judgements_go_with_parts_too(tmp_path):
    lines = FEATURES.splitlines(keepends=True)
    for name, part in {"train": lines[:3], "vali": lines[3:5], "test": lines[5:]}.items():
        (tmp_path / f"{name}.txt").write_text("".join(part))
    rows = QRELS.splitlines(keepends=True)
    (tmp_path / "qrels.train.txt").write_text("".join(rows[:3]))
    (tmp_path / "test.qrels").write_text("".join(rows[3:]))
    check_joined(read_splits(tmp_path, cache=False))


@pytest.mark.parametrize(
    ("features", "qrels", "what"),
    [
        (
            FEATURES,
            "301 0 FT-1\n",
            r"qrels\.txt, line 1: '301 0 FT-1' is no judgement; expected 'QUERY ITERATION",
        ),
        (FEATURES, "301 0 FT-1 x\n", "line 1: .* is no judgement"),
        (FEATURES, "\n", "contains no judgements"),
        (FEATURES, "1 0 FT-1 1\n", "none of its documents has a judgement, not even 'FT-1' of query '301'"),
        (FEATURES, "301 0 FT-1 1\n301 0 FT-1 2\n", "line 2: document 'FT-1' of query '301' has another grade"),
        (FEATURES, "301 0 FT-1 256\n", "line 1: grade 256 is above 255"),
        ("0 qid:301 1:1\n", QRELS, "line 1: no comment names the document"),
        ("0 qid:301 1:1 # FT-1\n" * 2, QRELS, "document 'FT-1' stands twice among those of query '301'"),
    ],
)
def test_wrong_judgements_are_named(tmp_path, features, qrels, what):
    (tmp_path / "features.txt").write_text(features)
    (tmp_path / "qrels.txt").write_text(qrels)
    with pytest.raises(ConfigError, match=what) as caught:
        read_splits(tmp_path)
    assert "\n" not in str(caught.value)


@given(st.binary(max_size=60), st.sampled_from(["rank.train", "rank.train.query", "qrels.txt"]))
@settings(max_examples=60, deadline=None)
def test_a_file_of_anything_beside_others_gives_data_or_one_clear_line(tmp_path_factory, content, name):
    folder = tmp_path_factory.mktemp("any")
    write_grouped(folder, "rank.train", [3, 1, 5, 2, 4])
    write_grouped(folder, "rank.test", [2, 7])
    (folder / name).write_bytes(content)
    try:
        parts, said = read_splits(folder, cache=False), ""
    except ConfigError as error:
        parts, said = (), str(error)
    assert "\n" not in said
    assert all(np.isfinite(part.x).all() and part.grades.min() >= 0 for part in parts)


def test_judgements_of_ir_datasets(tmp_path, monkeypatch):
    """The package is not installed for tests; what stands here has its interface and no more."""

    class Docs:
        def qrels_iter(self):
            for line in filter(str.strip, QRELS.splitlines()):
                query, iteration, document, grade = line.split()
                yield Qrel(query, document, int(grade), iteration)

    registry = {"robust04/fold1": Docs(), "docs-only": object()}
    module = types.ModuleType("ir_datasets")
    module.load = lambda name: registry[name]
    (tmp_path / "features.txt").write_text(FEATURES)
    monkeypatch.setitem(sys.modules, "ir_datasets", None)
    with pytest.raises(ConfigError, match="needs the package ir-datasets: pip install ir-datasets"):
        read_splits(tmp_path / "features.txt", qrels="irds:robust04/fold1")
    monkeypatch.setitem(sys.modules, "ir_datasets", module)
    check_joined(read_splits(tmp_path / "features.txt", qrels="irds:robust04/fold1"))
    for name in ("docs-only", "unknown"):
        with pytest.raises(ConfigError, match=f"qrels=irds:{name}: ir_datasets cannot provide judgements"):
            read_splits(tmp_path / "features.txt", qrels=f"irds:{name}")


def test_check_says_what_is_there_and_keeps_nothing(tmp_path):
    for n in (1, 2):
        for k, part in enumerate(("train", "vali", "test")):
            (tmp_path / f"Fold{n}").mkdir(exist_ok=True)
            (tmp_path / f"Fold{n}" / f"{part}.txt").write_text(f"{k} qid:{n} 1:1 4:2\n" * 4)
    found = check_data_set("letor", tmp_path)
    assert len(found) == 6
    assert found[2].endswith("Fold1/test.txt: 4 documents of 1 queries, 4 features, grades 2: 100.0%")
    assert check_data_set("mslr", tmp_path / "Fold1" / "test.txt") == [found[2]]
    assert "136 features" in check_data_set("mslr")[0]
    assert not list(tmp_path.rglob("*.mutirao"))
    with pytest.raises(ConfigError, match="need a path"):
        check_data_set("mq2008")


def test_one_file_of_a_real_set_gives_the_folds_its_queries_make(real_data):
    file = real_data / "MQ2008" / "S1.txt"
    whole = read_letor(file, cache=False)
    train, vali, test = read_splits(file, 3, cache=False)
    ids = whole.query_ids.tolist()
    cuts = [-(-k * len(ids) // 5) for k in range(6)]  # query i is in part floor(5 i / n)
    parts = [ids[a:b] for a, b in itertools.pairwise(cuts)]
    assert train.query_ids.tolist() == sorted(parts[2] + parts[3] + parts[4], key=ids.index)
    assert (vali.query_ids.tolist(), test.query_ids.tolist()) == (parts[0], parts[1])
    assert np.array_equal(np.sort(np.concatenate([p.x[:, 0] for p in (train, vali, test)])), np.sort(whole.x[:, 0]))
