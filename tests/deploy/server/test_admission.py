"""With how many samples sites were admitted: the server's folder may say, and the round goes by it."""

from dataclasses import replace
from pathlib import Path

import pytest

from loopgrid import connected, identity, softmax_task
from mutirao.aggregation import FedAvg
from mutirao.core.rounds import Run, train
from mutirao.deploy.server.control_calls import admitted_samples
from mutirao.errors import ConfigError
from mutirao.selection import everyone

__all__ = ["identity"]  # a fixture that holds for all tests here, too


def test_a_site_counts_for_no_more_than_twice_what_it_was_admitted_with(tmp_path: Path) -> None:
    task = softmax_task()
    large, *others = sorted(task.population)
    held = {c: (x[:40], y[:40]) if c in others else (x, y) for c, (x, y) in task.population.items()}
    (tmp_path / "samples.toml").write_text(f'"{large}" = 30\n', encoding="utf-8")
    _, fleet = connected(replace(task, population=held))
    fleet.admitted = admitted_samples(tmp_path)
    run = Run(task.initial())
    (done,) = train(run, fleet, rounds=1, select=everyone, aggregate=FedAvg(), expect=len(held))
    assert {row["client"]: row["n"] for row in done.clients} == dict.fromkeys(others, 40) | {large: 60}
    assert [row.get("n_declared") for row in done.clients] == [120, None, None, None, None]
    assert run.roster.first_n[run.roster.row(large)] == 30


def test_without_such_a_file_nothing_is_known_and_a_wrong_one_is_refused_by_name(tmp_path: Path) -> None:
    assert admitted_samples(tmp_path) == {}
    (tmp_path / "samples.toml").write_text("recife = 0\n", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"samples.toml: recife: 0 is too small, at least 1 is needed"):
        admitted_samples(tmp_path)
