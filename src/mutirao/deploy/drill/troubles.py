"""What goes wrong besides death: networks, disks, certificates, clocks, and sites that do not tell the truth."""

import contextlib
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from mutirao.core.files import write_whole
from mutirao.deploy.clientapp import write_command
from mutirao.deploy.drill.federation import Federation, expected_digest, rounds_made
from mutirao.deploy.drill.impostor import come_through_forwarder, speak_for_others
from mutirao.deploy.drill.trials import Impossible, Trial
from mutirao.deploy.founding import renew
from mutirao.deploy.keeping import process_holding
from mutirao.deploy.processes import environment, launch, running, stop, superlink_command, until
from mutirao.runs.reader import Columns, text_of

ROUNDS = 4
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


def finish(federation: Federation, trial: Trial, script: Script, out: Path | None = None, rounds: int = ROUNDS) -> None:
    """Run to the end with the script, and judge; all its steps must have been taken."""
    out = out or federation.folder / "run"
    federation.judge(trial, federation.run(out, rounds, script), expected_digest(rounds), out)
    if script.steps:
        trial.good, trial.happened = False, f"the run ended before the trouble was over; {trial.happened}"


# ---- networks


def command(*words: str) -> None:
    """Run a system command; Impossible if it is not there or not allowed."""
    if shutil.which(words[0]) is None:
        raise Impossible(f"{words[0]} is not installed")
    done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode:
        raise Impossible(f"{shlex.join(words)}: {' '.join((done.stdout + done.stderr).split())[:150]}")


@contextlib.contextmanager
def namespace() -> Iterator[str]:
    """A network namespace with one link to this one; the name of our end is `<name>a`, of theirs `<name>b`."""
    if sys.platform != "linux" or os.geteuid() != 0:
        raise Impossible("network namespaces need Linux and root")
    name = f"mtr{os.getpid() % 100000}"
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
        for words in (["ip", "link", "del", f"{name}a"], ["ip", "netns", "del", name]):
            subprocess.run(words, capture_output=True)


def disturb_network(
    folder: Path, trial: Trial, worse: Callable[[str], None], better: Callable[[str], None], most: float
) -> None:
    """A run in which the victim's link to the server gets worse after a round, and better after a time."""
    with namespace() as name, Federation(folder, ("127.0.0.1", f"{ADDRESS}.1"), "0.0.0.0") as federation:
        federation.spaces[VICTIM] = name
        federation.start()
        script = Script(federation, after_round(1), do(lambda: worse(name)), Pause(most), do(lambda: better(name)))
        finish(federation, trial, script)


def cut(folder: Path, trial: Trial) -> None:
    """No packet passes for longer than it takes Flower to give a site up."""

    def turn(state: str) -> Callable[[str], None]:
        return lambda name: command("ip", "link", "set", f"{name}a", state)

    disturb_network(folder, trial, turn("down"), turn("up"), 60.0)


def slow(folder: Path, trial: Trial) -> None:
    """A link as slow as an old modem, in both directions, for two rounds or more."""
    limit = ("root", "tbf", "rate", "64kbit", "burst", "4kb", "latency", "2s")

    def worse(name: str) -> None:
        command("tc", "qdisc", "add", "dev", f"{name}a", *limit)
        command("tc", "-n", name, "qdisc", "add", "dev", f"{name}b", *limit)

    def better(name: str) -> None:
        command("tc", "qdisc", "del", "dev", f"{name}a", "root")
        command("tc", "-n", name, "qdisc", "del", "dev", f"{name}b", "root")

    disturb_network(folder, trial, worse, better, 20.0)


# ---- disks


@contextlib.contextmanager
def small_disk(folder: Path, kilobytes: int) -> Iterator[Path]:
    """A file system of its own that is soon full."""
    if sys.platform != "linux" or os.geteuid() != 0:
        raise Impossible("a small file system needs Linux and root")
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


def disk(folder: Path, trial: Trial) -> None:
    """The run folder's disk is full after a round, until somebody makes room."""
    with small_disk(folder / "small", 8192) as small, Federation(folder / "parties") as federation:
        federation.start()
        out = small / "run"
        script = Script(
            federation,
            after_round(1),
            do(lambda: fill(small)),
            lambda _: process_holding(out) == 0,  # the server process has ended by it
            Pause(10.0),
            do(lambda: (small / "filler").unlink()),
        )
        finish(federation, trial, script, out)
        trial.happened = f"the server process ended, and went on when there was room; {trial.happened}"


def site_disk(folder: Path, trial: Trial) -> None:
    """A site that cannot write its audit trail sends nothing."""
    with Federation(folder / "parties") as federation, small_disk(folder / "small", 64) as small:
        node = federation.nodes[VICTIM]
        text = node.policy_file.read_text(encoding="utf-8")
        write_whole(node.policy_file, text.replace('audit = "audit.jsonl"', f'audit = "{small / "audit.jsonl"}"'))
        federation.start()
        out = federation.folder / "run"
        script = Script(
            federation,
            after_round(1),
            do(lambda: fill(small)),
            lambda _: HELD_BACK in text_of(out / "run.log"),  # what is left of the trail's last block is soon used up
            do(lambda: (small / "filler").unlink()),
        )
        finish(federation, trial, script, out, 3 * ROUNDS)
        failures = text_of(out / "clients.csv").count(HELD_BACK)
        trial.happened = f"{failures} replies were held back; {trial.happened}"
        trial.good = trial.good and failures > 0


