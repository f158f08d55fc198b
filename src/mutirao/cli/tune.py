"""The command that tunes the methods of a study."""

import sys
from pathlib import Path

import click

from mutirao.cli.options import FILE, FOLDER, TRUST, Agreement, Assignments, look_here, settings


@click.command()
@click.argument("file", type=FILE, metavar="STUDY.toml")
@click.option("--out", type=FOLDER, help="Folder [default: runs/tune-NAME].")
@click.option("--trials", type=click.IntRange(min=1), help="Trials of each method, for a range [default: the file's].")
@settings("A setting for all runs, such as data=PATH.")
@click.option("--workers", type=click.IntRange(min=0), default=0, help="Processes [default: one a core].")
@click.option("--json", "as_json", is_flag=True, help="Print nothing but the trials, as JSON.")
@TRUST
def tune(
    file: Path, out: Path | None, trials: int | None, sets: Assignments, workers: int, as_json: bool, trust: Agreement
) -> None:
    """Find each method's settings with equal effort, on validation data, and write the study that confirms them.

    The file's [tune] table says what is tried. What is finished is kept: the same command goes on.

    \b
    Examples:
      mutirao tune studies/quickstart.toml
      mutirao study runs/tune-quickstart/confirm-quickstart.toml
    """
    from mutirao.runs.trust import names_in_file
    from mutirao.studies.tuning import read_tuning
    from mutirao.studies.tuning import tune as carry_out

    folder = out or Path("runs") / f"tune-{file.stem}"
    look_here(names_in_file(file), [value for _, value in sets])
    asked = read_tuning(file, sets, trust, folder, trials)

    from mutirao.cli.terminal import show_trials  # after all that a typing error may end
    from mutirao.studies.confirmation import write_tuning
    from mutirao.studies.study_display import CellBar
    from mutirao.studies.tuning import warnings, winners

    with CellBar(asked.runs, quiet=as_json) as watch:
        try:
            done = carry_out(asked, folder, workers, watch)
        except KeyboardInterrupt:
            click.echo("error: stopped; what was done is kept: run the same command again to go on", err=True)
            sys.exit(130)
    study = write_tuning(asked, done, folder)
    if as_json:
        click.echo((folder / "trials.json").read_text(encoding="utf-8"))
    else:
        show_trials(asked, done, study)
    for line in warnings(asked, done):
        click.secho(f"WARNING: {line}", err=True, bold=True)
    sys.exit(0 if len(winners(asked, done)) == len(asked.study.methods) else 1)
