"""Screen a slide: score its tiles with a trained model, and show the most suspicious on a page.

The page is for a pathologist who takes part in research. It is not a diagnosis, and says so.
"""

import json
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageDraw

from mutirao.core.cpu_threads import core_count
from mutirao.errors import ConfigError
from mutirao.io import write_rows, write_whole
from mutirao.research_notice import NOTICE, sign_picture
from mutirao.systems.cytology.slides.models import ScreeningModel
from mutirao.systems.cytology.slides.readers import Pixels, encode_image, open_slide
from mutirao.systems.cytology.slides.tiling import (
    Choice,
    Cut,
    Tile,
    choose,
    grid,
    mask_slide,
    measure_tiles,
    preview_overview,
    shrink_picture,
)
from mutirao.systems.images.choices import BAG_HEADS
from mutirao.templates import data_uri, render
from mutirao.training.optimizers import one_thread

SHOWN = 24  # tiles on the contact sheet
TOP = 10  # tiles that the slide's score is the mean of
COLUMNS = 6
THUMB = 192


@dataclass(frozen=True)
class Scored:
    """A kept tile with its score (0 to 1), its likeliest class and, with an attention head, its attention."""

    tile: Tile
    score: float
    label: str
    attention: float | None = None
    heat: float = 0.0  # for map and ranking, 0 to 1: the score, or the attention relative to the largest


@dataclass(frozen=True)
class Screened:
    """A screened slide: its tiles, the most suspicious first, its score, and its overview."""

    name: str
    tiles: tuple[Scored, ...]
    score: float
    picture: Pixels
    scale: float
    sheet: tuple[Pixels, ...]
    all_tiles: int
    cut: Cut
    words: str  # how the slide's score is computed
    ranked_by: str = "suspicious"


def cut_for(model: ScreeningModel, size: int | None, mpp: float | None, anyway: bool = False) -> Cut:
    """Tiles of the scale that the model was trained on; if it is not stored, `size` and `mpp` are needed.

    On tiles of another scale a model gives wrong scores without an error: that needs `anyway`.
    """
    known = (model.facts.get("tile"), model.facts.get("mpp"))
    size = size or known[0]
    mpp = mpp or known[1]
    if all(known) and (size, mpp) != known and not anyway:
        raise ConfigError(
            f"the model was trained on tiles of {known[0]} pixels at {known[1]:g} micrometres a pixel, not {size} at "
            f"{mpp:g}; leave out --size and --mpp-out, or add --anyway to screen at another scale"
        )
    if not size or not mpp:
        raise ConfigError(
            "the model does not contain the scale of its training pictures; give --size and --mpp-out "
            "so that a tile shows as much as one of them"
        )
    return Cut(size=int(size), mpp=float(mpp))


