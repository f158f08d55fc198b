"""Laboratories that stain and scan otherwise, with models of their own: `python -m research.personal_stains FOLDER`.

FOLDER holds cells by class, such as Herlev's. Some of its slides are dealt to four laboratories, whose pictures each
get a look of their own (stain, colour balance, light curve, focus), and the cytology recipe trains the last block of
its body. One laboratory, by lot, is new: it never trains, and adapts to be judged. All are judged on slides they kept
back. Batch normalisation of the recipe's body has statistics that stay as they are; `live` ones move with the data.
"""

import argparse
import json
import logging
import tempfile
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image
from sklearn.model_selection import StratifiedGroupKFold
from torch import nn

from mutirao.config import resolve
from mutirao.core.client_evaluation import summarise
from mutirao.core.fleet import Request, Site
from mutirao.core.rounds import Run
from mutirao.datasets.class_folders import read_image_folder
from mutirao.experiments.personal_models import ClientRoles
from mutirao.experiments.task import Recipe, Task
from mutirao.randomness import rng
from mutirao.simulation.local_fleet import LocalFleet
from mutirao.systems.cytology.recipe import Config, recipe
from mutirao.systems.images.backbones import FrozenNorm
from mutirao.systems.images.stain import hed, simulate_scanner
from mutirao.training.optimizers import one_thread
from research.personal import judge_with, report

# Each laboratory's stain (strength and shift of three dyes) and scanner (gain of each channel, light curve, blur).
LOOKS: tuple[tuple[tuple[float, ...], tuple[float, ...], tuple[float, ...], float, float], ...] = (
    ((1.0, 1.0, 1.0), (0.0, 0.0, 0.0), (1.0, 1.0, 1.0), 1.0, 0.0),
    ((1.5, 0.7, 1.0), (0.06, -0.04, 0.0), (1.0, 0.92, 0.85), 0.75, 0.8),
    ((0.6, 1.4, 1.2), (-0.05, 0.06, 0.02), (0.88, 1.0, 1.0), 1.35, 0.3),
    ((1.3, 1.3, 0.6), (0.03, 0.03, -0.04), (1.0, 0.88, 0.95), 1.5, 1.2),
)
FROZEN = {
    "fedper": {"personal": "fedper"},
    "fedbn": {"personal": "fedbn"},
    "finetune": {"personal": "finetune"},
}
LIVE = {"fedbn, live": {"personal": "fedbn"}, "finetune, live": {"personal": "finetune"}}
SETTINGS = {"trainable": "last_block", "views": 1, "validation": 0.5, "rounds": 10, "epochs": 1}
METRIC, EPOCHS, EACH = "accuracy", 3, 90  # what judges; epochs of what is personal; cells of a laboratory


def write_laboratories(cells: Path, out: Path, seed: int) -> None:
    """Deal slides of a folder to `client_1` to `client_4`, each with its look, and to a common test set as it is."""
    found = read_image_folder(cells, r"^(\d+)-")
    split = StratifiedGroupKFold(len(LOOKS) + 1, shuffle=True, random_state=seed)
    slides = np.where(found.slides == "", [f.name for f in found.files], found.slides)
    for k, (_, rows) in enumerate(split.split(slides, found.labels, slides)):
        rows = rng(seed, 0, "cells").permutation(rows)
        few = [rows[found.labels[rows] == label][:2] for label in range(len(found.classes))]  # all have all classes
        rows = rows[:EACH] if k < len(LOOKS) else np.concatenate(few)
        home = out / (f"client_{k + 1}" if k < len(LOOKS) else "global_test")
        for i in rows.tolist():
            file = home / found.classes[found.labels[i]] / f"{found.files[i].stem}.png"
            file.parent.mkdir(parents=True, exist_ok=True)
            pixels = np.asarray(Image.open(found.files[i]).convert("RGB"))
            Image.fromarray(look(pixels, k) if k < len(LOOKS) else pixels).save(file, compress_level=1)


def look(pixels: npt.NDArray[np.uint8], k: int) -> npt.NDArray[np.uint8]:
    """A picture as laboratory k stains and scans it."""
    strength, shift, gain, gamma, blur = LOOKS[k]
    return simulate_scanner(hed(pixels, strength, shift), gain, gamma, blur)


