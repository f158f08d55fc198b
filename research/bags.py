"""Attention against means and maxima where few tiles of a slide decide: `python -m research.bags`.

Three hospitals train a head on whole slides (FedAvg); judged are slides that nobody trained on, by AUC. Sets:

synthetic       three laboratories with their own stain and scanner; 50 painted tiles a slide, and in every second
                slide one or two of them with an abnormal cell. The tiles of a laboratory's slides come from a pool that
                is painted anew for every seed; no tile is in training and in test.
herlev-planted  Herlev's cells (`--herlev FOLDER`): 20 normal cells a bag, in every second bag one is abnormal instead.
                Real cells, but no real slides. No slide of Herlev's is in training and in test.
herlev-slides   a bag is what Herlev has of one slide, 1 to 14 cells, all normal or all abnormal: nothing is planted.

Learning rates were chosen with `--first 100 --seeds 1 --lr ...`, for each head its own; the table has other seeds.
"""

import argparse
import json
import logging
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from mutirao.config import resolve
from mutirao.core.rounds import Run
from mutirao.experiments.task import Task, federate
from mutirao.metrics import auc
from mutirao.randomness import rng
from mutirao.simulation.local_fleet import LocalFleet
from mutirao.stats import interval, paired
from mutirao.systems.cytology.recipe import Config
from mutirao.systems.images.bags import pad_bags
from mutirao.systems.images.client import Hospital
from mutirao.systems.images.features import Extractor
from mutirao.systems.images.heads import make_head, probabilities
from mutirao.training.samples import ClientData, Samples
from research.stains import draw_tiles, features

Features = npt.NDArray[np.float32]
Bags = tuple[list[Features], list[int]]
LR = {"mean": 3e-3, "max": 1e-3, "abmil": 1e-2}
SETTINGS = {"rounds": 20, "epochs": 2, "batch_size": 8, "validation": 0}


def plant(normal: Features, abnormal: Features, bags: int, tiles: int, most: int, draw: np.random.Generator) -> Bags:
    """So many bags of so many tiles; in every second one 1 to `most` of them are abnormal."""
    found, labels = [], []
    for i in range(bags):
        few = int(draw.integers(1, most + 1)) if i % 2 else 0
        parts = [normal[draw.choice(len(normal), tiles - few, replace=False)]]
        parts.append(abnormal[draw.choice(len(abnormal), few, replace=False)])
        found.append(np.concatenate(parts))
        labels.append(int(few > 0))
    return found, labels


def synthetic(seed: int, extract: Extractor, herlev: Path | None, slides: int) -> tuple[dict[str, Bags], Bags]:
    """Slides of three laboratories, and others of theirs for the test."""
    train, test = {}, ([], [])
    for place in "ABC":
        for what, normal, abnormal, bags in (("train", 120, 16, slides), ("test", 80, 16, 20)):
            tiles, y = draw_tiles(place, seed, normal, abnormal, f"bags {what}")
            x = features(tiles, extract)
            made = plant(x[y == 0], x[y == 1], bags, 50, 2, rng(seed, 0, what, place))
            if what == "train":
                train[place] = made
            else:
                test[0].extend(made[0]), test[1].extend(made[1])
    return train, test


def cells_of(herlev: Path | None, extract: Extractor) -> tuple[Features, npt.NDArray[np.bool_], npt.NDArray[np.str_]]:
    """Herlev's cells whose slide is known: features, whether abnormal, and the slide."""
    if herlev is None:
        raise SystemExit("--herlev: where are Herlev's pictures?")
    named = re.compile(r"^(\d+)-")
    files = [f for f in sorted(herlev.glob("*/*.*")) if named.match(f.name)]
    slides = np.array([named.match(f.name)[1] for f in files])  # type: ignore[index]
    return extract(files), np.array([not f.parent.name.startswith("normal") for f in files]), slides


def herlev_planted(seed: int, extract: Extractor, herlev: Path | None, bags: int) -> tuple[dict[str, Bags], Bags]:
    """Bags of normal cells of other people, an abnormal one planted in every second."""
    x, abnormal, slides = cells_of(herlev, extract)
    draw = rng(seed, 0, "herlev")
    # Whole slides: a fifth for each hospital, two for the test.
    place = dict(zip(names := np.unique(slides), draw.permutation(np.arange(len(names)) % 5), strict=True))
    where = np.array([place[s] for s in slides])
    train = {}
    for k in range(3):
        own = where == k
        train[f"client_{k + 1}"] = plant(x[own & ~abnormal], x[own & abnormal], bags, 20, 1, draw)
    held = where >= 3
    return train, plant(x[held & ~abnormal], x[held & abnormal], 60, 20, 1, draw)


