"""Three sites with a folder each, over a SuperLink with TLS that knows their keys: the same model as in process."""

import contextlib
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from mutirao.config import resolve
from mutirao.deploy.admission import admit
from mutirao.deploy.content import sources
from mutirao.deploy.founding import found_server, found_site, take_key
from mutirao.deploy.layout import Server, free_port
from mutirao.deploy.processes import Process, start_superlink, start_supernode, stop_all
from mutirao.deploy.rehearse import permit_training
from mutirao.deploy.submitting import follow, submit
from mutirao.recipes.task import find
from mutirao.report import execute

# What the sites have agreed on. With `sites` a folder is one party's own; without, client_*/ or global_test/ is in it.
CYTOLOGY = {"rounds": 2, "views": 1, "slide": "", "weights": "random"}
IMAGES = {"rounds": 2, "views": 1, "side": 16, "clients": 3, "sites": True}


def write_pictures(folder: Path, count: int, seed: int) -> None:
    draw = np.random.default_rng(seed)
    for label, name in enumerate(("abnormal", "normal")):
        (folder / name).mkdir(parents=True)
        for i in range(count):
            pixels = draw.normal(90 + 90 * label, 25, (48, 48, 3)).clip(0, 255).astype(np.uint8)
            Image.fromarray(pixels).save(folder / name / f"{i}.png")


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Server, list[Process]]]:
    """A SuperLink with a certificate that knows its nodes by their keys; what joins the list is ended with it."""
    monkeypatch.setenv("MUTIRAO_CACHE", str(tmp_path / "cache"))
    sources.cache_clear()  # the nodes hash what is installed now
    made = found_server(tmp_path / "superlink", ["localhost"], free_port(), host="127.0.0.1")
    started = [start_superlink(made.folder)]
    with contextlib.ExitStack() as stack:
        stack.callback(lambda: stop_all(reversed(started)))
        yield made, started


@pytest.mark.slow
@pytest.mark.parametrize(("recipe", "settings"), [("cytology", CYTOLOGY), ("images", IMAGES)])
def test_three_sites_behind_tls_and_keys_make_the_model_of_the_local_fleet(
    recipe: str, settings: dict[str, Any], server: tuple[Server, list[Process]], tmp_path: Path
) -> None:
    link, started = server
    own_alone = "sites" in settings
    held = tmp_path / "server" / "global_test"
    write_pictures(held, 4, seed=9)
    (tmp_path / "whole").mkdir()
    (tmp_path / "whole" / "global_test").symlink_to(held)
    for k in (1, 2, 3):
        own = tmp_path / f"hospital_{k}" / f"client_{k}"  # nobody else's folder holds these pictures
        write_pictures(own, 5, seed=k)
        (tmp_path / "whole" / f"client_{k}").symlink_to(own)
        node = found_site(
            tmp_path / f"node_{k}",
            *(f"hospital_{k}", f"localhost:{link.port}", link.ca, str(own if own_alone else own.parent), [recipe]),
            client=f"client_{k}",
            sets=list(settings.items()),
        )
        node.policy_file.write_text(permit_training(node.policy_file.read_text()))
        admit(link.folder, take_key(link.folder, node.public_key))
        started.append(start_supernode(node.folder))
    out, since = tmp_path / "run", time.time()
    data = str(held if own_alone else held.parent)
    number = submit(link.folder, recipe, [*settings.items(), ("data", data)], out, timeout=120)
    whole = {**settings, "data": str(tmp_path / "whole")} | ({"sites": False} if own_alone else {})
    local = execute(recipe, resolve(find(recipe).config, whole), tmp_path / "local")
    follow(link.folder, number, out, since, 240, print)
    there = json.loads((out / "summary.json").read_text())
    assert there["digest"] == local["digest"]
    assert there["final"] == local["final"]
