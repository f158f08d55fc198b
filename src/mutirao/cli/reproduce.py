"""`mutirao reproduce`: reproduce a published system, at the size that the time allows."""

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mutirao.cli.options import FOLDER, JSON, STOPPED, WORKERS, fail
from mutirao.errors import ConfigError

if TYPE_CHECKING:
    from mutirao.studies.reproduction import Size, System


@click.command()
@click.argument("system", required=False)
@click.option("--quick", "size", flag_value="quick", help="Under 10 minutes on two cores [default].")
@click.option("--full", "size", flag_value="full", help="The size of its documentation page.")
@click.option("--minutes", type=click.FloatRange(min=0.1), help="The largest size that fits into so many minutes.")
@click.option("--data", type=FOLDER, help="Folder of the data [default: search, also in $MUTIRAO_DATA].")
@click.option("--stand-in", is_flag=True, help="Use embedded or generated data instead of the real ones.")
@click.option("--out", type=FOLDER, help="Folder [default: runs/reproduce-SYSTEM-SIZE].")
@WORKERS
@JSON
def reproduce(
    system: str | None,
    size: str | None,
    minutes: float | None,
    data: Path | None,
    stand_in: bool,
    out: Path | None,
    workers: int,
    as_json: bool,
) -> None:
    """Reproduce a published system and check its claims.

    Published figures are shown beside ours. Without SYSTEM, the systems are listed. Finished runs are kept: the same
    command continues.

    \b
    Examples:
      mutirao reproduce
      mutirao reproduce groups --quick
      mutirao reproduce fedrisk --minutes 5 --data ~/data/MQ2008
      mutirao reproduce recsys --stand-in
    """
    from mutirao.studies.reproduction import NAMES, QUICK_LIMIT, find_system_data, largest_size, read_system

    if system is None:
        show_systems([read_system(name) for name in NAMES], data, as_json)
        return
    if minutes is not None and size is not None:
        raise ConfigError(f"--minutes and --{size} both set the size; give only one")
    if stand_in and data is not None:
        raise ConfigError("--stand-in needs no --data; give only one")
    chosen = read_system(system)
    folder = None if stand_in else find_system_data(chosen, data)
    if folder is None and not stand_in:
        raise ConfigError(missing(chosen))
    limit: float | None
    if minutes is not None:
        form = largest_size(chosen, minutes)
        name = f"{minutes:g}min"
        limit = minutes
    elif size == "full":
        form = chosen.full
        name = size
        limit = None
    else:
        form = chosen.quick
        name = "quick"
        limit = QUICK_LIMIT
    place = out or Path("runs") / f"reproduce-{system}-{name}{'-stand-in' * stand_in}"
    if stand_in:
        form = replace(form, settings={**form.settings, **chosen.data.settings})
    run_reproduction(chosen, form, name, folder, place, limit, workers, as_json)


def missing(system: "System") -> str:
    """The error if data are missing: what is needed, where it was searched, and the stand-in."""
    from mutirao.studies.reproduction import usual_places

    places = ", ".join(map(str, usual_places()))
    names = " or ".join(system.data.names)
    return (
        f"{system.name} needs {system.data.needs}. A folder {names} was not found in {places}. "
        f"Give --data PATH, or try the command on a stand-in ({system.data.about}): --stand-in"
    )


