"""Whatever comes from the network, damaged on purpose: `python tests/site/fuzzing.py --minutes 10` runs it for long.

Each target takes a random generator, makes one sound input, damages it, and parses it. It may say no in the one way it
is meant to; anything else is a crash. Slowest case, memory and counts are printed as it goes on.
"""

import argparse
import contextlib
import ctypes
import faulthandler
import gc
import json
import logging
import random
import resource
import socket
import struct
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import Array as Parcel
from flwr.app import ArrayRecord, ConfigRecord, Error, Message, MetricRecord, RecordDict
from flwr.supercore.task_identity import TaskIdentity

from mutirao.core.arrays import NUMBERS
from mutirao.core.fleet import Failure, Reply
from mutirao.deploy.flower.run_tasks import settings_in
from mutirao.deploy.policy.rules import Policy, load_policy, policy_template
from mutirao.deploy.site import worker
from mutirao.deploy.site.clientapp import words_in
from mutirao.deploy.site.worker_client import FRAME, MAGIC, ProtocolError, receive, send
from mutirao.errors import ConfigError, Damaged, MutiraoError, Refused
from mutirao.flower.messages import (
    MalformedError,
    audit_head_in,
    name_in,
    reply_content,
    reply_in,
    request_in,
)
from mutirao.io import load_arrays, save_arrays
from mutirao.runs.audit_trail import Audit, check_chain, cross_check, read_trail, write_events

NASTY = [0, 1, 4, 8, 127, 128, 255, 2**31 - 1, 2**32 - 1, 2**63 - 1, 2**64 - 1]
VALUES: list[Any] = [
    None,
    True,
    -1,
    0,
    2**70,
    1e308,
    float("nan"),
    "",
    "x" * 3000,
    "\0",
    [],
    [[]],
    {},
    {"a": {}},
    "é\ud800",
]
Draw = random.Random


def damaged(draw: Draw, content: bytes) -> bytes:
    """Bytes with a few flips, cuts, repeats and absurd numbers."""
    out = bytearray(content)
    for _ in range(draw.choice([1, 1, 2, 5, 20])):
        where = draw.randrange(len(out) + 1)
        match draw.randrange(7):
            case 0 if out:
                out[where % len(out)] ^= 1 << draw.randrange(8)
            case 1:
                del out[where:]
            case 2:
                del out[where : where + draw.randrange(1, 40)]
            case 3:
                out[where:where] = draw.randbytes(draw.randrange(1, 40))
            case 4:
                out[where:where] = out[where : where + draw.randrange(1, 200)]
            case 5:
                out[where : where + 8] = struct.pack("<Q", draw.choice(NASTY))
            case 6:
                out[where : where + 4] = struct.pack("<I", draw.choice(NASTY) % 2**32)
    return bytes(out)


def twisted(draw: Draw, value: Any, depth: int = 0) -> Any:
    """JSON with a part of it replaced by something else, removed or doubled."""
    if depth > 4 or draw.random() < 0.15:
        return draw.choice(VALUES)
    if isinstance(value, dict) and value:
        out = dict(value)
        key = draw.choice(list(out))
        out[key] = twisted(draw, out[key], depth + 1)
        if draw.random() < 0.2:
            del out[key]
        return out
    if isinstance(value, list) and value:
        out_list = list(value)
        i = draw.randrange(len(out_list))
        out_list[i] = twisted(draw, out_list[i], depth + 1)
        return out_list + out_list[: draw.randrange(2)]
    return draw.choice(VALUES)


def some_arrays(draw: Draw) -> dict[str, np.ndarray]:
    kinds = ["<f4", "<f8", "<i8", "|b1", "<c8", "<u2"]
    shapes = [(), (0,), (3,), (2, 3), (1, 0, 4)]
    return {f"a{i}": np.zeros(draw.choice(shapes), draw.choice(kinds)) for i in range(draw.randrange(4))}


class Recorder:
    """A socket that only remembers what was sent."""

    def __init__(self) -> None:
        self.sent = bytearray()

    def sendall(self, block: Any) -> None:
        self.sent += block


