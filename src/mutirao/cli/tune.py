"""`mutirao tune`: tune the methods of a study."""

import sys
from pathlib import Path

import click

from mutirao.cli.options import (
    FILE,
    FOLDER,
    JSON,
    STOPPED,
    TRUST,
    WORKERS,
    Assignments,
    CodeConsent,
    allow_local_imports,
    fail,
    settings,
)


@click.command("tune")
@click.argument("file", type=FILE, metavar="STUDY.toml")
@click.option("--out", type=FOLDER, help="Folder [default: runs/tune-NAME].")
@click.option("--trials", type=click.IntRange(min=1), help="Number of trials of each method [default: as in the file].")
@settings("A setting for all runs, such as data=PATH.")
@WORKERS
@JSON
@TRUST
def tune_study(
    file: Path, out: Path | None, trials: int | None, sets: Assignments, workers: int, as_json: bool, trust: CodeConsent
) -> None:
    """Tune each method's settings with equal effort.

    The file's [tune] table says what is tried. Trials are compared on validation data; a study file is written that
    confirms the best settings on test data. Finished runs are kept: the same command continues.

    \b
    Examples:
      mutirao tune studies/quickstart.toml
      mutirao study runs/tune-quickstart/confirm-quickstart.toml
    """
    from mutirao.runs.trust import names_in_file
    from mutirao.studies.tuning import read_tuning, tune

    folder = out or Path("runs") / f"tune-{file.stem}"
    allow_local_imports(names_in_file(file), [value for _, value in sets])
    tuning = read_tuning(file, sets, trust, folder, trials)

    # This imports torch, so it comes after everything that a typing error may end.
    from mutirao.cli.terminal import show_trials
    from mutirao.studies.confirmation import write_tuning
    from mutirao.studies.study_display import CellBar
    from mutirao.studies.tuning import warnings, winners

    with CellBar(tuning.runs, quiet=as_json) as watch:
        try:
            trials_done = tune(tuning, folder, workers, watch)
        except KeyboardInterrupt:
            fail(STOPPED, 130)
    study = write_tuning(tuning, trials_done, folder)
    if as_json:
        click.echo((folder / "trials.json").read_text(encoding="utf-8"))
    else:
        show_trials(tuning, trials_done, study)
    for line in warnings(tuning, trials_done):
        click.secho(f"WARNING: {line}", err=True, bold=True)
    sys.exit(0 if len(winners(tuning, trials_done)) == len(tuning.study.methods) else 1)
