"""A study compares queries: each counts once, whatever the seeds, against values worked by hand and a real run."""

import csv
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from scipy import stats

from mutirao.cli.main import main
from mutirao.studies.study import read_study
from mutirao.systems.ranking.report import compare_queries, pair_queries

STUDY = """
recipe = "ranking"
baseline = "mean"
metrics = ["ndcg@5", "mrr@10"]
seeds = 2
[settings]
queries = 50
clients = 4
per_round = 2
rounds = 2
[over]
fold = [1, 2]
[methods.mean]
aggregate = "mean"
[methods.fedrisk]
aggregate = { name = "fedrisk", memory = "previous" }
"""


def rows(**queries: float) -> dict[str, Any]:
    return {name: {"ndcg@5": value} for name, value in queries.items()}


def test_a_query_counts_once_however_often_it_is_evaluated() -> None:
    ours = {"seed 0": rows(a=1.0, b=0.4), "seed 1": rows(a=0.0, b=0.6), "seed 2": rows(c=1.0)}
    theirs = {"seed 0": rows(a=0.5, b=0.0, z=1.0), "seed 1": rows(a=0.5, b=0.1)}
    a, b = pair_queries(ours, theirs, "ndcg@5")
    np.testing.assert_allclose(a, [0.5, 0.5])
    np.testing.assert_allclose(b, [0.5, 0.05])  # c and z are not in both


@pytest.mark.slow
def test_a_study_of_ranking_says_who_wins_which_queries(tmp_path: Path) -> None:
    file, out = tmp_path / "s.toml", tmp_path / "out"
    file.write_text(STUDY)
    done = CliRunner().invoke(main, ["study", str(file), "--out", str(out), "--workers", "1"])
    assert done.exit_code == 0, done.output
    assert "wins.png" in done.output
    assert (out / "queries.md").read_text().count("fedrisk") == 2
    (line, _) = compare_queries(read_study(file), out)
    kept: dict[str, dict[str, list[float]]] = {"mean": {}, "fedrisk": {}}
    for path in sorted(out.glob("cells/*/*/queries.csv")):  # the same, by loops
        with path.open() as text:
            for row in csv.DictReader(text):
                kept[path.parts[-3]].setdefault(row["query"], []).append(float(row["ndcg@5"]))
    gaps = [np.mean(kept["fedrisk"][q]) - np.mean(kept["mean"][q]) for q in kept["mean"]]
    assert all(len(values) == 2 for values in kept["mean"].values())  # two seeds, one fold each
    assert line.test.difference.mean == pytest.approx(np.mean(gaps), abs=1e-12)
    assert line.test.p_t == pytest.approx(stats.ttest_1samp(gaps, 0.0).pvalue)
    assert line.against.wins + line.against.losses + line.against.ties == len(gaps)
    assert line.against.wins == sum(gap > 0 for gap in gaps)


def test_runs_without_queries_leave_none(tmp_path: Path) -> None:
    file = tmp_path / "s.toml"
    file.write_text(STUDY)
    assert compare_queries(read_study(file), tmp_path / "none") == []