def a_frame(draw: Draw, facts: Any) -> bytes:
    recorder = Recorder()
    send(recorder, facts, {"model": some_arrays(draw), "state": some_arrays(draw)})  # type: ignore[arg-type]
    frame = bytes(recorder.sent)
    if draw.random() < 0.5:
        return damaged(draw, frame)
    _, size, body = FRAME.unpack(frame[: FRAME.size])
    head = json.loads(frame[FRAME.size : FRAME.size + size])
    text = json.dumps(twisted(draw, head)).encode()
    return FRAME.pack(MAGIC, len(text), body) + text + frame[FRAME.size + size :]


ORDER = {"name": "c0", "run_config": {"recipe": "quickstart", "clients": 3}, "node_config": {"name": "c0"}}


def frames(draw: Draw) -> None:
    """The worker's protocol, read from a socket."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.settimeout(5)
        content = a_frame(draw, {"ask": "do", "do": "train", "config": {"round": 1}, "order": ORDER})
        threading.Thread(target=pour, args=(ours, content), daemon=True).start()
        try:
            _, groups = receive(theirs)
            assert all(a.dtype.kind in NUMBERS for g in groups.values() for a in g.values())
        except (ProtocolError, EOFError):
            pass


def pour(link: socket.socket, content: bytes) -> None:
    try:
        link.sendall(content)
        link.shutdown(socket.SHUT_WR)
    except OSError:  # the other side had enough
        pass


class Living:
    """A worker's server in this process; after anything at all it must still answer a sound greeting."""

    def __init__(self) -> None:
        self.folder = tempfile.TemporaryDirectory()
        self.server = worker.Worker(Path(self.folder.name), "right", 1, 60.0)

    def __call__(self, draw: Draw) -> None:
        """Damaged greetings, and damaged questions after a sound one."""
        answer, worker.handle_request = worker.handle_request, lambda facts, groups: ({"n": len(facts)}, groups)
        try:
            greeting = a_frame(draw, {"stamp": "right"}) if draw.random() < 0.3 else b""
            self.say(greeting or self.sound({"stamp": "right"}) + a_frame(draw, {"ask": "open", "order": ORDER}))
            self.server.stale = False
            told = self.say(self.sound({"stamp": "right"}) + self.sound({"ask": "open"}), patience=5.0)
            assert b'"fits": true' in told, told[:200]
            assert b'"n": 1' in told, told[:200]
        finally:
            worker.handle_request = answer

    def sound(self, facts: dict[str, Any]) -> bytes:
        recorder = Recorder()
        send(recorder, facts)  # type: ignore[arg-type]
        return bytes(recorder.sent)

    def say(self, content: bytes, patience: float = 0.05) -> bytes:
        ours, theirs = socket.socketpair()
        theirs.settimeout(5)
        thread = threading.Thread(target=self.server.talk, args=(theirs,), daemon=True)
        with ours:
            thread.start()
            threading.Thread(target=send_all, args=(ours, content), daemon=True).start()
            heard = bytearray()
            ours.settimeout(patience)
            deadline = time.monotonic() + 60
            while time.monotonic() < deadline:
                try:
                    block = ours.recv(65536)
                except TimeoutError:
                    break  # it waits for bytes that the damaged frame promised
                except OSError:
                    break
                if not block:
                    break
                heard += block
        thread.join(60)
        assert not thread.is_alive(), "a line never ended"
        return bytes(heard)


def send_all(link: socket.socket, content: bytes) -> None:
    with contextlib.suppress(OSError):
        link.sendall(content)


def fork_servers(draw: Draw) -> None:
    """The arguments a fork server is given."""
    content = json.dumps(["--token", "abc", "--parent-pid", "1"]).encode()
    words = words_in(
        damaged(draw, content) if draw.random() < 0.5 else json.dumps(twisted(draw, ["--token", "x"])).encode()
    )
    assert words is None or all(isinstance(word, str) for word in words)


