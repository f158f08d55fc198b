"""`mutirao slides cut`, `label`, `agreement` and `gather`: from annotations and labels to a training set."""

import shutil
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mutirao.cli.options import FILE, FOLDER, JSON, announce_page, print_result
from mutirao.cli.slides import MppOf, scaling, slides
from mutirao.errors import ConfigError

if TYPE_CHECKING:
    from mutirao.systems.cytology.slides.tile_labels import LabelTile

__all__ = ["slides"]  # the group, with these commands
SHOWN = 20  # problems on the terminal
TILES = click.argument("folder", type=FOLDER, metavar="TILES")
READERS = click.option("--reader", "readers", multiple=True, help="Only this reader's labels; may be given many times.")
LABORATORY = click.option(
    "--laboratory", default="", help="Laboratory of the slides: a name, or a CSV with columns slide, laboratory."
)


def words(text: str) -> tuple[str, ...]:
    """Split a comma-separated list."""
    return tuple(word.strip() for word in text.split(",") if word.strip())


def laboratory_lookup(given: str) -> Callable[[str], str]:
    """A function from a slide's name to its laboratory: one name for all, or from a table."""
    if not given.endswith(".csv"):
        return lambda slide: given
    from mutirao.io import read_csv

    path = Path(given).expanduser()
    rows = read_csv(path)
    if not rows or not {"slide", "laboratory"} <= rows[0].keys():
        raise ConfigError(f"{path} is not a table with columns 'slide' and 'laboratory'")
    known = {row["slide"]: row["laboratory"] for row in rows}
    return lambda slide: known.get(slide, known.get(Path(slide).stem, ""))


@slides.command()
@click.argument("paths", nargs=-1, required=True, type=FILE, metavar="SLIDE|FOLDER...")
@click.option(
    "--annotations",
    type=FILE,
    multiple=True,
    required=True,
    help="QuPath's .geojson, ASAP's .xml, a .csv of points or boxes, or a folder of them; may be given many times.",
)
@click.option("--out", type=FOLDER, required=True, help="New folder; gets one folder a class, origins.csv, tiles.json.")
@click.option("--size", default=512, show_default=True, help="Pixels of a tile's side.")
@click.option("--mpp-out", default=0.5, show_default=True, help="Micrometres a pixel of the tiles.")
@click.option("--classes", default="", help="Use only these classes, as in abnormal,normal [default: all].")
@click.option("--rename", multiple=True, metavar="OLD=NEW", help="Rename a class; may be given many times.")
@click.option("--cover", default=0.5, show_default=True, help="Share of a tile that an annotated area must cover.")
@click.option(
    "--conflict",
    type=click.Choice(["leave", "largest", "first"]),
    default="leave",
    show_default=True,
    help="Tiles annotated with two classes: leave them out, take the larger area, or the first in --classes.",
)
@LABORATORY
@click.option("--reader", default="", help="Name of the annotator, for origins.csv.")
@scaling
@JSON
def cut(
    paths: tuple[Path, ...],
    annotations: tuple[Path, ...],
    out: Path,
    size: int,
    mpp_out: float,
    classes: str,
    rename: tuple[str, ...],
    cover: float,
    conflict: Any,
    laboratory: str,
    reader: str,
    mpp_of: MppOf,
    as_json: bool,
) -> None:
    """Cut annotated slides into a training set.

    It gets one folder a class, and a table of where each tile comes from. A point, or an area smaller than a tile,
    gives a tile centred on it; a larger area gives the tiles that it covers. Annotations belong to the slide of the
    same name (smear.geojson to smear.svs), or to the one in a table's column `slide`. What cannot be used is named
    and skipped; the exit code is then 1.

    \b
    Examples:
      mutirao slides cut slides/ --annotations qupath/ --out cells --size 256
      mutirao slides cut smear.svs --annotations smear.xml --classes abnormal,normal --conflict first --out cells
    """
    from mutirao.systems.cytology.slides.cutting import CuttingPlan, annotations_in, cut_marks
    from mutirao.systems.cytology.slides.readers import find_slides
    from mutirao.systems.cytology.slides.tiling import Cut

    lab_of = laboratory_lookup(laboratory)
    pairs = [text.partition("=") for text in rename]
    if bad := [old for old, sign, new in pairs if not (sign and new.strip())]:
        raise ConfigError(f"--rename {bad[0]}: right would be OLD=NEW")
    plan = CuttingPlan(words(classes), {old.strip(): new.strip() for old, _, new in pairs}, cover, conflict)
    found = cut_marks(
        find_slides(tuple(p.expanduser() for p in paths)),
        annotations_in([p.expanduser() for p in annotations]),
        out.expanduser(),
        Cut(size=size, mpp=mpp_out),
        plan,
        mpp_of,
        lambda path: lab_of(path.name),
        reader,
        lambda line: None if as_json else click.echo(line),
    )
    for line in found.problems[:SHOWN]:
        click.echo(f"left out: {line}", err=True)
    if len(found.problems) > SHOWN:
        click.echo(f"left out: {len(found.problems) - SHOWN} more", err=True)
    counts = dict(sorted(found.tiles.items()))
    summary = ", ".join(f"{name} {n:,}" for name, n in counts.items()) or "no tile"
    ends = {"leave": "left out", "largest": "given to the one that covers more", "first": "given to the first named"}
    facts = {"out": str(out), "tiles": counts, "contested": found.contested, "problems": found.problems}
    print_result(
        facts,
        as_json,
        f"{out}: {summary}; {found.contested:,} tiles that two classes claim were {ends[conflict]}",
        f"train on it with: mutirao run cytology --set data={out} --set slide={out / 'origins.csv'}",
    )
    sys.exit(1 if found.problems else 0)