def screen_slide(
    path: Path,
    model: ScreeningModel,
    cut: Cut | None = None,
    choice: Choice | None = None,
    mpp: float | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Screened:
    """Score every kept tile by the probability of all abnormal classes together.

    The slide's score is the mean of its ten most suspicious tiles, since a few cells decide. A model with a head for
    slides gives the score itself; with attention, tiles are ranked and coloured by it. The default `cut` has the scale
    that the model was trained on.
    """
    cut = cut or cut_for(model, None, None)
    abnormal = model.abnormal
    if not abnormal.any():
        raise ConfigError(f"the model has no abnormal class among {', '.join(model.classes)}; see the setting 'normal'")
    slide = open_slide(path, mpp)
    try:
        seen = mask_slide(slide)
        tiles = choose(list(measure_tiles(slide, grid(slide, cut, seen), cut, None)), choice or Choice())
        kept = [t for t in tiles if t.kept]

        is_slide_head = model.head in BAG_HEADS
        features: dict[Tile, Any] = {}

        def score_tile(tile: Tile) -> Scored:
            pixels = slide.region(tile.x, tile.y, tile.side, cut.size)
            if is_slide_head:
                features[tile] = model.features(pixels)
                predicted = model.classify_slide(features[tile][None])[0]
            else:
                predicted = model(pixels)
            score = float(predicted[abnormal].sum())
            return Scored(tile, score, model.classes[int(predicted.argmax())], heat=score)

        scored = []
        with one_thread(), ThreadPoolExecutor(core_count(), "mutirao-screen") as pool:
            for i, one in enumerate(pool.map(score_tile, kept), 1):
                scored.append(one)
                if progress is not None:
                    progress(i, len(kept))
        words = f"mean of the {TOP} most suspicious tiles"
        slide_score = None
        if is_slide_head and scored:
            predicted, attention = model.classify_slide(np.stack([features[s.tile] for s in scored]))
            words = f"by all tiles together (head {model.head})"
            slide_score = float(predicted[abnormal].sum())
            if model.head == "abmil":
                top = attention.max()
                for i, weight in enumerate(attention):
                    scored[i] = replace(scored[i], attention=float(weight), heat=float(weight / top))
        ranked = sorted(scored, key=lambda s: (-s.heat, s.tile.y, s.tile.x))
        overview = preview_overview(slide)
        sheet = tuple(slide.region(s.tile.x, s.tile.y, s.tile.side, THUMB) for s in ranked[:SHOWN])
    finally:
        slide.close()
    score = slide_score
    if score is None:
        score = float(np.mean([s.score for s in ranked[:TOP]] or [np.nan]))
    by = "attended" if model.head == "abmil" else "suspicious"
    return Screened(path.name, tuple(ranked), score, *overview, sheet, len(tiles), cut, words, by)


def colour(score: float) -> tuple[int, int, int]:
    """From pale yellow over orange to dark red, readable for the colour-blind."""
    stops = np.array([[255, 247, 188], [254, 196, 79], [236, 112, 20], [128, 20, 10]], np.float64)
    place = min(max(score, 0.0), 1.0) * (len(stops) - 1)
    low = min(int(place), len(stops) - 2)
    r, g, b = stops[low] + (place - low) * (stops[low + 1] - stops[low])
    return int(r), int(g), int(b)


def heat_map(found: Screened) -> Image.Image:
    """The overview of the slide with each scored tile coloured."""
    base, by = shrink_picture(found.picture, found.scale)
    over = base.copy()
    pen = ImageDraw.Draw(over)
    for s in found.tiles:
        x = s.tile.x / by
        y = s.tile.y / by
        side = s.tile.side / by
        pen.rectangle((x, y, x + side - 1, y + side - 1), fill=colour(s.heat))
    return Image.blend(base, over, 0.55)


def contact_sheet(found: Screened) -> Image.Image:
    """The most suspicious tiles, in order, each with its score."""
    rows = max(1, -(-len(found.sheet) // COLUMNS))
    canvas = Image.new("RGB", (COLUMNS * (THUMB + 8) + 8, rows * (THUMB + 28) + 8), "white")
    pen = ImageDraw.Draw(canvas)
    for i, (pixels, s) in enumerate(zip(found.sheet, found.tiles, strict=False)):
        x = 8 + i % COLUMNS * (THUMB + 8)
        y = 8 + i // COLUMNS * (THUMB + 28)
        canvas.paste(Image.fromarray(pixels), (x, y))
        pen.rectangle((x - 3, y - 3, x + THUMB + 2, y + THUMB + 2), outline=colour(s.heat), width=3)
        pen.text((x, y + THUMB + 5), f"{i + 1}. {s.score:.2f}  {s.label[:22]}", fill="#222222")
    return canvas


def write_screening(found: Screened, model: ScreeningModel, out: Path) -> dict[str, Any]:
    """Write scores.csv, heat.jpg, sheet.jpg, screening.json and the page index.html; return the facts."""
    rows = [[s.tile.name, s.tile.x, s.tile.y, s.tile.side, f"{s.score:.6f}", s.label] for s in found.tiles]
    names = ["tile", "x", "y", "side", "score", "class"]
    if found.ranked_by == "attended":
        names.append("attention")
        for row, s in zip(rows, found.tiles, strict=True):
            row.append(f"{s.attention:.6f}")
    write_whole(out / "scores.csv", write_rows([names, *rows]))
    pictures = {
        name: encode_image(sign_picture(picture), quality=85)
        for name, picture in (("heat.jpg", heat_map(found)), ("sheet.jpg", contact_sheet(found)))
    }
    for name, content in pictures.items():
        write_whole(out / name, content)
    facts = {
        "slide": found.name,
        "score": None if np.isnan(found.score) else round(found.score, 6),
        "tiles": found.all_tiles,
        "scored": len(found.tiles),
        "above_half": sum(s.score > 0.5 for s in found.tiles),
        "notice": NOTICE,
        "score_is": found.words,
        "model": {k: model.facts[k] for k in ("body", "classes", "abnormal")} | {"head": model.head},
        "size": found.cut.size,
        "mpp": found.cut.mpp,
        "learnt": {"size": model.facts.get("tile"), "mpp": model.facts.get("mpp")},
    }
    write_whole(out / "screening.json", json.dumps(facts, indent=2) + "\n")
    write_whole(out / "index.html", page(found, facts, pictures))
    return facts


def page(found: Screened, facts: dict[str, Any], pictures: dict[str, bytes]) -> str:
    """Render a self-contained page, which loads nothing from other hosts."""
    return render(
        "systems/cytology/slides/assets/screening.html",
        found=found,
        facts=facts,
        notice=NOTICE,
        bars=histogram([s.score for s in found.tiles]),
        scale=[colour(v / 10) for v in range(11)],
        shown=found.tiles[:SHOWN],
        heat=data_uri(pictures["heat.jpg"], "image/jpeg"),
        sheet=data_uri(pictures["sheet.jpg"], "image/jpeg"),
    )


def histogram(scores: Sequence[float]) -> list[dict[str, Any]]:
    """The scores in ten bars; the highest has 56 pixels."""
    counts: npt.NDArray[np.int64] = np.histogram(scores, 10, (0, 1))[0]
    most = max(1, int(counts.max()))
    return [
        {"count": n, "height": 56 * n / most, "colour": colour((i + 0.5) / 10)} for i, n in enumerate(counts.tolist())
    ]
