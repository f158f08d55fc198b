"""What several tests share: settings of the session, and the real data if a user has them."""

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest

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
