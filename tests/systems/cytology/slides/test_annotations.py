"""What QuPath and ASAP write, and tables, in small files of their exact layout; and files that are none of these."""

import json
from pathlib import Path

import numpy as np
import pytest

from mutirao.errors import ConfigError
from mutirao.systems.cytology.slides import annotations
from mutirao.systems.cytology.slides.annotations import Mark, read_annotations

QUPATH = {
    "type": "FeatureCollection",
    "features": [
        {
            "type": "Feature",
            "id": "4fb2c0c8-8b2f-4b0e-9d3c-2c6ed05a6b64",
            "geometry": {"type": "Polygon", "coordinates": [[[10, 10], [60, 10], [60, 60.5], [10, 60.5], [10, 10]]]},
            "properties": {
                "objectType": "annotation",
                "classification": {"name": "abnormal", "color": [200, 0, 0]},
                "isLocked": False,
            },
        },
        {
            "type": "Feature",
            "id": "6a7e",
            "geometry": {"type": "MultiPoint", "coordinates": [[5, 6], [7, 8]]},
            "properties": {
                "objectType": "annotation",
                "classification": {"names": ["Cell", "Positive"], "color": [1, 2, 3]},
            },
        },
        {
            "type": "Feature",
            "id": "PathDetectionObject",
            "geometry": {
                "type": "MultiPolygon",
                "coordinates": [
                    [[[0, 0], [9, 0], [9, 9], [0, 0]], [[1, 1], [2, 1], [2, 2], [1, 1]]],
                    [[[20, 20], [29, 20], [29, 29], [20, 20]]],
                ],
            },
            "properties": {"classification": {"name": "normal", "colorRGB": -3670016}},
        },
        {
            "type": "Feature",
            "geometry": {"type": "Point", "coordinates": [1, 2]},
            "properties": {"objectType": "annotation"},
        },
        {
            "type": "Feature",
            "geometry": {"type": "LineString", "coordinates": [[1, 2], [3, 4]]},
            "properties": {"classification": {"name": "normal"}},
        },
        {"type": "Feature", "geometry": None, "properties": {"classification": {"name": "normal"}}},
        {
            "type": "Feature",
            "geometry": {"type": "Point", "coordinates": [1e30, 2]},
            "properties": {"classification": {"name": "normal"}},
        },
        {
            "type": "Feature",
            "geometry": {"type": "Polygon", "coordinates": [[[1, 2], [3, 4]]]},
            "properties": {"classification": {"name": "normal"}},
        },
        "not a feature",
    ],
}

ASAP = """<?xml version="1.0"?>
<ASAP_Annotations>
	<Annotations>
		<Annotation Name="Annotation 0" Type="Polygon" PartOfGroup="Tumor" Color="#F4FA58">
			<Coordinates>
				<Coordinate Order="1" X="25325.4883" Y="72592.5781" />
				<Coordinate Order="0" X="21676.3555" Y="72592.5781" />
				<Coordinate Order="2" X="25325,4883" Y="76241,7109" />
			</Coordinates>
		</Annotation>
		<Annotation Name="Annotation 1" Type="Dot" PartOfGroup="normal" Color="#64FE2E">
			<Coordinates><Coordinate Order="0" X="100" Y="200" /></Coordinates>
		</Annotation>
		<Annotation Name="Annotation 2" Type="PointSet" PartOfGroup="normal" Color="#64FE2E">
			<Coordinates><Coordinate Order="0" X="1" Y="2" /><Coordinate Order="1" X="3" Y="4" /></Coordinates>
		</Annotation>
		<Annotation Name="Annotation 3" Type="Rectangle" PartOfGroup="None" Color="#64FE2E">
			<Coordinates><Coordinate Order="0" X="1" Y="2" /></Coordinates>
		</Annotation>
		<Annotation Name="Annotation 4" Type="Spline" PartOfGroup="Tumor" Color="#64FE2E">
			<Coordinates><Coordinate Order="0" X="1" Y="x" /></Coordinates>
		</Annotation>
		<Annotation Name="Annotation 5" Type="Measurement" PartOfGroup="Tumor" Color="#64FE2E">
			<Coordinates><Coordinate Order="0" X="1" Y="1" /><Coordinate Order="1" X="1" Y="9" /></Coordinates>
		</Annotation>
	</Annotations>
	<AnnotationGroups>
		<Group Name="Tumor" PartOfGroup="None" Color="#64FE2E"><Attributes /></Group>
	</AnnotationGroups>
</ASAP_Annotations>
"""


def read(tmp_path: Path, name: str, text: str) -> tuple[list[Mark], list[str]]:
    (tmp_path / name).write_text(text, encoding="utf-8")
    return read_annotations(tmp_path / name)


