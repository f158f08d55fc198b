"""The live page as a person uses it, in a real browser, during a real run; and the report with the network cut off."""

import csv
import io
import json
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from living import Live

AXE_SERIOUS = ("serious", "critical")


@pytest.fixture
def page(browser: Any) -> Any:
    """A fresh page that may not complain."""
    context = browser.new_context(viewport={"width": 1280, "height": 900}, accept_downloads=True)
    opened = context.new_page()
    opened.set_default_timeout(180_000)
    problems: list[str] = []
    opened.on("console", lambda m: problems.append(m.text) if m.type == "error" else None)
    opened.on("pageerror", lambda e: problems.append(str(e)))
    yield opened
    context.close()
    assert problems == []


def serious(page: Any) -> list[str]:
    """What axe-core finds, in one line each."""
    from axe_playwright_python.sync_playwright import Axe

    found = Axe().run(page, options={"resultTypes": ["violations"]}).response["violations"]
    return [f"{v['id']}: {v['nodes'][0]['html'][:200]}" for v in found if v["impact"] in AXE_SERIOUS]


def row(page: Any, run: str) -> Any:
    return page.locator(f"#runs li[data-id='{run}']")


def download(page: Any, name: str) -> str:
    with page.expect_download() as waiting:
        page.get_by_role("button", name=name).first.click()
    return Path(waiting.value.path()).read_text()


def until(true: Callable[[], bool]) -> None:
    """Wait for something to come true; the page's policy forbids to ask it with a piece of script."""
    end = time.monotonic() + 60
    while not true():
        assert time.monotonic() < end
        time.sleep(0.05)


def last_round(page: Any) -> int:
    said = page.locator("#curves .about").first.inner_text()
    found = re.search(r"round (\d+)", said)
    return int(found[1]) if found else 0


def test_a_person_watches_compares_filters_downloads_cancels_and_resumes(live: Live, page: Any) -> None:
    running = live.run("gamma", "rounds=60", "pause=0.05")
    page.goto(live.address)
    row(page, "gamma").locator(".badge.running").wait_for()
    assert row(page, "beta").count() == 1

    # the curve grows while we look
    row(page, "gamma").get_by_role("button").click()
    page.locator("#curves polyline").first.wait_for(state="attached")
    seen = last_round(page)
    until(lambda: last_round(page) > seen + 2)
    drawn = page.locator("#curves polyline").first.get_attribute("points")
    assert len(drawn.split()) >= seen + 2

    # cancel it: the process is ours, the run is kept
    page.locator("#cancel").click()
    row(page, "gamma").locator(".badge.stopped").wait_for()
    assert running.wait(30) != 0
    page.locator("#resume").wait_for()
    made = len((live.folder / "gamma" / "history.csv").read_text().splitlines()) - 1
    assert 0 < made < 60

    # filter, and compare two
    page.locator("#search").fill("alp")
    assert page.locator("#runs li").count() == 1
    page.locator("#search").fill("")
    page.locator("#state").select_option("stopped")
    row(page, "alpha").wait_for(state="detached")
    assert row(page, "gamma").count() == 1
    page.locator("#state").select_option("")
    row(page, "alpha").get_by_role("checkbox").check()
    row(page, "beta").get_by_role("checkbox").check()
    page.locator("#ends tbody tr").nth(1).wait_for()
    assert page.locator("#curves polyline").count() == 2
    page.locator("#metric").select_option("loss")
    assert page.locator("#curves figcaption").inner_text() == "loss by round"
    assert serious(page) == []

    # take the data and the picture home
    rows = list(csv.reader(io.StringIO(download(page, "Download data"))))
    assert rows[0] == ["round", "alpha", "beta"]
    assert len(rows) == 13
    picture = ElementTree.fromstring(download(page, "Download SVG"))
    assert picture.tag.endswith("svg")
    assert len(list(picture.iter("{http://www.w3.org/2000/svg}polyline"))) == 2
    page.get_by_role("button", name="clear").click()

    # go on with the run: this page starts it, and it ends well
    page.locator("#resume").click()
    page.locator("#badge.running").wait_for()
    until(lambda: "resumed" in page.locator("#badge").inner_text())
    until(lambda: last_round(page) > made)
    page.locator("#cancel").click()
    row(page, "gamma").locator(".badge.stopped").wait_for()


