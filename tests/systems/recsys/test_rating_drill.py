"""The drill of a recommender: as it is, every rating is read; where privacy is promised, no more than by guessing."""

import json
from pathlib import Path
from typing import Any

import pytest

from mutirao.privacy.trials import Trial
from mutirao.systems.recsys.rating_drill import MAX_GAIN, RatingDrill, drill_ratings


@pytest.fixture(scope="module")
def drilled(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Trial]:
    folder, trial = tmp_path_factory.mktemp("ratings"), Trial("ratings", "")
    drill_ratings(folder, trial, RatingDrill(users=30, summed=8))
    return folder, trial


def results(folder: Path) -> dict[str, dict[str, Any]]:
    return {one["rule"]: one for one in json.loads((folder / "ratings.json").read_text())["told"]}


@pytest.mark.slow
@pytest.mark.parametrize(
    "rule",
    ["as it is (download=touched)", "download=all", "privacy=central, at the server", "epochs=5", "taken: as it is"],
)
def test_where_single_updates_are_seen_everything_is_read(drilled: tuple[Path, Trial], rule: str) -> None:
    found = results(drilled[0])[rule]
    assert (found["precision"], found["recall"]) == (1.0, 1.0)
    assert found["read"] == 1.0 if rule != "download=all" else found["read"] > 0.9
    assert not found["private"]


def test_where_privacy_is_promised_reading_gives_no_more_than_guessing(drilled: tuple[Path, Trial]) -> None:
    private = {name: one for name, one in results(drilled[0]).items() if one["private"]}
    assert len(private) == 5
    for name, one in private.items():
        assert one["learned"] <= MAX_GAIN, name
        by_nothing = max(0.0, one["usual"] - one["guessed"])  # how people rate in general may be the better guess
        assert one["gain"] <= MAX_GAIN + by_nothing, name
        assert one["precision"] < 0.6, name
    assert drilled[1].good


@pytest.mark.slow
def test_of_real_ratings_no_more_is_read_than_by_each_users_mean(real_data: Path, tmp_path: Path) -> None:
    trial = Trial("ratings", "")
    drill_ratings(tmp_path, trial, RatingDrill(data=str(real_data / "ml-100k"), users=25, summed=20))
    found = results(tmp_path)
    assert found["as it is (download=touched)"]["read"] == 1.0
    explicit = {name: one["gain"] for name, one in found.items() if one["private"] and not name.startswith("taken")}
    assert len(explicit) == 3
    assert max(explicit.values()) <= MAX_GAIN, explicit


def test_half_measures_are_shown_as_what_they_are(drilled: tuple[Path, Trial]) -> None:
    found = results(drilled[0])
    assert found["clipped to 1, hardly any noise"]["recall"] > 0.9
    assert found["privacy=local, noise 0.03"]["gain"] > 0.1
    summed = found["secagg+, sum of 8"]
    assert summed["gain"] > found["secagg+, one masked update"]["gain"], "rare items are of one user each"


def test_there_is_a_picture_and_a_table(drilled: tuple[Path, Trial]) -> None:
    folder, trial = drilled
    assert (folder / "ratings.png").read_bytes().startswith(b"\x89PNG")
    assert len(trial.facts["table"]) == 17
    assert "of" in trial.happened
