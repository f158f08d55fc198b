import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.image import imread

from mutirao.errors import ConfigError
from mutirao.partitioning import by_key, describe, dirichlet, iid
from mutirao.report.plots import BRIGHT, MOST_BARS, MUTED, draw_bands, draw_curves, draw_partition, draw_weights

ROWS = [{"round": r, "accuracy": 1 - 1 / r, "loss": 1 / r, "train_loss": 2 / r} for r in range(1, 31)]


def rng(seed=0):
    return np.random.default_rng(seed)


def skewed(clients, classes=10, each=60):
    labels = np.repeat(np.arange(classes), each)
    return describe(labels, dirichlet(labels, clients, 1.0, rng(), min_size=0))


def pixels_of(picture, colour):
    wanted = np.array([int(colour[i : i + 2], 16) for i in (1, 3, 5)])
    return int((np.abs(np.rint(picture[..., :3] * 255) - wanted).max(-1) <= 1).sum())


@pytest.mark.parametrize(("clients", "classes"), [(1, 1), (1, 10), (3, 2), (100, 10), (250, 10), (20, 24), (20, 100)])
def test_a_partition_of_any_size_fits_its_picture(tmp_path, clients, classes):
    draw_partition(skewed(clients, classes), tmp_path / "partition.png")
    picture = imread(tmp_path / "partition.png")
    height, width = picture.shape[:2]
    assert 1000 < width < 1400
    assert 250 < height < 1600
    edge = np.concatenate([picture[0], picture[-1], picture[:, 0], picture[:, -1]])
    assert (edge == 1).all()  # nothing is cut off


def test_the_area_of_a_colour_is_the_share_of_its_class(tmp_path):
    labels = np.repeat([0, 1, 2], [600, 300, 100])
    draw_partition(describe(labels, iid(labels, 5, rng())), tmp_path / "partition.png")
    picture = imread(tmp_path / "partition.png")
    bars = picture[:, : int(picture.shape[1] * 0.9)]  # without the legend
    areas = np.array([pixels_of(bars, colour) for colour in BRIGHT[:3]], float)
    assert areas / areas.sum() == pytest.approx([0.6, 0.3, 0.1], abs=0.02)


def test_the_names_of_the_classes_and_of_the_axes_are_in_the_picture(tmp_path):
    labels = np.array(["cat", "dog", "frog"])[rng().integers(0, 3, 90)]
    draw_partition(describe(labels, by_key(labels)), tmp_path / "partition.svg")
    text = (tmp_path / "partition.svg").read_text()
    for word in ("cat", "dog", "frog", "samples", "client", "3 clients, 90 samples, label skew 0.6"):
        assert f"<!-- {word}" in text


def test_many_clients_are_sampled_and_the_picture_says_so(tmp_path):
    draw_partition(skewed(MOST_BARS), tmp_path / "all.svg")
    draw_partition(skewed(1000), tmp_path / "some.svg")
    assert "shown)" not in (tmp_path / "all.svg").read_text()
    assert "client (100 of 1,000 shown)" in (tmp_path / "some.svg").read_text()


def test_colours_of_the_palettes_differ_in_brightness_or_hue_for_the_colour_blind():
    # Machado et al. 2009, the two common kinds at full severity
    kinds = [
        np.array([[0.152, 1.053, -0.205], [0.115, 0.786, 0.099], [-0.004, -0.048, 1.052]]),
        np.array([[0.367, 0.861, -0.228], [0.280, 0.673, 0.047], [-0.012, 0.043, 0.969]]),
    ]
    for palette in (BRIGHT, MUTED):
        colours = np.array([[int(c[i : i + 2], 16) / 255 for i in (1, 3, 5)] for c in palette]) ** 2.2
        for kind in [np.eye(3), *kinds]:
            seen = np.clip(colours @ kind.T, 0, 1) ** (1 / 2.2)
            apart = np.linalg.norm(seen[:, None] - seen[None], axis=-1)
            assert apart[~np.eye(len(palette), dtype=bool)].min() > 0.05


def test_curves_share_a_panel_by_family(tmp_path):
    draw_curves(ROWS, ["accuracy", "loss", "train_loss"], tmp_path / "curves.svg", title="three lines")
    text = (tmp_path / "curves.svg").read_text()
    assert text.count("<!-- round -->") == 2
    for word in ("accuracy", "loss", "three lines", "evaluation, global model", "training, on the clients"):
        assert f"<!-- {word} -->" in text


