"""`mutirao catalogue`: match catalogues, train item vectors, carry them over and recommend by them."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import click

from mutirao.cli.options import FILE, JSON, tell
from mutirao.errors import ConfigError

By = Literal["popularity", "random"]
COLUMNS = "Columns of your own file: item,user,rating (no header) or user=NAME,item=NAME."


@click.group()
def catalogue() -> None:
    """Bridge two catalogues by their titles, and carry item vectors from one to the other.

    Example: mutirao catalogue match ml-1m netflix
    """


@catalogue.command("match")
@click.argument("a", type=FILE, metavar="A")
@click.argument("b", type=FILE, metavar="B")
@click.option("--threshold", default=75.0, show_default=True, help="Least likeness of a fuzzy match, in per cent.")
@click.option("--review", type=FILE, help="A table of matches with verdicts: yes and no of a person are final.")
@click.option("--out", type=FILE, default=Path("matches.csv"), show_default=True, help="The table to write.")
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON.")
def match_command(a: Path, b: Path, threshold: float, review: Path | None, out: Path, as_json: bool) -> None:
    """Find the items of catalogue B that are items of catalogue A: by title and year, by title, by likeness.

    A and B are folders or files as MovieLens and Netflix publish them, CSV files with id, title and year, or files of
    item vectors. Look at the doubtful pairs at the top of the table, write yes or no into the column verdict, and
    give the table back with --review.

    \b
    Examples:
      mutirao catalogue match ml-1m netflix --out matches.csv
      mutirao catalogue match ml-1m netflix --review matches.csv --out matches.csv
    """
    from mutirao.systems.recsys.match_review import read_verdicts, write_matches
    from mutirao.systems.recsys.matching import match
    from mutirao.systems.recsys.readers import read_catalogue

    if out.exists() and (review is None or out.resolve() != review.resolve()):
        raise ConfigError(
            f"{out} is there already and may hold verdicts; give it with --review too, or name another --out"
        )
    judged = read_verdicts(review.expanduser()) if review else None
    matches = match(read_catalogue(a.expanduser()), read_catalogue(b.expanduser()), threshold, judged)
    write_matches(matches, out)
    report = matches.report()
    tell(report | {"table": str(out)}, as_json, *describe_matches(report, out))


def describe_matches(report: dict[str, Any], out: Path) -> Iterator[str]:
    """The report in plain lines."""
    yield f"{report['matched']:,} of {report['items']:,} items matched ({report['share']:.1%})"
    if "rated" in report:
        rated = f"{report['rated_matched']:,} of {report['rated']:,} rated items ({report['rated_share']:.1%})"
        yield f"{rated}, with {report['ratings_share']:.1%} of the ratings"
    for step, count in report["steps"].items():
        yield f"  {step:<10} {count:>7,}"
    yield f"{report['doubtful']:,} pairs are doubtful, {report['near']:,} more are near but do not count"
    for which, twice in zip(("first", "second"), report["titles_twice"], strict=True):
        if twice:
            more = f"{twice:,} titles stand more than once in the {which} catalogue"
            yield f"{more}; the more often rated item goes first"
    yield f"written: {out}; those to look at stand first"


@catalogue.command("transfer")
@click.argument("target", type=FILE)
@click.argument("source", type=FILE, metavar="SOURCE.safetensors")
@click.option("--matches", "table", type=FILE, help="Pairs as `match TARGET SOURCE` wrote them [default: match anew].")
@click.option("--share", default=1.0, show_default=True, help="The share of the pairs to carry over.")
@click.option("--by", type=click.Choice(["popularity", "random"]), default="popularity", show_default=True)
@click.option("--seed", default=0, show_default=True, help="Of the items without a pair, and of random shares.")
@click.option("--out", type=FILE, default=Path("items.safetensors"), show_default=True)
@JSON
def transfer_command(
    target: Path, source: Path, table: Path | None, share: float, by: By, seed: int, out: Path, as_json: bool
) -> None:
    """Build the first item vectors of catalogue TARGET from those of another catalogue.

    Matched items take the vector of their pair, all others N(0, 0.1).

    \b
    Examples:
      mutirao catalogue transfer ml-1m netflix.safetensors --matches matches.csv --out first.safetensors
      mutirao catalogue transfer ml-1m netflix.safetensors --share 0.5 --by random
    """
    from mutirao.randomness import rng
    from mutirao.systems.recsys.embeddings import Embeddings, load_embeddings, save_embeddings, transfer
    from mutirao.systems.recsys.match_review import pairs_between
    from mutirao.systems.recsys.matching import match
    from mutirao.systems.recsys.readers import read_catalogue

    mine, theirs = read_catalogue(target.expanduser()), load_embeddings(source.expanduser())
    joined = pairs_between(table.expanduser(), mine, theirs.catalogue) if table else match(mine, theirs.catalogue).pairs
    dimension = theirs.vectors.shape[1]
    vectors = transfer(mine, theirs, joined, dimension=dimension, rng=rng(seed, 0, "transfer"), share=share, by=by)
    carried = round(share * len(joined))
    facts = {"pairs": len(joined), "carried_over": carried, "items": len(mine), "share": share, "by": by, "seed": seed}
    save_embeddings(Embeddings(mine, vectors, {"how": "transfer", **facts, "source": theirs.card}), out)
    said = f"{carried:,} of {len(mine):,} items begin at a vector of {source}; written: {out}"
    tell(facts | {"dimension": dimension, "file": str(out)}, as_json, said)


@catalogue.command("pretrain")
@click.argument("data", type=FILE)
@click.option("--columns", default="", help=COLUMNS)
@click.option("--begin", type=click.Choice(["random", "pca", "word2vec"]), default="random", show_default=True)
@click.option("--dimension", default=50, show_default=True, help="Length of the vectors, biases included.")
@click.option(
    "--epochs", default=25, show_default=True, help="Of matrix factorisation; 0 leaves vectors as they begin."
)
@click.option("--lr", default=0.02, show_default=True, help="Learning rate of the factorisation.")
@click.option("--decay", default=0.1, show_default=True, help="Weight of the squared vectors.")
@click.option("--window", default=5, show_default=True, help="word2vec: how many items on either side belong together.")
@click.option("--whiten", is_flag=True, help="pca: give every component the same variance.")
@click.option("--spread", default=0.1, show_default=True, help="Standard deviation of the first vectors.")
@click.option("--folds", default=0, show_default=True, help="Find the epochs by cross-validation with so many folds.")
@click.option("--biases/--no-biases", default=True, show_default=True)
@click.option("--seed", default=0, show_default=True)
@click.option("--out", type=FILE, default=Path("items.safetensors"), show_default=True)
@click.option("--json", "as_json", is_flag=True, help="Print the card as JSON.")
def pretrain_command(
    data: Path, columns: str, folds: int, seed: int, out: Path, as_json: bool, **factorisation: Any
) -> None:
    """Train item vectors on pooled ratings, to be carried over to another catalogue.

    Example: mutirao catalogue pretrain netflix --begin word2vec --out netflix.safetensors
    """
    from mutirao.systems.recsys.pretrain import Factorisation, pretrain
    from mutirao.systems.recsys.readers import read_ratings

    made = pretrain(read_ratings(data.expanduser(), columns), Factorisation(**factorisation), seed, folds)
    keep(made, out, as_json)


def keep(made: Any, out: Path, as_json: bool) -> None:
    """Write item vectors and say so."""
    from mutirao.systems.recsys.embeddings import save_embeddings

    save_embeddings(made, out)
    said = f"{len(made.catalogue):,} vectors of length {made.vectors.shape[1]}; written: {out}"
    tell(made.card | {"file": str(out)}, as_json, said)


@catalogue.command("export")
@click.argument("run", type=FILE)
@click.option("--model", type=click.Choice(["best", "last"]), default="best", show_default=True, help="Of which round.")
@click.option("--out", type=FILE, default=Path("items.safetensors"), show_default=True)
@click.option("--json", "as_json", is_flag=True, help="Print the card as JSON.")
def export_command(run: Path, model: str, out: Path, as_json: bool) -> None:
    """Write the item vectors of a run of recsys, to be served or carried over.

    Example: mutirao catalogue export runs/recsys --out items.safetensors
    """
    from mutirao.systems.recsys.trained import embeddings_of_run

    keep(embeddings_of_run(run.expanduser(), model), out, as_json)


@catalogue.command("recommend")
@click.argument("items", type=FILE, metavar="ITEMS.safetensors")
@click.argument("ratings", nargs=-1, metavar="ID=RATING...")
@click.option("-k", "count", type=click.IntRange(min=1), default=10, show_default=True, help="How many items.")
@JSON
def recommend_command(items: Path, ratings: tuple[str, ...], count: int, as_json: bool) -> None:
    """Recommend items to somebody with these ratings; the vector is rebuilt here and forgotten.

    Example: mutirao catalogue recommend items.safetensors 1193=5 661=2 -k 5
    """
    from mutirao.systems.recsys.recommender import Recommender

    given: dict[str, float] = {}
    for text in ratings:
        name, equals, value = text.rpartition("=")
        if name in given:
            raise ConfigError(f"item {name!r} is rated twice; right would be once")
        try:
            given[name] = float(value if equals else "")
        except ValueError:
            raise ConfigError(f"{text!r} is not of the form ID=RATING, such as 1193=5") from None
    found = Recommender.of(items.expanduser()).recommend(given, count)
    tell([r._asdict() for r in found], as_json, *(f"{r.score:8.3f}  {r.id:<10} {r.title}" for r in found))


@catalogue.command("cold")
@click.argument("items", type=FILE, metavar="ITEMS.safetensors")
@click.argument("catalogue_of", type=FILE, metavar="CATALOGUE")
@click.option("--out", type=FILE, required=True, help="The file to write.")
@click.option("--json", "as_json", is_flag=True, help="Print the card as JSON.")
def cold_command(items: Path, catalogue_of: Path, out: Path, as_json: bool) -> None:
    """Add the items of a catalogue that nobody rated, with vectors predicted from genres, decades and titles.

    Example: mutirao catalogue cold items.safetensors ml-1m --out all-items.safetensors
    """
    from mutirao.systems.recsys.cold_items import add_cold
    from mutirao.systems.recsys.embeddings import load_embeddings
    from mutirao.systems.recsys.readers import read_catalogue

    keep(add_cold(load_embeddings(items.expanduser()), read_catalogue(catalogue_of.expanduser())), out, as_json)


@catalogue.command("judge-cold")
@click.argument("data", type=FILE)
@click.option("--columns", default="", help=COLUMNS)
@click.option("--hide", default=0.1, show_default=True, help="The share of the items whose ratings are hidden.")
@click.option("--dimension", default=50, show_default=True, help="Length of the vectors, biases included.")
@click.option("--seeds", type=click.IntRange(min=1), default=1, show_default=True, help="Draws of users and items.")
@JSON
def judge_cold_command(data: Path, columns: str, hide: float, dimension: int, seeds: int, as_json: bool) -> None:
    """Hide all ratings of some items, predict their vectors, and evaluate them on users that nobody has seen.

    Example: mutirao catalogue judge-cold ml-1m --hide 0.1 --seeds 5
    """
    from statistics import mean

    from mutirao.systems.recsys.cold_items import evaluate_cold
    from mutirao.systems.recsys.pretrain import Factorisation
    from mutirao.systems.recsys.readers import read_ratings

    ratings = read_ratings(data.expanduser(), columns).with_at_least(2)
    found = [evaluate_cold(ratings, Factorisation(dimension), hide, seed) for seed in range(seeds)]
    lines = (f"{name:<26} {mean(f[name] for f in found):.4f}" for name in found[0])
    tell(found, as_json, "vectors of hidden items from  RMSE", *lines)