def a_parcel(draw: Draw) -> Parcel:
    parcel = Parcel.from_numpy_ndarray(np.asarray(next(iter(some_arrays(draw).values()), np.arange(6.0).reshape(2, 3))))
    data, dtype, shape, stype = parcel.data, parcel.dtype, list(parcel.shape), parcel.stype
    match draw.randrange(6):
        case 0 | 1:
            data = damaged(draw, data)
        case 2:
            dtype = draw.choice(["object", "O", "float64", "S4", "U9", "V16", "datetime64", "", "x" * 500, "f4,f4"])
        case 3:
            shape = [draw.choice([-1, 0, 1, 3, 2**31, 2**62]) for _ in range(draw.randrange(5))]
        case 4:
            header = str({"descr": draw.choice(["|O", "<f8", "<U4"]), "fortran_order": False, "shape": tuple(shape)})
            data = (
                b"\x93NUMPY"
                + draw.choice([b"\x01\x00", b"\x02\x00", b"\x03\x00"])
                + struct.pack("<H", len(header))
                + header.encode()
            )
        case _:
            stype = draw.choice(["numpy.ndarray", "pickle", ""])
    return Parcel(dtype=dtype, shape=tuple(shape), stype=stype, data=data)


def a_record(draw: Draw) -> Any:
    match draw.randrange(6):
        case 0:
            return ArrayRecord({f"p{i}": a_parcel(draw) for i in range(draw.randrange(3))})
        case 1:
            return MetricRecord({"n": draw.choice([0, -1, 2**62, 1.5, [1, 2], [0.1], float("nan"), float("inf")])})
        case 2:
            return ConfigRecord(
                {
                    draw.choice(["name", "do", "seq", "head", "first", "n"]): draw.choice(
                        ["", "x" * 5000, b"\xff", 1, -(2**62), 0.5, True, "a\nb", "\x1b[2J", [1], ["a"]]
                    )
                }
            )
        case _:
            return ArrayRecord({"w": Parcel.from_numpy_ndarray(np.zeros((2, 3)))})


def messages(draw: Draw) -> None:
    """Replies, names, heads and requests in Flower's messages."""
    TaskIdentity._task_id, TaskIdentity._run_id, TaskIdentity._node_id = 1, 7, 1  # whose process this would be
    names = ["arrays", "extras", "metrics", "count", "audit", "name", "config", "request"]
    content = reply_content(Reply({"w": np.zeros((2, 3))}, metrics={"loss": 0.5}, n=3))
    for name in draw.sample(names, draw.randrange(1, 5)):
        content[name] = a_record(draw)
    if draw.random() < 0.2:
        content.pop(draw.choice(list(content)))
    question = Message(RecordDict(), 7, "train", ttl=100.0)
    question.metadata.__dict__["_message_id"] = "m"
    answer = Message(content, reply_to=question)
    if draw.random() < 0.1:
        answer = Message(
            Error(draw.choice([0, 1, 204, 8001, 10**9]), draw.choice(["", "x" * 9999, "a\nb\x1b"])), reply_to=question
        )
    outcome = reply_in(answer, answer.metadata.src_node_id)
    assert isinstance(outcome, Reply | Failure)
    if isinstance(outcome, Failure):
        assert "\n" not in outcome.reason
        assert len(outcome.reason) < 500
    else:
        arrays = [*outcome.arrays.values(), *outcome.extras.values()]
        assert all(a.dtype.kind in NUMBERS for a in arrays)
    name = name_in(answer, answer.metadata.src_node_id)
    assert isinstance(name, Failure) or name.isprintable()
    head = audit_head_in(answer, "audit")
    assert not head or set(head) == {"seq", "first", "head"}
    # at a site `answer` makes one line of what is wrong
    with contextlib.suppress(MalformedError, KeyError, AttributeError, ValueError):
        request_in(answer)


