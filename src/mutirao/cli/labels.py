"""`mutirao slides cut`, `label`, `agreement` and `gather`: from what people drew and chose to a training set."""

import shutil
import sys
from collections.abc import Callable
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
    """A list that commas separate."""
    return tuple(word.strip() for word in text.split(",") if word.strip())


def laboratories(told: str) -> Callable[[str], str]:
    """The laboratory of a slide by its name: one for all, or by a table."""
    if not told.endswith(".csv"):
        return lambda slide: told
    from mutirao.io import read_csv

    path = Path(told).expanduser()
    rows = read_csv(path)
    if not rows or not {"slide", "laboratory"} <= rows[0].keys():
        raise ConfigError(f"{path} is no table with columns 'slide' and 'laboratory'")
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
    from mutirao.systems.cytology.slides.readers import slides_in
    from mutirao.systems.cytology.slides.tiling import Cut

    lab_of = laboratories(laboratory)
    pairs = [text.partition("=") for text in rename]
    if bad := [old for old, sign, new in pairs if not (sign and new.strip())]:
        raise ConfigError(f"--rename {bad[0]}: right would be OLD=NEW")
    plan = CuttingPlan(words(classes), {old.strip(): new.strip() for old, _, new in pairs}, cover, conflict)
    found = cut_marks(
        slides_in(tuple(p.expanduser() for p in paths)),
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
    told = ", ".join(f"{name} {n:,}" for name, n in counts.items()) or "no tile"
    ends = {"leave": "left out", "largest": "given to the one that covers more", "first": "given to the first named"}
    facts = {"out": str(out), "tiles": counts, "contested": found.contested, "problems": found.problems}
    print_result(
        facts,
        as_json,
        f"{out}: {told}; {found.contested:,} tiles that two classes claim were {ends[conflict]}",
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
    from mutirao.systems.cytology.slides.tile_labels import agreed_classes, file_of, tiles_in

    with needing_packages():
        from mutirao.dashboard.labelling_page import labelling

    place = folder.expanduser()
    file, tiles = file_of(place, reader), tiles_in(place)
    page = partial(labelling, tiles, place, reader, agreed_classes(place, words(classes)))

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
    from mutirao.systems.cytology.slides.reader_agreement import compare_readers, page_of
    from mutirao.systems.cytology.slides.tile_labels import agreed_classes, read_labels, tiles_in

    place = folder.expanduser()
    tiles, labels = tiles_in(place), read_labels(place, readers)
    slides_of = {tile.name: tile.slide for tile in tiles.tiles}
    found = compare_readers(labels, slides_of, agreed_classes(place, ()), rng(0, 0, "agreement"))
    target = out or place / "agreement.html"
    paths = {tile.name: tile.path for tile in tiles.tiles}
    write_whole(target.expanduser(), page_of(found, paths, place.resolve().name))
    differing = [found.tiles[i] for i in found.differing]
    lines = [f"{found.kind} of {', '.join(found.readers)}: {found.kappa}, drawn over {found.drawn}"]
    for a, b in found.pairs:
        lines.append(f"\n{a} (rows) and {b} (columns)" + ("" if len(found.readers) == 2 else f": {found.pairs[a, b]}"))
        wide = max(map(len, found.classes))
        lines.append(" " * wide + "".join(f"  {c:>{max(6, len(c))}}" for c in found.classes))
        for name, row in zip(found.classes, found.table(a, b).tolist(), strict=True):
            cells = "".join(f"  {n:>{max(6, len(c))}}" for n, c in zip(row, found.classes, strict=True))
            lines.append(f"{name:<{wide}}{cells}")
    lines.append(f"\n{len(found.tiles):,} tiles labelled by all, {found.partly:,} by some only")
    lines.append(f"they differ on {len(differing):,}; look at {target}")
    kappas = {f"{a}, {b}": k.facts() for (a, b), k in found.pairs.items()}
    facts = {"kind": found.kind, "kappa": found.kappa.facts(), "pairs": kappas, "tiles": len(found.tiles)}
    print_result(facts | {"partly": found.partly, "differing": differing, "page": str(target)}, as_json, *lines)


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
    from mutirao.systems.cytology.slides.tile_labels import agreed_classes, joined, read_labels, tiles_in

    place, target = folder.expanduser(), out.expanduser()
    tiles, labels = tiles_in(place), read_labels(place, readers)
    chosen, without = joined(labels, [tile.name for tile in tiles.tiles], rule)
    if not chosen:
        raise ConfigError(f"no tile of {folder} has a class by the rule {rule!r}; there are {dict(without)}")
    lab_of, by_name, who = laboratories(laboratory), tiles.by_name, " ".join(labels)
    found = ((by_name[name], label) for name, label in chosen.items())
    origins = (origin_of(tile, label, tiles.scale, lab_of(tile.slide), who) for tile, label in found)
    files = (partial(shutil.copyfile, by_name[name].path) for name in chosen)
    made = write_set(target, agreed_classes(place, ()), zip(origins, files, strict=True), tiles.scale)
    counts = {name: sum(o.label == name for o in made) for name in sorted({o.label for o in made})}
    told = ", ".join(f"{name} {n:,}" for name, n in counts.items())
    left = ", ".join(f"{n:,} {why}" for why, n in without.items()) or "none"
    scale = f"tiles of {tiles.scale}" if tiles.scale else "note: nothing says the scale of these tiles"
    facts = {"out": str(out), "tiles": counts, "left_out": dict(without), "readers": list(labels)}
    print_result(facts, as_json, f"{out}: {told}; left out: {left}", scale)


def origin_of(tile: "LabelTile", label: str, scale: Any, laboratory: str, reader: str) -> Any:
    """The line of a labelled tile; its new name holds its old path, so that no two tiles have the same."""
    from mutirao.datasets.tile_folders import Origin

    old = Path(tile.name)
    cut_here = isinstance(tile.x, int)  # x0_y512.jpg in a folder of its slide's name
    name = f"{tile.slide}_{old.name}" if cut_here else tile.name.replace("/", "_")
    mpp, size = (scale.mpp, scale.size) if scale else ("", "")
    file, lab = f"{label}/{name}", laboratory or tile.laboratory
    return Origin(file, tile.slide, lab, mpp, tile.x, tile.y, size, label, tile.name, reader)
