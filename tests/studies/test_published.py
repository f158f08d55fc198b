"""What papers say, beside what we measured."""

import csv
import json
import math
from pathlib import Path

import pytest

from mutirao.errors import ConfigError
from mutirao.report import render
from mutirao.studies.comparison import compare_methods, header_of, latex, write_tables
from mutirao.studies.published import PublishedValue, read_published_values
from mutirao.studies.study import read_study, run_study
from mutirao.studies.study_display import result_tables

STUDY = """
recipe = "quickstart"
metrics = ["accuracy", "loss"]
seeds = 2
[threshold]
accuracy = 0.2
[settings]
rounds = 2
clients = 6
per_round = 6
epochs = 1
[methods.fedavg]
[methods.slow]
lr = 0.001
[published]
source = "Silva et al., Example 2020, table 1"
note = "On other digits."
[published.values.fedavg]
accuracy = { value = 0.5, half = 0.01, note = "read off a curve" }
[published.values.slow]
accuracy = 2.0
[published.rounds_to.fedavg]
accuracy = 17
"""


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("published")
    (folder / "s.toml").write_text(STUDY)
    study = read_study(folder / "s.toml")
    assert run_study(study, folder / "out", workers=1) == []
    write_tables(study, compare_methods(study, folder / "out"), folder / "out")
    return folder


def test_published_values_stand_beside_ours_in_every_table(finished: Path) -> None:
    study = read_study(finished / "s.toml")
    lines = compare_methods(study, finished / "out")
    by = {(x.method, x.metric): x for x in lines}
    ours = by["fedavg", "accuracy"]
    assert ours.apart == pytest.approx(ours.final.mean - 0.5)
    assert ours.within is (abs(ours.final.mean - 0.5) <= ours.final.half)
    assert by["slow", "accuracy"].within is False
    assert by["slow", "loss"].published is None
    assert by["slow", "loss"].within is None

    rows = list(csv.DictReader((finished / "out/table.csv").read_text().splitlines()))
    assert [row["published"] for row in rows] == ["0.5 ± 0.01", "2", "", ""]
    assert rows[0]["published rounds"] == "17"
    assert rows[1]["ours - published"] == f"{by['slow', 'accuracy'].final.mean - 2:+.4f}"
    assert rows[1]["within"] == "no"
    table = json.loads((finished / "out/table.json").read_text())
    assert table["published"]["source"].startswith("Silva")
    assert table["lines"][0]["published"]["value"] == 0.5
    assert table["lines"][0]["published"]["note"] == "read off a curve"
    assert table["lines"][1]["published"]["half"] is None
    assert table["lines"][3]["published"] is None
    assert "Published: Silva et al., Example 2020, table 1. On other digits." in (finished / "out/table.md").read_text()
    assert r"method & accuracy & published & loss \\" in (finished / "out/table.tex").read_text()
    assert r"0.5 $\pm$ 0.01" in latex(lines)
    page = render(finished / "out")
    assert "Published accuracy beside ours" in page
    assert "Published loss beside ours" not in page
    assert "read off a curve" in page
    tables = result_tables(lines)
    assert [str(table.title) for table in tables] == ["accuracy", "accuracy, published", "loss"]
    heads = ["published", "ours - published", "within", "published rounds"]
    assert [str(column.header) for column in tables[1].columns][-4:] == heads
    assert tables[1].row_count == 2


def test_a_study_without_published_values_has_no_such_columns(finished: Path) -> None:
    plain = STUDY[: STUDY.index("[published]")]
    (finished / "plain.toml").write_text(plain)
    lines = compare_methods(read_study(finished / "plain.toml"), finished / "out")
    assert "published" not in header_of(lines)
    assert "published" not in latex(lines)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (("published.values.slow", "published.values.slwo"), "no method 'slwo'; did you mean 'slow'?"),
        (("accuracy = 2.0", "acuracy = 2.0"), "'acuracy' is not one of the study's metrics; did you mean 'accuracy'?"),
        (("accuracy = 2.0", 'accuracy = "x"'), "published.values.slow: accuracy: 'x' is not a number"),
        (("accuracy = 2.0", "accuracy = nan"), "nan is not a number"),
        (("accuracy = 2.0", "accuracy = { half = 1 }"), "the value is missing"),
        (("accuracy = 2.0", "accuracy = { value = 1, half = -1 }"), "at least 0"),
        (("accuracy = 2.0", "accuracy = { value = 1, haf = 1 }"), "unknown key 'haf'; did you mean 'half'?"),
        (('source = "Silva et al., Example 2020, table 1"', ""), "name the source of the values"),
        (('source = "Silva et al., Example 2020, table 1"', "source = 3"), "source must be text"),
        (("note =", "notes ="), "unknown key 'notes'; did you mean 'note'?"),
        (("accuracy = 17", "loss = 17"), "'loss' has no [threshold]"),
    ],
)
def test_what_the_study_does_not_measure_is_refused_before_anything_runs(
    tmp_path: Path, change: tuple[str, str], said: str
) -> None:
    (tmp_path / "s.toml").write_text(STUDY.replace(*change))
    with pytest.raises(ConfigError) as caught:
        read_study(tmp_path / "s.toml")
    assert said in str(caught.value)
    assert str(tmp_path / "s.toml") in str(caught.value)


def test_a_published_metric_that_no_cell_has_is_refused_where_the_study_names_none(tmp_path: Path) -> None:
    text = STUDY.replace('metrics = ["accuracy", "loss"]', "").replace("accuracy = 2.0", "f1 = 2.0")
    (tmp_path / "s.toml").write_text(text)
    with pytest.raises(ConfigError, match="no cell has a metric 'f1'"):
        run_study(read_study(tmp_path / "s.toml"), tmp_path / "out", workers=1)
    assert not (tmp_path / "out").exists()


def test_claims_as_text() -> None:
    assert str(PublishedValue(0.682)) == "0.682"
    assert str(PublishedValue(0.275, 0.041)) == "0.275 ± 0.041"
    assert str(PublishedValue(rounds=500)) == ""
    assert read_published_values(None, (), (), ()).claims == {}
    only = read_published_values({"source": "x", "rounds_to": {"a": {"rmse": 2}}}, ["a"], [], ["rmse"])
    assert only.claims["a", "rmse"].rounds == 2
    assert math.isnan(only.claims["a", "rmse"].value)


@pytest.mark.parametrize("table", [3, "x", [1]])
def test_what_is_no_table_is_refused(table: object) -> None:
    for wrong in (table, {"source": "x", "values": table}, {"source": "x", "values": {"a": table}}):
        with pytest.raises(ConfigError, match="must be a table"):
            read_published_values(wrong, ["a"], (), ())


def test_the_projects_own_studies_can_be_read() -> None:
    for path in sorted((Path(__file__).parents[2] / "studies").glob("*.toml")):
        assert read_study(path).cells
