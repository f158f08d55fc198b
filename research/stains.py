"""What stain normalisation and augmentation bring where laboratories differ: `python -m research.stains`.

Laboratories A, B and C train a linear head together (FedAvg); judged are tiles of other slides of theirs, and tiles of
laboratory D, which took no part and stains and scans in its own way. Five seeds, each with slides of its own; the
control is stain=none with augment=none. About ten CPU minutes. `--picture` draws the laboratories' tiles instead.
"""

import argparse
import io
import json
import logging
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageDraw

from mutirao.config import resolve
from mutirao.core.rounds import Run
from mutirao.experiments.task import Task, federate
from mutirao.metrics import auc, balanced_accuracy
from mutirao.simulation.local_fleet import LocalFleet
from mutirao.stats import interval, paired
from mutirao.systems.cytology.recipe import Config
from mutirao.systems.cytology.slides.synthetic_slides import TILE, Laboratory, Smear, TileRenderer
from mutirao.systems.images.client import Hospital
from mutirao.systems.images.features import Extractor
from mutirao.systems.images.heads import probabilities, trained_part
from mutirao.systems.images.stain import NORMALIZERS, simulate_scanner
from mutirao.training.optimizers import one_thread
from mutirao.training.samples import Samples

Pixels = npt.NDArray[np.uint8]

# Stain and focus, then the scanner: gain of each channel, exponent of light, blur in pixels.
PLACES: dict[str, tuple[Laboratory, tuple[Any, float, float]]] = {
    "A": (
        Laboratory("A", (0.94, 0.95, 0.95), (0.92, 0.66, 0.70), (0.62, 0.80, 0.82), (0.28, 0.22, 0.42), 0.8, 1.2),
        ((1.0, 1.0, 1.0), 1.0, 0.0),
    ),
    "B": (
        Laboratory("B", (0.97, 0.96, 0.92), (0.93, 0.72, 0.58), (0.70, 0.82, 0.74), (0.36, 0.26, 0.34), 1.6, 1.8),
        ((1.0, 0.98, 0.94), 0.85, 0.6),
    ),
    "C": (
        Laboratory("C", (0.90, 0.92, 0.96), (0.80, 0.58, 0.74), (0.52, 0.68, 0.84), (0.20, 0.18, 0.40), 1.2, 2.0),
        ((0.97, 1.0, 1.0), 1.1, 0.3),
    ),
    "D": (
        Laboratory("D", (0.96, 0.93, 0.93), (0.86, 0.46, 0.58), (0.66, 0.62, 0.80), (0.30, 0.14, 0.34), 2.0, 2.4),
        ((1.0, 0.93, 0.90), 1.3, 1.0),
    ),
}
ARMS = {
    "none": ("none", "none"),
    "macenko": ("macenko", "none"),
    "reinhard": ("reinhard", "none"),
    "augment": ("none", "stain"),
}
EACH, VIEWS = 20, 2  # tiles of each class a laboratory, to train and to test; views of those trained on
SETTINGS = {"rounds": 30, "epochs": 2, "lr": 3e-3, "validation": 0}


def draw_tiles(
    place: str, seed: int, normal: int, abnormal: int, what: str
) -> tuple[list[Pixels], npt.NDArray[np.int64]]:
    """So many tiles of 128 micrometres without and with an abnormal nucleus, from as many slides as it takes."""
    laboratory, scanner = PLACES[place]
    found: dict[int, list[Pixels]] = {0: [], 1: []}
    wanted, slide = (normal, abnormal), 0
    while any(len(found[label]) < wanted[label] for label in found):
        smear, name = Smear(4096, 4096, 0.25, per_mm2=70, abnormal=0.3), f"{what} {place} {slide}"
        renderer = TileRenderer.of(smear, laboratory, seed, name)
        slide += 1
        for column, row in np.ndindex(8, 8):
            x, y = renderer.cells.x - TILE * column, renderer.cells.y - TILE * row
            inside = (np.minimum(x, y) > 40) & (np.maximum(x, y) < TILE - 40)  # whole nuclei
            if inside.any():
                label = int(renderer.cells.abnormal[inside].any())
                if len(found[label]) < wanted[label]:
                    found[label].append(simulate_scanner(shrink(renderer.tile(column, row)), *scanner))
    return found[0] + found[1], np.repeat([0, 1], wanted)


def shrink(pixels: Pixels) -> Pixels:
    """A tile at half its size."""
    return np.asarray(Image.fromarray(pixels).reduce(2))


def as_png(pixels: Pixels) -> bytes:
    """The tile as a file holds it."""
    out = io.BytesIO()
    Image.fromarray(pixels).save(out, "PNG", compress_level=1)
    return out.getvalue()


def features(tiles: list[Pixels], extract: Extractor) -> npt.NDArray[np.float32]:
    """What the head is given of these tiles."""
    with one_thread():
        return np.stack([extract.of_content(as_png(tile)) for tile in tiles])


