"""What goes wrong besides death: networks, disks, certificates, clocks, and sites that do not tell the truth."""

import contextlib
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from breakable import Federation, expected_digest, rounds_made

from mutirao.deploy.processes import environment, launch, running, stop, superlink_command, wait_until
from mutirao.deploy.provisioning import renew
from mutirao.deploy.server.submission import writing_process
from mutirao.deploy.site.clientapp import write_command
from mutirao.io import write_whole
from mutirao.runs.reader import text_in

ROUNDS = 4
LIAR = Path(__file__).with_name("byzantine_site.py")
HELD_BACK = "OSError"  # what the server is told: the site could not write down what it does
VICTIM = "c2"
ADDRESS = "10.213.77"  # of the little network between two namespaces


class Script:
    """Steps to take while a run goes on, each when the one before is over; a step returns True when it is."""

    def __init__(self, federation: Federation, *steps: Callable[[Path], bool]) -> None:
        self.federation, self.steps = federation, list(steps)

    def __call__(self, out: Path) -> None:
        """Go on with the script, as far as it can be by now."""
        self.federation.mend()
        if self.steps and self.steps[0](out):
            self.steps.pop(0)


def after_round(number: int) -> Callable[[Path], bool]:
    """A step that waits for a round to be made."""
    return lambda out: rounds_made(out) >= number


class Pause:
    """A step that waits for some seconds."""

    def __init__(self, seconds: float) -> None:
        self.seconds, self.began = seconds, 0.0

    def __call__(self, out: Path) -> bool:
        """Whether the time is over."""
        self.began = self.began or time.monotonic()
        return time.monotonic() - self.began >= self.seconds


def do(action: Callable[[], Any]) -> Callable[[Path], bool]:
    """A step that does something at once."""

    def step(out: Path) -> bool:
        action()
        return True

    return step


def finish(federation: Federation, script: Script, out: Path | None = None, rounds: int = ROUNDS) -> None:
    """Run to the end with the script, and judge; all its steps must have been taken."""
    out = out or federation.folder / "run"
    summary = federation.run(out, rounds, script)
    assert script.steps == [], "the run ended before the trouble was over"
    federation.judge(summary, expected_digest(rounds), out)


# ---- networks


def command(*words: str) -> None:
    """Run a system command; skips if it is not there or not allowed."""
    if shutil.which(words[0]) is None:
        pytest.skip(f"{words[0]} is not installed")
    done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"{shlex.join(words)}: {' '.join((done.stdout + done.stderr).split())[:150]}")


@contextlib.contextmanager
def namespace() -> Iterator[str]:
    """A network namespace with one link to this one; the name of our end is `<name>a`, of theirs `<name>b`."""
    if sys.platform != "linux" or os.geteuid() != 0:
        pytest.skip("network namespaces need Linux and root")
    remove_stale_namespaces()
    name = f"mtr{os.getpid()}"
    command("ip", "netns", "add", name)
    try:
        command("ip", "link", "add", f"{name}a", "type", "veth", "peer", "name", f"{name}b")
        command("ip", "link", "set", f"{name}b", "netns", name)
        command("ip", "addr", "add", f"{ADDRESS}.1/24", "dev", f"{name}a")
        command("ip", "link", "set", f"{name}a", "up")
        command("ip", "-n", name, "addr", "add", f"{ADDRESS}.2/24", "dev", f"{name}b")
        command("ip", "-n", name, "link", "set", f"{name}b", "up")
        command("ip", "-n", name, "link", "set", "lo", "up")
        yield name
    finally:
        remove_namespace(name)


def remove_namespace(name: str) -> None:
    """Remove a namespace and our end of its link."""
    for words in (["ip", "link", "del", f"{name}a"], ["ip", "netns", "del", name]):
        subprocess.run(words, capture_output=True)


def remove_stale_namespaces() -> None:
    """Remove what tests that were killed left behind: their address is ours, and no site would be let in."""
    if shutil.which("ip") is None:
        return
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True).stdout
    for name in re.findall(r"^(mtr\d+)\b", listed, re.MULTILINE):
        if not Path("/proc", name.removeprefix("mtr")).exists():
            remove_namespace(name)


def disturb_network(
    folder: Path, worse: Callable[[str], None], better: Callable[[str], None], meanwhile: Callable[[Path], bool]
) -> None:
    """A run in which the victim's link to the server gets worse after a round, and better after `meanwhile`."""
    with namespace() as name, Federation(folder, ("127.0.0.1", f"{ADDRESS}.1"), "0.0.0.0") as federation:
        federation.spaces[VICTIM] = name
        federation.start()
        script = Script(federation, after_round(1), do(lambda: worse(name)), meanwhile, do(lambda: better(name)))
        finish(federation, script)


