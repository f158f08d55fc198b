"""The command `mutirao combine`: what the models of several groups say together."""

import re
from dataclasses import asdict
from pathlib import Path

import click

from mutirao.cli.options import FILE, FOLDER, JSON, TRUST, Agreement, look_here, tell


@click.command()
@click.argument("folder", type=FILE, metavar="RUN")
@click.option("--client", required=True, help="Who asks.")
@click.option(
    "--weights",
    "by",
    type=click.Choice(["sample", "validation", "distance", "equal"]),
    default="sample",
    show_default=True,
    help="What a group counts by: the asker's own sample, common data, its signature, or nothing.",
)
@click.option("--few", type=click.IntRange(min=1), default=20, show_default=True, help="Samples of the asker's sample.")
@click.option("--out", type=FOLDER, help="Folder of weights.json and predictions.csv [default: RUN/combined/CLIENT].")
@JSON
@TRUST
def combine(folder: Path, client: str, by: str, few: int, out: Path | None, as_json: bool, trust: Agreement) -> None:
    """Ask the models of a run's groups together: their probabilities, weighted for one client, over all classes.

    \b
    Examples:
      mutirao combine runs/groups --client c03
      mutirao combine runs/groups --client c03 --weights equal --out runs/c03-equal
    """
    from mutirao.runs.group_ensemble import combine_run
    from mutirao.runs.trust import names_in_file

    look_here(names_in_file(folder / "config.toml"))
    found = combine_run(folder, client, by, few, trust)
    place = re.sub(r"[^\w@+-]+", "-", client)  # a client may be called by any text
    files = found.write(out or folder / "combined" / place)
    best = max((g for g in found.union if g != "combined"), key=lambda g: found.union[g])
    mine = f", {found.group}, its own group, alone {found.own[found.group]:.3f}" if found.group else ""
    tell(
        {k: v for k, v in asdict(found).items() if k != "guesses"},
        as_json,
        f"weights by {by}: " + ", ".join(f"{g} {w:.3f}" for g, w in found.weights.items()),
        f"{client}'s own test data: together {found.own['combined']:.3f}{mine}",
        f"test data of all clients: together {found.union['combined']:.3f}, {best}, the best alone, "
        f"{found.union[best]:.3f}",
        *(f"written: {file}" for file in files),
    )