def trails(draw: Draw) -> None:
    """The audit trail of the other side."""
    with tempfile.TemporaryDirectory() as place:
        server, site = Audit(Path(place) / "server.jsonl"), Audit(Path(place) / "audit.jsonl")
        server.append("started", config="0", model="1")
        for number in (1, 2):
            site.append("asked", site="c0", round=number, server=server.where())
            site.append("sent", site="c0", round=number, server=server.where(), reply="r")
            server.append("round", round=number, heads={"c0": site.where() | {"reply": "r"}})
        lines = site.path.read_bytes().splitlines()
        if draw.random() < 0.5:
            site.path.write_bytes(damaged(draw, site.path.read_bytes()))
        else:
            i = draw.randrange(len(lines))
            lines[i] = json.dumps(twisted(draw, json.loads(lines[i]))).encode()
            site.path.write_bytes(b"\n".join(lines) + b"\n")
        events, _ = check_chain(server.path)
        read_trail(site.path)
        good, problems = cross_check(events, site.path)
        assert problems or good
        found = read_trail(site.path)[1]
        write_events({"server": events, "c0": found}, Path(place) / "events.csv")
        cross_check(found, server.path)  # and the other way round
        Audit(site.path).append("asked", round=3)


POLICY = policy_template(["quickstart"])


def policies(draw: Draw) -> None:
    """A policy file, and the settings of a run that is judged by one."""
    with tempfile.TemporaryDirectory() as place:
        path = Path(place) / "policy.toml"
        path.write_bytes(damaged(draw, POLICY.encode()))
        with contextlib.suppress(ConfigError):
            load_policy(path)
        settings = twisted(
            draw, {"recipe": "quickstart", "set": "lr=0.1 epochs=2", "rounds": 2, "partition.alpha": 0.3}
        )
        asked = (
            {str(k): v for k, v in settings.items() if isinstance(v, bool | int | float | str)}
            if isinstance(settings, dict)
            else {}
        )
        with contextlib.suppress(Refused, ConfigError):
            Policy(recipes={"quickstart": "x"}).approve(str(asked.get("recipe", "quickstart")), asked)
        with contextlib.suppress(MutiraoError):
            settings_in(asked)


def checkpoints(draw: Draw) -> None:
    """A checkpoint in safetensors."""
    with tempfile.TemporaryDirectory() as place:
        path = Path(place) / "x.safetensors"
        save_arrays(path, {"w": np.arange(12.0).reshape(3, 4), "n": np.array(3)}, {"round": 1}, durable=False)
        path.write_bytes(damaged(draw, path.read_bytes()))
        with contextlib.suppress(Damaged):
            load_arrays(path)


NAMES = ("frames", "living worker", "fork server", "messages", "trails", "policies", "checkpoints")
Targets = dict[str, Callable[[Draw], None]]


def targets() -> Targets:
    """All of them, by name."""
    settings_in({})  # imports torch, which takes long the first time
    parts = (frames, Living(), fork_servers, messages, trails, policies, checkpoints)
    return dict(zip(NAMES, parts, strict=True))


def memory() -> float:
    """MB this process holds now, without what the allocator keeps for later."""
    gc.collect()
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL("libc.so.6").malloc_trim(0)
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() / 2**20


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="")
    options = parser.parse_args()
    logging.disable(logging.CRITICAL)
    began, said, crashes = time.monotonic(), 0.0, 0
    counts: dict[str, int] = {}
    slowest: dict[str, float] = {}
    chosen = {k: f for k, f in targets().items() if options.only in k}
    seed = options.seed
    while time.monotonic() - began < 60 * options.minutes:
        for name, target in chosen.items():
            seed += 1
            faulthandler.dump_traceback_later(60, exit=True)  # a hang
            start = time.monotonic()
            try:
                target(Draw(seed))
            except Exception as error:
                crashes += 1
                print(f"CRASH {name} seed {seed}: {type(error).__name__}: {error}", flush=True)
                if crashes > 20:
                    sys.exit(1)
            slowest[name] = max(slowest.get(name, 0.0), time.monotonic() - start)
            counts[name] = counts.get(name, 0) + 1
        if time.monotonic() - said > 30:
            said = time.monotonic()
            threads = threading.active_count()
            total = sum(counts.values())
            print(f"{said - began:6.0f} s  {total:8d} cases  {memory():6.1f} MB  {threads} threads", flush=True)
    faulthandler.cancel_dump_traceback_later()
    for name in chosen:
        print(f"{name:<14} {counts[name]:8d} cases, slowest {slowest[name]:.3f} s")
    print(f"{memory():.1f} MB, {crashes} crashes")
    sys.exit(1 if crashes else 0)


if __name__ == "__main__":
    main()
