"""The fork server: it forks a client process for each call, lives on after nonsense, and ends with its SuperNode."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mutirao.deploy.site import clientapp, launcher, supernode
from mutirao.deploy.site.clientapp import load_later, words_in, write_clientapp


def until(happened: Callable[[], bool], seconds: float = 180.0) -> bool:
    deadline = time.monotonic() + seconds
    while not happened() and time.monotonic() < deadline:
        time.sleep(0.05)
    return happened()


def test_a_call_is_taken_by_a_new_process_and_nonsense_by_none(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path_factory.mktemp("h")))
    with subprocess.Popen(["sleep", "600"]) as parent, socket.create_server(("127.0.0.1", 0)) as deaf:
        words = ["--token", "x", "--insecure", "--runtime-api-address", f"127.0.0.1:{deaf.getsockname()[1]}"]
        words += ["--parent-pid", str(parent.pid)]
        folder = launcher.folder_of(parent.pid)
        assert not launcher.delegate(words)  # there is no fork server yet
        clientapp.start_fork_server(parent.pid, words)
        pid = int((folder / "forkserver.pid").read_text())
        clientapp.start_fork_server(parent.pid, words)
        assert int((folder / "forkserver.pid").read_text()) == pid  # one is enough
        assert until((folder / "forkserver").exists)
        for nonsense in (b"", b"{", b'["--token", 7]', b"[" * 50000):
            with socket.socket(socket.AF_UNIX) as link:
                link.connect(str(folder / "forkserver"))
                if nonsense:
                    link.sendall(nonsense)
        assert launcher.delegate(words)
        deaf.settimeout(180)
        with deaf.accept()[0]:  # the new process asks the SuperNode for its message
            parent.kill()
    assert until(lambda: not launcher.start_ticks(pid))


def test_the_command_runs_the_callers_file_and_falls_back_to_the_long_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = write_clientapp(tmp_path, "our_site:task_of").read_text()
    assert f"-I -S {launcher.__file__} --task=our_site:task_of" in text
    became: list[list[str]] = []
    monkeypatch.setattr(os, "execv", lambda path, words: became.append(words))
    monkeypatch.setattr(sys, "argv", ["caller", "--task=a:b", "--token", "x", "--parent-pid", str(os.getpid())])
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    for switch in ("on", "off"):
        monkeypatch.setenv("MUTIRAO_WORKER", switch)
        launcher.main()
    assert became == 2 * [[sys.executable, "-m", "mutirao.deploy.site.clientapp", *sys.argv[1:]]]


def test_a_function_of_the_site_is_imported_when_it_is_called() -> None:
    made = load_later("not_there.at_all:task_of")
    assert (made.__module__, made.__qualname__) == ("not_there.at_all", "task_of")
    with pytest.raises(Exception, match="not_there"):
        made(None)
    assert words_in(b'["a"]') == ["a"]
    assert words_in(b'"a"') is None


def test_a_supernode_that_lost_its_connection_begins_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    became: list[Any] = []
    monkeypatch.setattr(os, "execv", lambda path, words: became.append(words))
    monkeypatch.setattr(sys, "argv", ["supernode", "--superlink", "x:1"])
    with subprocess.Popen(["sleep", "600"]) as child:
        assert child.pid in supernode.children()
        monkeypatch.setattr(supernode, "children", lambda: [child.pid])
        supernode.restart(pause=0.0)
        assert child.wait(60) == -signal.SIGTERM
    assert became == [[sys.executable, "-m", "mutirao.deploy.site.supernode", "--superlink", "x:1"]]
