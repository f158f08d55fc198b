"""Sites with a folder each, over a SuperLink with TLS that knows their keys: the same model as in process.

Of five hospitals three have something else than what is agreed on, or may not say: they take no part, by name.
"""

import contextlib
import csv
import json
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from mutirao.config import resolve
from mutirao.deploy.layout import Server, free_port
from mutirao.deploy.policy.pins import sources
from mutirao.deploy.processes import Process, start_superlink, start_supernode, stop_all
from mutirao.deploy.provisioning import create_server, create_site, store_key
from mutirao.deploy.rehearsal import permit_training
from mutirao.deploy.server.control_calls import admit
from mutirao.deploy.server.submission import follow, submit
from mutirao.experiments.task import find
from mutirao.report import execute

# What the sites have agreed on. Each has its own pictures in folders by class, and nobody else has them.
CYTOLOGY = {"rounds": 2, "views": 1, "slide": "", "weights": "random"}
IMAGES = {"rounds": 2, "views": 1, "side": 16, "clients": 3, "sites": True}
NAMES = ("abnormal", "normal")
COUNTS = '\nextras = ["counts"]\nmetrics'  # of a policy that lets a site tell how many it has of each class


def write_pictures(folder: Path, count: int, seed: int, names: tuple[str, ...] = NAMES) -> Path:
    draw = np.random.default_rng(seed)
    for label, name in enumerate(names):
        (folder / name).mkdir(parents=True)
        for i in range(count):
            pixels = draw.normal(90 + 90 * label, 25, (48, 48, 3)).clip(0, 255).astype(np.uint8)
            Image.fromarray(pixels).save(folder / name / f"{i}.png")
    return folder


