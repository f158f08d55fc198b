"""`mutirao slides`: cut slides into tiles, select and preview them, screen slides, and export models."""

import functools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mutirao.cli.options import FILE, FOLDER, JSON, CommandGroup, print_result
from mutirao.errors import ConfigError

if TYPE_CHECKING:
    from mutirao.systems.cytology.slides.tiling import Choice

MppOf = Callable[[Path], float | None]  # micrometres a pixel of a slide; None: as the slide says


def choosing(command: Callable[..., None]) -> Callable[..., None]:
    """Add the options of tile selection; the command gets them as one `choice`."""

    @click.option("--min-variance", default=0.5, show_default=True, help="Drop tiles of lower local variance: blurred.")
    @click.option("--min-entropy", default=0.1, show_default=True, help="Drop tiles of fewer bits a pixel: empty.")
    @click.option("--quantile", default=1.0, show_default=True, help="Keep this share of each slide's tiles, the best.")
    @click.option("--top", default=0, show_default="all", help="Keep at most this many tiles of each slide, the best.")
    @functools.wraps(command)
    def with_choice(min_variance: float, min_entropy: float, quantile: float, top: int, **rest: Any) -> None:
        from mutirao.systems.cytology.slides.tiling import Choice

        command(choice=Choice(min_variance, min_entropy, quantile, top), **rest)

    return with_choice


def scaling(command: Callable[..., None]) -> Callable[..., None]:
    """Add the options for slides of unknown pixel size; the command gets them as one `mpp_of`."""

    @click.option("--mpp", type=float, help="Micrometres a pixel of slides that do not state it.")
    @click.option("--mpp-table", type=FILE, help="CSV with columns slide, mpp, for slides that do not state it.")
    @functools.wraps(command)
    def with_scale(mpp: float | None, mpp_table: Path | None, **rest: Any) -> None:
        from mutirao.systems.cytology.slides.readers import read_mpp_table

        if mpp is not None and not 0.02 <= mpp <= 50:
            raise ConfigError(f"--mpp: {mpp!r} is not between 0.02 and 50 micrometres a pixel")
        known = read_mpp_table(mpp_table.expanduser()) if mpp_table else {}
        command(mpp_of=lambda path: known.get(path.name, known.get(path.stem, mpp)), **rest)

    return with_scale


@click.group(cls=CommandGroup)
def slides() -> None:
    """Cut, label and screen whole slides (for research only).

    Not a medical device.

    Example: mutirao slides tile slides/ --out tiles
    """


@slides.command()
@click.argument("paths", nargs=-1, required=True, type=FILE, metavar="SLIDE|FOLDER...")
@click.option("--out", type=FOLDER, default=Path("tiles"), show_default=True, help="Folder; each slide gets one in it.")
@click.option("--size", default=512, show_default=True, help="Pixels of a tile's side.")
@click.option("--mpp-out", type=float, help="Micrometres a pixel of the tiles [default: 0.5].")
@click.option("--magnification", type=float, help="Instead of --mpp-out: 20 is 0.5, 40 is 0.25 micrometres a pixel.")
@click.option("--overlap", default=0, show_default=True, help="Pixels that neighbouring tiles share.")
@click.option("--image", type=click.Choice(["jpg", "png"]), default="jpg", show_default=True, help="Image format.")
@click.option("--workers", type=click.IntRange(min=0), default=0, help="Threads [default: one a core].")
@scaling
@choosing
@JSON
def tile(
    paths: tuple[Path, ...],
    out: Path,
    mpp_out: float | None,
    magnification: float | None,
    workers: int,
    mpp_of: MppOf,
    choice: "Choice",
    as_json: bool,
    **cut: Any,
) -> None:
    """Cut slides into tiles, without the glass, and rank them.

    Each slide gets a folder with tiles/, the table tiles.csv and preview.jpg. Slides that are already cut are skipped.
    A slide that cannot be read is named and skipped; the exit code is then 1.

    \b
    Examples:
      mutirao slides tile slides/ --out tiles
      mutirao slides tile smear.svs --magnification 40 --top 500
    """
    from mutirao.systems.cytology.slides.readers import find_slides
    from mutirao.systems.cytology.slides.tiling import Cut, tile_all

    if magnification is not None and (mpp_out is not None or magnification <= 0):
        raise ConfigError("give either --mpp-out or a --magnification above 0")
    mpp = mpp_out or 0.5
    # A pixel is taken as 0.5 micrometres at magnification 20, and as 0.25 at 40.
    if magnification:
        mpp = 10 / magnification
    how = Cut(mpp=mpp, **cut)
    found: list[dict[str, Any]] = []

    def watch(path: Path, facts: dict[str, Any] | str, known: bool) -> None:
        if isinstance(facts, str):
            click.echo(f"left out: {facts}", err=True)
            return
        found.append(facts)
        if not as_json:
            tiles = f"{facts['tiles']:,} tiles, {facts['background']:,} are glass, {facts['kept']:,} kept"
            click.echo(f"{path.name}: {tiles}{' (done before)' if known else ''}")

    slides_ = find_slides(tuple(p.expanduser() for p in paths))
    problems = tile_all(slides_, out, how, choice, mpp_of, watch, workers)
    said = f"{len(found)} of {len(slides_)} slides are in {out}"
    print_result({"slides": found, "problems": problems}, as_json, said)
    sys.exit(1 if problems else 0)