# ---- certificates and clocks


def certificate(folder: Path, trial: Trial) -> None:
    """Sites do not speak to a server whose certificate has expired; once it is renewed they come back by themselves."""
    with Federation(folder) as federation:
        server = federation.server
        words: list[str] = []

        def expire() -> None:
            stop(server.folder)
            renew(server.folder, days=0)
            launch(server, superlink_command(server), environment(server))
            minded = until(lambda: any("expired" in process.text() for process in sites), 40)
            words.append("sites refused it as expired" if minded else "NO SITE MINDED")

        def mend() -> None:
            ended = sum(not process.alive() for process in sites)
            words.append(f"{ended} SITES ENDED" if ended else "none ended")
            stop(server.folder)
            renew(server.folder)
            federation.start_link()

        federation.start()
        sites = [process for node in federation.nodes.values() if (process := running(node.folder))]
        federation.away |= federation.nodes.keys()  # nobody starts them again
        finish(federation, trial, Script(federation, after_round(1), do(expire), Pause(60.0), do(mend)))
        trial.happened = f"{', '.join(words)}; {trial.happened}"
        trial.good = trial.good and not any("SITE" in word for word in words)


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
        raise Impossible("a wrong clock needs Linux and a C compiler")
    folder.mkdir(parents=True, exist_ok=True)
    source, library = folder / "shift.c", folder / "shift.so"
    source.write_text(SHIFT, encoding="utf-8")
    command(compiler, "-shared", "-fPIC", "-O1", "-o", str(library), str(source), "-ldl")
    return {"LD_PRELOAD": str(library), "MUTIRAO_DRILL_SHIFT": str(seconds)}


def clock(folder: Path, trial: Trial) -> None:
    """The server does not believe a request that is signed in the future; with the right time the site is let in."""
    wrong = shift_clock(folder / "clock", 3600)
    with Federation(folder / "parties") as federation:
        federation.start()
        words: list[str] = []

        def go_wrong() -> None:
            federation.away.add(VICTIM)
            stop(federation.nodes[VICTIM].folder)
            process = federation.start_node(VICTIM, wrong)
            until(lambda: "401" in process.text() or not process.alive(), 60)
            refused = "401" in process.text()
            words.append("it was not let in (401)" if refused else f"IT SAID: {process.last_words()[:80]}")

        def set_right() -> None:
            stop(federation.nodes[VICTIM].folder)
            federation.away.discard(VICTIM)

        finish(federation, trial, Script(federation, after_round(1), do(go_wrong), Pause(5.0), do(set_right)))
        trial.happened = f"{words[0]}; {trial.happened}"
        trial.good = trial.good and "401" in words[0]


# ---- sites that do not tell the truth


def make_liar_trial(mode: str, **sets: Any) -> Callable[[Path, Trial], None]:
    """A trial in which one site's client process is `mutirao.deploy.drill.liar`."""

    def trouble(folder: Path, trial: Trial) -> None:
        with Federation(folder) as federation:
            words = [sys.executable, "-m", "mutirao.deploy.drill.liar", mode, str(folder / "lies.txt")]
            write_command(folder / "bin", words)
            path = f"{folder / 'bin'}{os.pathsep}{environment(federation.nodes[VICTIM])['PATH']}"
            federation.extra[VICTIM] = {"PATH": path}
            federation.start()
            out = folder / "run"
            settings = {k: v for k, v in sets.items() if k != "exclude"}
            summary = federation.run(out, ROUNDS, Script(federation), **settings)
            lies = text_of(folder / "lies.txt").splitlines()
            kinds = [text.partition(":")[0] for text in Columns(out / "clients.csv").texts("failure") if text]
            trial.happened = f"{len(lies)} times ({'; '.join(dict.fromkeys(lies))[:160]})"
            trial.happened += f", failures: {', '.join(dict.fromkeys(kinds)) or 'none'}"
            liar = VICTIM if mode == "garbage" else ""
            federation.judge(trial, summary, expected_digest(ROUNDS, **sets), out, liar)
            trial.good = trial.good and len(lies) > 0

    return trouble


TROUBLES: dict[str, Callable[[Path, Trial], None]] = {
    "cut": cut,
    "slow": slow,
    "disk": disk,
    "site-disk": site_disk,
    "certificate": certificate,
    "clock": clock,
    "duplicate": make_liar_trial("duplicate"),
    "garbage": make_liar_trial("garbage", min_replies=2, exclude=VICTIM),
    "impostor": speak_for_others,
    "forwarder": come_through_forwarder,
}
