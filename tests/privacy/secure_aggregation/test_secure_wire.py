"""All that travels, and all that the server writes, is searched for any single client's update, metrics and size."""

import csv
import struct
from pathlib import Path
from typing import Any

import numpy as np
from parties import MODEL, Lossy, ask, handler, lossy, names, update_of

from mutirao.config import resolve
from mutirao.core.arrays import Arrays
from mutirao.core.fleet import Reply, Request
from mutirao.experiments.task import find
from mutirao.privacy.secure_aggregation import SecAggPlus
from mutirao.privacy.secure_aggregation.fixed_point import FixedPoint
from mutirao.privacy.secure_aggregation.kinds import Secure
from mutirao.runs.execute import execute
from mutirao.simulation.local_fleet import LocalFleet

PIECE = 16  # bytes of an array that must not be found anywhere


def carried(seen: list[tuple[str, Request, Reply | None]]) -> bytes:
    """Everything in these requests and replies, as bytes."""
    out = []
    for _, request, reply in seen:
        groups: list[Arrays] = [request.arrays, request.extras]
        groups += [reply.arrays, reply.extras] if reply is not None else []
        out += [v.tobytes() for group in groups for v in group.values()]
        out.append(repr(dict(request.config)).encode())
        if reply is not None:
            out += [struct.pack("<d", v) + repr(v).encode() for v in reply.metrics.values()]
            out.append(struct.pack("<q", reply.n))
    return b"|".join(out)


def needles(current: Arrays, reply: Reply, secure: Secure, clients: int) -> dict[str, bytes]:
    """What would give a client away: its model, its update, the same as words, its metrics, its size."""
    found: dict[str, bytes] = {}
    for name, theirs in reply.arrays.items():
        if theirs.dtype.kind != "f" or theirs.nbytes < PIECE or np.array_equal(theirs, current[name]):
            continue
        gap = theirs.astype(np.float64) - current[name]
        forms = {"model": theirs, "update": gap, "update, single": gap.astype(np.float32), "scaled": gap * reply.n}
        found |= {f"{name} as {form}": np.ascontiguousarray(v).tobytes() for form, v in forms.items()}
    if isinstance(secure, SecAggPlus):
        words, wide = FixedPoint(secure, clients, tuple(sorted(reply.metrics))).write(current, reply, reply.n)
        found |= {"words": words.tobytes(), "figures": wide.tobytes()[8:]}
    loss = reply.metrics["loss"]  # an accuracy is a fraction that may stand anywhere
    return found | {"loss as a double": struct.pack("<d", loss), "loss as text": repr(loss).encode()}


def leaks(heap: bytes, current: Arrays, own: dict[str, Reply], secure: Secure) -> set[str]:
    """Which of anybody's needles are in the heap: as a whole, or a piece from the beginning, the middle or the end."""
    found = set()
    for reply in own.values():
        for name, needle in needles(current, reply, secure, len(own)).items():
            middle = len(needle) // 2 // 8 * 8
            pieces = (needle[:PIECE], needle[middle : middle + PIECE], needle[-PIECE:])
            found |= {name for piece in pieces if any(piece) and piece in heap}
    return found


def test_no_request_or_reply_holds_anything_of_one_client() -> None:
    secure, who = SecAggPlus(), names(6)
    own = {c: update_of(c, MODEL) for c in who}
    inside, fleet = lossy(6, secure)
    ask(fleet, who)
    ask(fleet, who, "evaluate")
    assert leaks(carried(inside.seen), MODEL, own, secure) == set()
    sizes = [np.int64(r.n).tobytes() for r in own.values()]
    replies = b"|".join(v.tobytes() for _, _, r in inside.seen if r for v in (*r.arrays.values(), *r.extras.values()))
    assert not any(size in replies for size in sizes)
    assert {r.n for _, _, r in inside.seen if r} == {1}


def test_the_search_finds_a_plain_update() -> None:
    plain = Lossy(LocalFleet(handler, dict.fromkeys(names(6))))
    ask(plain, names(6))
    found = leaks(carried(plain.seen), MODEL, {c: update_of(c, MODEL) for c in names(6)}, SecAggPlus())
    assert {"w as model", "b as model", "loss as a double", "loss as text"} <= found


def run_and_search(out: Path, secure: str) -> tuple[set[str], set[str]]:
    """What of single clients is on the wire and in the folder of a run of three rounds."""
    settings = {"rounds": 3, "clients": 8, "per_round": 5, "secure": secure, "clients_every": -1}
    config = resolve(find("quickstart").config, settings)
    task = find("quickstart").prepare(config)
    own: list[tuple[Arrays, dict[str, Reply]]] = []
    trainer: Any = task.handler
    plain_many = trainer.many

    def noted(requests: Any, sites: Any) -> Any:
        replies = plain_many(requests, sites)
        own.append((next(iter(requests.values())).arrays, dict(replies)))
        return replies

    class Noted:
        capabilities, many = trainer.capabilities, staticmethod(noted)

        def __call__(self, request: Request, site: Any) -> Reply:
            raise AssertionError("they are asked together")

    fleet = Lossy(LocalFleet(task.secure.at_client(Noted()), task.population))
    execute("quickstart", config, out, fleet=fleet)
    folder = b"|".join(path.read_bytes() for path in sorted(out.rglob("*")) if path.is_file())
    assert len(own) == 3
    assert all(len(replies) == 5 for _, replies in own)
    wire = set().union(*(leaks(carried(fleet.seen), x, replies, task.secure) for x, replies in own))
    return wire, set().union(*(leaks(folder, x, replies, task.secure) for x, replies in own))


def test_a_run_leaves_nothing_of_one_client_on_the_wire_or_in_its_folder(tmp_path: Path) -> None:
    assert run_and_search(tmp_path / "secure", "secagg+") == (set(), set())
    with (tmp_path / "secure" / "clients.csv").open(newline="") as lines:
        rows = list(csv.DictReader(lines))
    assert len({(r["round"], r["n"], r["loss"], r["accuracy"], r["weight"]) for r in rows}) == 3 < len(rows)
    wire, folder = run_and_search(tmp_path / "plain", "none")
    assert {"0.bias as model", "loss as a double"} <= wire
    assert "loss as text" in folder
