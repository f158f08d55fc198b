"""`mutirao data`: what data sets are known, whether a copy is whole, and how pictures are dealt to hospitals."""

from pathlib import Path

import click

from mutirao.cli.options import FILE, FOLDER, JSON, look_here, tell
from mutirao.errors import ConfigError


@click.group()
def data() -> None:
    """Data sets: what is known, and whether a copy on disk is whole.

    Example: mutirao data check cifar10 ~/data/cifar-10-batches-bin
    """


@data.command("list")
@JSON
def data_list(as_json: bool) -> None:
    """List the data sets that recipes can read.

    Example: mutirao data list
    """
    from mutirao.datasets import DATA_SETS

    bold = (f"{click.style(k, bold=True)}\n  {d.about}\n  layout: {d.layout}" for k, d in DATA_SETS.items())
    tell({k: {"about": d.about, "layout": d.layout} for k, d in DATA_SETS.items()}, as_json, *bold)


@data.command("check")
@click.argument("name")
@click.argument("path", required=False, type=FILE)
@JSON
def data_check(name: str, path: Path | None, as_json: bool) -> None:
    """Read a data set as its recipe would and say what was found.

    Example: mutirao data check cifar10 ~/data/cifar-10-batches-bin
    """
    from mutirao.datasets import check_data_set

    findings = check_data_set(name, path.expanduser() if path else None)
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
    from mutirao.images.splits import prepare_hospitals
    from mutirao.randomness import rng

    look_here(partition)
    if not 0.02 <= share <= 0.5:
        raise ConfigError(f"--test: {share!r} is not a share from 0.02 to 0.5")
    part = complete("partition", Part(partition, {} if alpha is None else {"alpha": alpha}, "mutirao.images.splits"))
    deal = build("partition", part)
    sizes = prepare_hospitals(
        source.expanduser(), out.expanduser(), clients, deal, rng(seed, 0, "partition"), seed, share, slide
    )
    for name, count in sizes.items():
        click.echo(f"{out / name}: {count:,} pictures")
