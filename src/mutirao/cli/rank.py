"""The command `mutirao rank`: a trained ranker scores the documents of a file."""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mutirao.cli.options import FILE, JSON, print_result
from mutirao.errors import ConfigError

if TYPE_CHECKING:
    from mutirao.systems.ranking.ranker import Ranker


@dataclass(frozen=True, kw_only=True)
class RankOptions:
    """The arguments of `mutirao rank`."""

    model: Path
    file: Path | None
    out: Path | None
    form: str
    which: str
    sparse: bool
    queries: Path | None
    onnx: Path | None
    save: Path | None


@click.command()
@click.argument("model", type=FILE, metavar="MODEL")
@click.argument("file", type=FILE, metavar="[FILE]", required=False)
@click.option("--out", type=FILE, help="File for the scores: one a line, in the order of FILE.")
@click.option(
    "--format",
    "form",
    type=click.Choice(["scores", "trec"]),
    default="scores",
    show_default=True,
    help="One score a line, or a TREC run: QUERY Q0 DOCUMENT RANK SCORE TAG.",
)
@click.option(
    "--which", type=click.Choice(["best", "last"]), default="best", show_default=True, help="Which round's model."
)
@click.option("--sparse", is_flag=True, help="Features missing at the end of a line are 0.")
@click.option("--queries", type=FILE, help="Write the metrics of each query to this CSV file.")
@click.option("--onnx", type=FILE, help="Write the ranker as ONNX, feature scaling included.")
@click.option("--save", type=FILE, help="Write the ranker to one file, usable without the run folder.")
@JSON
def rank(as_json: bool, **arguments: Any) -> None:
    """Score the documents of a LETOR file with a trained ranker.

    MODEL is a run folder or a file written by --save; FILE may be gzipped. If documents have grades, the ranking
    metrics are printed too.

    \b
    Examples:
      mutirao rank runs/ranking test.txt --out scores.txt
      mutirao rank runs/ranking test.txt.gz --format trec --out run.trec
      mutirao rank runs/ranking --onnx ranker.onnx --save ranker.safetensors
    """
    from mutirao.systems.ranking.ranker import Ranker

    options = RankOptions(**arguments)
    if options.file is None and (options.out or options.queries):
        raise ConfigError("name the FILE whose documents are to be scored")
    if options.file is None and not (options.onnx or options.save):
        raise ConfigError("there is nothing to do: name a FILE to score, --onnx or --save")
    ranker = Ranker.load(options.model, options.which)
    result: dict[str, object] = {"round": ranker.round, "features": ranker.features}
    lines: list[str] = []
    if options.save is not None:
        ranker.save(options.save)
        lines.append(f"written: {options.save}")
    if options.onnx is not None:
        ranker.write_onnx(options.onnx)
        lines.append(f"written: {options.onnx}")
    if options.file is not None:
        result |= score_file(ranker, options.file, options, as_json, lines)
    print_result(result, as_json, *lines)


def score_file(ranker: "Ranker", file: Path, options: RankOptions, as_json: bool, lines: list[str]) -> dict[str, Any]:
    """Score a file and write what the options name; appends the lines to print and returns the fields of the result."""
    from mutirao.io import write_whole
    from mutirao.systems.ranking.metrics import write_query_metrics
    from mutirao.systems.ranking.ranker import as_lines, as_trec, evaluate_documents, read_documents, score_documents

    data = read_documents(file, ranker.features, options.sparse)
    with click.progressbar(
        length=len(data), label="scoring", file=sys.stderr, hidden=not sys.stderr.isatty()
    ) as progress:
        scores = score_documents(ranker, data, progress.update)
    writes_file = options.out is not None or options.queries is not None
    # Without --out the scores are printed, unless JSON or only the metrics of queries are requested.
    if options.out is not None or not (as_json or writes_file):
        text = as_trec(file, data, scores) if options.form == "trec" else as_lines(scores)
        if options.out is not None:
            write_whole(options.out, text)
            lines.append(f"written: {options.out}, {len(data):,} documents of {len(data.query_ids):,} queries")
        else:
            lines.append(text.rstrip())
    if options.queries is not None:
        write_query_metrics(scores, data, ranker.metrics, options.queries)
        lines.append(f"written: {options.queries}")
    metrics = evaluate_documents(ranker, data, scores)
    if metrics and writes_file:
        lines.append(", ".join(f"{name} {value:.4f}" for name, value in metrics.items()))
    return {"documents": len(data), "queries": len(data.query_ids), "metrics": metrics}
