"""Both admin pages as a person uses them: a real SuperLink, the commands in processes of their own, a real browser."""

import subprocess
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from living import mutirao
from mutirao.core.fleet import Reply, Request, Site
from mutirao.deploy.keys import key_fingerprint
from mutirao.deploy.layout import Node, Server, free_port
from mutirao.deploy.policy.enforcement import PolicyHandler, Requester
from mutirao.deploy.policy.rules import load_policy
from mutirao.deploy.processes import start_superlink
from mutirao.deploy.provisioning import create_server, create_site
from mutirao.deploy.server.control_calls import is_admitted
from mutirao.deploy.site.pause import is_paused
from mutirao.runs.audit_trail import check_chain

pytestmark = pytest.mark.slow  # for the processes it waits for
SERIOUS = ("serious", "critical")
EVIL = "<img src=x onerror=alert(1)>"
POLICY = """
[asked]
requests = ["train"]
[reply]
arrays = ["*"]
[privacy]
clip = 1.0
noise = 4.0
budget = 40.0
"""


@dataclass
class Federation:
    """A server and a site, and where their pages are."""

    server: Server
    site: Node
    pages: dict[str, str]


def show(folder: Path) -> tuple["subprocess.Popen[str]", str]:
    """Start a page as a person does; its process and its address."""
    page = mutirao("site", "admin", str(folder), "--no-open", cwd=folder, stdout=subprocess.PIPE)
    assert page.stdout is not None
    said = page.stdout.readline()
    assert " is shown at http://127.0.0.1:" in said, said
    threading.Thread(target=page.stdout.read, daemon=True).start()
    return page, said.split(" at ")[1].strip()


@pytest.fixture(scope="module")
def federation(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Federation]:
    place = tmp_path_factory.mktemp("federation")
    server = create_server(place / "server", ["localhost"], free_port(), host="127.0.0.1")
    site = create_site(place / "recife", "recife", f"localhost:{server.port}", server.ca, client="c0")
    site.policy_file.write_text(POLICY)
    handler = PolicyHandler(answer, load_policy(site.policy_file), Requester("7", EVIL, "recife"))
    for number in range(1, 16):
        handler(Request("train", {"w": np.zeros(4)}, {"round": number}), Site("recife", None))
    link = start_superlink(server.folder)
    begun = [show(folder) for folder in (server.folder, site.folder)]
    yield Federation(server, site, {"server": begun[0][1], "site": begun[1][1]})
    for process, _ in begun:
        process.terminate()
        process.wait(60)
    link.stop()


def answer(request: Request, site: Site) -> Reply:
    return Reply({"w": request.arrays["w"] + 1.0}, n=60)


@pytest.fixture
def page(browser: Any) -> Iterator[Any]:
    """A fresh page that may not complain, but of an answer that says no."""
    context = browser.new_context(viewport={"width": 1280, "height": 900})
    opened = context.new_page()
    opened.set_default_timeout(180_000)
    problems: list[str] = []
    opened.on("console", lambda m: problems.append(m.text) if m.type == "error" and "409" not in m.text else None)
    opened.on("pageerror", lambda e: problems.append(str(e)))
    yield opened
    context.close()
    assert problems == []


def test_a_key_is_admitted_and_dismissed_with_confirmation(federation: Federation, page: Any, tmp_path: Path) -> None:
    server, site = federation.server, federation.site
    page.goto(federation.pages["server"])
    page.locator("#state.on").wait_for()
    page.get_by_text("No site is admitted yet.").wait_for()

    # nonsense is one line, and nothing happens
    page.get_by_label("Public key").fill("nonsense")
    page.get_by_label("Name of the site").fill("recife")
    page.get_by_role("button", name="Look at the key").click()
    page.get_by_text("recife.pub is no public key of a site").wait_for()

    # a file, its fingerprint, no, and yes
    page.get_by_label("Name of the site").fill("")
    page.get_by_label("File").set_input_files(site.public_key)
    page.get_by_role("button", name="Look at the key").click()
    dialog = page.get_by_role("dialog", name="Admit this site?")
    dialog.get_by_text(key_fingerprint(site.public_key)).wait_for()
    assert "c0" in dialog.inner_text()
    page.keyboard.press("Escape")
    dialog.wait_for(state="hidden")
    assert not is_admitted(server, site.public_key)
    page.get_by_role("button", name="Look at the key").click()
    dialog.get_by_role("button", name="Admit").click()
    page.get_by_text("admitted: recife").wait_for()
    page.locator("#sites").get_by_text("not connected").wait_for()
    assert is_admitted(server, site.public_key)

    # dismissed by its name alone, with the keyboard
    page.get_by_role("button", name="dismiss recife").focus()
    page.keyboard.press("Enter")
    sure = page.get_by_role("dialog", name="Dismiss this site?")
    page.keyboard.type("recif")
    page.keyboard.press("Enter")
    sure.get_by_text("type recife to dismiss it").wait_for()
    assert is_admitted(server, site.public_key)
    page.keyboard.type("e")
    page.keyboard.press("Enter")
    page.get_by_text("dismissed: recife").wait_for()
    page.get_by_text("No site is admitted yet.").wait_for()
    assert not is_admitted(server, site.public_key)
    events, problems = check_chain(server.trail)
    assert ([e["event"] for e in events], problems) == (["admitted", "dismissed"], [])


def test_the_pause_switch_and_what_left_are_on_the_sites_page(federation: Federation, page: Any) -> None:
    policy = load_policy(federation.site.policy_file)
    page.goto(federation.pages["site"])
    switch = page.get_by_role("switch", name="Pause")
    page.locator("#requests").get_by_text(EVIL).first.wait_for()
    assert page.locator("main img").count() == 0
    assert page.locator("meter").count() == 1
    switch.focus()
    page.keyboard.press("Space")
    page.get_by_text("paused: nothing is answered").wait_for()
    assert switch.get_attribute("aria-checked") == "true"
    assert is_paused(policy)
    page.keyboard.press("Space")  # it has kept the focus
    page.get_by_text("the site answers again").wait_for()
    assert not is_paused(policy)


@pytest.mark.parametrize("colours", ["light", "dark"])
@pytest.mark.parametrize("role", ["server", "site"])
def test_nobody_is_left_out_by_colours_or_width(federation: Federation, browser: Any, role: str, colours: str) -> None:
    from axe_playwright_python.sync_playwright import Axe

    for width in (1280, 360):
        context = browser.new_context(viewport={"width": width, "height": 800}, color_scheme=colours)
        page = context.new_page()
        page.set_default_timeout(180_000)
        page.goto(federation.pages[role])
        page.locator("#figures li").first.wait_for()
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        found = Axe().run(page, options={"resultTypes": ["violations"]}).response["violations"]
        assert [f"{v['id']}: {v['nodes'][0]['html'][:200]}" for v in found if v["impact"] in SERIOUS] == []
        context.close()
