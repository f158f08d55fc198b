"""The systems that can be reproduced: their files hold, they fit the time, and data are found or said to be missing."""

import re
import time
from pathlib import Path

import pytest

from mutirao.errors import ConfigError
from mutirao.studies.confirmation import write_toml
from mutirao.studies.reproduction import (
    NAMES,
    OutOfTime,
    at_most,
    find_system_data,
    largest_size,
    list_cuts,
    read_system,
    study_table,
)
from mutirao.studies.study import read_study


@pytest.mark.parametrize("name", NAMES)
def test_every_form_is_a_study_that_can_be_read(name: str, tmp_path: Path) -> None:
    system = read_system(name)
    for form in (system.quick, system.full, largest_size(system, 0.1)):
        file = tmp_path / "study.toml"
        file.write_text(write_toml(study_table(system, form, system.data.stand_in, True)))
        study = read_study(file)
        assert len(study.cells) == form.runs
        assert "stand-in" in study.published.note or not study.published.source
    assert {m for c in system.claims for m in c.methods} <= {*system.full.methods}
    assert {c.metric for c in system.claims if c.metric} <= {*study.metrics}
    assert system.quick.minutes < 10 <= system.full.minutes
    assert (Path(__file__).parents[2] / system.page).is_file()


@pytest.mark.parametrize("name", NAMES)
def test_the_more_time_the_larger_and_never_longer_than_asked(name: str) -> None:
    system = read_system(name)
    forms = [largest_size(system, minutes) for minutes in (0.1, 1, 3, 5, 10, 20, 50, 100, 500)]
    for minutes, form in zip((0.1, 1, 3, 5, 10, 20, 50, 100, 500), forms, strict=True):
        assert form.minutes <= minutes
        assert (list_cuts(system, form) == []) == (minutes >= system.full.minutes)
    assert forms[-1] == system.full
    full = [form for form in forms if form.settings == system.full.settings]
    assert [form.runs for form in full] == sorted(form.runs for form in full)


def test_what_was_cut_is_said() -> None:
    system = read_system("fedrisk")
    assert list_cuts(system, largest_size(system, 0.3)) == ["seeds: 1 of 5", "rounds: 10 instead of 100"]
    said = list_cuts(read_system("aoiu"), read_system("aoiu").quick)
    assert "methods: 4 of 6, without powerofchoice, oort" in said
    assert "partition.size: 100 instead of 500" in said
    assert "rounds are counted to accuracy 0.25, not 0.6" in said


def test_rounds_to_another_threshold_do_not_stand_beside_published_ones() -> None:
    system = read_system("aoiu")
    quick, full = (study_table(system, form, "digits", False)["published"] for form in (system.quick, system.full))
    assert full["rounds_to"]["aoi"] == {"accuracy": 41}
    assert quick["rounds_to"]["aoi"] == {}
    assert quick["values"].keys() == {*system.quick.methods}


def test_data_are_found_by_what_they_hold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    system = read_system("recsys")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("MUTIRAO_DATA", raising=False)
    (tmp_path / "a" / "ml-1m").mkdir(parents=True)  # empty
    monkeypatch.setenv("MUTIRAO_DATA", str(tmp_path / "a"))
    assert find_system_data(system, None) is None
    (tmp_path / "a" / "ml-1m" / "ratings.dat").touch()
    assert find_system_data(system, None) == find_system_data(system, tmp_path / "a") == tmp_path / "a" / "ml-1m"
    assert find_system_data(system, tmp_path / "a" / "ml-1m") == tmp_path / "a" / "ml-1m"
    with pytest.raises(ConfigError, match=re.escape("contains ratings.dat; expected MovieLens-1M")):
        find_system_data(system, tmp_path)


def test_a_block_ends_when_its_minutes_are_over() -> None:
    with pytest.raises(OutOfTime), at_most(0.05 / 60):
        time.sleep(30)
    with at_most(0.05 / 60):
        pass
    time.sleep(0.1)  # nothing comes after the block
    with at_most(None):
        pass


def test_an_unknown_system_is_refused() -> None:
    with pytest.raises(ConfigError, match="did you mean 'groups'"):
        read_system("group")
