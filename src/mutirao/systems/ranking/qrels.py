"""Judgements apart from features: TREC's qrels, from files or from `ir_datasets`, joined by query and document.

A qrels file has lines `QUERY ITERATION DOCUMENT GRADE`. Features are lines of LETOR's form whose comment begins with
the document's name (`0 qid:301 1:0.5 2:3 # FT911-3`, or `#docid = GX029-35`), as RankLib, Terrier, Anserini and LETOR
write them. As in trec_eval, a document without a judgement counts as not relevant, and so does one judged below 0.
"""

import logging
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np

from mutirao.config import one_line
from mutirao.errors import ConfigError
from mutirao.systems.ranking.letor import read_raw_letor, read_text_blocks, stat_file
from mutirao.systems.ranking.letor_parsing import MOST_GRADE, quote
from mutirao.systems.ranking.missing_values import fill_missing
from mutirao.systems.ranking.ranking_data import RankingData

log = logging.getLogger("mutirao")

FORM = "QUERY ITERATION DOCUMENT GRADE"
PACKAGE = "irds:"  # before the name of a set of ir_datasets
DOCUMENT = re.compile(rb"\s*(?:docid\s*[=:]?\s*)?(\S+)", re.I)
GRADE = re.compile(rb"-?\d{1,4}")

Judgements = dict[tuple[str, str], int]  # grade by query and document


def read_judgements(sources: Iterable[str]) -> Judgements:
    """All judgements of qrels files, or of sets of ir_datasets (`irds:msmarco-passage/dev`)."""
    judged: Judgements = {}
    for source in sources:
        rows = rows_of_package(source) if source.startswith(PACKAGE) else rows_of_file(Path(source).expanduser())
        for query, document, grade, where in rows:
            if grade > MOST_GRADE:
                raise ConfigError(f"{where}: grade {grade} is above {MOST_GRADE}, the most that is taken")
            if judged.setdefault((query, document), grade) != grade:
                raise ConfigError(f"{where}: document {document!r} of query {query!r} has another grade already")
        if not judged:
            raise ConfigError(f"{source} holds no judgements; right would be lines '{FORM}'")
    return judged


def rows_of_file(file: Path) -> Iterator[tuple[str, str, int, str]]:
    """Query, document and grade of each line, and where it stands."""
    stat_file(file)
    number = 0
    for text in read_text_blocks(file):
        for line in text.removesuffix(b"\n").split(b"\n"):
            number += 1
            words, where = line.split(), f"{file}, line {number}"
            if not words:
                continue
            if len(words) != 4 or not GRADE.fullmatch(words[3]):
                raise ConfigError(f"{where}: {quote(line)} is no judgement; right would be '{FORM}'")
            yield _text(words[0], where), _text(words[2], where), int(words[3]), where


def rows_of_package(source: str) -> Iterator[tuple[str, str, int, str]]:
    """The same from ir_datasets, if it is installed (MacAvaney et al., 2021); it fetches what it does not have."""
    name = source.removeprefix(PACKAGE)
    try:
        import ir_datasets
    except ImportError as error:
        raise ConfigError(f"qrels={source} needs the package ir-datasets: pip install ir-datasets") from error
    try:
        for row in ir_datasets.load(name).qrels_iter():
            yield str(row.query_id), str(row.doc_id), int(row.relevance), source
    except Exception as error:  # a set that is not known, has no judgements or cannot be fetched
        raise ConfigError(f"qrels={source}: ir_datasets cannot give judgements: {one_line(error)}") from error


def read_judged(file: Path, judged: Judgements) -> RankingData:
    """Documents with features from a file and grades from judgements; grades in the file do not count."""
    data, documents = read_raw_letor(file), list(documents_in(file))
    names = [str(name) for name in data.query_ids.tolist()]
    pairs = [(names[query], document) for query, document in zip(data.queries.tolist(), documents, strict=True)]
    if len(set(pairs)) < len(pairs):
        query, document = next(pair for k, pair in enumerate(pairs) if pair in set(pairs[:k]))
        raise ConfigError(f"{file}: document {document!r} stands twice among those of query {query!r}")
    known = sum(pair in judged for pair in pairs)
    if not known:
        query, document = pairs[0]
        raise ConfigError(
            f"{file}: none of its documents is judged, not even {document!r} of query {query!r}; right would be "
            f"features and judgements with the same names"
        )
    if known < len(pairs):
        log.info("%s: %d of %d documents are not judged: not relevant", file, len(pairs) - known, len(pairs))
    fill_missing(data.x, data.queries)
    grades = np.array([max(0, judged.get(pair, 0)) for pair in pairs], np.int64)
    return RankingData(data.x, grades, data.queries, data.query_ids)


def documents_in(file: Path) -> Iterator[str]:
    """The names of documents that a file of features has in its comments."""
    for number, name in comments_in(file):
        if name is None:
            raise ConfigError(
                f"{file}, line {number}: no comment names the document; right would be 'GRADE qid:ID 1:VALUE "
                f"... # DOCUMENT' for features whose judgements are apart"
            )
        yield _text(name, f"{file}, line {number}")


def comments_in(file: Path) -> Iterator[tuple[int, bytes | None]]:
    """Of each document the line it stands on, and what the comment there calls it, if it does."""
    number = 0
    for text in read_text_blocks(file):
        for line in text.removesuffix(b"\n").split(b"\n"):
            number += 1
            body, _, comment = line.partition(b"#")
            if body.strip():
                named = DOCUMENT.match(comment)
                yield number, named[1] if named else None


def _text(word: bytes, where: str) -> str:
    try:
        return word.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{where}: {quote(word)} is not text in UTF-8") from error
