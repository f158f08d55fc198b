"""Two readers label 500 tiles in a real browser that is killed midway, on a server that is, too; nothing is lost."""

import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from click.testing import CliRunner
from fastapi.testclient import TestClient
from PIL import Image
from sklearn.metrics import cohen_kappa_score

from living import PATIENCE, find_chromium, mutirao
from mutirao.cli import main
from mutirao.dashboard.labelling_page import labelling
from mutirao.systems.cytology.slides.tile_labels import read_labels, tiles_in

CLASSES = ("normal", "abnormal", "unusable")
COUNT = 500
PRESS = """keys => { for (const key of keys)
  document.activeElement.dispatchEvent(new KeyboardEvent("keydown", { key, bubbles: true, cancelable: true })) }"""


LOOKS = [
    (360, "dark"),
    pytest.param(1280, "light", marks=pytest.mark.slow),
    pytest.param(1280, "dark", marks=pytest.mark.slow),
    pytest.param(360, "light", marks=pytest.mark.slow),
]


def make_tiles(folder: Path, count: int) -> Path:
    rows = ["file,slide,laboratory"]
    folder.mkdir()
    for i in range(count):
        Image.fromarray(np.full((8, 8, 3), i % 256, np.uint8)).save(folder / f"t{i:03}.png")
        rows.append(f"t{i:03}.png,s{i % 7},lab")
    (folder / "origins.csv").write_text("\n".join(rows) + "\n")
    return folder


def digits(seed: int) -> str:
    """The keys a reader presses, one a tile."""
    return "".join(map(str, np.random.default_rng(seed).choice([1, 2, 3], COUNT, p=[0.6, 0.3, 0.1])))


def until(true: Callable[[], bool], said: Callable[[], object] = lambda: "") -> None:
    end = time.monotonic() + PATIENCE
    while not true():
        assert time.monotonic() < end, said()
        time.sleep(0.05)


@dataclass
class Server:
    """A labelling page in a process of its own."""

    process: "subprocess.Popen[str]"
    address: str


