"""The live page as a person uses it, in a real browser, during a real run; and the report with the network cut off."""

import csv
import io
import itertools
import json
import re
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from living import PATIENCE, Live, wait_for_list, wait_until_shown

AXE_SERIOUS = ("serious", "critical")


LOOKS = [
    (390, "dark"),
    pytest.param(1280, "light", marks=pytest.mark.slow),
    pytest.param(1280, "dark", marks=pytest.mark.slow),
    pytest.param(390, "light", marks=pytest.mark.slow),
]


@pytest.fixture
def page(browser: Any) -> Any:
    """A fresh page that may not complain."""
    context = browser.new_context(viewport={"width": 1280, "height": 900}, accept_downloads=True)
    opened = context.new_page()
    opened.set_default_timeout(1000 * PATIENCE)
    problems: list[str] = []
    opened.on("console", lambda m: problems.append(m.text) if m.type == "error" else None)
    opened.on("pageerror", lambda e: problems.append(str(e)))
    yield opened
    context.close()
    assert problems == []


@pytest.fixture
def study(live: Live, page: Any) -> str:
    """The page of a small study, two methods and three seeds, once the live page knows all of its runs."""
    from mutirao.studies.comparison import compare_methods, write_tables
    from mutirao.studies.study import read_study, run_study

    place, file = live.folder / "study", live.folder.parent / "study.toml"
    if not place.exists():
        methods = '[methods.plain]\naggregate = "fedavg"\n[methods.adam]\n'
        file.write_text(f'recipe = "iris:iris"\nseeds = 3\nbaseline = "plain"\n{methods}')
        planned = read_study(file, trust=lambda where, names: True)
        assert run_study(planned, place, start="here") == []
        write_tables(planned, compare_methods(planned, place), place)
    page.goto(live.address)
    row(page, "study").get_by_text("6 of 6 runs").wait_for()
    return f"{live.address}#/study?id=study"


def serious(page: Any) -> list[str]:
    """What axe-core finds, in one line each."""
    from axe_playwright_python.sync_playwright import Axe

    found = Axe().run(page, options={"resultTypes": ["violations"]}).response["violations"]
    return [f"{v['id']}: {v['nodes'][0]['html'][:200]}" for v in found if v["impact"] in AXE_SERIOUS]


def row(page: Any, run: str) -> Any:
    return page.locator(f"tr[data-id='{run}']")


def shown(page: Any) -> list[str]:
    return [str(name) for name in page.locator("#runs tbody tr[data-id]").evaluate_all("l => l.map(n => n.dataset.id)")]


def download(page: Any, name: str) -> str:
    with page.expect_download() as waiting:
        page.get_by_role("button", name=name).first.click()
    return Path(waiting.value.path()).read_text()


def until(true: Callable[[], bool]) -> None:
    """Wait for something to come true; the page's policy forbids to ask it with a piece of script."""
    end = time.monotonic() + PATIENCE
    while not true():
        assert time.monotonic() < end
        time.sleep(0.05)


@pytest.fixture
def made(live: Live) -> Iterator[Path]:
    """A run that was stopped after two rounds; a test writes on in its files."""
    folder = live.folder / "made"
    folder.mkdir()
    (folder / "config.toml").write_text('recipe = "quickstart"\nrounds = 9\n')
    (folder / "history.csv").write_text("round,accuracy\n1,0.1\n2,0.2\n")
    (folder / "audit.jsonl").write_text('{"event": "started", "time": "2020-01-01T00:00:00+00:00"}\n')
    wait_until_shown(live, "made")
    yield folder
    shutil.rmtree(folder)
    wait_for_list(live, lambda listed: '"made"' not in listed)


def append(file: Path, line: str) -> None:
    with file.open("a") as opened:
        opened.write(line + "\n")