def done_slides(folder: Path) -> list[Path]:
    """The folders of cut slides: those in `folder`, or `folder` itself."""
    if (folder / "tiles.csv").exists():
        return [folder]
    places = sorted(p.parent for p in folder.glob("*/tiles.csv"))
    if not places:
        raise ConfigError(f"{folder} holds no slide that was cut; run mutirao slides tile first")
    return places


@slides.command()
@click.argument("folder", type=FOLDER)
@choosing
@click.option("--prune", is_flag=True, help="Also delete the files of tiles that are not kept.")
@JSON
def select(folder: Path, choice: "Choice", prune: bool, as_json: bool) -> None:
    """Select tiles again with other thresholds.

    Only the columns `kept`, `score` and `why` of tiles.csv change.

    \b
    Examples:
      mutirao slides select tiles --quantile 0.5
      mutirao slides select tiles --top 200 --prune
    """
    from mutirao.systems.cytology.slides.tiling import choose, read_tile_table, write_tile_table

    rows = {}
    lines = []
    for place in done_slides(folder.expanduser()):
        tiles = choose(read_tile_table(place / "tiles.csv"), choice)
        write_tile_table(tiles, place / "tiles.csv")
        if prune:
            for t in tiles:
                if not t.kept:
                    (place / "tiles" / t.name).unlink(missing_ok=True)
        reasons = {w: sum(t.why == w for t in tiles) for w in ("background", "variance", "entropy", "rank")}
        rows[place.name] = {"tiles": len(tiles), "kept": sum(t.kept for t in tiles), **reasons}
        dropped = ", ".join(f"{k} {v:,}" for k, v in reasons.items() if v)
        kept = f"{rows[place.name]['kept']:,} of {len(tiles):,} kept"
        lines.append(f"{place.name}: {kept}; dropped: {dropped or 'none'}")
    print_result(rows, as_json, *lines)


@slides.command()
@click.argument("slide", type=FILE)
@click.option("--tiles", "folder", type=FOLDER, required=True, help="This slide's folder, as written by `tile`.")
@click.option("--out", type=FILE, help="Picture to write [default: preview.jpg in that folder].")
@scaling
def preview(slide: Path, folder: Path, out: Path | None, mpp_of: MppOf) -> None:
    """Draw the tiles on a thumbnail of the slide.

    Kept tiles are green, tiles dropped by rank or threshold orange.

    Example: mutirao slides preview slides/smear.svs --tiles tiles/smear
    """
    from mutirao.systems.cytology.slides.readers import open_slide
    from mutirao.systems.cytology.slides.tiling import draw_preview as draw
    from mutirao.systems.cytology.slides.tiling import preview_overview, read_tile_table

    tiles = read_tile_table(folder.expanduser() / "tiles.csv")
    path = slide.expanduser()
    opened = open_slide(path, mpp_of(path))
    try:
        target = out or folder.expanduser() / "preview.jpg"
        draw(*preview_overview(opened), tiles, target)
    finally:
        opened.close()
    click.echo(f"written: {target}")