def enliven(module: nn.Module) -> nn.Module:
    """The module with batch normalisation that goes on counting, from where the frozen one is."""
    for path, part in list(module.named_modules()):
        if isinstance(part, FrozenNorm):
            live = nn.BatchNorm2d(len(part.weight), part.eps)
            live.load_state_dict(
                {"weight": part.weight, "bias": part.bias, "running_mean": part.mean, "running_var": part.var},
                strict=False,
            )
            above, _, name = path.rpartition(".")
            setattr(module.get_submodule(above), name, live)
    return module


def live_task(config: Config) -> Task:
    """The recipe's task with live normalisation."""
    task = recipe.task(config)
    hospital: Any = task.handler
    handler = replace(hospital, model=lambda: enliven(hospital.model()))
    return replace(task, handler=handler, initial=lambda: handler.initial(config.seed), evaluate=None)


def one(arms: Mapping[str, Mapping[str, Any]], kind: Recipe, shared: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    """Some methods with one seed; the last is finetune, whose model before anybody adapts it is FedAvg's."""
    rows: dict[str, dict[str, float]] = {}
    for arm, own in arms.items():
        config = resolve(Config, {**shared, **own, "personal.new": 0.25, "personal.epochs": EPOCHS})
        task = kind.prepare(config)
        fleet, run = LocalFleet(task.handler, task.population), Run(task.initial(), seed=config.seed)
        *_, last = kind.flow(fleet, config, task, run)
        rows[arm] = {"mean": last.row[METRIC], "worst": last.row[f"{METRIC}_worst"], "new": last.row[f"new_{METRIC}"]}
    new, trainer = ClientRoles.of(config, task.population).new, task.handler.trainer  # type: ignore[attr-defined]

    def figures(models: Mapping[str, Any]) -> dict[str, float]:
        told = {c: judge_with(trainer, arrays, task.population[c], METRIC) for c, arrays in models.items()}
        known = summarise(METRIC, [v for c, v in told.items() if c not in new])
        strange = [v for c, v in told.items() if c in new]
        return {"mean": known[f"{METRIC}_mean"], "worst": known[f"{METRIC}_worst"], "new": float(np.mean(strange))}

    rows["fedavg"] = figures(dict.fromkeys(task.population, run.arrays))
    if kind is not recipe:
        return rows  # whoever is alone needs no live statistics: there is nobody to differ from
    told = {"seed": config.seed, "round": 1, "epochs": config.rounds * config.epochs}
    sites = {c: Site(c, task.population[c]) for c in task.population}
    grown = {c: trainer.train(Request("train", trainer.initial(config.seed), told), site) for c, site in sites.items()}
    rows["alone"] = figures({c: reply.arrays for c, reply in grown.items()})
    return rows


def main() -> None:
    """Run what is asked for."""
    parser = argparse.ArgumentParser(prog="python -m research.personal_stains", description=__doc__)
    parser.add_argument("folder", type=Path, help="cells by class, such as Herlev's")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    args = parser.parse_args()
    logging.getLogger("mutirao").setLevel(logging.ERROR)
    rows: dict[str, list[dict[str, float]]] = {}
    start = time.process_time()
    for seed in range(args.first, args.first + args.seeds):
        with tempfile.TemporaryDirectory() as folder, one_thread():
            write_laboratories(args.folder, Path(folder), seed)
            shared = {**SETTINGS, "data": folder, "seed": seed, "evaluate_every": 10**6}
            found = one(FROZEN, recipe, shared)
            live = one(LIVE, replace(recipe, task=live_task), shared)
        found |= {k if "live" in k else f"{k}, live": row for k, row in live.items()}
        for arm, row in found.items():
            rows.setdefault(arm, []).append(row)
            print(json.dumps({"seed": seed, "arm": arm, **{k: round(v, 4) for k, v in row.items()}}), flush=True)
    said = {"mean": "mean", "worst": "worst laboratory", "new": "new laboratory"}
    print("\n".join(report(rows, ("fedavg", "alone", *FROZEN, "fedavg, live", *LIVE), said)))
    print(f"{time.process_time() - start:.0f} CPU seconds")


if __name__ == "__main__":
    main()