class Held:
    """What a page asks of an address: the server answers at once, and the page hears of it when it is let go."""

    def __init__(self, page: Any, address: str) -> None:
        self.page = page
        self.free = False
        self.answered: list[tuple[Any, Any]] = []
        page.route(address, self.hold)

    def hold(self, route: Any) -> None:
        if self.free:
            route.continue_()
            return
        stream = "/events?" in route.request.url  # it does not end: the server is asked when it is let go
        self.answered.append((route, None if stream else route.fetch()))

    def wait(self) -> None:
        while not self.answered:
            self.page.wait_for_timeout(20)

    def let_go(self) -> None:
        self.free = True
        for route, answer in self.answered:
            if answer is None:
                route.continue_()
            else:
                route.fulfill(response=answer)


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
    row(page, "gamma").get_by_role("link").click()
    page.locator("#curves polyline").first.wait_for(state="attached")
    seen = last_round(page)
    until(lambda: last_round(page) > seen + 2)
    drawn = page.locator("#curves polyline").first.get_attribute("points")
    assert len(drawn.split()) >= seen + 2

    # cancel it: the process is ours, the run is kept
    page.locator("#cancel").click()
    page.locator("#badge.stopped").wait_for()
    assert running.wait(30) != 0
    page.locator("#resume").wait_for()
    made = len((live.folder / "gamma" / "history.csv").read_text().splitlines()) - 1
    assert 0 < made < 60

    # filter by words and by state, and sort; all of it is in the address
    page.get_by_role("link", name="all runs").click()
    page.locator("#search").fill("alp")
    until(lambda: shown(page) == ["alpha"])
    page.locator("#search").fill("rounds 8")  # a setting in which it differs
    until(lambda: shown(page) == ["beta"])
    page.locator("#search").fill("")
    page.locator("#state").select_option("stopped")
    until(lambda: shown(page) == ["gamma"])
    page.reload()
    row(page, "gamma").wait_for()
    assert shown(page) == ["gamma"]
    page.locator("#state").select_option("")
    for key, falling in (("Enter", "ascending"), ("Space", "descending")):
        page.locator("th[data-sort=name] button").focus()
        page.keyboard.press(key)
        assert page.locator("th[data-sort=name]").get_attribute("aria-sort") == falling
        names = [name for name in shown(page) if name in ("alpha", "beta", "gamma")]
        assert names == sorted(names, reverse=falling == "descending")

    # compare two
    row(page, "alpha").get_by_role("checkbox").check()
    row(page, "beta").get_by_role("checkbox").check()
    page.locator("#compare").click()
    page.locator("#ends tbody tr").nth(1).wait_for()
    assert page.locator("#compared polyline").count() == 2
    settings = page.locator("#difference tbody tr").all_inner_texts()
    assert ["rounds", "12", "8"] in [line.split() for line in settings]
    assert not any(line.startswith("pause") for line in settings)
    page.locator("#metric").select_option("loss")
    page.locator("figcaption", has_text="loss by round").wait_for()
    assert serious(page) == []

    # take the data and the picture home
    rows = list(csv.reader(io.StringIO(download(page, "Download data"))))
    assert rows[0] == ["round", "alpha", "beta"]
    assert len(rows) == 13
    picture = ElementTree.fromstring(download(page, "Download SVG"))
    assert picture.tag.endswith("svg")
    assert len(list(picture.iter("{http://www.w3.org/2000/svg}polyline"))) == 2

    # go on with the run: this page starts it, and it ends well
    page.goto(f"{live.address}#/run?id=gamma")
    page.locator("#resume").click()
    page.locator("#badge.running").wait_for()
    until(lambda: "resumed" in page.locator("#badge").inner_text())
    until(lambda: last_round(page) > made)
    page.locator("#cancel").click()
    page.locator("#badge.stopped").wait_for()


def test_seeds_are_one_curve_with_a_band_by_any_axis_and_smoothed(live: Live, study: str, page: Any) -> None:
    page.goto(study)
    verdicts = page.locator("table.verdict tbody tr")
    verdicts.first.wait_for()
    assert sorted(w for text in verdicts.all_inner_texts() for w in ("baseline", "undecided") if w in text) == [
        "baseline",
        "undecided",
    ]
    page.get_by_role("link", name="compare all").click()
    page.locator("#compared polygon").first.wait_for(state="attached")
    assert (page.locator("#compared polygon").count(), page.locator("#compared polyline").count()) == (2, 2)
    assert "95% interval" in page.locator("#compared .about").inner_text()
    page.locator("#bands").select_option("range")
    rows = list(csv.DictReader(io.StringIO(download(page, "Download data"))))
    name = next(key for key in rows[0] if key == "aggregate fedavg (3 seeds)")
    runs = live.folder / "study" / "cells" / "plain"
    each = [list(csv.DictReader((runs / f"seed{s}" / "history.csv").open())) for s in range(3)]
    values = [float(history[-1]["accuracy"]) for history in each]
    assert float(rows[-1][name]) == pytest.approx(sum(values) / 3)
    assert [float(rows[-1][f"{name} {end}"]) for end in ("low", "high")] == [min(values), max(values)]
    page.locator("#bands").select_option("none")
    until(lambda: page.locator("#compared polyline").count() == 6)
    page.locator("#axis").select_option("bytes")
    page.locator("figcaption", has_text="accuracy by bytes").wait_for()
    sent = sum(float(line["bytes_down"]) + float(line["bytes_up"]) for line in each[0])
    page.locator("#smooth").fill("0.5")
    until(lambda: page.locator("#compared polyline.faint").count() == 6)
    rows = list(csv.DictReader(io.StringIO(download(page, "Download data"))))
    assert max(float(line["bytes sent and received"]) for line in rows) == sent
    smooth, weight = 0.0, 0.0
    for line in each[0]:
        smooth, weight = 0.5 * smooth + 0.5 * float(line["accuracy"]), 0.5 * weight + 0.5
    assert float(rows[-1]["study/cells/plain/seed0"]) == pytest.approx(smooth / weight)
    page.reload()  # the address says it all
    until(lambda: page.locator("#compared polyline.faint").count() == 6)


