"""Policies that remember go on, after any end, as if there had been none; and none of them goes with sums alone."""

from pathlib import Path
from typing import Any

import pytest

from mutirao.config import resolve
from mutirao.errors import ConfigError
from mutirao.report import execute
from mutirao.systems.selection_lab import Config

SMALL = {"clients": 10, "per_round": 3, "epochs": 1, "devices": "fedcs", "clients_every": -1}
POLICIES: dict[str, dict[str, Any]] = {
    "oort": {"select.pace": 30.0, "select.pace_step": 1, "select.blacklist": 2},
    "hicsfl": {},
    "divfl": {},
    "mix": {"select.scores": "version_age + dissimilarity"},
    "fedcor": {"select.warmup": 2, "select.interval": 2},
}


@pytest.mark.parametrize("policy", POLICIES)
def test_a_run_in_two_parts_is_that_in_one(policy: str, tmp_path: Path) -> None:
    settings = {**SMALL, "select": policy, **POLICIES[policy]}
    if policy == "hicsfl":
        settings["select.gamma"] = 0.0  # which cools down by how many rounds a run has
    whole = execute("selection", resolve(Config, {**settings, "rounds": 7}), tmp_path / "whole", pictures=False)
    execute("selection", resolve(Config, {**settings, "rounds": 4}), tmp_path / "parts", pictures=False)
    parts = execute(
        "selection", resolve(Config, {**settings, "rounds": 7}), tmp_path / "parts", resume=True, pictures=False
    )
    assert parts["digest"] == whole["digest"]


@pytest.mark.parametrize("policy", POLICIES)
def test_what_looks_at_single_clients_is_refused_with_secure_aggregation(policy: str, tmp_path: Path) -> None:
    settings = {**SMALL, "devices": "none", "secure": "secagg+", "rounds": 1, "select": policy, **POLICIES[policy]}
    with pytest.raises(ConfigError, match=r"uses the .* of single clients, and secure=secagg\+ shows"):
        execute("selection", resolve(Config, settings), tmp_path / "run")