@pytest.mark.parametrize("form", ["collection", "array"])
def test_qupaths_features_are_read_and_those_of_no_use_named(tmp_path: Path, form: str) -> None:
    content = QUPATH if form == "collection" else QUPATH["features"]
    marks, problems = read(tmp_path, "s1.geojson", json.dumps(content))
    assert [(m.label, m.is_point, len(m.rings)) for m in marks] == [
        ("abnormal", False, 1),
        ("Cell: Positive", True, 1),
        ("Cell: Positive", True, 1),
        ("normal", False, 2),  # with its hole
        ("normal", False, 1),
    ]
    assert marks[0].rings[0].max(0).tolist() == [60, 60.5]
    assert marks[2].rings[0].tolist() == [[7, 8]]
    assert [p.partition(": ")[0] for p in problems] == [f"s1.geojson, feature {i}" for i in range(4, 10)]
    said = " ".join(problems)
    assert "it has no class" in said
    assert "a LineString has no area" in said
    assert "cannot be on a slide" in said
    assert "three points at least" in said


def test_a_single_feature_and_a_collection_of_geometries_are_read(tmp_path: Path) -> None:
    point = {"type": "Point", "coordinates": [3, 4, 0]}
    feature = {
        "type": "Feature",
        "geometry": {"type": "GeometryCollection", "geometries": [point, point]},
        "properties": {"classification": "normal"},
    }
    marks, problems = read(tmp_path, "a.json", json.dumps(feature))
    assert [m.label for m in marks] == ["normal", "normal"]
    assert problems == []


def test_asaps_annotations_are_read_in_their_order_and_with_decimal_commas(tmp_path: Path) -> None:
    marks, problems = read(tmp_path, "s1.xml", ASAP)
    assert [(m.label, m.is_point) for m in marks] == [("Tumor", False), *[("normal", True)] * 3]
    assert np.allclose(marks[0].rings[0][[0, 2]], [[21676.3555, 72592.5781], [25325.4883, 76241.7109]])
    assert [p.split(":")[0] for p in problems] == [f"s1.xml, annotation {i}" for i in (4, 5, 6)]
    assert "part of no group" in problems[0]


def test_tables_of_points_and_of_boxes_with_the_names_that_programs_use(tmp_path: Path) -> None:
    points, none = read(tmp_path, "p.csv", "X;Y;Label;Image\n1;2;normal;a.svs\n3;4;abnormal;\n\n")
    assert [(m.label, m.is_point, m.slide) for m in points] == [("normal", True, "a.svs"), ("abnormal", True, "")]
    assert none == []
    boxes, problems = read(
        tmp_path, "b.csv", "xmin,ymin,xmax,ymax,class\n1,2,11,22,normal\n5,5,1,9,x\n1,,3,4,x\n1,2,3,4,\n1,2,nan,4,x\n"
    )
    assert boxes[0].rings[0].tolist() == [[1, 2], [11, 2], [11, 22], [1, 22]]
    assert [p.split(":")[0] for p in problems] == [f"b.csv, line {i}" for i in (3, 4, 5, 6)]
    assert "a box cannot have -4 x 4 pixels" in problems[0]
    sized, _ = read(tmp_path, "w.tsv", "x\ty\twidth\theight\tclassification\n1\t2\t10\t20\tnormal\n")
    assert sized[0].rings[0].tolist() == boxes[0].rings[0].tolist()


BOMB = '<!DOCTYPE a [<!ENTITY b "bbbbbbbbbb"><!ENTITY c "&b;&b;&b;">]><ASAP_Annotations>&c;</ASAP_Annotations>'


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("a.geojson", "{", "is not JSON"),
        ("a.geojson", "[" * 100_000, "is not JSON"),
        ("a.geojson", '"text"', "is not GeoJSON"),
        ("a.geojson", '{"type": "FeatureCollection"}', "is not GeoJSON"),
        ("a.xml", BOMB, "declares a document type"),
        ("a.xml", BOMB.replace("DOCTYPE", "doctype"), "declares a document type"),
        ("a.xml", "<ASAP_Annotations>", "is not XML"),
        ("a.xml", "<Annotations MicronsPerPixel='0.25'/>", "begins with <Annotations>"),
        ("a.csv", "Centroid X µm,Centroid Y µm,Class\n1,2,a\n", "right would be columns x, y and class"),
        ("a.csv", "", "right would be columns x, y and class"),
        ("a.txt", "x", "annotations end in .geojson"),
        ("a.csv", "x,y,class\n\0", "not a text file"),
    ],
)
def test_a_file_that_is_none_of_them_is_one_line(tmp_path: Path, name: str, text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said) as error:
        read(tmp_path, name, text)
    assert "\n" not in str(error.value)
    assert name in str(error.value)


def test_a_file_that_is_too_large_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(annotations, "MOST_BYTES", 10)
    with pytest.raises(ConfigError, match="at most 10 bytes"):
        read(tmp_path, "a.csv", "x,y,class\n1,2,a\n")
