"""TREC's qrels (relevance judgements), from files or from `ir_datasets`, joined to features by query and document.

A qrels file has lines `QUERY ITERATION DOCUMENT GRADE`. Features are lines of LETOR's form with a comment that begins
with the document's name (`0 qid:301 1:0.5 2:3 # FT911-3`, `#docid = GX029-35`), as RankLib, Terrier, Anserini and LETOR
write them. As in trec_eval, a document counts as not relevant if it has no judgement, or a grade below 0.
"""

import logging
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np

from mutirao.config import one_line
from mutirao.errors import ConfigError
from mutirao.systems.ranking.letor import read_raw_letor, read_text_blocks, stat_file
from mutirao.systems.ranking.letor_parsing import MOST_GRADE, fill_missing, quote_word
from mutirao.systems.ranking.ranking_data import RankingData

log = logging.getLogger("mutirao")

FORM = "QUERY ITERATION DOCUMENT GRADE"
PACKAGE = "irds:"  # before the name of a set of ir_datasets
DOCUMENT = re.compile(rb"\s*(?:docid\s*[=:]?\s*)?(\S+)", re.I)
GRADE = re.compile(rb"-?\d{1,4}")

Qrels = dict[tuple[str, str], int]  # grade by query and document


def read_qrels(sources: Iterable[str]) -> Qrels:
    """Grades from qrels files, or from sets of ir_datasets (`irds:msmarco-passage/dev`)."""
    qrels: Qrels = {}
    for source in sources:
        rows = qrels_in_file(Path(source).expanduser())
        if source.startswith(PACKAGE):
            rows = qrels_in_package(source)
        for query, document, grade, where in rows:
            if grade > MOST_GRADE:
                raise ConfigError(f"{where}: grade {grade} is above {MOST_GRADE}, the highest that is supported")
            if qrels.setdefault((query, document), grade) != grade:
                raise ConfigError(f"{where}: document {document!r} of query {query!r} has another grade already")
        if not qrels:
            raise ConfigError(f"{source} contains no judgements; expected lines '{FORM}'")
    return qrels


def qrels_in_file(file: Path) -> Iterator[tuple[str, str, int, str]]:
    """Query, document and grade of each line, and its position for messages."""
    stat_file(file)
    number = 0
    for text in read_text_blocks(file):
        for line in text.removesuffix(b"\n").split(b"\n"):
            number += 1
            words = line.split()
            where = f"{file}, line {number}"
            if not words:
                continue
            if len(words) != 4 or not GRADE.fullmatch(words[3]):
                raise ConfigError(f"{where}: {quote_word(line)} is no judgement; expected '{FORM}'")
            yield _text(words[0], where), _text(words[2], where), int(words[3]), where


def qrels_in_package(source: str) -> Iterator[tuple[str, str, int, str]]:
    """The same from ir_datasets, if it is installed (MacAvaney et al., 2021); it fetches what it does not have."""
    name = source.removeprefix(PACKAGE)
    try:
        import ir_datasets
    except ImportError as error:
        raise ConfigError(f"qrels={source} needs the package ir-datasets: pip install ir-datasets") from error
    try:
        for row in ir_datasets.load(name).qrels_iter():
            yield str(row.query_id), str(row.doc_id), int(row.relevance), source
    except Exception as error:  # an unknown set, one without judgements, or one that cannot be fetched
        raise ConfigError(f"qrels={source}: ir_datasets cannot provide judgements: {one_line(error)}") from error


def read_with_qrels(file: Path, qrels: Qrels) -> RankingData:
    """Documents with features from a file and grades from qrels; grades in the file are ignored."""
    data = read_raw_letor(file)
    documents = documents_in(file)
    # Query ids are numbers in the features where they can be, and always text in qrels.
    names = [str(name) for name in data.query_ids.tolist()]
    pairs = [(names[query], document) for query, document in zip(data.queries.tolist(), documents, strict=True)]
    query, document = pairs[0]
    if len(set(pairs)) < len(pairs):
        query, document = Counter(pairs).most_common(1)[0][0]
        raise ConfigError(f"{file}: document {document!r} stands twice among those of query {query!r}")
    known = sum(pair in qrels for pair in pairs)
    if not known:
        raise ConfigError(
            f"{file}: none of its documents has a judgement, not even {document!r} of query {query!r}; expected "
            f"features and judgements with the same names"
        )
    if known < len(pairs):
        missing = len(pairs) - known
        log.info("%s: %d of %d documents have no judgement and count as not relevant", file, missing, len(pairs))
    fill_missing(data.x, data.queries)
    grades = np.array([max(0, qrels.get(pair, 0)) for pair in pairs], np.int64)
    return RankingData(data.x, grades, data.queries, data.query_ids)


def documents_in(file: Path) -> Iterator[str]:
    """The names of the documents, from the comments of a file of features."""
    for number, name in comments_in(file):
        if name is None:
            raise ConfigError(
                f"{file}, line {number}: no comment names the document; expected 'GRADE qid:ID 1:VALUE "
                f"... # DOCUMENT', which the judgements refer to"
            )
        yield _text(name, f"{file}, line {number}")


def comments_in(file: Path) -> Iterator[tuple[int, bytes | None]]:
    """The line number of each document, and its name from the comment, or None."""
    number = 0
    for text in read_text_blocks(file):
        for line in text.removesuffix(b"\n").split(b"\n"):
            number += 1
            features, _, comment = line.partition(b"#")
            if features.strip():
                name = None
                if named := DOCUMENT.match(comment):
                    name = named[1]
                yield number, name


def _text(word: bytes, where: str) -> str:
    try:
        return word.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{where}: {quote_word(word)} is not text in UTF-8") from error