def run_reproduction(
    system: "System",
    form: "Size",
    size: str,
    data: Path | None,
    out: Path,
    limit: float | None,
    workers: int,
    as_json: bool,
) -> None:
    """Run the study, evaluate the claims, write and show everything; exit code 1 if a run failed."""
    from mutirao.io import write_whole
    from mutirao.report import write_report
    from mutirao.report.plot_kinds import draw_study
    from mutirao.studies import study as studies
    from mutirao.studies.comparison import compare_methods, write_tables
    from mutirao.studies.confirmation import write_toml
    from mutirao.studies.reproduction import OutOfTime, at_most, list_cuts, outcome_of, study_table
    from mutirao.studies.study_display import CellBar

    source = system.data.stand_in
    label = f"STAND-IN DATA, not the paper's: {system.data.about}"
    if data:
        source = str(data.resolve())
        label = f"data: {source}"
    cuts = list_cuts(system, form)
    if not as_json:
        about = f"{form.runs} runs, about {form.minutes:.2g} min on two cores"
        print_notes(f"{system.title}\n{system.paper}\n{label}\n{size}: {about}", *(f"  cut, {line}" for line in cuts))
    out.mkdir(parents=True, exist_ok=True)
    head = f"# {system.title}: written by `mutirao reproduce {system.name}`; `mutirao study` runs it, too.\n"
    write_whole(out / "study.toml", head + write_toml(study_table(system, form, source, data is None)))
    grid = studies.read_study(out / "study.toml")
    problems: list[str] = []
    with CellBar(len(grid.cells), quiet=as_json) as watch:
        try:
            with at_most(limit):
                problems = studies.run_study(grid, out, workers, watch)
        except OutOfTime:
            done = sum(1 for _ in studies.results(grid, out))
            made = f"runs: {done} of {len(grid.cells)} were made in {limit:g} min"
            cuts.append(f"{made}; the same command makes the rest")
            if not done:
                raise ConfigError(f"{made}; the same command goes on with them, --minutes gives more time") from None
        except KeyboardInterrupt:
            fail(STOPPED, 130)
    for problem in problems:
        click.echo(f"not finished: {problem}", err=True)
    lines = compare_methods(grid, out)
    write_tables(grid, lines, out)
    draw_study(grid, out)
    outcome = outcome_of(system, grid, size, label, cuts, out, stand_in=data is None)
    write_whole(out / "reproduction.json", json.dumps(outcome, indent=2) + "\n")
    write_report(out)
    if as_json:
        click.echo(json.dumps(outcome, indent=2))
    else:
        show_outcome(outcome, lines, out)
    sys.exit(1 if problems else 0)


def print_notes(*lines: str) -> None:
    """Print lines on standard error, apart from the result."""
    for line in lines:
        click.echo(line, err=True)


def show_systems(systems: "list[System]", data: Path | None, as_json: bool) -> None:
    """List the systems: paper, data, where the data are, and the minutes of each size."""
    from mutirao.studies.reproduction import find_system_data

    rows: list[dict[str, Any]] = []
    for system in systems:
        try:
            found = find_system_data(system, data)
        except ConfigError:
            # --data is for another system.
            found = None
        rows.append(
            {
                "system": system.name,
                "about": system.title,
                "paper": system.paper,
                "needs": system.data.needs,
                "found": str(found) if found else None,
                "stand_in": system.data.about,
                "quick_minutes": system.quick.minutes,
                "full_minutes": system.full.minutes,
                "page": system.page,
            }
        )
    if as_json:
        click.echo(json.dumps(rows, indent=2))
        return
    for row in rows:
        where = row["found"] or f"not found; --stand-in: {row['stand_in']}"
        click.secho(f"{row['system']}: {row['about']}", bold=True)
        click.echo(f"  paper  {row['paper']}\n  data   {row['needs']}\n  found  {where}")
        click.echo(f"  time   quick {row['quick_minutes']:g} min, full {row['full_minutes']:g} min, on two cores")
    click.echo("\nmutirao reproduce SYSTEM [--quick | --full | --minutes N] reproduces one.")


def show_outcome(outcome: dict[str, Any], lines: Any, out: Path) -> None:
    """Published values beside ours, the verdicts, and where the rest is."""
    from rich.console import Console

    from mutirao.studies.reproduction import BESIDE, beside_rows
    from mutirao.studies.study_display import make_table

    console = Console(highlight=False, width=None if sys.stdout.isatty() else 130)
    table = make_table(f"published beside ours ({outcome['data']})", BESIDE)
    for row in beside_rows(lines):
        table.add_row(*row)
    console.print(table)
    for line in outcome["cuts"]:
        console.print(f"cut, {line}", soft_wrap=True)
    for claim in outcome["claims"]:
        console.print(f"[bold]{claim['verdict']:<13}[/bold] {claim['line']}", soft_wrap=True)
    console.print(f"everything is in {out}; look at {out / 'report.html'}, and at {outcome['page']}", soft_wrap=True)
