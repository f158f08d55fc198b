"""`mutirao data`: list, download, check and partition data sets."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mutirao.cli.options import FILE, FOLDER, JSON, CommandGroup, allow_local_imports, fail, print_result
from mutirao.errors import ConfigError

if TYPE_CHECKING:
    from mutirao.datasets.published import DataSet


@click.group(cls=CommandGroup)
def data() -> None:
    """List, download and check data sets.

    Example: mutirao data get fashion-mnist
    """


@data.command("list")
@JSON
def data_list(as_json: bool) -> None:
    """List the data sets that recipes can read.

    For each: what it is, where to get it, and whether a copy is on this machine.

    Example: mutirao data list
    """
    from mutirao.cli.listing import in_columns, terminal_width
    from mutirao.datasets.published import FORMATS, PUBLISHED, data_folders

    sections = {
        f"Published sets; looked for, and put, in {data_folders()[0]}": PUBLISHED,
        "Formats for data of your own": FORMATS,
    }
    width = terminal_width()
    lines: list[str] = []
    for title, sets in sections.items():
        lines += ["", click.style(title, bold=True)]
        for name, data_set in sets.items():
            lines += ["", click.style(name, bold=True), *in_columns(description(name, data_set), width)]
    print_result(facts_of_sets(), as_json, *lines[1:])


def facts_of_sets() -> dict[str, dict[str, Any]]:
    """All facts about each set, for --json, and the folder of a local copy."""
    from mutirao.datasets import DATA_SETS
    from mutirao.datasets.published import FORMATS, find_copy

    facts: dict[str, dict[str, Any]] = {}
    for name, data_set in DATA_SETS.items():
        copy = find_copy(name)
        facts[name] = {
            "about": data_set.about,
            "layout": data_set.layout,
            "source": data_set.source,
            "page": data_set.page,
            "terms": data_set.terms,
            "size": data_set.size,
            "fetched": bool(data_set.files),
            "form": name in FORMATS,
            "here": str(copy) if copy else None,
        }
    return facts


def description(name: str, data_set: "DataSet") -> dict[str, str]:
    """The lines about one set on the terminal, by their labels."""
    from mutirao.datasets.published import find_copy, how_to_get

    lines = {
        "what": data_set.about,
        "source": data_set.source,
        "page": data_set.page,
        "terms": data_set.terms,
        "size": data_set.size,
        "layout": data_set.layout,
    }
    if data_set.folders:
        copy = find_copy(name)
        lines["here"] = str(copy) if copy else f"no: {how_to_get(name)}"
    return {label: text for label, text in lines.items() if text}


@data.command("get")
@click.argument("name")
@click.option("--to", type=FOLDER, help="Folder of data sets [default: the first of $MUTIRAO_DATA, or the cache].")
@click.option("--mirror", default="", help="An https address with the same files.")
@JSON
def data_get(name: str, to: Path | None, mirror: str, as_json: bool) -> None:
    """Download a data set, check it and unpack it.

    The same command continues after an interruption.

    \b
    Examples:
      mutirao data get ml-1m
      mutirao data get fashion-mnist --to ~/data
    """
    from mutirao.datasets.download import get_data_set
    from mutirao.datasets.published import File

    def on_file(file: File) -> Callable[[int, int], None]:
        if as_json or not sys.stderr.isatty():
            click.echo(f"fetching {file.name}", err=True)
            return lambda done, total: None
        return ProgressBar(file.name)

    try:
        place, new = get_data_set(name, to, mirror, on_file)
    except KeyboardInterrupt:
        fail("stopped; the same command continues from here", 130)
    state = "is here" if new else "is already here"
    data_setting = name if to is None else place
    print_result(
        {"name": name, "path": str(place), "fetched": new},
        as_json,
        f"{name} {state}: {place}; use it with --set data={data_setting}",
    )


class ProgressBar:
    """A progress bar for the bytes of a download."""

    def __init__(self, name: str) -> None:
        """A bar labelled with the file's name; it appears with the first bytes."""
        self.name = name
        self.bar: Any = None

    def __call__(self, done: int, total: int) -> None:
        """Draw the bar at `done` of `total` bytes."""
        if self.bar is None:
            self.bar = click.progressbar(length=total or None, label=self.name, file=sys.stderr, show_pos=False)
        self.bar.update(done - self.bar.pos)
        if done == total:
            self.bar.render_finish()


@data.command("check")
@click.argument("name")
@click.argument("path", required=False, type=FILE)
@JSON
def data_check(name: str, path: Path | None, as_json: bool) -> None:
    """Read a data set as its recipe does, and describe it.

    Without PATH, the installed copy is read.

    Example: mutirao data check cifar10 ~/data/cifar-10-batches-bin
    """
    from mutirao.datasets import check_data_set
    from mutirao.datasets.published import find_copy

    findings = check_data_set(name, path.expanduser() if path else find_copy(name))
    print_result(findings, as_json, *findings)


@data.command("prepare")
@click.argument("source", type=FILE)
@click.option("--out", type=FOLDER, required=True, help="A new or empty folder.")
@click.option("--clients", type=click.IntRange(min=1), default=3, show_default=True, help="Number of hospitals.")
@click.option("--partition", default="even", show_default=True, help="even, dirichlet, by_slide, by_laboratory, ...")
@click.option("--alpha", type=float, help="For --partition dirichlet: smaller is more skewed.")
@click.option("--slide", default=r"^(\d+)-", show_default=True, help="Pattern or table for a picture's slide.")
@click.option("--test", "share", default=0.2, show_default=True, help="Share of test pictures, if there is no Test/.")
@click.option("--seed", default=0, show_default=True, help="Random seed.")
def data_prepare(
    source: Path, out: Path, clients: int, partition: str, alpha: float | None, slide: str, share: float, seed: int
) -> None:
    """Partition pictures among hospitals.

    SOURCE has folders Training/ and Test/, or one folder for each class. The result has folders client_1/ ... client_k/
    and global_test/.

    Example: mutirao data prepare herlev --out federation --clients 3
    """
    from mutirao.config import Part, build, complete_part
    from mutirao.randomness import rng
    from mutirao.systems.images.image_sources import write_client_folders

    allow_local_imports(partition)
    if not 0.02 <= share <= 0.5:
        raise ConfigError(f"--test: {share!r} must be a share from 0.02 to 0.5")
    settings = {} if alpha is None else {"alpha": alpha}
    part = complete_part("partition", Part(partition, settings, "mutirao.systems.images.image_sources"))
    split = build("partition", part)
    sizes = write_client_folders(
        source.expanduser(), out.expanduser(), clients, split, rng(seed, 0, "partition"), seed, share, slide
    )
    for name, count in sizes.items():
        click.echo(f"{out / name}: {count:,} pictures")