def test_two_people_note_at_once_and_neither_loses_a_word(live: Live, page: Any) -> None:
    other = page.context.new_page()
    for each in (page, other):
        each.goto(f"{live.address}#/run?id=beta")
        each.locator("summary", has_text="Notes").click()
    page.locator("#notes").fill("mine <img src=x>")
    page.locator("#keep").click()
    page.get_by_text("saved", exact=True).wait_for()
    other.locator("#notes").fill("theirs")
    other.locator("#keep").click()
    other.get_by_text("Somebody else saved meanwhile").wait_for()
    assert other.locator(".theirs pre").inner_text() == "mine <img src=x>"
    assert other.locator("#notes").input_value() == "theirs"
    other.get_by_role("button", name="put theirs above mine").click()
    other.locator("#keep").click()
    other.get_by_text("saved", exact=True).wait_for()
    file = live.folder / "beta" / "notes.md"
    assert file.read_text() == "mine <img src=x>\n\ntheirs"
    other.get_by_role("link", name="all runs").click()
    until(lambda: "mine <img src=x> theirs" in row(other, "beta").inner_text())
    assert other.locator("tbody img").count() == 0
    file.unlink()


def test_a_list_shows_what_changed_before_the_server_heard_of_it(live: Live, made: Path, page: Any) -> None:
    page.goto(f"{live.address}#/run?id=made")
    page.locator("#curves polyline").first.wait_for(state="attached")
    stream = Held(page, "**/events?*")
    page.get_by_role("link", name="all runs").click()
    stream.wait()
    (made / "notes.md").write_text("while nobody listened")
    wait_until_shown(live, "while nobody listened")
    stream.let_go()
    row(page, "made").get_by_text("while nobody listened").wait_for()


def test_a_run_shows_what_changed_before_the_server_heard_of_it(live: Live, made: Path, page: Any) -> None:
    page.goto(live.address)
    stream = Held(page, "**/events?*")
    row(page, "made").get_by_role("link").click()
    stream.wait()
    page.locator("#badge.stopped").wait_for()
    page.locator("#curves polyline").first.wait_for(state="attached")
    append(made / "history.csv", "3,0.3")
    append(made / "audit.jsonl", '{"event": "failed", "reason": "while nobody listened"}')
    wait_until_shown(live, "while nobody listened")
    stream.let_go()
    page.locator("#badge.failed").wait_for()
    until(lambda: last_round(page) == 3)


def test_an_older_list_does_not_undo_what_the_page_heard_meanwhile(live: Live, made: Path, page: Any) -> None:
    ended: list[Any] = []

    def end_once(route: Any) -> None:  # the browser connects again, and the page asks for the list
        if ended:
            route.continue_()
            return
        ended.append(route)
        route.fulfill(body="retry: 10\nevent: hello\ndata: {}\n\n", content_type="text/event-stream")

    page.goto(live.address)
    page.locator("#live.on").wait_for()
    (made / "notes.md").write_text("the first")
    row(page, "made").get_by_text("the first").wait_for()
    page.route("**/events?*", end_once)
    older = Held(page, "**/api/runs")
    row(page, "made").get_by_role("link").click()
    older.wait()
    (made / "notes.md").write_text("the second")
    wait_until_shown(live, "the second")
    append(made / "history.csv", "3,0.3")  # is told after the note
    until(lambda: last_round(page) == 3)
    older.let_go()
    page.get_by_role("link", name="all runs").click()
    row(page, "made").get_by_text("the second").wait_for()