def serve(folder: Path, reader: str) -> Server:
    words = ("slides", "label", folder.name, "--classes", ",".join(CLASSES), "--reader", reader, "--no-open")
    process = mutirao(*words, cwd=folder.parent, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    assert process.stdout is not None
    said = process.stdout.readline()
    assert " are shown at http://127.0.0.1:" in said, said
    threading.Thread(target=process.stdout.read, daemon=True).start()
    return Server(process, said.split(" at ")[1].strip())


@contextmanager
def own_chromium(driver: Any, profile: Path) -> Iterator[tuple[Any, "subprocess.Popen[str]"]]:
    """A browser whose process is ours, so that it can be killed as a crash would; and a page in it."""
    path = find_chromium()
    words = [
        path,
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--remote-debugging-port=0",
        f"--user-data-dir={profile}",
    ]
    with (profile.parent / "chromium.log").open("w") as log:
        process = subprocess.Popen([*words, "about:blank"], stderr=log, stdout=log, text=True, start_new_session=True)
    port = profile / "DevToolsActivePort"
    try:
        until(lambda: port.exists() and "\n" in port.read_text())
        opened = driver.connect_over_cdp(f"http://127.0.0.1:{port.read_text().split()[0]}")
        page = opened.contexts[0].new_page()
        page.set_default_timeout(180_000)
        yield page, process
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(PATIENCE)


def begin(page: Any, server: Server) -> None:
    page.goto(server.address)
    page.locator("#sheet button[aria-current]").wait_for()


def saved(page: Any) -> int:
    return int(page.locator("body").get_attribute("data-saved"))


def on_disk(folder: Path, reader: str) -> str:
    """The keys that were pressed, as the reader's file tells; a tile that has no label is a blank."""
    known = read_labels(folder, [reader])[reader]
    names = [tile.name for tile in tiles_in(folder).tiles]
    return "".join(str(CLASSES.index(known[n]) + 1) if n in known else " " for n in names)


@pytest.mark.slow
def test_a_killed_browser_and_a_killed_server_lose_no_acknowledged_label(browser: Any, tmp_path: Path) -> None:
    folder = make_tiles(tmp_path / "tiles", COUNT)
    driver = browser.browser_type
    ana, rui = digits(1), digits(2)

    # the browser dies in the middle of a burst of keys
    server = serve(folder, "ana")
    with own_chromium(driver, tmp_path / "a") as (page, process):
        begin(page, server)
        page.keyboard.type(ana[:180])
        until(lambda: saved(page) > 0)
        acknowledged = saved(page)
        os.killpg(process.pid, signal.SIGKILL)
    assert acknowledged <= len(on_disk(folder, "ana").rstrip()) <= 180

    # a new one goes on at the right place; then the server dies
    context = browser.new_context(viewport={"width": 1000, "height": 700})
    page = context.new_page()
    page.set_default_timeout(180_000)
    begin(page, server)  # by now the server has whatever was on its way
    kept = len(on_disk(folder, "ana").rstrip())
    assert on_disk(folder, "ana") == ana[:kept].ljust(COUNT)
    assert page.locator("#sheet [aria-current]").get_attribute("data-i") == str(kept)
    page.keyboard.type(ana[kept:330])
    until(lambda: saved(page) > kept + 20)
    before = saved(page)
    server.process.kill()
    server.process.wait(PATIENCE)
    survived = len(on_disk(folder, "ana").rstrip())
    assert before <= survived
    page.keyboard.type(ana[330:340])
    said = page.locator("#saved")
    until(lambda: said.inner_text().startswith("NOT SAVED"), said.inner_text)
    assert saved(page) <= survived  # what the page calls saved is
    assert "the server does not answer; start it again" in said.inner_text()

    # started again, it goes on at the right place to the end; and so does another reader
    again = serve(folder, "ana")
    begin(page, again)
    assert page.locator("#sheet [aria-current]").get_attribute("data-i") == str(survived)
    page.keyboard.type(ana[survived:])
    until(lambda: saved(page) == COUNT and said.inner_text() == "all saved", said.inner_text)
    assert page.locator("#done").inner_text() == f"{COUNT} of {COUNT} labelled"
    assert on_disk(folder, "ana") == ana
    other = serve(folder, "rui")
    begin(page, other)
    page.evaluate(PRESS, rui)  # quicker than a hand: the keys of ana were pressed one by one
    until(lambda: saved(page) == COUNT and said.inner_text() == "all saved", said.inner_text)
    context.close()
    for left in (again, other):
        left.process.send_signal(signal.SIGINT)
        assert left.process.wait(PATIENCE) == 0
    assert (on_disk(folder, "ana"), on_disk(folder, "rui")) == (ana, rui)
    told = CliRunner().invoke(main, ["slides", "agreement", str(folder), "--json"])
    facts = json.loads(told.stdout)
    assert facts["kappa"]["value"] == pytest.approx(cohen_kappa_score(list(ana), list(rui)))
    assert len(facts["differing"]) == sum(a != b for a, b in zip(ana, rui, strict=True))


@pytest.fixture(scope="module")
def ready(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Server]]:
    folder = make_tiles(tmp_path_factory.mktemp("label") / "tiles", 120)
    (folder / "t119.png").write_bytes(b"no picture")
    server = serve(folder, "ana")
    yield folder, server
    server.process.terminate()
    server.process.wait(PATIENCE)


def serious(page: Any) -> list[str]:
    from axe_playwright_python.sync_playwright import Axe

    found = Axe().run(page, options={"resultTypes": ["violations"]}).response["violations"]
    return [f"{v['id']}: {v['nodes'][0]['html'][:200]}" for v in found]


@pytest.mark.parametrize(("width", "colours"), LOOKS)
def test_nobody_is_left_out_by_colours_or_width(
    ready: tuple[Path, Server],
    browser: Any,
    width: int,
    colours: str,
) -> None:
    context = browser.new_context(viewport={"width": width, "height": 800}, color_scheme=colours)
    page = context.new_page()
    begin(page, ready[1])
    page.keyboard.type("123")
    until(lambda: page.locator("#saved").inner_text() == "all saved")
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert serious(page) == []
    current = page.locator("#sheet [aria-current]").bounding_box()
    bar = page.locator("aside").bounding_box()
    assert width > 700 or current["y"] + current["height"] <= bar["y"]  # what is chosen is not behind the bar
    context.close()