@slides.command()
@TILES
@click.option("--classes", default="", help="Two to nine, as in normal,abnormal [default: those of earlier labels].")
@click.option("--reader", required=True, help="Name of the reader; the labels go to labels-NAME.csv.")
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option("--port", type=click.IntRange(0, 65535), default=0, help="Port [default: any free one].")
@click.option("--open/--no-open", "browse", default=None, help="Open a browser [default: on a terminal].")
def label(folder: Path, classes: str, reader: str, host: str, port: int, browse: bool | None) -> None:
    """Label tiles on a page in the browser.

    TILES is a folder written by `mutirao slides tile` or `cut`, or any folder of pictures. Every label is saved at
    once. Ctrl-C ends the page; start it again to continue.

    Example: mutirao slides label tiles --classes normal,abnormal --reader ana
    """
    from mutirao.dashboard.serving import needing_packages, serve_page
    from mutirao.systems.cytology.slides.tile_labels import file_of, label_classes, tiles_in

    with needing_packages():
        from mutirao.dashboard.labelling_page import labelling

    place = folder.expanduser()
    file = file_of(place, reader)
    tiles = tiles_in(place)
    page = partial(labelling, tiles, place, reader, label_classes(place, words(classes)))

    def say(address: str) -> None:
        announce_page(f"{len(tiles.tiles):,} tiles are shown", address, host, browse)
        click.echo(f"labels are kept in {file}", err=True)

    serve_page(page, host, port, say)


@slides.command()
@TILES
@READERS
@click.option("--out", type=FILE, help="Page to write [default: agreement.html in TILES].")
@JSON
def agreement(folder: Path, readers: tuple[str, ...], out: Path | None, as_json: bool) -> None:
    """Measure how well readers agree, and show where they differ.

    It prints kappa with a confidence interval over slides, and confusion tables. A page shows the tiles on which the
    readers differ.

    Example: mutirao slides agreement tiles
    """
    from mutirao.io import write_whole
    from mutirao.randomness import rng
    from mutirao.systems.cytology.slides.reader_agreement import agreement_page, compare_readers
    from mutirao.systems.cytology.slides.tile_labels import label_classes, read_labels, tiles_in

    place = folder.expanduser()
    tiles = tiles_in(place)
    labels = read_labels(place, readers)
    slides_of = {tile.name: tile.slide for tile in tiles.tiles}
    found = compare_readers(labels, slides_of, label_classes(place, ()), rng(0, 0, "agreement"))
    target = out or place / "agreement.html"
    paths = {tile.name: tile.path for tile in tiles.tiles}
    write_whole(target.expanduser(), agreement_page(found, paths, place.resolve().name))
    differing = [found.tiles[i] for i in found.differing]
    lines = [f"{found.kind} of {', '.join(found.readers)}: {found.kappa}, over {found.resampled}"]
    for a, b in found.pairs:
        title = f"\n{a} (rows) and {b} (columns)"
        lines.append(title if len(found.readers) == 2 else f"{title}: {found.pairs[a, b]}")
        lines += confusion_lines(found.classes, found.table(a, b).tolist())
    lines.append(f"\n{len(found.tiles):,} tiles labelled by all, {found.partly:,} by some only")
    lines.append(f"they differ on {len(differing):,}; look at {target}")
    kappas = {f"{a}, {b}": k.facts() for (a, b), k in found.pairs.items()}
    facts = {"kind": found.kind, "kappa": found.kappa.facts(), "pairs": kappas, "tiles": len(found.tiles)}
    print_result(facts | {"partly": found.partly, "differing": differing, "page": str(target)}, as_json, *lines)


