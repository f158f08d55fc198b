"""What several tests share: a small, real federated task in plain NumPy, and the real data if a user has them."""

import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import hypothesis
import numpy as np
import pytest
from sklearn.datasets import load_iris

from mutirao.config import Common, Part, setting
from mutirao.core.arrays import Arrays
from mutirao.core.fleet import Reply, Request, Site
from mutirao.randomness import rng
from mutirao.recipes.task import Recipe, Task

os.environ["XDG_CONFIG_HOME"] = tempfile.mkdtemp(prefix="mutirao-")  # the secret that marks runs: not the user's own
# No deadline: a first call may import, and a machine be busy. `make test-slow` asks for the thorough profile.
hypothesis.settings.register_profile("quick", max_examples=25, deadline=None)
hypothesis.settings.register_profile("thorough", max_examples=300, deadline=None)
hypothesis.settings.load_profile("quick")

pytest_plugins = ["living", "smears"]  # a live page and a browser, and slides, for those who ask for them


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Deployed federations come first: they mostly wait, so that other workers compute meanwhile."""
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)


X, Y = load_iris(return_X_y=True)
X = (X - X.mean(0)) / X.std(0)


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a command of ours sets for the processes it starts is not for those of the next test."""
    monkeypatch.setenv("PYTHONSAFEPATH", os.environ.get("PYTHONSAFEPATH", ""))


@pytest.fixture
def without_pictures(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs draw nothing: most of the time of a small run goes into its pictures, which few tests look at."""
    if request.node.get_closest_marker("pictures"):
        return
    monkeypatch.setattr("mutirao.report.draw_run", lambda run, task, out: None)


def softmax_step(request: Request, site: Site) -> Reply:
    """One epoch of softmax regression on iris; the site counts its visits in a state that never leaves."""
    x, y = site.data
    w, b = request.arrays["w"].copy(), request.arrays["b"].copy()
    order = rng(int(request.config["seed"]), int(request.config["round"]), "batches", site.id).permutation(len(y))
    for i in order:
        z = x[i] @ w + b
        p = np.exp(z - z.max())  # of a model with much noise exp(z) alone is infinite
        p /= p.sum()
        p[y[i]] -= 1
        w -= 0.05 * np.outer(x[i], p)
        b -= 0.05 * p
    visits = int(site.state.get("visits", np.zeros((), np.int64))) + 1
    site.state["visits"] = np.asarray(visits)
    arrays: Arrays = {"w": w, "b": b + 1e-3 * visits, "seen": np.asarray(request.arrays["seen"] + len(y))}
    return Reply(arrays, metrics={"loss": float(-np.log(p[y[i]] + 1))}, n=len(y))


def accuracy(arrays: Arrays) -> dict[str, float]:
    return {"accuracy": float(((X @ arrays["w"] + arrays["b"]).argmax(1) == Y).mean())}


@dataclass(frozen=True, kw_only=True)
class IrisConfig(Common):
    clients: int = setting(6, "how many clients", low=1)
    per_round: int | float = setting(3, "clients a round", low=1e-9)
    rounds: int = setting(4, "how many rounds", low=1)
    aggregate: Part = setting(Part("fedadam"), "how updates are joined")


def iris_task(config: IrisConfig) -> Task:
    parts = np.array_split(rng(config.seed, 0, "deal").permutation(len(Y)), config.clients)
    return Task(
        handler=softmax_step,
        population={f"c{i}": (X[p], Y[p]) for i, p in enumerate(parts)},
        initial=lambda: {"w": np.zeros((4, 3)), "b": np.zeros(3), "seen": np.zeros((), np.int64)},
        evaluate=accuracy,
    )


iris = Recipe(IrisConfig, iris_task)


@pytest.fixture(scope="session")
def real_data() -> Path:
    """The folder with real data sets; a user who has none skips what needs them."""
    folder = os.environ.get("MUTIRAO_DATA")
    if not folder:
        pytest.skip("MUTIRAO_DATA does not name a folder with real data sets")
    return Path(folder)


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Features and synthetic slides made by tests are not left in the user's cache."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MUTIRAO_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield
