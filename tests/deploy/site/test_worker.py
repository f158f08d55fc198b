"""The site's resident worker: same results, whoever does the work and whoever dies."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent))
import at_work

from mutirao.core.arrays import Arrays
from mutirao.core.fleet import Reply, Request, Site
from mutirao.deploy.layout import FOLDER_VARIABLE
from mutirao.deploy.policy.enforcement import PolicyHandler, Requester
from mutirao.deploy.policy.rules import Policy, ReplyRules, RequestRules
from mutirao.deploy.site import launcher
from mutirao.deploy.site.task_stamp import TaskSpec
from mutirao.deploy.site.worker_client import MAX_LOG, WorkerClient, log_path
from mutirao.errors import Refused
from mutirao.runs.audit_trail import check_chain

MODEL: Arrays = {"w": np.arange(4, dtype=np.float32), "b": np.zeros((2, 4))}
ORDER = TaskSpec("c1", "at_work:task_of", run="5", node=9)


@pytest.fixture(scope="module", autouse=True)
def places(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Workers find the site's module, and live in a folder of these tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", f"{Path(__file__).parent}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
        patch.setenv("XDG_RUNTIME_DIR", str(tmp_path_factory.mktemp("w")))
        patch.setenv("MUTIRAO_TEST_CLIENT", str(os.getpid()))
        yield


@pytest.fixture(scope="module")
def node() -> Iterator[int]:
    """A process that stands for the SuperNode."""
    with subprocess.Popen(["sleep", "600"]) as process:
        yield process.pid
        process.kill()


@pytest.fixture(scope="module")
def warm(node: int) -> WorkerClient:
    return WorkerClient(node)


def cold() -> Any:
    return at_work.task_of(None)


def ask(
    warm: WorkerClient, do: str = "train", state: dict[str, Any] | None = None, extras: Arrays | None = None
) -> tuple[Any, Site]:
    task = warm.task(ORDER, cold)
    site = Site("c1", task.population["c1"], state or {})
    return task.handler(Request(do, MODEL, {"round": 3}, extras or {}), site), site


def until(happened: Callable[[], bool], seconds: float = 180.0) -> bool:
    deadline = time.monotonic() + seconds
    while not happened() and time.monotonic() < deadline:
        time.sleep(0.05)
    return happened()


def same(ours: Reply, theirs: Reply) -> None:
    for one, other in ((ours.arrays, theirs.arrays), (ours.extras, theirs.extras)):
        assert one.keys() == other.keys()
        for k in one:
            assert one[k].dtype == other[k].dtype
            np.testing.assert_array_equal(one[k], other[k])
    assert ours.n == theirs.n
    assert {k: v for k, v in ours.metrics.items() if k != "pid"}.keys() == {"nan"}


def test_the_worker_gives_what_the_handler_gives_and_stays(warm: WorkerClient) -> None:
    extras: Arrays = {"control": np.arange(3.0), "flags": np.array([True])}
    reply, site = ask(warm, state={"visits": np.asarray(4)}, extras=extras)
    here = Site("c1", cold().population["c1"], {"visits": np.asarray(4)})
    same(reply, at_work.handler(Request("train", MODEL, extras=extras), here))
    assert reply.extras.keys() == {"visits", "control", "flags"}
    np.testing.assert_array_equal(site.state["visits"], here.state["visits"])
    pid = int(reply.metrics["pid"])
    assert pid != os.getpid()
    assert int(ask(warm)[0].metrics["pid"]) == pid


def test_the_guard_can_count_samples_that_are_elsewhere(warm: WorkerClient, tmp_path: Path) -> None:
    task = warm.task(ORDER, cold)
    policy = Policy(asked=RequestRules(("train",), min_samples=13), audit=tmp_path / "audit.jsonl")
    with pytest.raises(Refused, match="min_samples"):
        PolicyHandler(task.handler, policy, Requester())(Request("train", MODEL), Site("c1", task.population["c1"]))


@pytest.mark.parametrize("do", ["raise", "refuse", "text"])
def test_what_the_code_raises_is_raised_here(warm: WorkerClient, do: str) -> None:
    with pytest.raises(Exception, match=r"no such column|asked\.names: not this|not numbers") as caught:
        ask(warm, do)
    assert type(caught.value).__name__ == {"raise": "ValueError", "refuse": "Refused", "text": "TypeError"}[do]
    if isinstance(caught.value, Refused):
        assert (caught.value.rule, caught.value.detail) == ("asked.names", "secret")
    with pytest.raises(Exception, match="the handler answered with int, not with a Reply"):
        ask(warm, "nothing")


@pytest.mark.parametrize("deaths", [1, 2])
def test_a_worker_that_is_killed_at_work_costs_nothing_but_time(
    warm: WorkerClient, tmp_path: Path, deaths: int
) -> None:
    policy = Policy(
        asked=RequestRules(("die",)),
        reply=ReplyRules(arrays=("*",), extras=("*",), metrics=("*",)),
        audit=tmp_path / "audit.jsonl",
    )
    task, trace = warm.task(ORDER, cold), tmp_path / "deaths"
    site = Site("c1", task.population["c1"], {"visits": np.asarray(4)})
    request = Request("die", MODEL, {"trace": str(trace), "deaths": deaths})
    reply = PolicyHandler(task.handler, policy, Requester())(request, site)
    assert len(trace.read_text()) == deaths
    assert (int(reply.metrics["pid"]) == os.getpid()) == (deaths == 2)  # at last this process does it
    here = Site("c1", cold().population["c1"], {"visits": np.asarray(4)})
    same(reply, at_work.handler(Request("train", MODEL), here))
    assert int(site.state["visits"]) == 5
    events, problems = check_chain(policy.audit)
    assert problems == []
    assert [e["event"] for e in events] == ["asked", "sent"]  # once, however often it was tried


def test_another_environment_needs_another_worker(warm: WorkerClient, monkeypatch: pytest.MonkeyPatch) -> None:
    before = int(ask(warm)[0].metrics["pid"])
    monkeypatch.setenv("MUTIRAO_SOMETHING", "else")
    after = int(ask(warm)[0].metrics["pid"])
    assert after != before
    assert until(lambda: not launcher.start_ticks(before))  # it is not needed any more


@pytest.mark.slow
def test_a_worker_ends_with_its_supernode_and_in_the_middle_of_work_nobody_waits_for(tmp_path: Path) -> None:
    with subprocess.Popen(["sleep", "600"]) as parent:
        warm = WorkerClient(parent.pid)
        folder = launcher.folder_of(parent.pid)
        assert folder.stat().st_mode & 0o777 == 0o700
        pid = int(ask(warm)[0].metrics["pid"])
        waiting = subprocess.Popen(
            [sys.executable, __file__, str(parent.pid)], env=os.environ | {"MUTIRAO_TEST_CLIENT": ""}
        )
        with waiting:  # a client that asks for a minute's work, and is killed
            assert until(lambda: "asking" in (folder / "asking").read_text() if (folder / "asking").exists() else False)
            pid = int((folder / "asking").read_text().split()[1])
            time.sleep(1.0)
            waiting.kill()
        assert until(lambda: not launcher.start_ticks(pid))
        pid = int(ask(warm)[0].metrics["pid"])
        parent.kill()
    assert until(lambda: not launcher.start_ticks(pid))
    assert until(lambda: not folder.exists())


def test_a_folder_that_others_can_open_is_not_used(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path_factory.mktemp("o")  # a short path: a socket's has some hundred letters at most
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(place))
    (place / f"mutirao-{os.getuid()}").mkdir(mode=0o755)
    reply, _ = ask(WorkerClient(os.getpid()))
    assert int(reply.metrics["pid"]) == os.getpid()
    assert not launcher.delegate(["--parent-pid", str(os.getpid())])


def test_a_worker_that_does_not_answer_is_done_without(warm: WorkerClient, monkeypatch: pytest.MonkeyPatch) -> None:
    pid = int(ask(warm)[0].metrics["pid"])
    monkeypatch.setattr("mutirao.deploy.site.worker_client.GREETING_TIMEOUT", 0.3)
    os.kill(pid, signal.SIGSTOP)
    try:
        assert int(ask(warm)[0].metrics["pid"]) == os.getpid()
    finally:
        os.kill(pid, signal.SIGCONT)


def test_a_client_process_imports_no_torch() -> None:
    code = (
        "import sys, mutirao.deploy.site.clientapp as c; c.prepare()\n"
        "print('torch' in sys.modules, 'scipy' in sys.modules)"
    )
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert told.stdout.split() == ["False", "False"]


if __name__ == "__main__":  # the client that is killed
    place = launcher.folder_of(int(sys.argv[1]))
    first = ask(WorkerClient(int(sys.argv[1])))[0]
    (place / "asking").write_text(f"asking {int(first.metrics['pid'])}")
    ask(WorkerClient(int(sys.argv[1])), "sleep")


def test_what_a_worker_warns_of_is_among_the_sites_logs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert log_path("mutirao.deploy.site.worker", tmp_path) == tmp_path / "worker.log"
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path / "site"))
    log = log_path("mutirao.deploy.site.worker", tmp_path)
    assert log == tmp_path / "site" / "logs" / "worker.log"
    log.write_bytes(bytes(MAX_LOG + 1))
    assert not log_path("mutirao.deploy.site.worker", tmp_path).exists()
    assert (log.parent / "worker.1.log").stat().st_size > MAX_LOG
