"""`mutirao combine`: predict with the models of several groups."""

import re
from dataclasses import asdict
from pathlib import Path

import click

from mutirao.cli.options import FILE, FOLDER, JSON, TRUST, CodeConsent, allow_local_imports, print_result


@click.command("combine")
@click.argument("folder", type=FILE, metavar="RUN")
@click.option("--client", required=True, help="Client to predict for.")
@click.option(
    "--weights",
    "by",
    type=click.Choice(["sample", "validation", "distance", "equal"]),
    default="sample",
    show_default=True,
    help="Weight groups by the client's own samples, by common data, by signature, or equally.",
)
@click.option("--few", type=click.IntRange(min=1), default=20, show_default=True, help="Size of that sample.")
@click.option("--out", type=FOLDER, help="Folder of weights.json and predictions.csv [default: RUN/combined/CLIENT].")
@JSON
@TRUST
def predict_with_groups(
    folder: Path, client: str, by: str, few: int, out: Path | None, as_json: bool, trust: CodeConsent
) -> None:
    """Predict with the models of all groups, weighted for a client.

    The groups' class probabilities are averaged over all classes, with weights that suit this client.

    \b
    Examples:
      mutirao combine runs/groups --client c03
      mutirao combine runs/groups --client c03 --weights equal --out runs/c03-equal
    """
    from mutirao.runs.group_ensemble import combine_run
    from mutirao.runs.trust import names_in_file

    allow_local_imports(names_in_file(folder / "config.toml"))
    found = combine_run(folder, client, by, few, trust)
    # A client id may be any text, also one with slashes or dots that would lead out of the folder.
    folder_name = re.sub(r"[^\w@+-]+", "-", client)
    files = found.write(out or folder / "combined" / folder_name)
    best = max((group for group in found.union if group != "combined"), key=lambda group: found.union[group])
    own_group = f", {found.group}, its own group, alone {found.own[found.group]:.3f}" if found.group else ""
    content = asdict(found)
    del content["guesses"]
    print_result(
        content,
        as_json,
        f"weights by {by}: " + ", ".join(f"{g} {w:.3f}" for g, w in found.weights.items()),
        f"{client}'s own test data: together {found.own['combined']:.3f}{own_group}",
        f"test data of all clients: together {found.union['combined']:.3f}, {best}, the best alone, "
        f"{found.union[best]:.3f}",
        *(f"written: {file}" for file in files),
    )
