"""Workers that are processes: what they get and give, whom they fail, and that none is left."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from mutirao.core.arrays import digest
from mutirao.core.fleet import Failure, Reply, Request, Site
from mutirao.training.engine.jobs import plan_jobs
from mutirao.training.engine.process_pool import SharedBuffer, fork_fault, idle_workers
from mutirao.training.samples import Samples
from mutirao.training.trainer import Trainer

DRAW = np.random.default_rng(0)
CONFIG = {"seed": 1, "round": 1}


def data(n: int = 20) -> tuple[Any, Any]:
    return DRAW.normal(size=(n, 6)).astype(np.float32), DRAW.integers(0, 3, n)


def linear() -> nn.Module:
    return nn.Linear(6, 3)


def asked(trainer: Trainer, sites: dict[str, Site], **config: Any) -> dict[str, Reply | Failure]:
    arrays = trainer.initial(0)
    return trainer.many({c: Request("train", arrays, CONFIG | config) for c in sites}, sites)


def sites_of(*names: str) -> dict[str, Site]:
    return {c: Site(c, data()) for c in names}


def digests(answers: dict[str, Reply | Failure]) -> list[str]:
    return [digest(r.arrays) for r in answers.values() if isinstance(r, Reply)]


def test_a_desk_holds_whatever_is_put_on_it_and_grows() -> None:
    desk = SharedBuffer()
    for size in (3, 0, 100_000, 7):
        thing = {"a": np.arange(size), "b": [np.float32(size), "text"], "c": np.eye(3, dtype=np.float32)[:, ::2]}
        for copy in (False, True):
            got = desk.take(desk.put(thing), copy)
            np.testing.assert_array_equal(got["a"], thing["a"])
            np.testing.assert_array_equal(got["c"], thing["c"])
            assert got["b"] == thing["b"]
    kept = desk.take(desk.put(np.ones(4)), copy=True)
    desk.put(np.zeros(4))
    assert kept.tolist() == [1, 1, 1, 1]


def test_workers_are_forked_once_and_see_data_as_they_are_now() -> None:
    """A worker that trained on what it was born with would not notice that a client's data changed."""
    trainer, sites = Trainer(linear, engine="processes", workers=2), sites_of("ana", "bia", "caio")
    first, before = digests(asked(trainer, sites)), pids_of(trainer)
    assert len(before) == 2
    for site in sites.values():
        site.data[0][:] *= -1
    again = digests(asked(trainer, sites))
    assert pids_of(trainer) == before
    assert again == digests(asked(Trainer(linear, engine="plain"), sites))
    assert not set(again) & set(first)


def pids_of(trainer: Trainer) -> set[int]:
    idle = idle_workers(trainer)
    workers = [idle.get() for _ in range(idle.qsize())]
    for worker in workers:
        idle.put(worker)
    return {worker.pid for worker in workers}


def test_an_optimiser_that_is_kept_is_kept_at_the_site() -> None:
    made = []
    for engine in ("processes", "plain"):
        trainer, sites = Trainer(linear, engine=engine, momentum=0.9, keep_optimizer=True), sites_of("ana", "bia")
        for site in sites.values():
            site.data = (np.ones((8, 6), np.float32), np.arange(8) % 3)
        asked(trainer, sites)
        made.append((digests(asked(trainer, sites, round=2)), {c: digest(s.state) for c, s in sites.items()}))
    assert made[0] == made[1]


class Deadly(nn.Module):
    """A model that ends its process when it sees a certain number."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        if (x == 666).any():
            os.kill(os.getpid(), signal.SIGKILL)
        return self.layer(x)


def test_a_client_whose_process_ends_fails_alone_and_the_next_round_goes_on() -> None:
    trainer, sites = Trainer(Deadly, engine="processes", workers=2), sites_of("ana", "bia", "caio", "davi")
    sites["bia"].data[0][3, 3] = 666
    for _ in range(2):
        answers = asked(trainer, sites)
        assert [c for c, r in answers.items() if isinstance(r, Failure)] == ["bia"]
        assert "the process that trained it ended" in str(answers["bia"])


def test_where_nothing_can_be_forked_threads_do_the_work() -> None:
    sites, found = sites_of("ana", "bia"), []
    plain = digests(asked(Trainer(linear, engine="plain"), sites))

    def elsewhere() -> None:
        found.append(digests(asked(Trainer(linear, engine="processes"), sites)))

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert found == [plain]
    trainer = Trainer(linear)
    turned = {"ana": Site("ana", Samples(torch.ones(6, 9).t(), torch.zeros(9, dtype=torch.int64)))}
    jobs, _ = plan_jobs(trainer, {"ana": Request("train", trainer.initial(0), CONFIG)}, turned)
    assert "not contiguous" in fork_fault(jobs)


SCRIPT = """
import os, sys, time
import numpy as np
from torch import nn
from mutirao import Request, Trainer
from mutirao.core.fleet import Site
from mutirao.training.engine.process_pool import idle_workers
trainer = Trainer(lambda: nn.Linear(6, 3), engine="processes", workers=2)
sites = {c: Site(c, (np.ones((8, 6), np.float32), np.zeros(8, np.int64))) for c in "ab"}
trainer.many({c: Request("train", trainer.initial(0), {"seed": 0, "round": 1}) for c in sites}, sites)
idle = idle_workers(trainer)
print(idle.get().pid, idle.get().pid, flush=True)
time.sleep(60 if sys.argv[1] == "killed" else 0)
"""


@pytest.mark.slow
@pytest.mark.parametrize("how", ["killed", "done"])
def test_no_worker_outlives_its_parent(how: str) -> None:
    process = subprocess.Popen([sys.executable, "-c", SCRIPT, how], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    pids = [int(pid) for pid in process.stdout.readline().split()]
    assert len(pids) == 2
    if how == "killed":
        process.kill()
    process.wait(timeout=60)
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and any(runs(pid) for pid in pids):
        time.sleep(0.05)
    assert not any(runs(pid) for pid in pids)


def runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False