def confusion_lines(classes: Sequence[str], table: Sequence[Sequence[int]]) -> list[str]:
    """A confusion table as lines of text, with aligned columns."""
    widths = [max(6, len(name)) for name in classes]
    margin = max(map(len, classes))
    lines = [" " * margin + "".join(f"  {name:>{width}}" for name, width in zip(classes, widths, strict=True))]
    for name, row in zip(classes, table, strict=True):
        cells = "".join(f"  {count:>{width}}" for count, width in zip(row, widths, strict=True))
        lines.append(f"{name:<{margin}}{cells}")
    return lines


@slides.command()
@TILES
@click.option("--out", type=FOLDER, required=True, help="New folder; gets one folder a class, origins.csv, tiles.json.")
@click.option(
    "--rule",
    type=click.Choice(["agreed", "majority"]),
    default="agreed",
    show_default=True,
    help="Take tiles on which all readers agree, or most of those who labelled them.",
)
@READERS
@LABORATORY
@JSON
def gather(folder: Path, out: Path, rule: str, readers: tuple[str, ...], laboratory: str, as_json: bool) -> None:
    """Make a training set of the labels on which readers agree.

    It gets one folder a class. The other tiles are counted.

    Example: mutirao slides gather tiles --out cells --rule majority
    """
    from mutirao.datasets.tile_folders import write_set
    from mutirao.systems.cytology.slides.tile_labels import combine_labels, label_classes, read_labels, tiles_in

    place = folder.expanduser()
    tiles = tiles_in(place)
    labels = read_labels(place, readers)
    chosen, without = combine_labels(labels, [tile.name for tile in tiles.tiles], rule)
    if not chosen:
        raise ConfigError(f"no tile of {folder} has a class by the rule {rule!r}; there are {dict(without)}")
    lab_of = laboratory_lookup(laboratory)
    by_name = tiles.by_name
    files = []
    for name, label in chosen.items():
        tile = by_name[name]
        origin = origin_of(tile, label, tiles.scale, lab_of(tile.slide), " ".join(labels))
        files.append((origin, partial(shutil.copyfile, tile.path)))
    written = write_set(out.expanduser(), label_classes(place, ()), files, tiles.scale)
    counts = dict(sorted(Counter(origin.label for origin in written).items()))
    summary = ", ".join(f"{name} {n:,}" for name, n in counts.items())
    left = ", ".join(f"{n:,} {why}" for why, n in without.items()) or "none"
    scale = f"tiles of {tiles.scale}" if tiles.scale else "note: the scale of these tiles is unknown"
    facts = {"out": str(out), "tiles": counts, "left_out": dict(without), "readers": list(labels)}
    print_result(facts, as_json, f"{out}: {summary}; left out: {left}", scale)


def origin_of(tile: "LabelTile", label: str, scale: Any, laboratory: str, reader: str) -> Any:
    """The origin of a labelled tile; its new name contains its old path, so that all names differ."""
    from mutirao.datasets.tile_folders import Origin

    old = Path(tile.name)
    # A tile cut by `slides tile` is called x0_y512.jpg, in a folder with the name of its slide.
    cut_here = isinstance(tile.x, int)
    name = f"{tile.slide}_{old.name}" if cut_here else tile.name.replace("/", "_")
    return Origin(
        file=f"{label}/{name}",
        slide=tile.slide,
        laboratory=laboratory or tile.laboratory,
        mpp=scale.mpp if scale else "",
        x=tile.x,
        y=tile.y,
        size=scale.size if scale else "",
        label=label,
        source=tile.name,
        reader=reader,
    )
