"""Bubbles: their area is the number of samples, and any partition fits its picture."""

from pathlib import Path

import numpy as np
import pytest
from matplotlib.image import imread

from mutirao.partitioning import describe, dirichlet
from mutirao.report.plots import BRIGHT, MOST, draw_bubbles


def coloured(path: Path) -> np.ndarray:  # type: ignore[type-arg]
    picture = imread(path)[..., :3]
    return np.asarray(picture[..., 2] - picture[..., 0] > 0.2)  # blue on white and grey


@pytest.mark.parametrize(("clients", "classes"), [(1, 1), (10, 10), (250, 10), (20, 100)])
def test_any_partition_fits(clients: int, classes: int, tmp_path: Path) -> None:
    labels = np.repeat(np.arange(classes), 60)
    parts = dirichlet(labels, clients, 1.0, np.random.default_rng(0), min_size=0)
    draw_bubbles(describe(labels, parts), tmp_path / "p.png")
    picture = imread(tmp_path / "p.png")
    edge = np.concatenate([picture[0], picture[-1], picture[:, 0], picture[:, -1]])
    assert (edge == 1).all()  # nothing is cut off
    assert max(picture.shape) < 3200
    assert BRIGHT[0] == "#4477AA"


def test_the_area_of_a_bubble_is_its_samples(tmp_path: Path) -> None:
    labels = np.repeat([0, 1], [400, 100])
    draw_bubbles(describe(labels, [np.arange(400), np.arange(400, 500)]), tmp_path / "p.png")
    blue = coloured(tmp_path / "p.png")
    columns = np.flatnonzero(blue.any(0))
    gap = columns[np.argmax(np.diff(columns))]  # between the bubbles of the two clients
    large, small = blue[:, : gap + 1].sum(), blue[:, gap + 1 :].sum()
    assert large / small == pytest.approx(4, rel=0.15)


def test_many_clients_are_sampled_and_the_picture_says_so(tmp_path: Path) -> None:
    labels = np.repeat([0, 1], 150)
    draw_bubbles(describe(labels, np.array_split(np.arange(300), 300)), tmp_path / "p.svg")
    text = (tmp_path / "p.svg").read_text()
    assert "of 300 shown" in text
    assert int(text.split("client (")[1].split(" of")[0]) <= MOST