@pytest.mark.slow
def test_the_network_between_a_site_and_the_server_is_down_for_a_minute(tmp_path: Path) -> None:
    """No packet passes for longer than it takes Flower to give a site up."""

    def turn(state: str) -> Callable[[str], None]:
        return lambda name: command("ip", "link", "set", f"{name}a", state)

    disturb_network(tmp_path, turn("down"), turn("up"), Pause(60.0))


@pytest.mark.slow
def test_a_link_between_a_site_and_the_server_is_as_slow_as_a_modem(tmp_path: Path) -> None:
    """A link as slow as an old modem, in both directions, for two rounds or more."""
    limit = ("root", "tbf", "rate", "64kbit", "burst", "4kb", "latency", "2s")

    def worse(name: str) -> None:
        command("tc", "qdisc", "add", "dev", f"{name}a", *limit)
        command("tc", "-n", name, "qdisc", "add", "dev", f"{name}b", *limit)

    def better(name: str) -> None:
        command("tc", "qdisc", "del", "dev", f"{name}a", "root")
        command("tc", "-n", name, "qdisc", "del", "dev", f"{name}b", "root")

    disturb_network(tmp_path, worse, better, after_round(3))


# ---- disks


@contextlib.contextmanager
def small_disk(folder: Path, kilobytes: int) -> Iterator[Path]:
    """A file system of its own that is soon full."""
    if sys.platform != "linux" or os.geteuid() != 0:
        pytest.skip("a small file system needs Linux and root")
    folder.mkdir(parents=True)
    command("mount", "-t", "tmpfs", "-o", f"size={kilobytes}k", "tmpfs", str(folder))
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], capture_output=True)


def fill(folder: Path) -> None:
    """Leave no byte free."""
    with (folder / "filler").open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(512))


@pytest.mark.slow
def test_the_disk_with_the_run_folder_is_full_for_a_while(tmp_path: Path) -> None:
    """The run folder's disk is full after a round, until somebody makes room."""
    with small_disk(tmp_path / "small", 8192) as small, Federation(tmp_path / "parties") as federation:
        federation.start()
        out = small / "run"
        script = Script(
            federation,
            after_round(1),
            do(lambda: fill(small)),
            lambda _: writing_process(out) == 0,  # the server process has ended by it
            Pause(10.0),
            do(lambda: (small / "filler").unlink()),
        )
        finish(federation, script, out)


@pytest.mark.slow
def test_the_disk_with_a_sites_audit_trail_is_full_for_a_while(tmp_path: Path) -> None:
    """A site that cannot write its audit trail sends nothing."""
    with Federation(tmp_path / "parties") as federation, small_disk(tmp_path / "small", 64) as small:
        node = federation.nodes[VICTIM]
        text = node.policy_file.read_text(encoding="utf-8")
        write_whole(node.policy_file, text.replace('audit = "audit.jsonl"', f'audit = "{small / "audit.jsonl"}"'))
        federation.start()
        out = federation.folder / "run"
        script = Script(
            federation,
            after_round(1),
            do(lambda: fill(small)),
            lambda _: HELD_BACK in text_in(out / "run.log"),  # what is left of the trail's last block is soon used up
            do(lambda: (small / "filler").unlink()),
        )
        finish(federation, script, out, 3 * ROUNDS)
        assert HELD_BACK in text_in(out / "clients.csv")


# ---- certificates and clocks


@pytest.mark.slow
def test_the_servers_certificate_expires_and_is_renewed(tmp_path: Path) -> None:
    """Sites do not speak to a server whose certificate has expired; once it is renewed they come back by themselves."""
    with Federation(tmp_path) as federation:
        server = federation.server

        def expire() -> None:
            stop(server.folder)
            renew(server.folder, days=0)
            launch(server, superlink_command(server), environment(server))
            assert wait_until(lambda: any("expired" in process.text() for process in sites), 40)

        def mend() -> None:
            assert all(process.alive() for process in sites)
            stop(server.folder)
            renew(server.folder)
            federation.start_link()

        federation.start()
        sites = [process for node in federation.nodes.values() if (process := running(node.folder))]
        federation.away |= federation.nodes.keys()  # nobody starts them again
        finish(federation, Script(federation, after_round(1), do(expire), Pause(60.0), do(mend)))


