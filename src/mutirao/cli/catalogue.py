"""`mutirao catalogue`: match catalogues, train and transfer item vectors, and recommend."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import click

from mutirao.cli.options import FILE, JSON, CommandGroup, print_result
from mutirao.errors import ConfigError

By = Literal["popularity", "random"]
COLUMNS = "Columns of your own file: item,user,rating (no header) or user=NAME,item=NAME."


@click.group(cls=CommandGroup)
def catalogue() -> None:
    """Match catalogues, transfer item vectors, and recommend.

    Example: mutirao catalogue match ml-1m netflix
    """


@catalogue.command("match")
@click.argument("a", type=FILE, metavar="A")
@click.argument("b", type=FILE, metavar="B")
@click.option("--threshold", default=75.0, show_default=True, help="Lowest similarity of a fuzzy match, in per cent.")
@click.option("--review", type=FILE, help="A table of matches with your verdicts: yes and no are final.")
@click.option("--out", type=FILE, default=Path("matches.csv"), show_default=True, help="The table to write.")
@JSON
def match_command(a: Path, b: Path, threshold: float, review: Path | None, out: Path, as_json: bool) -> None:
    """Find the items that two catalogues have in common.

    Items match by title and year, by title alone, or by similar titles. A and B are folders or files as MovieLens and
    Netflix publish them, CSV files with id, title and year, or files of item vectors. Check the doubtful pairs at the
    top of the table, write yes or no into the column verdict, and pass the table back with --review.

    \b
    Examples:
      mutirao catalogue match ml-1m netflix --out matches.csv
      mutirao catalogue match ml-1m netflix --review matches.csv --out matches.csv
    """
    from mutirao.systems.recsys.matching import match, read_verdicts, write_matches
    from mutirao.systems.recsys.readers import read_catalogue

    if out.exists() and (review is None or out.resolve() != review.resolve()):
        raise ConfigError(f"{out} already exists and may hold verdicts; pass it to --review too, or name another --out")
    verdicts = read_verdicts(review.expanduser()) if review else None
    matches = match(read_catalogue(a.expanduser()), read_catalogue(b.expanduser()), threshold, verdicts)
    write_matches(matches, out)
    report = matches.report()
    print_result(report | {"table": str(out)}, as_json, *describe_matches(report, out))


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
            more = f"{twice:,} titles are more than once in the {which} catalogue"
            yield f"{more}; the more often rated item goes first"
    yield f"written: {out}; pairs to check come first"


@catalogue.command("transfer")
@click.argument("target", type=FILE)
@click.argument("source", type=FILE, metavar="SOURCE.safetensors")
@click.option("--matches", "table", type=FILE, help="Pairs written by `match TARGET SOURCE` [default: match them now].")
@click.option("--share", default=1.0, show_default=True, help="Share of the pairs to transfer.")
@click.option(
    "--by",
    type=click.Choice(["popularity", "random"]),
    default="popularity",
    show_default=True,
    help="Which pairs, if --share is below 1.",
)
@click.option("--seed", default=0, show_default=True, help="Random seed: items without a pair, random shares.")
@click.option("--out", type=FILE, default=Path("items.safetensors"), show_default=True)
@JSON
def transfer_command(
    target: Path, source: Path, table: Path | None, share: float, by: By, seed: int, out: Path, as_json: bool
) -> None:
    """Initialise the item vectors of one catalogue from another's.

    Matched items of TARGET start from the vector of their pair, all others from N(0, 0.1).

    \b
    Examples:
      mutirao catalogue transfer ml-1m netflix.safetensors --matches matches.csv --out first.safetensors
      mutirao catalogue transfer ml-1m netflix.safetensors --share 0.5 --by random
    """
    from mutirao.randomness import rng
    from mutirao.systems.recsys.embeddings import Embeddings, load_embeddings, save_embeddings, transfer
    from mutirao.systems.recsys.matching import match, pairs_between
    from mutirao.systems.recsys.readers import read_catalogue

    ours = read_catalogue(target.expanduser())
    trained = load_embeddings(source.expanduser())
    if table:
        pairs = pairs_between(table.expanduser(), ours, trained.catalogue)
    else:
        pairs = match(ours, trained.catalogue).pairs
    dimension = trained.vectors.shape[1]
    vectors = transfer(ours, trained, pairs, dimension=dimension, rng=rng(seed, 0, "transfer"), share=share, by=by)
    count = round(share * len(pairs))
    facts = {"pairs": len(pairs), "carried_over": count, "items": len(ours), "share": share, "by": by, "seed": seed}
    save_embeddings(Embeddings(ours, vectors, {"how": "transfer", **facts, "source": trained.card}), out)
    text = f"{count:,} of {len(ours):,} items start from a vector of {source}; written: {out}"
    print_result(facts | {"dimension": dimension, "file": str(out)}, as_json, text)


@catalogue.command("pretrain")
@click.argument("data", type=FILE)
@click.option("--columns", default="", help=COLUMNS)
@click.option("--begin", type=click.Choice(["random", "pca", "word2vec"]), default="random", show_default=True)
@click.option("--dimension", default=50, show_default=True, help="Length of the vectors, biases included.")
@click.option(
    "--epochs", default=25, show_default=True, help="Epochs of matrix factorisation; 0 keeps the initial vectors."
)
@click.option("--lr", default=0.02, show_default=True, help="Learning rate of the factorisation.")
@click.option("--decay", default=0.1, show_default=True, help="Weight of the L2 penalty.")
@click.option("--window", default=5, show_default=True, help="word2vec: context size, in items on either side.")
@click.option("--whiten", is_flag=True, help="pca: give every component the same variance.")
@click.option("--spread", default=0.1, show_default=True, help="Standard deviation of the initial vectors.")
@click.option(
    "--folds",
    default=0,
    show_default=True,
    help="Choose the epochs by cross-validation; number of folds.",
)
@click.option("--biases/--no-biases", default=True, show_default=True, help="Learn a bias for each item and user.")
@click.option("--seed", default=0, show_default=True, help="Random seed.")
@click.option("--out", type=FILE, default=Path("items.safetensors"), show_default=True)
@JSON
def pretrain_command(
    data: Path, columns: str, folds: int, seed: int, out: Path, as_json: bool, **factorisation: Any
) -> None:
    """Train item vectors on pooled ratings.

    The result can initialise another catalogue: see `transfer`.

    Example: mutirao catalogue pretrain netflix --begin word2vec --out netflix.safetensors
    """
    from mutirao.systems.recsys.pretrain import Factorisation, pretrain
    from mutirao.systems.recsys.readers import read_ratings

    embeddings = pretrain(read_ratings(data.expanduser(), columns), Factorisation(**factorisation), seed, folds)
    write_embeddings(embeddings, out, as_json)


def write_embeddings(embeddings: Any, out: Path, as_json: bool) -> None:
    """Write item vectors and print their number, or their card as JSON."""
    from mutirao.systems.recsys.embeddings import save_embeddings

    save_embeddings(embeddings, out)
    text = f"{len(embeddings.catalogue):,} vectors of length {embeddings.vectors.shape[1]}; written: {out}"
    print_result(embeddings.card | {"file": str(out)}, as_json, text)


@catalogue.command("export")
@click.argument("run", type=FILE)
@click.option(
    "--model", type=click.Choice(["best", "last"]), default="best", show_default=True, help="Which round's model."
)
@click.option("--out", type=FILE, default=Path("items.safetensors"), show_default=True)
@JSON
def export_command(run: Path, model: str, out: Path, as_json: bool) -> None:
    """Write the item vectors of a recsys run.

    Example: mutirao catalogue export runs/recsys --out items.safetensors
    """
    from mutirao.systems.recsys.trained import embeddings_of_run

    write_embeddings(embeddings_of_run(run.expanduser(), model), out, as_json)


@catalogue.command("recommend")
@click.argument("items", type=FILE, metavar="ITEMS.safetensors")
@click.argument("ratings", nargs=-1, metavar="ID=RATING...")
@click.option("-k", "count", type=click.IntRange(min=1), default=10, show_default=True, help="Number of items.")
@JSON
def recommend_command(items: Path, ratings: tuple[str, ...], count: int, as_json: bool) -> None:
    """Recommend items to a user with these ratings.

    The user's vector is computed from the ratings and not stored.

    Example: mutirao catalogue recommend items.safetensors 1193=5 661=2 -k 5
    """
    from mutirao.systems.recsys.recommender import Recommender

    given: dict[str, float] = {}
    for text in ratings:
        name, equals, value = text.rpartition("=")
        if name in given:
            raise ConfigError(f"item {name!r} is rated twice; expected one rating")
        try:
            # Without "=" all of the text is in `value`: an id alone must not be read as a rating.
            given[name] = float(value if equals else "")
        except ValueError:
            raise ConfigError(f"{text!r} is not of the form ID=RATING, such as 1193=5") from None
    found = Recommender.of(items.expanduser()).recommend(given, count)
    print_result([r._asdict() for r in found], as_json, *(f"{r.score:8.3f}  {r.id:<10} {r.title}" for r in found))


@catalogue.command("cold")
@click.argument("items", type=FILE, metavar="ITEMS.safetensors")
@click.argument("catalogue_of", type=FILE, metavar="CATALOGUE")
@click.option("--out", type=FILE, required=True, help="The file to write.")
@JSON
def cold_command(items: Path, catalogue_of: Path, out: Path, as_json: bool) -> None:
    """Add vectors for items without ratings.

    They are predicted from genres, decades and titles.

    Example: mutirao catalogue cold items.safetensors ml-1m --out all-items.safetensors
    """
    from mutirao.systems.recsys.cold_items import add_cold
    from mutirao.systems.recsys.embeddings import load_embeddings
    from mutirao.systems.recsys.readers import read_catalogue

    embeddings = add_cold(load_embeddings(items.expanduser()), read_catalogue(catalogue_of.expanduser()))
    write_embeddings(embeddings, out, as_json)


@catalogue.command("judge-cold")
@click.argument("data", type=FILE)
@click.option("--columns", default="", help=COLUMNS)
@click.option("--hide", default=0.1, show_default=True, help="Share of the items whose ratings are hidden.")
@click.option("--dimension", default=50, show_default=True, help="Length of the vectors, biases included.")
@click.option("--seeds", type=click.IntRange(min=1), default=1, show_default=True, help="Number of seeds.")
@JSON
def evaluate_cold_command(data: Path, columns: str, hide: float, dimension: int, seeds: int, as_json: bool) -> None:
    """Evaluate vectors predicted for items without ratings.

    The ratings of some items are hidden, their vectors predicted, and evaluated on users that were not trained on.

    Example: mutirao catalogue judge-cold ml-1m --hide 0.1 --seeds 5
    """
    from statistics import mean

    from mutirao.systems.recsys.cold_items import evaluate_cold
    from mutirao.systems.recsys.pretrain import Factorisation
    from mutirao.systems.recsys.readers import read_ratings

    ratings = read_ratings(data.expanduser(), columns).with_at_least(2)
    found = [evaluate_cold(ratings, Factorisation(dimension), hide, seed) for seed in range(seeds)]
    lines = []
    for name in found[0]:
        average = mean(errors[name] for errors in found)
        lines.append(f"{name:<26} {average:.4f}")
    print_result(found, as_json, "vectors of hidden items from  RMSE", *lines)
