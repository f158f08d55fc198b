"""The command `mutirao rank`: a trained ranker scores the documents of a file."""

import sys
from pathlib import Path

import click

from mutirao.cli.options import FILE, JSON, print_result
from mutirao.errors import ConfigError


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
def rank(
    model: Path,
    file: Path | None,
    out: Path | None,
    form: str,
    which: str,
    sparse: bool,
    queries: Path | None,
    onnx: Path | None,
    save: Path | None,
    as_json: bool,
) -> None:
    """Score the documents of a LETOR file with a trained ranker.

    MODEL is a run folder or a file written by --save; FILE may be gzipped. If documents have grades, the ranking
    metrics are printed too.

    \b
    Examples:
      mutirao rank runs/ranking test.txt --out scores.txt
      mutirao rank runs/ranking test.txt.gz --format trec --out run.trec
      mutirao rank runs/ranking --onnx ranker.onnx --save ranker.safetensors
    """
    from mutirao.io import write_whole
    from mutirao.systems.ranking.metrics import write_query_metrics
    from mutirao.systems.ranking.ranker import (
        Ranker,
        as_lines,
        as_trec,
        evaluate_documents,
        read_documents,
        score_documents,
    )

    if file is None and (out or queries):
        raise ConfigError("name the FILE whose documents are to be scored")
    if file is None and not (onnx or save):
        raise ConfigError("there is nothing to do: name a FILE to score, --onnx or --save")
    ranker = Ranker.load(model, which)
    told: dict[str, object] = {"round": ranker.round, "features": ranker.features}
    lines: list[str] = []
    if save is not None:
        ranker.save(save)
    if onnx is not None:
        ranker.write_onnx(onnx)
    lines += [f"written: {place}" for place in (save, onnx) if place is not None]
    if file is not None:
        data = read_documents(file, ranker.features, sparse)
        with click.progressbar(
            length=len(data), label="scoring", file=sys.stderr, hidden=not sys.stderr.isatty()
        ) as bar:
            scores = score_documents(ranker, data, bar.update)
        if out is not None:
            write_whole(out, as_trec(file, data, scores) if form == "trec" else as_lines(scores))
            lines.append(f"written: {out}, {len(data):,} documents of {len(data.query_ids):,} queries")
        elif not as_json and queries is None:
            lines.append((as_trec(file, data, scores) if form == "trec" else as_lines(scores)).rstrip())
        if queries is not None:
            write_query_metrics(scores, data, ranker.metrics, queries)
            lines.append(f"written: {queries}")
        metrics = evaluate_documents(ranker, data, scores)
        told |= {"documents": len(data), "queries": len(data.query_ids), "metrics": metrics}
        if metrics and (out is not None or queries is not None):
            lines.append(", ".join(f"{name} {value:.4f}" for name, value in metrics.items()))
    print_result(told, as_json, *lines)