SHIFT = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdlib.h>
#include <sys/time.h>
#include <time.h>
static long shift(void) { const char *s = getenv("MUTIRAO_DRILL_SHIFT"); return s ? atol(s) : 0; }
int clock_gettime(clockid_t id, struct timespec *t) {
    static int (*real)(clockid_t, struct timespec *);
    if (!real) real = (int (*)(clockid_t, struct timespec *))dlsym(RTLD_NEXT, "clock_gettime");
    int got = real(id, t);
    if (!got && id == CLOCK_REALTIME) t->tv_sec += shift();
    return got;
}
int gettimeofday(struct timeval *t, void *zone) {
    struct timespec now;
    (void)zone;
    clock_gettime(CLOCK_REALTIME, &now);
    t->tv_sec = now.tv_sec;
    t->tv_usec = now.tv_nsec / 1000;
    return 0;
}
time_t time(time_t *out) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (out) *out = now.tv_sec;
    return now.tv_sec;
}
"""


def shift_clock(folder: Path, seconds: int) -> dict[str, str]:
    """An environment in which the clock is wrong: a small library in front of the system's."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None or sys.platform != "linux":
        pytest.skip("a wrong clock needs Linux and a C compiler")
    folder.mkdir(parents=True, exist_ok=True)
    source, library = folder / "shift.c", folder / "shift.so"
    source.write_text(SHIFT, encoding="utf-8")
    command(compiler, "-shared", "-fPIC", "-O1", "-o", str(library), str(source), "-ldl")
    return {"LD_PRELOAD": str(library), "MUTIRAO_DRILL_SHIFT": str(seconds)}


@pytest.mark.slow
def test_a_sites_clock_is_an_hour_ahead_and_is_set_right(tmp_path: Path) -> None:
    """The server does not believe a request that is signed in the future; with the right time the site is let in."""
    wrong = shift_clock(tmp_path / "clock", 3600)
    with Federation(tmp_path / "parties") as federation:
        federation.start()

        def go_wrong() -> None:
            federation.away.add(VICTIM)
            stop(federation.nodes[VICTIM].folder)
            process = federation.start_node(VICTIM, wrong)
            assert wait_until(lambda: "401" in process.text(), 60), process.last_words()

        def set_right() -> None:
            stop(federation.nodes[VICTIM].folder)
            federation.away.discard(VICTIM)

        finish(federation, Script(federation, after_round(1), do(go_wrong), Pause(5.0), do(set_right)))


# ---- sites that do not tell the truth


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "sets", "excluded"),
    [("duplicate", {}, {}), ("garbage", {"min_replies": 2}, {"exclude": VICTIM})],
)
def test_a_site_sends_each_reply_twice_or_garbage(
    mode: str, sets: dict[str, Any], excluded: dict[str, Any], tmp_path: Path
) -> None:
    """The second reply changes nothing; of garbage the result is that of the run without the site."""
    with Federation(tmp_path) as federation:
        words = [sys.executable, str(LIAR), mode, str(tmp_path / "lies.txt")]
        write_command(tmp_path / "bin", words)
        path = f"{tmp_path / 'bin'}{os.pathsep}{environment(federation.nodes[VICTIM])['PATH']}"
        federation.extra[VICTIM] = {"PATH": path}
        federation.start()
        summary = federation.run(tmp_path / "run", ROUNDS, Script(federation), **sets)
        assert text_in(tmp_path / "lies.txt")
        liar = VICTIM if mode == "garbage" else ""
        federation.judge(summary, expected_digest(ROUNDS, **sets, **excluded), tmp_path / "run", liar)


# ---- what breaks a federation does


def test_a_shifted_clock_is_shifted(tmp_path: Path) -> None:
    env = shift_clock(tmp_path, 3600)
    code = "import time, datetime; print(time.time(), datetime.datetime.now().timestamp(), time.monotonic())"
    told = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | env, capture_output=True, text=True, check=True
    )
    wall, date, steady = (float(word) for word in told.stdout.split())
    assert abs(wall - time.time() - 3600) < 60
    assert abs(date - time.time() - 3600) < 60
    assert abs(steady - time.monotonic()) < 60


def test_a_script_takes_its_steps_one_after_the_other(tmp_path: Path) -> None:
    taken: list[str] = []

    class Calm:
        def mend(self) -> None:
            taken.append("mend")

    calm: Any = Calm()
    script = Script(calm, after_round(1), do(lambda: taken.append("done")))
    script(tmp_path)
    assert taken == ["mend"]
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "state_001.safetensors").touch()
    for _ in range(3):
        script(tmp_path)
    assert taken.count("done") == 1
    assert script.steps == []
