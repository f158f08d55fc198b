"""What the list shows of a run, and that no folder, however odd, stops it."""

import json
import math
import os
import socket
import time
import tomllib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mutirao.config import dump, resolve
from mutirao.dashboard.app import study_of
from mutirao.dashboard.curves import LEVELS, MOST_LINES, POINTS, History, read_column, spark, thin
from mutirao.dashboard.run_index import Item
from mutirao.dashboard.run_summary import QUIET, facts_of_run, read_settings, settings_of, silence
from mutirao.dashboard.watcher import Watcher
from mutirao.runs.execute import execute
from mutirao.systems.quickstart import Config

KEYS = st.from_regex(r"[A-Za-z0-9_-]{1,6}", fullmatch=True)
SCALARS = st.one_of(st.integers(-9, 9), st.booleans(), st.text(max_size=6), st.floats(allow_nan=False, width=16))
ODD = ["a = [1,", "2]", 'a = """x', "[b]", '[b."c"]', "[[t]]", "c.d = 1", '"', "a = 1 # note", "", "   ", "x = {y = 1}"]


def written(value: object) -> str:
    if isinstance(value, float) and math.isinf(value):
        return "inf" if value > 0 else "-inf"
    return json.dumps(value)


@given(st.lists(st.one_of(st.tuples(KEYS, SCALARS), KEYS, st.sampled_from(ODD)), max_size=8))
def test_lines_that_are_looked_up_say_what_toml_says(parts: list[object]) -> None:
    lines = []
    for part in parts:
        if isinstance(part, tuple):
            lines.append(f"{part[0]} = {written(part[1])}")
        else:
            lines.append(part if part in ODD else f"[{part}]")
    text = "\n".join(map(str, lines))
    try:
        expected = tomllib.loads(text)
    except ValueError:
        with pytest.raises(tomllib.TOMLDecodeError):
            read_settings(text)
    else:
        assert read_settings(text) == expected


def test_the_settings_of_a_run_are_dotted_keys() -> None:
    config = read_settings(
        dump("quickstart", resolve(Config, {"lr": 0.5, "aggregate": {"name": "fedadam", "lr": 0.1}}))
    )
    found = settings_of(config)
    assert [found[k] for k in ("recipe", "lr", "aggregate", "aggregate.lr")] == ["quickstart", 0.5, "fedadam", 0.1]


@given(st.lists(st.floats(-1e300, 1e300) | st.just(math.nan), max_size=200))
def test_a_sparkline_keeps_the_shape_of_a_curve(values: list[float]) -> None:
    word = spark(values)
    known = thin([v for v in values if v == v])
    assert len(word) in (0, min(len(known), POINTS))
    if word and max(known) > min(known):
        heights = [LEVELS.index(letter) for letter in word]
        assert (min(heights), max(heights)) == (0, len(LEVELS) - 1)
        step = (max(known) - min(known)) / (len(LEVELS) - 1)
        assert all(abs(min(known) + h * step - v) <= step * 0.51 for h, v in zip(heights, known, strict=True))


def test_one_column_is_read_without_the_others(tmp_path: Path) -> None:
    file = tmp_path / "history.csv"
    file.write_text('round,note,loss\n1,"a, b",0.5\n2,c,\n3,d,oops\n4,e,0.25\n5,f,0.1')  # the last line is half written
    assert read_column(file, "loss") == [0.5, 0.25]
    assert read_column(file, "gone") == read_column(tmp_path / "gone", "loss") == []
    file.write_text("round,loss\n" + "".join(f"{i},{i}\n" for i in range(3 * MOST_LINES)))
    found = read_column(file, "loss")
    assert MOST_LINES <= len(found) <= MOST_LINES * 1.5
    assert (found[0], found[-1]) == (0.0, 3.0 * MOST_LINES - 3)


def test_a_finished_run_says_what_it_did(tmp_path: Path) -> None:
    out = tmp_path / "run"
    summary = execute("iris:iris", {"rounds": 3, "seed": 4}, out)
    facts = facts_of_run(out, History(out / "history.csv"))
    assert (facts["state"], facts["rounds"], facts["of"], facts["way"]) == ("finished", 3, 3, "higher")
    assert facts["best"] == summary["best"]["accuracy"]
    assert facts["diff"] == {"seed": "4", "rounds": "3"}  # its own defaults are in its trail: 4 rounds
    assert len(facts["spark"]) == 3