def test_a_run_that_changes_while_the_page_asks_for_it_is_asked_for_again(live: Live, made: Path, page: Any) -> None:
    older = Held(page, "**/api/run?*")
    page.goto(f"{live.address}#/run?id=made")
    older.wait()
    page.locator("#live.on").wait_for()
    append(made / "audit.jsonl", '{"event": "failed", "reason": "meanwhile"}')
    page.locator("#counts", has_text="1 failed").wait_for()
    older.let_go()
    page.locator("#badge.failed").wait_for()


def test_a_round_made_while_the_page_asks_for_the_others_is_drawn(live: Live, made: Path, page: Any) -> None:
    older = Held(page, "**/api/history?*")
    page.goto(f"{live.address}#/run?id=made")
    older.wait()
    page.locator("#live.on").wait_for()
    append(made / "history.csv", "3,0.3")
    other = live.folder / "other"  # a sign that the page was told: its failure comes later than the round
    other.mkdir()
    (other / "config.toml").write_text('recipe = "quickstart"\n')
    (other / "audit.jsonl").write_text('{"event": "failed", "time": "2020-01-01T00:00:00+00:00"}\n')
    page.locator("#counts", has_text="1 failed").wait_for()
    older.let_go()
    until(lambda: last_round(page) == 3)
    shutil.rmtree(other)
    wait_for_list(live, lambda listed: '"other"' not in listed)


def test_clients_their_failures_and_the_log_are_text_and_never_markup(live: Live, page: Any) -> None:
    page.goto(live.address)
    row(page, "beta").get_by_role("link").click()
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


@pytest.mark.parametrize(("width", "colours"), LOOKS)
def test_nobody_is_left_out_by_colours_or_width(live: Live, study: str, browser: Any, width: int, colours: str) -> None:
    context = browser.new_context(viewport={"width": width, "height": 844}, color_scheme=colours)
    page = context.new_page()
    both = "&".join(f"id=study%2Fcells%2F{run}" for run in ("plain%2Fseed0", "plain%2Fseed1", "adam%2Fseed0"))
    for place, sign in (
        ("runs?cells=1", "#runs tr[data-id]"),
        ("run?id=beta&smooth=0.5", "#curves svg"),
        (f"compare?{both}", "#compared svg"),
        ("study?id=study", "tr[data-id]"),
    ):
        page.goto("about:blank")
        page.goto(f"{live.address}#/{place}")
        page.locator(sign).first.wait_for()
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), place
        assert serious(page) == [], place
        heads = [box for th in page.locator("table.runs thead button").all() if (box := th.bounding_box())]
        assert all(a["x"] + a["width"] <= b["x"] for a, b in itertools.pairwise(heads)), place  # none covers the next
    page.goto((live.folder / "beta" / "report.html").as_uri())
    page.locator("figure svg").first.wait_for()
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert serious(page) == []
    before = page.evaluate("getComputedStyle(document.body).backgroundColor")
    page.locator("#theme").click()
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") != before
    context.close()


def test_thousands_of_runs_are_few_rows_and_every_one_can_be_reached(browser: Any, tmp_path: Path, live: Live) -> None:
    folder = live.folder / "many"
    for i in range(300):
        (folder / f"r{i:03d}").mkdir(parents=True)
        (folder / f"r{i:03d}" / "config.toml").write_text(f'recipe = "quickstart"\nrounds = {i + 1}\n')
        (folder / f"r{i:03d}" / "audit.jsonl").write_text('{"event": "started", "time": "2020-01-01T00:00:00+00:00"}\n')
    page = browser.new_page(viewport={"width": 1280, "height": 900})
    page.goto(f"{live.address}#/runs?q=many/&sort=name&order=rising")
    until(lambda: "300 of" in page.locator("#found").inner_text())
    assert page.locator("#runs tbody tr[data-id]").count() < 60
    assert page.locator("#runs table").get_attribute("aria-rowcount") == "301"
    page.evaluate("scrollTo(0, document.body.scrollHeight)")
    row(page, "many/r299").wait_for()
    assert row(page, "many/r299").get_attribute("aria-rowindex") == "301"
    assert "rounds 300" in row(page, "many/r299").inner_text()
    assert page.locator("#runs tbody tr[data-id]").count() < 60
    row(page, "many/r299").get_by_role("link").focus()  # who reads with the keyboard keeps the place
    page.evaluate("scrollTo(0, 0)")
    row(page, "many/r000").wait_for()
    assert page.evaluate("document.activeElement.closest('tr').dataset.id") == "many/r299"
    page.close()
    shutil.rmtree(folder)


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
