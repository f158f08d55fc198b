"""The command line: a thin shell over the library; heavy things are imported only by the command that needs them."""

import json
import logging
import sys
from pathlib import Path
from typing import Any, NoReturn

import click

from mutirao.errors import ConfigError, MutiraoError

RECIPES = "quickstart, cifar10, or a dotted path such as my_task:recipe"


class Commands(click.Group):
    """A group whose problems end in one clear line and the problem's exit code."""

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command; a MutiraoError is for the user, not for a debugger."""
        try:
            return super().invoke(ctx)
        except MutiraoError as error:
            fail(str(error), error.code)
        except KeyboardInterrupt:
            fail("stopped; what was done is kept, go on with --resume", 130)


def fail(text: str, code: int) -> NoReturn:
    """Say what is wrong on one line and end."""
    click.echo(f"error: {text}", err=True)
    sys.exit(code)


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(package_name="mutirao")
@click.option("-v", "--verbose", is_flag=True, help="Say more about what happens.")
def main(verbose: bool) -> None:
    """Train one good model from data that cannot be moved and does not look alike.

    Example: mutirao run quickstart --set rounds=10
    """
    logging.basicConfig(level=logging.INFO if verbose else logging.WARNING, format="%(message)s", stream=sys.stderr)
    sys.path.insert(0, str(Path.cwd()))  # a user's own recipe or part lies where they work


@main.command("list")
@click.argument("recipe", required=False)
@click.option("--json", "as_json", is_flag=True, help="For machines.")
def list_command(recipe: str | None, as_json: bool) -> None:
    """List the recipes, or the settings of one.

    Example: mutirao list quickstart
    """
    from mutirao.listing import parts, recipes, settings

    tables = {"recipes": recipes()} | parts() if recipe is None else {f"settings of {recipe}": settings(recipe)}
    if as_json:
        click.echo(json.dumps(tables, indent=2))
        return
    for title, rows in tables.items():
        click.secho(f"\n{title}", bold=True)
        width = max(len(name) for name in rows)
        for name, text in rows.items():
            click.echo(f"  {name:<{width}}  {text}")
    if recipe is None:
        click.echo("\nmutirao list RECIPE shows its settings; mutirao run RECIPE runs it.")


@main.command()
@click.argument("recipe", metavar="RECIPE|CONFIG.toml")
@click.option("--set", "sets", multiple=True, metavar="KEY=VALUE", help="Change a setting; may be given many times.")
@click.option("--out", type=click.Path(path_type=Path, file_okay=False), help="Run folder [default: runs/RECIPE].")
@click.option("--fleet", type=click.Choice(["local", "flower"]), default="local", show_default=True)
@click.option("--resume", is_flag=True, help="Go on with the run in the folder.")
@click.option("--json", "as_json", is_flag=True, help="Print nothing but the summary, as JSON.")
def run(recipe: str, sets: tuple[str, ...], out: Path | None, fleet: str, resume: bool, as_json: bool) -> None:
    """Run a recipe, or repeat a run from its config.toml.

    \b
    Examples:
      mutirao run quickstart
      mutirao run quickstart --set aggregate=fedadam --set aggregate.lr=0.05 --out runs/adam
      mutirao run runs/adam/config.toml --out runs/again
      mutirao run quickstart --out runs/adam --resume
    """
    from mutirao.config import parse_assignment, read, resolve
    from mutirao.recipes import find
    from mutirao.running import continued, execute
    from mutirao.terminal import Progress, conclude

    assignments = [parse_assignment(text) for text in sets]
    table: dict[str, Any] = {}
    name = recipe
    if recipe.endswith(".toml"):
        table = read(Path(recipe))
        name = str(table.pop("recipe", ""))
        if not name:
            raise ConfigError(f'{recipe} does not say which recipe it is for; add: recipe = "quickstart"')
    folder = out or default_out(name, resume)
    if resume and (folder / "config.toml").exists():
        name, config = continued(name, folder, assignments)
    else:
        config = resolve(find(name).config, table, assignments)

    progress = Progress(config.rounds, quiet=as_json)
    with progress:
        if fleet == "flower":
            from mutirao.fleets.flower import simulate

            summary = simulate(name, config, folder, resume=resume, watch=progress)
        else:
            summary = execute(name, config, folder, resume=resume, watch=progress)
    if as_json:
        click.echo(json.dumps(summary, indent=2))
    else:
        conclude(summary, folder)


def default_out(name: str, resume: bool) -> Path:
    """runs/RECIPE, or the next free runs/RECIPE-2, -3, ...; with `resume` the latest that exists."""
    stem = name.replace(":", "-").replace("/", "-")
    candidate, number = Path("runs") / stem, 1
    while candidate.exists():
        latest, number = candidate, number + 1
        candidate = Path("runs") / f"{stem}-{number}"
    return latest if resume and number > 1 else candidate


@main.command()
@click.argument("file", type=click.Path(path_type=Path), metavar="STUDY.toml")
@click.option("--out", type=click.Path(path_type=Path, file_okay=False), help="Folder [default: runs/study-NAME].")
@click.option("--set", "sets", multiple=True, metavar="KEY=VALUE", help="A setting for all cells, such as data=PATH.")
@click.option("--workers", type=click.IntRange(min=0), default=0, help="Processes [default: one a core].")
@click.option("--json", "as_json", is_flag=True, help="Print nothing but the table, as JSON.")
def study(file: Path, out: Path | None, sets: tuple[str, ...], workers: int, as_json: bool) -> None:
    """Run a grid of methods x folds x seeds and compare them; finished cells are kept.

    Example: mutirao study studies/quickstart.toml
    """
    from mutirao.comparison import compare, draw_bands, write_tables
    from mutirao.config import parse_assignment
    from mutirao.study import carry_out, load
    from mutirao.terminal import Cells, show_table

    grid = load(file, [parse_assignment(text) for text in sets])
    folder = out or Path("runs") / f"study-{file.stem}"
    with Cells(len(grid.cells), quiet=as_json) as watch:
        problems = carry_out(grid, folder, workers, watch)
    lines = compare(grid, folder)
    write_tables(grid, lines, folder)
    pictures = draw_bands(grid, folder)
    if as_json:
        click.echo((folder / "table.json").read_text(encoding="utf-8"))
    else:
        show_table(lines, folder, pictures)
    for problem in problems:
        click.echo(f"not finished: {problem}", err=True)
    sys.exit(1 if problems else 0)


@main.command()
@click.argument("folder", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="For machines.")
def verify(folder: Path, as_json: bool) -> None:
    """Check a run folder against its audit trail; say exactly what was altered.

    Example: mutirao verify runs/quickstart
    """
    from mutirao.verify import verify as check

    good, problems = check(folder)
    if as_json:
        click.echo(json.dumps({"good": good, "problems": problems}, indent=2))
    else:
        for line in good:
            click.echo(f"ok       {line}")
        for line in problems:
            click.echo(f"ALTERED  {line}")
        click.echo(f"{folder}: {'as it was written' if not problems else f'{len(problems)} problems'}")
    sys.exit(1 if problems else 0)


@main.command()
@click.argument("folder", type=click.Path(path_type=Path))
def report(folder: Path) -> None:
    """Write report.html anew from what the run folder holds.

    Example: mutirao report runs/quickstart
    """
    from mutirao.report import write_report

    click.echo(f"written: {write_report(folder)}")


@main.group()
def data() -> None:
    """Data sets: what is known, and whether a copy on disk is whole.

    Example: mutirao data check cifar10 ~/data/cifar-10-batches-bin
    """


@data.command("list")
@click.option("--json", "as_json", is_flag=True, help="For machines.")
def data_list(as_json: bool) -> None:
    """List the data sets that recipes can read.

    Example: mutirao data list
    """
    from mutirao.data import DATA_SETS

    if as_json:
        click.echo(json.dumps({k: {"about": d.about, "layout": d.layout} for k, d in DATA_SETS.items()}, indent=2))
        return
    for name, known in DATA_SETS.items():
        click.secho(name, bold=True)
        click.echo(f"  {known.about}\n  layout: {known.layout}")


@data.command("check")
@click.argument("name")
@click.argument("path", required=False, type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="For machines.")
def data_check(name: str, path: Path | None, as_json: bool) -> None:
    """Read a data set as its recipe would and say what was found.

    Example: mutirao data check cifar10 ~/data/cifar-10-batches-bin
    """
    from mutirao.data import check

    findings = check(name, path.expanduser() if path else None)
    click.echo(json.dumps(findings, indent=2) if as_json else "\n".join(findings))


if __name__ == "__main__":
    main()