def test_clients_their_failures_and_the_log_are_text_and_never_markup(live: Live, page: Any) -> None:
    page.goto(live.address)
    row(page, "beta").get_by_role("button").click()
    page.get_by_role("tab", name="clients").click()
    first = page.locator("#clients tbody tr").first
    first.wait_for()
    assert "<img src=x onerror=alert(1)>2" in first.inner_text()
    assert "raised: ValueError: the disk of <b>this</b> client is full" in first.inner_text()
    page.locator("#who").fill("alert(1)>4")
    until(lambda: page.locator("#clients tbody tr").count() == 1)
    page.get_by_role("tab", name="more charts").click()
    page.get_by_role("heading", name="Failures and rejections").wait_for()
    page.get_by_role("tab", name="log").click()
    page.locator("#log").wait_for()
    assert "this" in page.locator("#log").inner_text()
    assert page.locator("img, #log b, td b").count() == 0
    assert serious(page) == []


@pytest.mark.parametrize(("width", "colours"), [(1280, "light"), (1280, "dark"), (390, "light"), (390, "dark")])
def test_nobody_is_left_out_by_colours_or_width(live: Live, browser: Any, width: int, colours: str) -> None:
    context = browser.new_context(viewport={"width": width, "height": 844}, color_scheme=colours)
    page = context.new_page()
    page.goto(live.address)
    row(page, "beta").get_by_role("button").click()
    page.locator("#curves svg").first.wait_for()
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert serious(page) == []
    page.goto((live.folder / "beta" / "report.html").as_uri())
    page.locator("figure svg").first.wait_for()
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert serious(page) == []
    before = page.evaluate("getComputedStyle(document.body).backgroundColor")
    page.locator("#theme").click()
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") != before
    context.close()


def test_the_report_needs_no_network_and_can_be_used_with_the_keyboard(live: Live, page: Any) -> None:
    asked: list[str] = []
    page.context.set_offline(True)
    page.on("request", lambda r: asked.append(r.url))
    address = (live.folder / "beta" / "report.html").as_uri()
    page.goto(address)
    page.locator("figure svg").first.wait_for()
    page.evaluate("scrollTo(0, document.body.scrollHeight)")
    page.wait_for_timeout(200)
    assert [u for u in asked if not u.startswith("blob:")] == [address]
    text = page.locator("main").inner_text()
    assert "8 rounds made" in text
    assert "the disk of <b>this</b> client is full" in text
    assert page.locator("main b b, main img").count() == 0

    plot = page.locator("figure .plot").first
    plot.focus()
    for key in ("ArrowRight", "ArrowRight"):
        page.keyboard.press(key)
    assert "round 2" in page.locator("figure .hush[aria-live]").first.inner_text()
    whole = page.locator("figure polyline").first.get_attribute("points")
    page.keyboard.press("+")
    assert page.locator("figure polyline").first.get_attribute("points") != whole
    page.keyboard.press("0")
    assert page.locator("figure polyline").first.get_attribute("points") == whole

    # zoom by brushing, as with a mouse
    box = plot.bounding_box()
    page.mouse.move(box["x"] + box["width"] * 0.4, box["y"] + 60)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] * 0.8, box["y"] + 60, steps=4)
    page.mouse.up()
    zoomed = page.locator("figure polyline").first.get_attribute("points")
    assert 0 < len(zoomed.split()) < len(whole.split())
    page.get_by_role("button", name="Show all").first.click()
    assert page.locator("figure polyline").first.get_attribute("points") == whole

    rows = list(csv.reader(io.StringIO(download(page, "Download data"))))
    assert rows[0][:2] == ["round", "accuracy"]
    assert len(rows) == 9
    assert ElementTree.fromstring(download(page, "Download SVG")).get("viewBox")


def test_a_hostile_run_folder_runs_no_script_in_its_report(live: Live, page: Any, tmp_path: Path) -> None:
    from mutirao.report import write_report

    attack = "</script><script>document.title='owned'</script><img src=x onerror=\"document.title='owned'\">"
    (tmp_path / "config.toml").write_text(f"recipe = {json.dumps(attack)}\nrounds = 2\n")
    history = io.StringIO()
    csv.writer(history).writerows([["round", attack, "seconds"], [1, 0.5, 1], [2, 0.7, 1]])
    (tmp_path / "history.csv").write_text(history.getvalue())
    clients = io.StringIO()
    table = [["round", "client", "try", "replied", "n", "weight", "failure", attack], [1, attack, 1, 1, 5, 1, "", 0.4]]
    csv.writer(clients).writerows([*table, [2, attack + "'\">", 1, 0, 0, 0, f"raised: {attack}", ""]])
    (tmp_path / "clients.csv").write_text(clients.getvalue())
    (tmp_path / "summary.json").write_text(
        json.dumps({"final": {attack: 1}, "judge": attack, "groups": {attack: [attack]}})
    )
    page.goto(write_report(tmp_path).as_uri())
    page.locator("figure svg").first.wait_for()
    page.evaluate("scrollTo(0, document.body.scrollHeight)")
    page.locator("summary").first.click()
    time.sleep(0.2)
    assert page.title() == f"{attack}: a Mutirão run"
    assert page.locator("img").count() == 0
