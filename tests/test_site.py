"""The built documentation: the words of the field are found, and its pages can be read in a browser, in any colours."""

import functools
import http.server
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pages import HOME

SERIOUS = ("serious", "critical")
# The words of the literature, and the pages on which somebody who searches for one must find it.
WORDS = {
    "non-IID": ["partitions", "methods", "glossary"],
    "heterogeneity": ["partitions", "glossary"],
    "label skew": ["partitions", "glossary"],
    "Byzantine": ["robust", "groups", "aggregation", "glossary"],
    "poisoning": ["robust", "glossary"],
    "robust aggregation": ["robust", "aggregation", "glossary"],
    "clustered": ["groups", "groups-any-task", "glossary"],
    "personalised": ["personal", "glossary"],
    "personalized": ["personal", "glossary"],
    "unlearning": ["withdrawal", "glossary"],
    "cross-silo": ["deploy", "glossary"],
    "cross-device": ["engine", "glossary"],
    "hyperparameter": ["studies", "glossary", "cheat-sheet"],
    "differential privacy": ["privacy", "glossary"],
    "gradient inversion": ["privacy", "glossary"],
    "secure aggregation": ["secure", "glossary"],
    "client drift": ["methods", "glossary"],
    "client selection": ["selection", "glossary"],
    "stragglers": ["glossary"],
    "straggler": ["asynchronous"],
    "quantisation": ["compression", "glossary"],
    "sparsification": ["compression", "glossary"],
    "fairness": ["aggregation", "glossary"],
    "multiple-instance learning": ["whole-slides", "glossary"],
    "transfer learning": ["backbones", "glossary"],
    "learning to rank": ["ranking", "online-ranking", "glossary"],
    "fault injection": ["survival"],
    "concept drift": ["partitions", "glossary"],
}
# One page of each layout: start, tables of commands, a guide with code, wide tables of results, the API, a notebook.
LAYOUTS = ("", "cheat-sheet/", "partitions/", "reproductions/groups/", "reference/aggregators/", "notebooks/2-fedrisk/")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site as `make test` has just built it, or built here if that one is missing or older than a page."""
    built = HOME / ".venv" / "site"
    pages = [HOME / "mkdocs.yml", *(path for path in (HOME / "docs").rglob("*") if path.is_file())]
    newest = max(path.stat().st_mtime for path in pages)
    if (built / "sitemap.xml").exists() and (built / "sitemap.xml").stat().st_mtime > newest:
        return built
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict", "--site-dir", str(folder)]
    subprocess.run(command, cwd=HOME, check=True, env=os.environ | {"NO_MKDOCS_2_WARNING": "1"})
    return folder


def text_of(entry: dict[str, str]) -> str:
    """What the search looks into."""
    return f"{entry['title']} {entry['text']}".lower()


@pytest.mark.parametrize("word", WORDS)
def test_the_search_finds_the_words_of_the_field_where_a_reader_would_look(word: str, site: Path) -> None:
    entries = json.loads((site / "search" / "search_index.json").read_text(encoding="utf-8"))["docs"]
    pages = {entry["location"].partition("#")[0].rstrip("/") for entry in entries if word.lower() in text_of(entry)}
    assert set(WORDS[word]) <= pages


def test_no_page_asks_another_host_for_anything(site: Path) -> None:
    for page in site.rglob("*.html"):
        text = page.read_text(encoding="utf-8")
        assert 'src="http' not in text, page
        assert '<link rel="stylesheet" href="http' not in text, page


@pytest.fixture(scope="module")
def address(site: Path) -> Iterator[str]:
    """The built site behind a server of this machine."""
    quiet = type("Quiet", (http.server.SimpleHTTPRequestHandler,), {"log_message": lambda *_: None})
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(quiet, directory=str(site))) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


def problems_of(page: Any) -> list[str]:
    """What axe-core finds that is serious, in one line each; and a page that is wider than its window."""
    from axe_playwright_python.sync_playwright import Axe

    violations = Axe().run(page, options={"resultTypes": ["violations"]}).response["violations"]
    lines = [f"{v['id']}: {n['html'][:160]}" for v in violations if v["impact"] in SERIOUS for n in v["nodes"][:3]]
    wide = page.evaluate("document.documentElement.scrollWidth - innerWidth")
    return lines + ([f"{wide} pixels wider than the window"] if wide > 0 else [])


@pytest.mark.slow
@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.parametrize("colours", ["light", "dark"])
def test_pages_of_every_layout_can_be_read_by_anybody(browser: Any, address: str, colours: str, width: int) -> None:
    context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=colours)
    page = context.new_page()
    problems = {}
    for layout in LAYOUTS:
        page.goto(address + layout, wait_until="load")
        if found := problems_of(page):
            problems[layout] = found
    context.close()
    assert not problems
