"""A site's client process that does not do as it should; a test puts it in the place of the right one."""

import importlib
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from mutirao.deploy.site import launcher
from mutirao.deploy.site.clientapp import answer_one_message, prepare
from mutirao.randomness import rng


def note(text: str) -> None:
    """Write down a lie, so that the test knows it was told."""
    with Path(sys.argv[2]).open("a", encoding="utf-8") as file:
        file.write(text + "\n")


def garbage(number: int) -> Any:
    """A reply that is none: another kind each time."""
    from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict

    noise = rng(number, 0, "garbage").bytes(200)

    def claimed(dtype: str, shape: tuple[int, ...], kind: str) -> ArrayRecord:
        return ArrayRecord({"w": Array(dtype=dtype, shape=shape, stype=kind, data=noise)})

    kinds: dict[str, ArrayRecord | ConfigRecord] = {
        "random bytes": claimed("float64", (5, 5), "numpy.ndarray"),
        "a pickle": claimed("object", (1,), "pickle"),
        "a terabyte": claimed("float64", (2**37,), "numpy.ndarray"),
        "NaN": ArrayRecord({"0.weight": Array.from_numpy_ndarray(np.full((16, 64), np.nan, np.float32))}),
        "text for arrays": ConfigRecord({"w": "hello"}),
    }
    name = list(kinds)[number % len(kinds)]
    note(name)
    count = {"count": MetricRecord({"n": 10}), "metrics": MetricRecord({"loss": 0.5})}
    return RecordDict({"arrays": kinds[name], "extras": ArrayRecord({}), **count})


def main() -> None:
    """Answer one message, badly."""
    mode, words = sys.argv[1], sys.argv[3:]
    prepare()
    place: Any = importlib.import_module("flwr.supernode.runtime.run_clientapp")
    ours: Any = importlib.import_module("mutirao.deploy.flower.client")
    push = place.push_message

    def push_twice(client: Any, message: Any, context: Any) -> None:
        push(client, message, context)
        if "query" in message.metadata.message_type:
            return
        try:
            push(client, message, context)
            note("sent again: taken")
        except Exception as error:
            note(f"sent again: {type(error).__name__}")

    if mode == "garbage":
        ours.reply_content = lambda reply: garbage(time.time_ns() // 10**9)
    else:
        place.push_message = push_twice
    answer_one_message(words, launcher.parent_in(words))


if __name__ == "__main__":
    main()
