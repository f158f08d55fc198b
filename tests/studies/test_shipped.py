"""The studies that come with the project can be read: every cell of each resolves to a configuration."""

from pathlib import Path

import pytest

from mutirao.studies.study import read_study

STUDIES = sorted((Path(__file__).parents[2] / "studies").glob("*.toml"))


@pytest.mark.parametrize("path", STUDIES, ids=lambda path: path.stem)
def test_a_study_is_read(path: Path) -> None:
    assert read_study(path).cells