@slides.command()
@click.argument("slide", type=FILE)
@click.option("--model", "model_path", type=FILE, required=True, help="A run folder, or a model from `export`.")
@click.option("--out", type=FOLDER, help="Folder [default: screening/NAME].")
@click.option("--size", type=int, help="Pixels of a tile [default: as the model was trained].")
@click.option("--mpp-out", type=float, help="Micrometres a pixel of the tiles [default: as the model was trained].")
@click.option("--anyway", is_flag=True, help="Allow another tile size or scale than in training.")
@scaling
@choosing
@JSON
def screen(
    slide: Path,
    model_path: Path,
    out: Path | None,
    size: int | None,
    mpp_out: float | None,
    anyway: bool,
    mpp_of: MppOf,
    choice: "Choice",
    as_json: bool,
) -> None:
    """Score the tiles of a slide with a model: heat map and page.

    The page also shows the most suspicious tiles and the score of the slide. For research only.

    Example: mutirao slides screen slides/smear.svs --model runs/cytology
    """
    from mutirao.research_notice import NOTICE
    from mutirao.systems.cytology.slides.screening import cut_for, write_screening
    from mutirao.systems.cytology.slides.screening import screen_slide as look
    from mutirao.systems.cytology.trained import network_at

    model = network_at(model_path.expanduser())
    path = slide.expanduser()
    cut = cut_for(model, size, mpp_out, anyway)
    trained = (model.facts.get("tile"), model.facts.get("mpp"))
    if any(trained) and trained != (cut.size, cut.mpp):
        click.echo(
            f"WARNING: the model was trained on tiles of {trained[0]} pixels at {trained[1]}, these differ", err=True
        )
    found = look(path, model, cut, choice, mpp_of(path))
    target = out or Path("screening") / path.stem
    facts = write_screening(found, model, target)
    score = "no tile was scored" if facts["score"] is None else f"score {facts['score']:.3f}"
    said = f"{path.name}: {score}; {facts['scored']:,} tiles scored, {facts['above_half']:,} above 0.5"
    print_result(facts, as_json, said, f"look at {target / 'index.html'}. {NOTICE}")


@slides.command()
@click.argument("run", type=FOLDER)
@click.option("--out", type=FILE, required=True, help="File that ends in .safetensors, .pt or .onnx.")
@click.option(
    "--round",
    "which",
    type=click.Choice(["best", "last"]),
    default="best",
    show_default=True,
    help="Which round's model.",
)
def export(run: Path, out: Path, which: str) -> None:
    """Write the model of a cytology run as one file.

    It holds backbone and head. `slides screen` reads .safetensors and .pt (torch.load with weights_only=True); .onnx is
    for other programs.

    Example: mutirao slides export runs/cytology --out model.onnx
    """
    from mutirao.systems.cytology.slides.models import save_model
    from mutirao.systems.cytology.trained import network_of_run

    model = network_of_run(run.expanduser(), which)
    save_model(model, out.expanduser())
    click.echo(f"written: {out}, {out.expanduser().stat().st_size:,} bytes, {len(model.classes)} classes")


@slides.command()
@click.argument("out", type=FILE, metavar="OUT.tiff")
@click.option("--width", default=8192, show_default=True, help="Width in pixels.")
@click.option("--height", default=8192, show_default=True, help="Height in pixels.")
@click.option("--mpp", default=0.5, show_default=True, help="Micrometres a pixel.")
@click.option("--cells", default=25.0, show_default=True, help="Cells in a square millimetre.")
@click.option("--abnormal", default=0.15, show_default=True, help="Share of abnormal cells.")
@click.option(
    "--laboratory",
    type=click.IntRange(1, 3),
    default=1,
    show_default=True,
    help="Stain and focus of a laboratory.",
)
@click.option("--seed", default=0, show_default=True, help="Random seed.")
def make(
    out: Path, width: int, height: int, mpp: float, cells: float, abnormal: float, laboratory: int, seed: int
) -> None:
    """Create a synthetic smear as a pyramidal TIFF.

    A table says where its cells are.

    Example: mutirao slides make smear.tiff --width 40000 --height 40000 --mpp 0.25
    """
    from mutirao.systems.cytology.slides.synthetic_slides import LABORATORIES, Smear, write_slide

    if out.suffix.lower() not in (".tif", ".tiff"):
        raise ConfigError(f"{out}: a synthetic slide's name ends in .tiff")
    if not 0 <= abnormal <= 1 or cells <= 0:
        raise ConfigError("--abnormal is a share from 0 to 1, and --cells is above 0")
    path = out.expanduser()
    found = write_slide(path, Smear(width, height, mpp, cells, abnormal), LABORATORIES[laboratory - 1], seed)
    cells_made = f"{len(found):,} cells, {found.abnormal.sum():,} abnormal"
    click.echo(f"written: {out}, {path.stat().st_size:,} bytes, {cells_made}")