def one(arm: str, seed: int) -> dict[str, float]:
    """One federation, judged at home and abroad."""
    stain, augment = ARMS[arm]
    config = resolve(Config, {**SETTINGS, "seed": seed})
    extract = Extractor(views=VIEWS, stain=stain, augment=augment)
    plain = Extractor(views=1, stain=stain)
    drawn = {place: draw_tiles(place, seed, EACH, EACH, "train") for place in "ABC"}
    clients = {place: Samples(features(tiles, extract), y) for place, (tiles, y) in drawn.items()}
    trainer = Hospital.of(config, lambda: trained_part(extract.network, "head", 2))
    task = Task(trainer, clients, lambda: trainer.initial(seed))
    run = Run(task.initial(), seed=seed)
    for _ in federate(LocalFleet(_Plain(trainer), clients), config, task, run):
        pass
    row: dict[str, float] = {}
    held = {place: draw_tiles(place, seed, EACH, EACH, "test") for place in PLACES}
    found = {p: probabilities(trainer.fill(run.arrays), features(tiles, plain)) for p, (tiles, _) in held.items()}
    for where, places in (("own", "ABC"), ("unseen", "D")):
        p, y = np.concatenate([found[k] for k in places]), np.concatenate([held[k][1] for k in places])
        row[f"{where} auc"] = auc(p[:, 1], y == 1)
        row[f"{where} balanced"] = balanced_accuracy(y, p.argmax(1), 2)
    return row


class _Plain:
    """A hospital that keeps nothing back to validate on."""

    def __init__(self, trainer: Hospital) -> None:
        self.trainer = trainer
        self.capabilities = trainer.capabilities

    def __call__(self, request: Any, site: Any) -> Any:
        return self.trainer.train(request, site)


def report(rows: dict[str, list[dict[str, float]]]) -> Iterator[str]:
    """The table: means with intervals over seeds, and the difference from the control, paired by seed."""
    yield "| stain, augment | own AUC | own balanced acc. | unseen AUC | unseen balanced acc. | unseen AUC - control |"
    yield "|---|---|---|---|---|---|"
    for arm, some in rows.items():
        cells = []
        for name in ("own auc", "own balanced", "unseen auc", "unseen balanced"):
            found = interval([r[name] for r in some])
            cells.append(f"{found.mean:.3f} ± {found.half:.3f}")
        against = paired([r["unseen auc"] for r in some], [r["unseen auc"] for r in rows["none"]])
        gap = "control" if arm == "none" else f"{against.difference.mean:+.3f} ± {against.difference.half:.3f}"
        yield f"| {arm} | {' | '.join(cells)} | {gap} |"


def picture(path: Path, seed: int = 0) -> None:
    """Two tiles of each laboratory as they are, by both normalisations, and augmented."""
    from mutirao.systems.images.stain import jitter

    side, columns = 168, 4
    canvas = Image.new("RGB", (90 + 8 * (side + 6), 24 + columns * (side + 6)), "white")
    pen = ImageDraw.Draw(canvas)
    for c, place in enumerate(PLACES):
        tiles = draw_tiles(place, seed, 2, 2, "picture")[0]
        pen.text((96 + 2 * c * (side + 6), 6), f"laboratory {place}{' (unseen)' if place == 'D' else ''}", fill="black")
        for k, tile in enumerate((tiles[0], tiles[-1])):
            small = np.asarray(Image.fromarray(tile).resize((224, 224), Image.Resampling.BILINEAR))
            rows = {
                "as it is": small,
                "macenko": NORMALIZERS["macenko"](small),
                "reinhard": NORMALIZERS["reinhard"](small),
            }
            for r, (name, shown) in enumerate((rows | {"augmented": jitter(small, f"{place} {k}")}).items()):
                pen.text((4, 24 + r * (side + 6) + side // 2), name, fill="black")
                at = (90 + (2 * c + k) * (side + 6), 24 + r * (side + 6))
                canvas.paste(Image.fromarray(shown).resize((side, side)), at)
    canvas.save(path, quality=90, subsampling=0)  # colours are what it is about


def main() -> None:
    """Run what is asked for."""
    parser = argparse.ArgumentParser(prog="python -m research.stains", description=__doc__)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--arms", default=",".join(ARMS), help="some of them, separated by commas")
    parser.add_argument("--picture", type=Path, help="draw the laboratories' tiles into this file, and end")
    args = parser.parse_args()
    logging.getLogger("mutirao").setLevel(logging.ERROR)
    if args.picture:
        return picture(args.picture)
    rows: dict[str, list[dict[str, float]]] = {arm: [] for arm in args.arms.split(",")}
    start = time.process_time()
    for seed in range(args.first, args.first + args.seeds):
        for arm, some in rows.items():
            some.append(one(arm, seed))
            print(
                json.dumps({"seed": seed, "arm": arm, **some[-1], "cpu": round(time.process_time() - start)}),
                flush=True,
            )
    print("\n".join(report(rows)))
    return None


if __name__ == "__main__":
    main()
