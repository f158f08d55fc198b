"""What is given back: in a terminal, in a notebook, in an editor."""

import builtins
import doctest
import importlib
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sklearn.datasets import load_iris
from torch import nn

import mutirao as mu

X, Y = load_iris(return_X_y=True)


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> mu.Result:
    folder = tmp_path_factory.mktemp("result") / "<i>run"
    data = {f"<b>{i}": (X[i::3].astype(np.float32), Y[i::3]) for i in range(3)}
    return mu.run(lambda: nn.Linear(4, 3), data, rounds=3, out=folder)


def test_it_says_itself_in_a_line(result: mu.Result) -> None:
    best = result.best["accuracy"]
    assert repr(result) == f"Result({result.folder}: accuracy {best:.4f} in round {result.best_round} of 3 rounds)"


def test_a_notebook_shows_it_with_nothing_from_elsewhere_and_nothing_unescaped(result: mu.Result) -> None:
    page = result._repr_html_()
    assert "<i>run" not in page
    assert "&lt;i&gt;run" in page
    assert page.count("<polyline") == 6
    assert "http" not in page
    assert "<td>balanced_accuracy</td>" in page
    framed = result.report._repr_html_()
    assert "<i>run" not in framed
    assert Path(result.report).read_text(encoding="utf-8").startswith("<!")
    assert str(result.report).endswith("report.html")


def test_tables_are_frames_where_there_is_pandas(result: mu.Result, monkeypatch: pytest.MonkeyPatch) -> None:
    assert result.history["round"].tolist() == [1, 2, 3]
    assert set(result.clients["client"]) == {"<b>0", "<b>1", "<b>2"}
    real: Callable[..., Any] = importlib.import_module

    def without(name: str, *more: Any) -> Any:
        if name == "pandas":
            raise ImportError(name)
        return real(name, *more)

    monkeypatch.setattr(importlib, "import_module", without)
    assert [row["round"] for row in result.history] == [1, 2, 3]
    assert isinstance(result.clients, builtins.list)


def test_curves_are_a_figure_that_a_notebook_can_show(result: mu.Result) -> None:
    figure = result.curves()
    assert {axes.get_title() for axes in figure.axes} >= {"accuracy", "loss", "auc"}
    assert figure._repr_png_().startswith(b"\x89PNG")  # type: ignore[attr-defined]
    assert [axes.get_title() for axes in result.curves("loss").axes] == ["loss"]
    with pytest.raises(mu.MutiraoError, match="no round has a metric 'los'; did you mean 'loss'"):
        result.curves("los")


def test_pictures_of_a_run_are_drawn_or_found_in_its_folder(result: mu.Result, tmp_path: Path) -> None:
    for kind in ("participation", "labels", "curves", "partition"):
        assert result.plot(kind)._repr_png_().startswith(b"\x89PNG")
    assert result.plot("curves", metric="loss").content != result.plot("curves", metric="auc").content
    result.plot("partition").save(tmp_path / "mine.png")
    assert (tmp_path / "mine.png").read_bytes() == (result.folder / "partition.png").read_bytes()
    assert not (result.folder / "labels.png").exists()  # what is only shown leaves nothing
    for wrong, right in (("particpation", "did you mean 'participation'"), ("../x/partition", "has no picture called")):
        with pytest.raises(mu.MutiraoError, match=right):
            result.plot(wrong)
    with pytest.raises(mu.MutiraoError, match=r"has no queries\.csv"):
        result.plot("wins", against=result)


def test_how_evenly_clients_took_part_is_told_in_figures(result: mu.Result) -> None:
    found, table = result.participation, result.clients
    assert found.times.sum() == len(table)
    assert found.figures["never"] == len(found.times) - table["client"].nunique()


def test_what_another_recipe_leaves_is_asked_for_in_vain_in_a_line(result: mu.Result) -> None:
    with pytest.raises(mu.MutiraoError, match="ranking recipe"):
        result.ranker()
    with pytest.raises(mu.MutiraoError, match="not of 'cytology'"):
        result.network()


def test_the_examples_hold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("run", "compare"):
        assert doctest.testmod(importlib.import_module(f"mutirao.api.{name}")).failed == 0


LIGHT = """
import sys
import mutirao
names = dir(mutirao)
heavy = {"torch", "numpy", "matplotlib", "rich", "scipy", "pandas", "sklearn", "IPython"}
print(*sorted(heavy & set(sys.modules)))
mutirao.run, mutirao.compare, mutirao.load
print(*sorted(heavy & set(sys.modules)))
try:
    mutirao.run("quikstart")
except mutirao.MutiraoError:
    print(*sorted(heavy & set(sys.modules)))
print(*names)
"""


def test_the_door_is_light_until_something_is_run() -> None:
    done = subprocess.run([sys.executable, "-c", LIGHT], capture_output=True, text=True, check=True)
    first, second, third, names = done.stdout.splitlines()
    assert first == ""
    assert "torch" not in second.split() + third.split()
    assert "matplotlib" not in second.split() + third.split()
    assert {"run", "compare", "load", "Result", "Table", "Trainer", "__version__"} <= set(names.split())


def test_every_public_name_is_there_and_is_explained() -> None:
    for name in mu.__all__:
        found = getattr(mu, name)
        assert name in dir(mu)
        if callable(found) and getattr(found, "__module__", "").startswith("mutirao"):
            assert found.__doc__, name
    with pytest.raises(AttributeError, match="module 'mutirao' has no attribute 'rnu'"):
        mu.rnu  # noqa: B018
    assert (Path(mu.__file__).parent / "py.typed").exists()


def test_a_run_of_recsys_recommends_to_anybody(tmp_path: Path, result: mu.Result) -> None:
    made = mu.run("recsys", rounds=4, dimension=6, evaluate_every=2, out=tmp_path / "run")
    recommender = mu.load(tmp_path / "run").recommender("last")
    assert isinstance(recommender, mu.Recommender)
    given = {"12": 5.0, "57": 1.0}
    found = recommender.recommend(given, k=3)
    np.testing.assert_array_equal(made.arrays("last")["items"], recommender.embeddings.vectors)
    assert [r.score for r in found] == [*recommender.predict(given, [r.id for r in found]).values()]
    with pytest.raises(mu.MutiraoError, match="a rating of 50 is not on the scale from 1 to 5"):
        recommender.recommend({"12": 50.0})
    with pytest.raises(mu.MutiraoError, match="not of 'recsys'"):
        result.recommender()
