"""`mutirao data`: what sets are known, how they come here, whether a copy is whole, how pictures are dealt."""

import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from mutirao.cli.options import FILE, FOLDER, JSON, look_here, tell
from mutirao.errors import ConfigError


@click.group()
def data() -> None:
    """Data sets: what is known, how to get them, and whether a copy on disk is whole.

    Example: mutirao data get fashion-mnist
    """


@data.command("list")
@JSON
def data_list(as_json: bool) -> None:
    """List the data sets that recipes can read: what they are, where they are to be had, and whether one is at hand.

    Example: mutirao data list
    """
    from mutirao.cli.listing import in_columns
    from mutirao.datasets.descriptions import facts_of, said_of, titled

    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else 0
    lines: list[str] = []
    for title, sets in titled():
        lines += ["", click.style(title, bold=True)]
        for name, known in sets.items():
            lines += ["", click.style(name, bold=True), *in_columns(said_of(name, known), width)]
    tell(facts_of(), as_json, *lines[1:])


@data.command("get")
@click.argument("name")
@click.option("--to", type=FOLDER, help="Folder of data sets [default: the first of $MUTIRAO_DATA, or the cache].")
@click.option("--mirror", default="", help="An https address under which the same files lie.")
@JSON
def data_get(name: str, to: Path | None, mirror: str, as_json: bool) -> None:
    """Fetch a data set that may be fetched, check it and unpack it; the same command goes on after an interruption.

    \b
    Examples:
      mutirao data get ml-1m
      mutirao data get fashion-mnist --to ~/data
    """
    from mutirao.datasets.installation import get_data_set
    from mutirao.datasets.published import File

    def begin(file: File) -> Callable[[int, int], None]:
        if as_json or not sys.stderr.isatty():
            click.echo(f"fetching {file.name}", err=True)
            return lambda done, total: None
        return Bar(file.name)

    try:
        place, new = get_data_set(name, to, mirror, begin)
    except KeyboardInterrupt:
        click.echo("error: stopped; the same command goes on from here", err=True)
        sys.exit(130)
    said = "is here" if new else "is already here"
    use = name if to is None else place
    tell(
        {"name": name, "path": str(place), "fetched": new},
        as_json,
        f"{name} {said}: {place}; use it with --set data={use}",
    )


class Bar:
    """A line on the terminal that grows with the bytes of a file."""

    def __init__(self, name: str) -> None:
        """Of the file of this name."""
        self.name = name
        self.bar: Any = None

    def __call__(self, done: int, total: int) -> None:
        """Draw it anew."""
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
    """Read a data set as its recipe would and say what was found; without a path, the copy that is at hand.

    Example: mutirao data check cifar10 ~/data/cifar-10-batches-bin
    """
    from mutirao.datasets import check_data_set
    from mutirao.datasets.locations import find_copy

    findings = check_data_set(name, path.expanduser() if path else find_copy(name))
    tell(findings, as_json, *findings)


@data.command("prepare")
@click.argument("source", type=FILE)
@click.option("--out", type=FOLDER, required=True, help="A new or empty folder.")
@click.option("--clients", type=click.IntRange(min=1), default=3, show_default=True, help="How many hospitals.")
@click.option("--partition", default="even", show_default=True, help="even, dirichlet, by_slide, by_laboratory, ...")
@click.option("--alpha", type=float, help="Of partition=dirichlet: the smaller, the more skewed.")
@click.option("--slide", default=r"^(\d+)-", show_default=True, help="Pattern or table that tells a picture's slide.")
@click.option("--test", "share", default=0.2, show_default=True, help="Share for the test, if there is no Test/.")
@click.option("--seed", default=0, show_default=True)
def data_prepare(
    source: Path, out: Path, clients: int, partition: str, alpha: float | None, slide: str, share: float, seed: int
) -> None:
    """Deal pictures to hospitals: client_1/ .. client_k/ and global_test/, from Training/ and Test/ or class folders.

    Example: mutirao data prepare herlev --out federation --clients 3
    """
    from mutirao.config import Part, build, complete
    from mutirao.randomness import rng
    from mutirao.systems.images.image_partitions import prepare_hospitals

    look_here(partition)
    if not 0.02 <= share <= 0.5:
        raise ConfigError(f"--test: {share!r} is not a share from 0.02 to 0.5")
    part = complete(
        "partition",
        Part(partition, {} if alpha is None else {"alpha": alpha}, "mutirao.systems.images.image_partitions"),
    )
    deal = build("partition", part)
    sizes = prepare_hospitals(
        source.expanduser(), out.expanduser(), clients, deal, rng(seed, 0, "partition"), seed, share, slide
    )
    for name, count in sizes.items():
        click.echo(f"{out / name}: {count:,} pictures")
