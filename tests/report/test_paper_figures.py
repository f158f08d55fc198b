"""Figures for papers: vector files of the size asked for, drawn from real folders, and clear refusals."""

import json
import re
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from mutirao.cli import main
from mutirao.report.paper_figures import first_round_at, space_out
from mutirao.runs.reader import Record


def make(folder: Path, per_round: int, seed: int, slope: float) -> None:
    folder.mkdir(parents=True)
    (folder / "config.toml").write_text(f'recipe = "iris"\nper_round = {per_round}\nclients = 8\nseed = {seed}\n')
    values = [1 - 1 / (1 + slope * r) for r in range(1, 11)]
    rows = "".join(f"{r},{v},{1 - v}\n" for r, v in enumerate(values, 1))
    (folder / "history.csv").write_text("round,accuracy,rmse\n" + rows)
    rng = np.random.default_rng(seed)
    chosen = [f"{r},c{c},1,0.5,{rng.normal()}" for r in range(1, 11) for c in rng.choice(8, 3, replace=False)]
    (folder / "clients.csv").write_text("round,client,replied,weight,risk\n" + "\n".join(chosen) + "\n")
    (folder / "partition.csv").write_text("client,cat,dog\n0,5,1\n1,0,8\n2,3,3\n")
    scan = "space,from,to,groups,noise\nall,0.1,1,2,0.5\nfirst 2,0.01,0.1,3,0.25\nfirst 2,0.1,inf,1,0\n"
    (folder / "eps_scan.csv").write_text(scan)


@pytest.fixture
def study(tmp_path: Path) -> Path:
    for method, slope in (("fast", 1.0), ("slow", 0.2)):
        for per_round in (2, 4):
            for seed in (0, 1):
                make(tmp_path / "cells" / method / f"per_round{per_round}-seed{seed}", per_round, seed, slope)
    plan = {"methods": ["slow", "fast"], "threshold": {"accuracy": 0.7}}
    (tmp_path / "study.json").write_text(json.dumps(plan))
    return tmp_path


def plot(*words: str) -> str:
    done = CliRunner().invoke(main, ["plot", *words])
    assert done.exit_code == 0, done.output
    return done.stdout


@pytest.mark.parametrize("kind", ["bands", "ablation", "best", "histogram", "users"])
def test_a_study_becomes_a_pdf_of_one_column(study: Path, kind: str) -> None:
    plot(str(study), kind, "--out", str(study / "fig.pdf"))
    content = (study / "fig.pdf").read_bytes()
    assert content.startswith(b"%PDF")
    box = re.search(rb"/MediaBox \[\s*0 0 ([\d.]+) ([\d.]+)", content)
    assert box
    assert float(box[1]) == pytest.approx(3.4 * 72, abs=1)
    assert b"/Type3" not in content  # text can be edited and searched


@pytest.mark.parametrize("kind", ["labels", "weights", "eps", "bands", "histogram", "best"])
def test_a_run_becomes_an_svg_whose_text_is_text(study: Path, kind: str) -> None:
    run = study / "cells" / "fast" / "per_round2-seed0"
    plot(str(run), kind, "--out", str(study / "fig.svg"), "--width", "7")
    text = (study / "fig.svg").read_text()
    assert 'width="504pt"' in text
    assert "<text" in text


def test_bars_stand_for_the_rounds_it_took(study: Path) -> None:
    plot(str(study), "users", "--out", str(study / "u.svg"))
    text = (study / "u.svg").read_text()
    assert ">&gt;10<" in text or ">>10<" in text  # the slow one never gets there
    first = first_round_at(Record.of(study / "cells/fast/per_round2-seed0"), "accuracy", 0.7)
    assert first == 3  # 1 - 1/(1 + r) >= 0.7
    assert first_round_at(Record.of(study / "cells/fast/per_round2-seed0"), "rmse", 0.3) == 3
    assert first_round_at(Record.of(study / "cells/slow/per_round2-seed0"), "accuracy", 0.7) == float("inf")


def test_labels_are_moved_apart_and_kept_in_order() -> None:
    moved = space_out([0.1, 0.11, 0.12, 0.9], 0.1)
    assert all(b - a > 0.0999 for a, b in pairwise(moved))
    assert moved[-1] == 0.9


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["eps"], "holds no eps_scan.csv"),
        (["labels"], "holds no partition.csv"),
        (["weights"], "holds no finished run"),
        (["bands", "--metric", "acuracy"], "did you mean 'accuracy'?"),
        (["bands", "--width", "99"], "99 inches"),
        (["labels", "--target", "3"], "labels takes no --target"),
        (["users", "--metric", "rmse"], "say which rmse"),
        (["bands", "--out", "x.gif"], "ends in .png"),
        (["bnds"], "did you mean 'bands'?"),
    ],
)
def test_what_cannot_be_drawn_is_said_in_a_line(study: Path, words: list[str], said: str) -> None:
    done = CliRunner().invoke(main, ["plot", str(study), *words])
    assert done.exit_code == 2
    assert said in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