def test_a_curve_goes_where_its_values_go(tmp_path):
    draw_curves(ROWS, ["accuracy"], tmp_path / "up.png")
    draw_curves([r | {"accuracy": -r["accuracy"]} for r in ROWS], ["accuracy"], tmp_path / "down.png")

    def heights(name):
        picture = imread(tmp_path / name)[..., :3]
        line = np.abs(picture - np.array([0x44, 0x77, 0xAA]) / 255).max(-1) < 0.02
        rows, columns = np.nonzero(line)
        middle = np.median(columns)
        return rows[columns < middle].mean(), rows[columns > middle].mean()

    first, last = heights("up.png")
    assert last < first  # rows count from the top
    first, last = heights("down.png")
    assert last > first


def test_rounds_without_an_evaluation_or_with_nan_are_passed_over(tmp_path):
    rows = [{"round": r} | ({"loss": 1 / r} if r % 5 == 0 else {}) for r in range(1, 21)]
    rows[-1]["loss"] = float("nan")
    draw_curves(rows, ["loss"], tmp_path / "curves.png")
    draw_curves([{"round": 1, "loss": float("inf")}], ["loss"], tmp_path / "never.svg")
    assert pixels_of(imread(tmp_path / "curves.png"), BRIGHT[0]) > 100
    assert "<!-- never finite -->" in (tmp_path / "never.svg").read_text()


@pytest.mark.parametrize("families", [1, 2, 3, 4, 5, 7])
def test_any_number_of_panels(tmp_path, families):
    names = [f"metric {i}" for i in range(families)]
    draw_curves([{"round": 1} | dict.fromkeys(names, 0.5)], names, tmp_path / "curves.svg")
    assert (tmp_path / "curves.svg").read_text().count("<!-- round -->") == families


def test_unknown_metrics_and_formats_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="did you mean 'accuracy'"):
        draw_curves(ROWS, ["acuracy"], tmp_path / "curves.png")
    with pytest.raises(ConfigError, match="no metrics"):
        draw_curves(ROWS, [], tmp_path / "curves.png")
    for name in ("curves", "curves.doc"):
        with pytest.raises(ConfigError, match=r"ends in \.png, \.svg, \.pdf"):
            draw_curves(ROWS, ["loss"], tmp_path / name)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("ending", "begins"), [("png", b"\x89PNG"), ("svg", b"<?xml"), ("pdf", b"%PDF"), ("PNG", b"\x89PNG")]
)
def test_the_ending_decides_the_format_and_only_the_whole_file_is_left(tmp_path, ending, begins):
    path = tmp_path / f"curves.{ending}"
    path.write_bytes(b"old")
    draw_curves(ROWS, ["loss"], path)
    assert path.read_bytes().startswith(begins)
    assert list(tmp_path.iterdir()) == [path]


def test_threads_may_draw_at_the_same_time(tmp_path):
    summary = skewed(5)
    threads = [threading.Thread(target=draw_partition, args=(summary, tmp_path / f"{i}.png")) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    first = imread(tmp_path / "0.png")
    assert all(np.array_equal(imread(tmp_path / f"{i}.png"), first) for i in range(4))


def test_importing_the_module_does_not_load_matplotlib_and_drawing_does_not_load_pyplot(tmp_path):
    code = f"""
import sys
from mutirao.report.plots import draw_curves
assert "matplotlib" not in sys.modules
draw_curves([{{"round": 1, "loss": 1.0}}], ["loss"], {str(tmp_path / "c.png")!r})
assert "matplotlib.pyplot" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_weights_are_drawn_where_clients_have_a_risk(tmp_path: Path) -> None:
    rows = [{"round": "1", "weight": "0.1", "risk": "-0.2"}, {"round": "2", "weight": "0.2", "risk": "0.3"}]
    draw_weights([*rows, {"round": "2"}], tmp_path / "weights.png")
    assert (tmp_path / "weights.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ConfigError, match="no client has a risk"):
        draw_weights([{"round": "1"}], tmp_path / "none.png")


@pytest.mark.parametrize(("methods", "panels"), [(2, 1), (6, 1), (9, 2)])
def test_every_method_has_its_band_however_many_there_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, methods: int, panels: int
) -> None:
    drawn: list[Any] = []
    monkeypatch.setattr("mutirao.report.plots.save", lambda figure, path: drawn.append(figure))
    runs = {f"m{i}": [[(1, 0.1 * i), (2, 0.2)], [(1, 0.1), (2, 0.4)]] for i in range(methods)}
    draw_bands(runs, "accuracy", tmp_path / "bands.svg", title="two rounds")
    (figure,) = drawn
    assert [len(axes.collections) for axes in figure.axes] == [len(axes.lines) for axes in figure.axes]
    assert sum(len(axes.collections) for axes in figure.axes) == methods  # beyond six there were none
    assert len(figure.axes) == panels


def test_bands_are_written(tmp_path: Path) -> None:
    draw_bands({f"m{i}": [[(1, 0.1 * i), (2, 0.2)]] for i in range(7)}, "accuracy", tmp_path / "bands.svg")
    assert "<svg" in (tmp_path / "bands.svg").read_text()