class Federation:
    """A SuperLink with a certificate that knows its nodes by their keys, and sites with pictures of their own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.link: Server = create_server(folder / "superlink", ["localhost"], free_port(), host="127.0.0.1")
        self.started: list[Process] = [start_superlink(self.link.folder)]
        self.nodes: dict[int, Process] = {}
        self.held = write_pictures(folder / "server" / "global_test", 4, seed=9)
        (folder / "whole").mkdir()
        (folder / "whole" / "global_test").symlink_to(self.held)

    def join(self, k: int, recipe: str, settings: dict[str, Any], own: Path, policy: Callable[[str], str]) -> None:
        """A site with these pictures, under a policy that allows training, as `policy` changes it."""
        node = create_site(
            self.folder / f"node_{k}",
            *(f"hospital_{k}", f"localhost:{self.link.port}", self.link.ca, str(own), [recipe]),
            client=f"client_{k}",
            sets=list(settings.items()),
        )
        node.policy_file.write_text(policy(permit_training(node.policy_file.read_text())))
        admit(self.link.folder, store_key(self.link.folder, node.public_key))
        self.start(k)

    def start(self, k: int) -> None:
        self.nodes[k] = start_supernode(self.folder / f"node_{k}")
        self.started.append(self.nodes[k])

    def honest(self, k: int, recipe: str, settings: dict[str, Any]) -> Path:
        """A site with what is agreed on; its pictures are those of client_k in the whole set, too."""
        own = write_pictures(self.folder / f"pictures_{k}", 5, seed=k)
        (self.folder / "whole" / f"client_{k}").symlink_to(own)
        self.join(k, recipe, settings, own, lambda text: text.replace("\nextras = []\nmetrics", COUNTS))
        return own

    def run(self, recipe: str, settings: dict[str, Any], out: Path, timeout: float = 120) -> Callable[[], None]:
        """Submit a run; what is returned waits for its end."""
        since = time.time()
        number = submit(self.link.folder, recipe, list(settings.items()), out, timeout=timeout)
        return lambda: follow(self.link.folder, number, out, since, 240, print)


@pytest.fixture
def federation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Federation]:
    monkeypatch.setenv("MUTIRAO_CACHE", str(tmp_path / "cache"))
    sources.cache_clear()  # the nodes hash what is installed now
    made = Federation(tmp_path)
    with contextlib.ExitStack() as stack:
        stack.callback(lambda: stop_all(reversed(made.started)))
        yield made


def same_as_in_process(recipe: str, settings: dict[str, Any], out: Path, whole: Path) -> None:
    local = execute(recipe, resolve(find(recipe).config, {**settings, "data": str(whole)}), out.with_name("local"))
    there = json.loads((out / "summary.json").read_text())
    assert there["digest"] == local["digest"]
    assert there["final"] == local["final"]


def rows_in(out: Path) -> list[dict[str, str]]:
    with (out / "clients.csv").open(newline="") as lines:
        return list(csv.DictReader(lines))


@pytest.mark.slow
def test_three_sites_with_pictures_of_any_kind_make_the_model_of_the_local_fleet(federation: Federation) -> None:
    for k in (1, 2, 3):
        federation.honest(k, "images", IMAGES)
    out = federation.folder / "run"
    wait = federation.run("images", {**IMAGES, "data": str(federation.held)}, out)
    wait()
    same_as_in_process("images", {**IMAGES, "sites": False}, out, federation.folder / "whole")


@pytest.mark.slow
def test_hospitals_that_differ_or_may_not_say_take_no_part_by_name_and_the_others_count_whole(
    federation: Federation,
) -> None:
    folder, out = federation.folder, federation.folder / "run"
    pictures = {k: federation.honest(k, "cytology", CYTOLOGY) for k in (1, 2)}
    odd = {
        3: (("abnormal", "columnar_normal"), lambda text: text),
        4: (NAMES, lambda text: text.replace("\n[settings]\n", '\n[settings]\nweights = ""\n')),
        5: (NAMES, lambda text: re.sub(r'\n  "agree",.*', "", text)),
    }
    for k, (names, policy) in odd.items():
        own = write_pictures(folder / f"pictures_{k}", 5, k, names)
        federation.join(k, "cytology", CYTOLOGY, own, policy)
    settings = {**CYTOLOGY, "data": str(federation.held.parent)}
    federation.run("cytology", {**settings, "clients": 5}, out)()
    refused = {row["client"]: row["failure"] for row in rows_in(out) if row["failure"]}
    assert refused.keys() == {"client_3", "client_4", "client_5"}
    assert refused["client_3"].startswith("refused: agreed.classes: classes")
    assert refused["client_4"].startswith("refused: agreed.body: body")
    assert refused["client_5"].startswith("refused: asked.requests: 'agree' may not be asked here")
    assert "add 'agree' to requests" in refused["client_5"]
    log = (out / "run.log").read_text()
    for k, rule in ((3, "agreed.classes"), (4, "agreed.body"), (5, "asked.requests")):
        assert f"client_{k} takes no part: refused: {rule}" in log
        trail = [json.loads(line) for line in (folder / f"node_{k}" / "audit.jsonl").read_text().splitlines()]
        assert {e["rule"] for e in trail if e["event"] == "refused"} == {rule}
        assert not [e for e in trail if e["event"] == "sent"]  # nothing has left, least of all an update
    counted = {(row["client"], row["n"]) for row in rows_in(out) if row["replied"] == "1"}
    assert counted == {("client_1", "8"), ("client_2", "8")}  # of ten pictures a fifth is kept back
    assert "client_1 has 10 samples: 'abnormal' 5, 'normal' 5" in log
    same_as_in_process("cytology", {**CYTOLOGY, "clients": 2}, out, folder / "whole")

    stop_all([federation.nodes[k] for k in odd])
    again = folder / "again"
    wait = federation.run("cytology", {**settings, "clients": 2, "rounds": 5, "wait": 120.0}, again)
    until(lambda: (again / "clients.csv").exists() and len(rows_in(again)) > 1)
    stop_all([federation.nodes[2]])
    (pictures[2] / "normal").rename(pictures[2] / "columnar_normal")
    federation.start(2)
    wait()
    rows = rows_in(again)
    assert [row["failure"] for row in rows if row["client"] == "client_1"] == [""] * 5
    late = [row["failure"] for row in rows if row["client"] == "client_2"]
    assert late[-1].startswith("refused: agreed.classes")  # and it is asked no more
    assert sum(failure.startswith("refused: agreed") for failure in late) == 1


def until(true: Callable[[], bool], seconds: float = 400) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.1)