def herlev_slides(seed: int, extract: Extractor, herlev: Path | None, _: int) -> tuple[dict[str, Bags], Bags]:
    """Slides as they are."""
    x, abnormal, slides = cells_of(herlev, extract)
    draw = rng(seed, 0, "herlev slides")
    names = draw.permutation(np.unique(slides))
    made = [[x[slides == name] for name in names], [int(abnormal[slides == name].any()) for name in names]]
    parts: list[Bags] = [(made[0][k::5], made[1][k::5]) for k in range(5)]
    test = parts[3][0] + parts[4][0], parts[3][1] + parts[4][1]
    return {f"client_{k + 1}": parts[k] for k in range(3)}, test


SETS: dict[str, Callable[[int, Extractor, Path | None, int], tuple[dict[str, Bags], Bags]]] = {
    "synthetic": synthetic,
    "herlev-planted": herlev_planted,
    "herlev-slides": herlev_slides,
}


def one(head: str, train: dict[str, Bags], test: Bags, seed: int, lr: float, width: Any) -> float:
    """The AUC over test slides of one federation."""
    config = resolve(Config, {**SETTINGS, "lr": lr, "seed": seed, "head": head})
    trainer = Hospital.of(config, lambda: make_head(head, width, "head", 2))
    none = Samples(pad_bags([np.zeros((1, 1, width.width), np.float32)]), [0], np.empty(0, np.intp))
    clients = {name: ClientData(Samples(pad_bags(x), y), none) for name, (x, y) in train.items()}
    task = Task(trainer, clients, lambda: trainer.initial(seed))
    run = Run(task.initial(), seed=seed)
    for _ in federate(LocalFleet(trainer, clients), config, task, run):
        pass
    found = probabilities(trainer.fill(run.arrays), pad_bags(test[0]))[:, 1]
    return auc(found, np.array(test[1]) == 1)


def pooled(train: dict[str, Bags]) -> dict[str, Bags]:
    """All slides in one place."""
    held = list(train.values())
    return {"pooled": ([bag for x, _ in held for bag in x], [label for _, y in held for label in y])}


def report(rows: dict[str, dict[str, list[float]]]) -> Iterator[str]:
    """Means with intervals over seeds, and attention against the others, paired by seed."""
    yield "| slides | mean | max | abmil | abmil - mean | abmil - max | abmil, pooled |"
    yield "|---|---|---|---|---|---|---|"
    for name, found in rows.items():
        cells = [f"{(i := interval(found[head])).mean:.3f} ± {i.half:.3f}" for head in ("mean", "max", "abmil")]
        for other in ("mean", "max"):
            gap = paired(found["abmil"], found[other]).difference
            cells.append(f"{gap.mean:+.3f} ± {gap.half:.3f}")
        at_once = interval(found["abmil, pooled"])
        yield f"| {name} | {' | '.join(cells)} | {at_once.mean:.3f} ± {at_once.half:.3f} |"


def main() -> None:
    """Run what is asked for."""
    parser = argparse.ArgumentParser(
        prog="python -m research.bags", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sets", default="synthetic", help=f"some of {','.join(SETS)}")
    parser.add_argument("--herlev", type=Path, help="a folder of Herlev's classes")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--slides", type=int, default=100, help="slides (or planted bags) a hospital trains on")
    parser.add_argument("--lr", type=float, help="one learning rate for all heads, to choose by")
    args = parser.parse_args()
    logging.getLogger("mutirao").setLevel(logging.ERROR)
    extract, start = Extractor(views=1), time.process_time()
    rows: dict[str, dict[str, list[float]]] = {}
    for name in args.sets.split(","):
        for seed in range(args.first, args.first + args.seeds):
            train, test = SETS[name](seed, extract, args.herlev, args.slides)
            arms = {head: (head, train) for head in LR} | {"abmil, pooled": ("abmil", pooled(train))}
            for arm, (head, held) in arms.items():
                found = one(head, held, test, seed, args.lr or LR[head], extract.network)
                rows.setdefault(name, {}).setdefault(arm, []).append(found)
            last = {arm: round(some[-1], 4) for arm, some in rows[name].items()}
            print(
                json.dumps({"set": name, "seed": seed, **last, "cpu": round(time.process_time() - start)}), flush=True
            )
    print("\n".join(report(rows)))


if __name__ == "__main__":
    main()