def test_mouse_and_keys_do_the_same_and_can_be_undone_even_after_a_reload(
    ready: tuple[Path, Server],
    browser: Any,
) -> None:
    folder, server = ready
    context = browser.new_context(viewport={"width": 1280, "height": 800})
    page = context.new_page()
    begin(page, server)

    def label(i: int) -> str:
        until(lambda: page.locator("#saved").inner_text() == "all saved")
        key = on_disk(folder, "ana")[i].strip()
        return CLASSES[int(key) - 1] if key else ""

    page.locator("#classes button").nth(1).click()
    page.locator("#sheet button").nth(50).click()
    assert label(50) == "abnormal"
    page.locator("#sheet button").nth(50).click()  # once more takes it back
    assert label(50) == ""
    page.keyboard.press("ArrowRight")
    page.keyboard.press("Enter")
    assert label(51) == "abnormal"
    page.keyboard.press("ArrowLeft")
    page.keyboard.press("3")
    assert label(50) == "unusable"
    page.keyboard.press("PageDown")
    assert page.locator("#sheet [aria-current]").get_attribute("data-i") == "96"
    assert page.locator("#sheet button").count() == 24
    begin(page, server)
    page.keyboard.press("u")
    assert label(50) == ""
    assert page.locator("#sheet [aria-current]").get_attribute("data-i") == "50"
    page.keyboard.press("Control+z")
    assert label(51) == ""
    page.locator("#show").select_option("=normal")
    names = [t.get_attribute("aria-label") for t in page.locator("#sheet button").all()]
    assert names
    assert all(n.endswith(": normal") for n in names)
    context.close()


TOKEN = "the token"


@pytest.fixture
def client(tmp_path: Path) -> Iterator[tuple[TestClient, Path]]:
    folder = make_tiles(tmp_path / "tiles", 3)
    with labelling(tiles_in(folder), folder, "ana", CLASSES, TOKEN, frozenset({"testserver"})) as app:
        yield TestClient(app), folder / "labels-ana.csv"


def test_nobody_reads_or_writes_without_the_token_from_elsewhere_or_under_another_name(
    client: tuple[TestClient, Path],
) -> None:
    page, file = client
    change = {"changes": [["t000.png", "normal"]]}
    before = file.read_bytes()
    for path in ("/", "/api/tiles", "/api/picture?i=0"):
        assert page.get(path).status_code == 403
        answer = page.get(path, headers={"X-Mutirao-Token": TOKEN})
        assert answer.status_code == 200
        assert "default-src 'none'" in answer.headers["content-security-policy"]
        assert page.get(path, headers={"X-Mutirao-Token": TOKEN, "Host": "evil.example"}).status_code == 403
    own = {"X-Mutirao-Token": TOKEN}
    for headers in (
        {},
        {"X-Mutirao-Token": "no"},
        own | {"Origin": "http://evil.example"},
        own | {"Sec-Fetch-Site": "cross-site"},
        own | {"Host": "evil.example"},
    ):
        assert page.post("/api/labels", json=change, headers=headers).status_code == 403
    assert page.post(f"/api/labels?token={TOKEN}", json=change).status_code == 403
    assert file.read_bytes() == before
    assert page.post("/api/labels", json=change, headers=own).json() == {"saved": 1, "labelled": 1}
    assert b"t000.png,normal," in file.read_bytes()


def test_what_cannot_be_a_label_is_refused_in_one_line_and_not_written(client: tuple[TestClient, Path]) -> None:
    page, file = client
    before, own = file.read_bytes(), {"X-Mutirao-Token": TOKEN}
    for changes, said in (
        ([["../origins.csv", "normal"]], "there is no tile"),
        ([["t000.png", "normal"], ["t001.png", "odd"]], "there is no class 'odd'"),
    ):
        answer = page.post("/api/labels", json={"changes": changes}, headers=own)
        assert answer.status_code == 409
        assert said in answer.json()["detail"]
    for bad in ({}, {"changes": "x"}, {"changes": [["t000.png"]]}, {"changes": [["t000.png", "normal"]] * 1001}, [1]):
        assert page.post("/api/labels", json=bad, headers=own).status_code == 422
    for path in ("/api/picture?i=3", "/assets/dash.html", "/assets/..%2fapp.py"):
        assert page.get(path, headers=own).status_code == 404
    assert page.get("/api/picture?i=-1", headers=own).status_code == 422
    assert file.read_bytes() == before


def test_a_tile_that_is_no_picture_does_not_end_the_page(ready: tuple[Path, Server]) -> None:
    base, token = ready[1].address.split("/?token=")
    answer = httpx.get(f"{base}/api/picture?i=119&token={token}", trust_env=False, timeout=PATIENCE)
    assert answer.status_code == 404
    assert answer.json()["detail"] == "this tile cannot be read"
