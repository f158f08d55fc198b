"""Small synthetic slides that the tests of slides share."""

from pathlib import Path

import pytest

from mutirao.systems.cytology.slides.synthetic_slides import LABORATORIES, Cells, Smear, write_slide


@pytest.fixture(scope="session")
def smear(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Cells]:
    """A slide of 3000 x 2100 pixels, so that its edge is no tile's edge, and its cells."""
    path = tmp_path_factory.mktemp("slides") / "smear.tiff"
    return path, write_slide(path, Smear(3000, 2100, 0.5, per_mm2=12), LABORATORIES[1], seed=3)
