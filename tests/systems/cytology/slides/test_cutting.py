"""From marks to class folders: where tiles lie, whose they are when two claim them, and what is left out by name."""

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from PIL import Image

from mutirao.cli import main
from mutirao.errors import ConfigError
from mutirao.systems.cytology.slides.annotations import Mark
from mutirao.systems.cytology.slides.cutting import CuttingPlan, Tally, places_of, resolve_conflict
from mutirao.systems.cytology.slides.readers import open_slide
from mutirao.systems.cytology.slides.synthetic_slides import Cells
from mutirao.systems.cytology.slides.tiling import Cut


def square(label: str, x: float, y: float, side: float) -> tuple[str, Mark]:
    ring = np.array([[x, y], [x + side, y], [x + side, y + side], [x, y + side]], float)
    return label, Mark(label, (ring if side else ring[:1],), f"{label} at {x:g}")


def places(smear: tuple[Path, Cells], *marks: tuple[str, Mark], **plan: Any) -> tuple[dict[Any, str], Tally]:
    tally, slide = Tally(), open_slide(smear[0])  # 3000 x 2100 pixels of 0.5 micrometres
    try:
        found = places_of(slide, marks, Cut(size=128, mpp=1.0), CuttingPlan(("a", "b"), **plan), tally)
    finally:
        slide.close()
    return {place: label for place, (label, _) in found.items()}, tally


def test_points_and_small_areas_are_in_the_middle_and_large_areas_on_the_grid(smear: tuple[Path, Cells]) -> None:
    found, tally = places(smear, square("a", 1000, 1000, 0), square("b", 500, 300, 100), square("a", 2990, 5, 0))
    assert found == {(872, 872): "a", (422, 222): "b", (2744, 0): "a"}  # the last one moved onto the slide
    assert tally.contested == 0
    large, _ = places(smear, square("a", 256 + 120, 256, 500))  # covers 136/256 of a column, then a whole, then 108/256
    assert sorted(large) == [(256, 256), (256, 512), (512, 256), (512, 512)]
    assert sorted(places(smear, square("a", 376, 256, 500), cover=0.4)[0]) == sorted([*large, (768, 256), (768, 512)])


def test_a_tile_that_two_classes_claim_goes_by_the_rule(smear: tuple[Path, Cells]) -> None:
    near = square("a", 1000, 1000, 0), square("b", 1050, 1000, 0)
    assert places(smear, *near)[0] == {}
    assert places(smear, *near)[1].contested == 2
    assert set(places(smear, *near, conflict="first")[0].values()) == {"a"}
    inner = square("b", 256, 256, 512), square("a", 300, 300, 40)
    left, tally = places(smear, *inner)
    assert left == {(512, 256): "b", (256, 512): "b", (512, 512): "b"}
    assert tally.contested == 2  # the grid's tile, and the one centred on the small area
    stepped = square("a", 256, 256, 512), square("b", 256, 256 + 90, 700)
    more = places(smear, *stepped, conflict="largest")[0]
    assert (more[256, 256], more[256, 768], more.get((256, 512))) == ("a", "b", None)  # both cover the last one whole
    assert resolve_conflict({"a": 1.0, "b": 1.0}, CuttingPlan(conflict="largest")) is None


def test_marks_beside_the_slide_or_on_too_little_of_a_tile_are_named(smear: tuple[Path, Cells]) -> None:
    thin = "a", Mark("a", (np.array([[0, 100], [900, 100], [900, 110], [0, 110]], float),), "s.xml, annotation 7")
    found, tally = places(smear, square("a", 5000, 10, 0), square("b", -50, -50, 10), thin, square("b", -40, 400, 300))
    assert found == {(0, 512): "b"}
    assert "a at 5000: (5000, 10) is not on smear.tiff, 3000 x 2100" in tally.problems
    assert "b at -50: (-50, -50) is not on smear.tiff, 3000 x 2100" in tally.problems
    assert "s.xml, annotation 7: it covers 0.5 of no tile; smaller tiles or --cover" in tally.problems


def test_the_class_and_the_cover_must_be_possible() -> None:
    for plan in ({"cover": 0.0}, {"classes": ("../x",)}, {"rename": {"a": "b/c"}}, {"conflict": "first"}):
        with pytest.raises(ConfigError):
            CuttingPlan(**plan)  # type: ignore[arg-type]