def test_a_run_at_work_without_a_word_is_called_stale(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "run"
    execute("iris:iris", {"rounds": 1}, out)
    trail = out / "audit.jsonl"
    trail.write_text("".join(trail.read_text().splitlines(keepends=True)[:-1]))
    with (out / ".lock").open("w") as lock:
        lock.write(f"{socket.gethostname()} {os.getpid()}\n")
        lock.flush()
        item = Item("run", out, "run")
        item.refresh()
        assert item.facts["state"] == "running"
        for name in ("audit.jsonl", "config.toml"):
            os.utime(out / name, (time.time() - QUIET - 60,) * 2)
        assert silence(out, History(out / "none")) == "11 minutes"
        assert item.refresh()
        assert (item.facts["state"], item.facts["why"]) == ("stale", "at work, but nothing came for 11 minutes")


def test_odd_folders_are_a_row_that_says_so_and_stop_nothing(tmp_path: Path) -> None:
    root, outside = tmp_path / "root", tmp_path / "outside.toml"
    outside.write_text('recipe = "the secret"\n')
    made = {}
    for name in ("fine", "broken", "linked", "pipe", "huge", "lists", "half", "<b>bold</b>", "notes"):
        made[name] = root / name
        made[name].mkdir(parents=True)
        (made[name] / "config.toml").write_text('recipe = "iris"\nrounds = 3\n')
        (made[name] / "audit.jsonl").write_text('{"event": "started", "time": "2026-01-01"}\n')
    (made["broken"] / "config.toml").write_text('recipe = "iris\nrounds')
    (made["linked"] / "config.toml").unlink()
    (made["linked"] / "config.toml").symlink_to(outside)
    os.mkfifo(made["pipe"] / "history.csv")  # reading it would wait for ever
    with (made["huge"] / "config.toml").open("wb") as file:
        file.truncate(1 << 22)
    (made["lists"] / "config.toml").write_text('recipe = ["a"]\nrounds = "many"\n[aggregate]\nname = [1]\n')
    (made["lists"] / "audit.jsonl").write_text('["no", "event"]\n{"event": "finished", "time": 7}\n')
    (made["lists"] / "summary.json").write_text(
        '{"final": [1], "best": "x", "rounds": {}, "judge": {}, "seconds": "s"}'
    )
    (made["half"] / "history.csv").write_bytes(b"round,accuracy\n1,0.5\n2\xff,0.")
    (made["notes"] / "notes.md").write_bytes(b"x" * 10_000_000)
    watcher = Watcher(root)
    watcher.look()
    facts = {f["id"]: f for f in json.loads(watcher.listing()[1])}
    assert facts.keys() == made.keys()
    assert facts["fine"]["state"] == facts["half"]["state"] == facts["<b>bold</b>"]["state"] == "stopped"
    assert facts["half"]["rounds"] == 1
    assert "cannot be read" in facts["broken"]["why"]
    for name, said in (("linked", "not a plain file"), ("pipe", "not a plain file"), ("huge", "too large")):
        assert facts[name]["state"] == "unreadable"
        assert said in facts[name]["why"]
    assert "secret" not in watcher.listing()[1].decode()
    assert (facts["lists"]["of"], facts["lists"]["rounds"]) == (0, 0)
    assert facts["notes"]["note"] == ""


def test_a_study_is_told_best_first_with_its_verdicts(tmp_path: Path) -> None:
    def line(method: str, mean: float, **more: object) -> dict[str, object]:
        return {"method": method, "metric": "accuracy", "mean": mean, "half_t": 0.01, "values": [mean] * 3, **more}

    lines = [
        line("base", 0.8),
        line("low", 0.6, verdict="worse", difference=-0.2, difference_half=0.05, p_t=0.001, p_holm=0.002),
        line("high", 0.81, verdict="not shown", difference=0.01, difference_half=0.05, p_t=0.6, p_holm=0.6),
        {"method": "gone", "metric": "accuracy", "mean": None},
        {"no": "line"},
    ]
    table = {"baseline": "base", "lines": lines, "directions": {"accuracy": "higher"}}
    (tmp_path / "table.json").write_text(json.dumps(table))
    (tmp_path / "study.json").write_text(json.dumps({"cells": ["base/seed0"]}))
    found = study_of(tmp_path)
    (shown,) = found["tables"]
    assert [(r["method"], r["verdict"], r["top"]) for r in shown["rows"]] == [
        ("high", "undecided", True),
        ("base", "baseline", False),
        ("low", "worse", False),
    ]
    assert shown["rows"][2]["p_t"] == 0.001
    assert found["planned"] == ["base/seed0"]
    table["directions"] = {"accuracy": "lower"}
    (tmp_path / "table.json").write_text(json.dumps(table))
    assert study_of(tmp_path)["tables"][0]["rows"][0]["method"] == "low"
