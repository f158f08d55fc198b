"""A real SuperLink with three SuperNodes, one of them slow: rounds go on without it, and its answer counts later."""

import csv
import json
import shutil

import pytest
from test_flower_deployment import EXAMPLE, Deployment, deployment

SLOW = '''
"""The quickstart with one client that is not done with its first work before two rounds are made."""
import time
from dataclasses import replace
from pathlib import Path

from mutirao.recipes import quickstart
from mutirao.recipes.task import Recipe


class Slow:
    def __init__(self, handler):
        self.handler = handler

    def __getattr__(self, name):
        if name == "handler":
            raise AttributeError(name)  # while it is made
        return getattr(self.handler, name)

    def __call__(self, request, site):
        if site.id == "c2" and request.do == "train":
            end = time.monotonic() + 400
            while not Path("STATE").exists() and time.monotonic() < end:
                time.sleep(0.1)
        return self.handler(request, site)


def task(config):
    made = quickstart.task(config)
    return replace(made, handler=Slow(made.handler))


recipe = Recipe(quickstart.Config, task)
'''


__all__ = ["deployment"]  # the fixture, for the test below


@pytest.mark.slow
def test_rounds_go_on_without_a_slow_site(deployment: Deployment) -> None:
    app, out = deployment.folder / "app", deployment.folder / "run"
    shutil.copytree(EXAMPLE, app)
    second = out / "checkpoints" / "state_002.safetensors"  # there when the second round is made
    (app / "flower_quickstart" / "slow.py").write_text(SLOW.replace("STATE", str(second)))
    sets = "hidden=16 epochs=1 aggregate=fedbuff aggregate.buffer=2"
    recipe = "flower_quickstart.slow:recipe"
    deployment.submit(app, f'recipe="{recipe}" out="{out}" rounds=4 per_round=3 timeout=480.0 set="{sets}"')
    deployment.until((out / "summary.json").exists, 500, "the end of the run")
    with (out / "clients.csv").open(newline="") as lines:
        rows = list(csv.DictReader(lines))
    assert not any(row["failure"] or row["rejected"] for row in rows)
    by_round = {n: [r["client"] for r in rows if r["round"] == str(n)] for n in range(1, 5)}
    assert all(len(names) == 2 for names in by_round.values())  # two fill the buffer
    assert by_round[1] == by_round[2] == ["c0", "c1"]
    late = [row for row in rows if row["client"] == "c2"]
    assert late  # it was given the first model of all, and came when there were two more
    assert float(late[0]["staleness"]) == int(late[0]["round"]) - 1 >= 2
    assert all(float(row["weight"]) == pytest.approx((1 + float(row["staleness"])) ** -0.5 / 2) for row in rows)
    assert json.loads((out / "summary.json").read_text())["rounds"] == 4