def cut(*args: str) -> Any:
    return CliRunner().invoke(main, ["slides", "cut", *args])


def test_cells_of_a_slide_become_a_training_set_and_every_trouble_is_a_line(
    smear: tuple[Path, Cells], tmp_path: Path
) -> None:
    slide, cells = smear
    features = [
        {
            "type": "Feature",
            "geometry": {"type": "Point", "coordinates": [float(x), float(y)]},
            "properties": {"classification": {"name": "ASC-H" if bad else "Normal"}},
        }
        for x, y, bad in zip(cells.x, cells.y, cells.abnormal, strict=True)
    ]
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "smear.geojson").write_text(json.dumps({"type": "FeatureCollection", "features": features}))
    (tmp_path / "notes" / "other.geojson").write_text(json.dumps(features[:2]))
    (tmp_path / "notes" / "broken.xml").write_text("<nothing")
    (tmp_path / "notes" / "more.csv").write_text("x,y,class,slide\n500,500,odd,smear.tiff\n9,9,Normal,smear\n")
    (tmp_path / "text.svs").write_text("no slide")
    (tmp_path / "notes" / "text.csv").write_text("x,y,class\n5,5,Normal\n")
    run = cut(
        *(str(slide), str(tmp_path / "text.svs"), "--annotations", str(tmp_path / "notes"), "--size", "64"),
        *("--out", str(tmp_path / "set"), "--classes", "abnormal,normal", "--rename", "ASC-H=abnormal", "--json"),
        *("--conflict", "first", "--laboratory", "lab 2", "--reader", "ana"),
    )
    assert run.exit_code == 1, run.output
    found = json.loads(run.stdout)
    said = "\n".join(found["problems"])
    assert "other.geojson: 2 marks, but there is no slide called other" in said
    assert "broken.xml is not XML" in said
    assert "1 marks of the class 'odd', which is none of abnormal, normal" in said
    assert "text.svs is not a slide that can be read" in said
    assert len(found["problems"]) == 4
    rows = list(csv.DictReader((tmp_path / "set" / "origins.csv").open()))
    assert len(rows) == sum(found["tiles"].values()) > 0.9 * len(cells)
    assert {(r["slide"], r["laboratory"], r["mpp"], r["size"], r["reader"]) for r in rows} == {
        ("smear", "lab 2", "0.5", "64", "ana")
    }
    first = rows[0]
    assert first["source"].startswith(("smear.geojson, feature ", "more.csv, line 3"))
    assert Path(first["file"]).name == f"smear_x{first['x']}_y{first['y']}.png"
    opened = open_slide(slide)
    pixels = np.asarray(Image.open(tmp_path / "set" / first["file"]))
    assert np.array_equal(pixels, opened.region(int(first["x"]), int(first["y"]), 64, 64))
    opened.close()
    for row in rows:  # an abnormal nucleus is in every abnormal tile, and in no normal one
        x, y = int(row["x"]), int(row["y"])
        inside = (cells.x >= x) & (cells.x < x + 64) & (cells.y >= y) & (cells.y < y + 64) & cells.abnormal
        assert inside.any() == (row["class"] == "abnormal")
    assert json.loads((tmp_path / "set" / "tiles.json").read_text())["size"] == 64


def test_a_lone_pair_belongs_together_and_nothing_to_cut_is_one_line(smear: tuple[Path, Cells], tmp_path: Path) -> None:
    (tmp_path / "points.csv").write_text("x,y,class\n500,500,a\n1500,900,A\n900,1500,b\n")
    run = cut(str(smear[0]), "--annotations", str(tmp_path / "points.csv"), "--out", str(tmp_path / "set"))
    assert run.exit_code == 0, run.output
    assert "a 2, b 1; 0 tiles that two classes claim were left out" in run.output  # A is a
    bad = cut(
        str(smear[0]), "--annotations", str(tmp_path / "points.csv"), "--out", str(tmp_path / "x"), "--classes", "z,y"
    )
    assert bad.exit_code == 2
    assert bad.output.startswith("error: no mark can be used in 1 files; ")
    coarse = [str(smear[0]), "--annotations", str(tmp_path / "points.csv"), "--out", str(tmp_path / "y")]
    fine = cut(*coarse, "--mpp-out", "0.1")
    assert "coarser than --mpp-out 0.1" in fine.output
    assert fine.exit_code == 1
