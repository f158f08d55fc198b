"""The commands of `mutirao`: a thin shell over the library.

Each command imports what it needs itself, so that `--help` is quick.
"""

import errno
import io
import json
import logging
import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import click

from mutirao.cli.catalogue import catalogue
from mutirao.cli.combine import predict_with_groups
from mutirao.cli.data import data
from mutirao.cli.drill import drill
from mutirao.cli.labels import slides
from mutirao.cli.new import new
from mutirao.cli.options import (
    FILE,
    FOLDER,
    JSON,
    STOPPED,
    TRUST,
    WORKERS,
    Assignments,
    CodeConsent,
    CommandGroup,
    allow_local_imports,
    announce_page,
    fail,
    print_result,
    settings,
)
from mutirao.cli.partition import partition
from mutirao.cli.rank import rank
from mutirao.cli.record import record
from mutirao.cli.reproduce import reproduce
from mutirao.cli.site import site
from mutirao.cli.tune import tune_study
from mutirao.errors import ConfigError, MutiraoError

DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS)


class Commands(CommandGroup):
    """All commands. A problem that the user can solve ends in one clear line and an exit code, not in a traceback."""

    headings: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "Train and compare": ("run", "list", "new", "study", "tune", "reproduce", "forget"),
        "Look at results and use models": ("report", "dash", "plot", "export", "verify", "replay", "combine", "rank"),
        "Deploy": ("site", "drill", "record"),
        "Data": ("data", "partition", "catalogue", "slides"),
    }

    def main(self, *args: Any, **extra: Any) -> Any:
        """Start; letters that a terminal or file cannot show, as on Windows, become question marks."""
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, io.TextIOWrapper):
                stream.reconfigure(errors="replace" if stream is sys.stdout else "backslashreplace")
        return super().main(*args, **extra)

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command."""
        try:
            return super().invoke(ctx)
        except MutiraoError as error:
            fail(str(error), error.code)
        except OSError as error:
            # The output is not read any more, as after `head`: click ends quietly.
            if error.errno == errno.EPIPE:
                raise
            fail(disk_problem(error), 1)
        except (MemoryError, RuntimeError) as error:
            problem = memory_problem(error)
            if not problem:
                raise
            fail(problem, 1)
        except KeyboardInterrupt:
            command = self.get_command(ctx, ctx.invoked_subcommand or "")
            can_resume = any(option.name == "resume" for option in getattr(command, "params", ()))
            fail("stopped; finished rounds are kept, continue with --resume" if can_resume else "stopped", 130)


def disk_problem(error: OSError) -> str:
    """An error of a file or disk on one line, with what to do if the disk is full."""
    text = str(error.strerror or error)
    if error.filename:
        text = f"{error.filename}: {text}"
    if error.errno in DISK_FULL:
        text += "; finished work is kept: make room and run the same command again, with --resume for a run"
    return text


def memory_problem(error: Exception) -> str:
    """An out-of-memory error on one line; empty if the error is another one.

    >>> memory_problem(RuntimeError("can't allocate memory: you tried to allocate 512000000000 bytes."))
    'not enough memory for 512 GB at once; use a smaller model, batch_size or samples'
    """
    text = str(error)
    # torch raises a RuntimeError with a text that depends on the allocator.
    is_memory = re.search("can't allocate memory|not enough memory|out of memory", text)
    if not isinstance(error, MemoryError) and not is_memory:
        return ""
    size = re.search(r"allocate (\d+) bytes", text)
    amount = f" for {int(size[1]) / 1e9:,.0f} GB at once" if size else ""
    return f"not enough memory{amount}; use a smaller model, batch_size or samples"


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(package_name="mutirao")
@click.option("-v", "--verbose", is_flag=True, help="Print more about what happens.")
def main(verbose: bool) -> None:
    """Federated learning: train one model from data that cannot be moved and differ from client to client.

    Example: mutirao run quickstart --set rounds=10
    """
    logging.basicConfig(level=logging.INFO if verbose else logging.WARNING, format="%(message)s", stream=sys.stderr)
    # Processes started from here must not import code from the working folder, which may come from elsewhere.
    os.environ["PYTHONSAFEPATH"] = "1"


@main.command("list")
@click.argument("recipe", required=False)
@JSON
def list_command(recipe: str | None, as_json: bool) -> None:
    """List recipes, presets and methods, or one recipe's settings.

    Example: mutirao list quickstart
    """
    from mutirao.cli.listing import everything, in_columns, list_settings, terminal_width

    allow_local_imports(recipe)
    tables = {f"settings of {recipe}": list_settings(recipe)} if recipe else everything()
    if as_json:
        click.echo(json.dumps(tables, indent=2))
        return
    for title, rows in tables.items():
        click.secho(f"\n{title}", bold=True)
        for line in in_columns(rows, terminal_width()):
            click.echo(line)
    if recipe is None:
        click.echo("\nmutirao list NAME shows the settings of a recipe or preset; mutirao run NAME runs it.")


@main.command("run")
@click.argument("recipe", metavar="RECIPE|PRESET|CONFIG.toml")
@settings("Change a setting; may be given many times.")
@click.option("--out", type=FOLDER, help="Run folder [default: runs/RECIPE].")
@click.option(
    "--fleet",
    type=click.Choice(["local", "flower"]),
    default="local",
    show_default=True,
    help="Simulate clients in this process, or over Flower's messages.",
)
@click.option("--resume", is_flag=True, help="Continue the run in the folder.")
@JSON
@click.option(
    "--progress",
    type=click.Choice(["auto", "lines", "jsonl", "quiet"]),
    default="auto",
    show_default=True,
    help="How progress is shown.",
)
@TRUST
def run_or_repeat(
    recipe: str,
    sets: Assignments,
    out: Path | None,
    fleet: str,
    resume: bool,
    as_json: bool,
    progress: str,
    trust: CodeConsent,
) -> None:
    """Run a recipe or preset, or repeat a run from its config.toml.

    A preset is a recipe with the settings of a standard benchmark.

    \b
    Examples:
      mutirao run quickstart
      mutirao run fashion-mnist
      mutirao run quickstart --set aggregate=fedadam --set aggregate.lr=0.05 --out runs/adam
      mutirao run runs/adam/config.toml --out runs/again
      mutirao run quickstart --out runs/adam --resume
    """
    from mutirao.config import read_toml, resolve
    from mutirao.experiments.presets import expand
    from mutirao.experiments.task import find
    from mutirao.runs.execute import default_out, reopen
    from mutirao.runs.trust import check_trust, is_own_run, names_in_file

    name, table = expand(recipe)
    values = [value for _, value in sets]
    if recipe.endswith(".toml"):
        file = Path(recipe)
        table = read_toml(file)
        check_trust(file, table, trust, values, lambda: file.name == "config.toml" and is_own_run(file.parent))
        name = str(table.pop("recipe", ""))
        if not name:
            raise ConfigError(f'{recipe} does not say which recipe it is for; add: recipe = "quickstart"')
        folder = out or default_out(name, resume)
    else:
        folder = out or default_out(recipe, resume)
    allow_local_imports(name, table, values, names_in_file(folder / "config.toml") if resume else [])
    if resume and (folder / "config.toml").exists():
        name, config = reopen(name, folder, sets, trust)
    else:
        config = resolve(find(name).config, table, sets)

    # This imports torch, so it comes after everything that a typing error may end.
    from mutirao.cli.terminal import conclude
    from mutirao.report import execute
    from mutirao.runs.progress import Progress, json_line

    with Progress(config.rounds, as_json, progress) as watch:
        if fleet == "flower":
            from mutirao.deploy.flower import simulate

            summary = simulate(name, config, folder, resume=resume, watch=watch)
        else:
            summary = execute(name, config, folder, resume=resume, watch=watch)
    if progress == "jsonl":
        click.echo(json_line({"event": "finished", **summary}))
    elif as_json:
        click.echo(json.dumps(summary, indent=2))
    else:
        conclude(summary, folder)


@main.command()
@click.argument("file", type=FILE, metavar="STUDY.toml")
@click.option("--out", type=FOLDER, help="Folder [default: runs/study-NAME].")
@settings("A setting for all cells, such as data=PATH.")
@WORKERS
@JSON
@TRUST
def study(file: Path, out: Path | None, sets: Assignments, workers: int, as_json: bool, trust: CodeConsent) -> None:
    """Run a grid of methods, folds and seeds, and compare them.

    Finished cells are kept: the same command continues.

    Example: mutirao study studies/quickstart.toml
    """
    from mutirao.cli.terminal import show_table
    from mutirao.report import write_report
    from mutirao.report.plot_kinds import draw_study
    from mutirao.runs.trust import names_in_file
    from mutirao.studies.comparison import compare_methods, write_tables
    from mutirao.studies.study import read_study, run_study
    from mutirao.studies.study_display import CellBar

    folder = out or Path("runs") / f"study-{file.stem}"
    allow_local_imports(names_in_file(file), [value for _, value in sets])
    grid = read_study(file, sets, trust, folder)
    with CellBar(len(grid.cells), quiet=as_json) as watch:
        try:
            problems = run_study(grid, folder, workers, watch)
        except KeyboardInterrupt:
            fail(STOPPED, 130)
    for problem in problems:
        click.echo(f"not finished: {problem}", err=True)
    lines = compare_methods(grid, folder)
    write_tables(grid, lines, folder)
    pictures = draw_study(grid, folder)
    write_report(folder)
    if as_json:
        click.echo((folder / "table.json").read_text(encoding="utf-8"))
    else:
        show_table(lines, folder, pictures)
    sys.exit(1 if problems else 0)


@main.command("verify")
@click.argument("folder", type=FILE, metavar="FOLDER|AUDIT.jsonl")
@click.option("--site", "sites", multiple=True, type=FILE, help="A site's own audit trail; may be given many times.")
@click.option("--csv", "table", type=click.Path(path_type=Path, dir_okay=False), help="Write all events to this file.")
@JSON
def verify_folder(folder: Path, sites: tuple[Path, ...], table: Path | None, as_json: bool) -> None:
    """Check a run folder against its audit trail.

    It says exactly what was altered; with --site, sites' own audit trails are compared too.

    \b
    Examples:
      mutirao verify runs/quickstart
      mutirao verify runs/quickstart --site recife/audit.jsonl --site natal/audit.jsonl --csv events.csv
    """
    from mutirao.runs.verify import verify_all

    good, problems = verify_all(folder, sites, table)
    lines = [*(f"ok       {line}" for line in good), *(f"ALTERED  {line}" for line in problems)]
    verdict = f"{folder}: as it was written"
    if problems:
        verdict = f"{folder}: {len(problems)} problems"
    print_result({"good": good, "problems": problems}, as_json, *lines, verdict)
    sys.exit(1 if problems else 0)


@main.command("forget")
@click.argument("folder", type=FILE)
@click.option("--client", required=True, help="Client that withdraws.")
@click.option("--out", required=True, type=FOLDER, help="Folder of the new run.")
@click.option("--prepare", is_flag=True, help="Only write the folder; a server with the sites resumes it.")
@JSON
@TRUST
def unlearn_client(folder: Path, client: str, out: Path, prepare: bool, as_json: bool, trust: CodeConsent) -> None:
    """Unlearn a client: train again without it.

    Training starts from the last round to which the client had not contributed. The same command continues after an
    interruption.

    Example: mutirao forget runs/quickstart --client c07 --out runs/without-c07
    """
    from mutirao.cli.terminal import conclude_forgetting
    from mutirao.report import write_report
    from mutirao.report.run_plots import draw_run
    from mutirao.runs.progress import Progress
    from mutirao.runs.trust import names_in_file
    from mutirao.runs.unlearning import forget, rounds_of

    allow_local_imports(names_in_file(folder / "config.toml"))
    parts: Any = {"draw": draw_run, "report": write_report, "trust": trust}
    with Progress(rounds_of(folder, trust), quiet=as_json) as watch:
        record = forget(folder, client, out, watch=watch, prepare_only=prepare, **parts)
    if prepare and not as_json:
        click.echo(f"prepared: {out} begins after round {record['rounds_kept']}; resume it with exclude={client}")
    elif as_json:
        click.echo(json.dumps(record, indent=2))
    else:
        conclude_forgetting(record, out)


@main.command()
@click.argument("folder", type=FILE)
def report(folder: Path) -> None:
    """Write the report.html of a run or study again.

    Example: mutirao report runs/quickstart
    """
    from mutirao.report import write_report

    click.echo(f"written: {write_report(folder)}")


@main.command("export")
@click.argument("folder", type=FILE)
@click.option(
    "--table",
    type=click.Choice(["history", "clients"]),
    default="history",
    show_default=True,
    help="A row for each round, or for each client and round.",
)
@click.option("--out", type=FILE, help="A .parquet or .csv file [default: TABLE.parquet].")
def export_runs(folder: Path, table: str, out: Path | None) -> None:
    """Write the rounds or clients of runs as Parquet or CSV.

    FOLDER is a run, or a folder with runs anywhere below it.

    Example: mutirao export runs/quickstart --out history.parquet
    """
    from mutirao.runs.reader import export_tables

    file = out or Path(f"{table}.parquet")
    click.echo(f"written: {file}, {export_tables(folder, file, table)} rows")


@main.command()
@click.argument("folder", type=FILE, default="runs")
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option("--port", type=click.IntRange(0, 65535), default=0, help="Port [default: any free one].")
@click.option("--read-only", is_flag=True, help="No run can be cancelled, resumed or annotated from the page.")
@click.option("--open/--no-open", "browse", default=None, help="Open a browser [default: on a terminal].")
def dash(folder: Path, host: str, port: int, read_only: bool, browse: bool | None) -> None:
    """Watch runs and studies on a live page.

    Ctrl-C ends it.

    Example: mutirao dash runs
    """
    from mutirao.dashboard.serving import serve

    serve(folder, host, port, lambda address: announce_page(f"{folder} is shown", address, host, browse), read_only)


@main.command()
@click.argument("folder", type=FILE)
@click.argument("kind", required=False)
@click.option("--out", type=FILE, help="File or folder to write [default: FOLDER].")
@click.option("--metric", default="", help="Metric to draw [default: all, or accuracy].")
@click.option("--target", "targets", type=float, multiple=True, help="Target of the metric; may be given many times.")
@click.option("--width", type=float, help="Width in inches [default: 3.4, one column of a paper].")
@click.option("--against", type=FILE, help="Another run, to compare the queries of this one with.")
def plot(
    folder: Path,
    kind: str | None,
    out: Path | None,
    metric: str,
    targets: tuple[float, ...],
    width: float | None,
    against: Path | None,
) -> None:
    """Draw figures of a run or study, with their tables.

    Without KIND, the kinds of figures are listed.

    \b
    Examples:
      mutirao plot runs/selection participation
      mutirao plot runs/study-selection selection --target 0.8 --target 0.9
      mutirao plot runs/study-quickstart bands --out fig.pdf --width 7
      mutirao plot runs/ranking wins --against runs/other
    """
    from mutirao.report.plot_kinds import KINDS, draw

    if kind is None:
        for name, (about, _) in KINDS.items():
            click.echo(f"{name:<14} {about}")
        return
    other = str(against) if against else ""
    for file in draw(folder, kind, out, metric=metric, targets=targets, width=width or 0.0, against=other):
        click.echo(f"written: {file}")


@main.command("replay")
@click.argument("folder", type=FILE)
@settings("The other selector, such as select=aoi.")
@click.option("--own", is_flag=True, help="Let the selector see the effects of its own choices, not of the run's.")
@JSON
@TRUST
def replay_run(folder: Path, sets: Assignments, own: bool, as_json: bool, trust: CodeConsent) -> None:
    """Show which clients another selector would have selected.

    A finished run's record is replayed, without training.

    Example: mutirao replay runs/selection --set select=aoiu --set select.alpha=0.9
    """
    from mutirao.cli.terminal import show_replay
    from mutirao.runs.replay import replay_folder
    from mutirao.runs.trust import names_in_file

    allow_local_imports(names_in_file(folder / "config.toml"), [value for _, value in sets])
    part, found = replay_folder(folder, sets, own, trust)
    if as_json:
        content = {"select": {"name": part.name, **part.settings}, "actual": found.actual, "other": found.other}
        click.echo(json.dumps(content | {"overlap": found.overlap}, indent=2))
    else:
        show_replay(part, found)


for command in (
    catalogue,
    predict_with_groups,
    data,
    drill,
    new,
    partition,
    rank,
    record,
    reproduce,
    site,
    slides,
    tune_study,
):
    main.add_command(command)
