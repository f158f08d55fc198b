"""The shelf and its watcher: what is found, what is read again, and who is told."""

import asyncio
import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from mutirao.dashboard.curves import History
from mutirao.dashboard.run_control import Control, Refused, resume_words
from mutirao.dashboard.run_index import Item, Shelf
from mutirao.dashboard.run_summary import clients_of, page_of
from mutirao.dashboard.watcher import MOST_WAITING, TURN, Listener, Watcher
from mutirao.runs.execute import execute
from mutirao.runs.reader import Columns


def event(name: str, **more: object) -> str:
    return json.dumps({"seq": 1, "time": "2026-01-01", "event": name, **more, "prev": "", "hash": ""}) + "\n"


def make(folder: Path, rows: int = 2, last: str = "round", **more: object) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.toml").write_text('recipe = "iris"\nrounds = 9\nclients = 5\n')
    (folder / "audit.jsonl").write_text(event("started") + event(last, **more))
    lines = [f"{i},0.{i}" for i in range(1, rows + 1)]
    (folder / "history.csv").write_text("\n".join(["round,accuracy", *lines]) + "\n")
    return folder


def rows(history: History) -> list[list[float | None]]:
    return [list(row) for row in zip(*history.part().values(), strict=True)]


def test_runs_studies_and_cells_are_found_and_links_are_not_followed(tmp_path: Path) -> None:
    root = tmp_path / "root"
    make(root / "a")
    make(root / "deep" / "b", last="failed", reason="too few")
    make(root / "study" / "cells" / "m" / "seed0")
    (root / "study" / "study.json").write_text(json.dumps({"recipe": "iris", "cells": ["m/seed0", "m/seed1"]}))
    make(tmp_path / "outside")
    (root / "link").symlink_to(tmp_path / "outside")
    (root / "loop").symlink_to(root)
    shelf = Shelf(root)
    shelf.walk()
    assert set(shelf.items) == {"a", "deep/b", "study", "study/cells/m/seed0"}
    for item in sorted(shelf.items.values(), key=lambda item: item.kind):  # runs first
        item.refresh([cell.facts for cell in shelf.cells_of(item.key)])
    facts = {k: i.facts for k, i in shelf.items.items()}
    assert facts["a"]["state"] == "stopped"
    assert (facts["a"]["rounds"], facts["a"]["of"], facts["a"]["value"]) == (2, 9, 0.2)
    assert (facts["deep/b"]["state"], facts["deep/b"]["why"]) == ("failed", "too few")
    assert (facts["study"]["rounds"], facts["study"]["of"]) == (0, 2)
    assert facts["study/cells/m/seed0"]["study"] == "study"
    assert not facts["a"]["ours"]


def test_a_run_that_went_is_told(tmp_path: Path) -> None:
    shelf = Shelf(tmp_path)
    make(tmp_path / "a")
    assert [item.key for item in shelf.walk()[0]] == ["a"]
    assert shelf.walk() == ([], [])
    (tmp_path / "a").rename(tmp_path / ".hidden")
    assert shelf.walk() == ([], ["a"])
    make(tmp_path / "b")
    shelf.walk()
    (tmp_path / "b" / "config.toml").unlink()  # no run any more
    assert shelf.walk() == ([], ["b"])


def test_history_is_read_on_from_where_it_ended(tmp_path: Path) -> None:
    file = tmp_path / "history.csv"
    history = History(file)
    assert history.read_on() == -1
    file.write_text("round,accuracy\n1,0.5\n2,0.")
    assert history.read_on() == 0
    assert rows(history) == [[1.0, 0.5]]
    with file.open("a") as more:
        more.write("75\n3,\n")
    assert history.read_on() == 1
    assert rows(history) == [[1.0, 0.5], [2.0, 0.75], [3.0, None]]
    assert history.part(2, ["accuracy"]) == {"accuracy": [None]}
    assert history.read_on() == -1
    new = tmp_path / "new"
    new.write_text("round,accuracy\n1,0.5\n2,0.9\n")  # a resumed run drops a row by replacing the file
    new.replace(file)
    history.read_on()
    assert rows(history) == [[1.0, 0.5], [2.0, 0.9]]
    new.write_text("round,accuracy,loss\n1,0.5,2\n")
    new.replace(file)
    history.read_on()
    assert history.columns == ["round", "accuracy", "loss"]
    assert rows(history) == [[1.0, 0.5, 2.0]]


def test_unchanged_runs_are_not_read_again(tmp_path: Path) -> None:
    item = Item("a", make(tmp_path / "a"), "run")
    assert item.refresh()
    assert not item.refresh()
    with (tmp_path / "a" / "audit.jsonl").open("a") as file:
        file.write(event("resumed", round=2))
    assert item.refresh()
    assert item.facts["resumed"]


def test_listeners_hear_of_new_rounds_and_slow_ones_begin_anew(tmp_path: Path) -> None:
    make(tmp_path / "a")

    async def story() -> list[dict[str, object]]:
        watcher = Watcher(tmp_path)
        watcher.look()
        assert watcher.rows("a") is not None
        heard = []
        with watcher.listening(frozenset({"a"})) as listener:
            with (tmp_path / "a" / "history.csv").open("a") as file:
                file.write("3,0.3\n")
            with (tmp_path / "a" / "audit.jsonl").open("a") as file:
                file.write(event("round", round=3))
            watcher.look()
            await asyncio.sleep(0)
            while not listener.queue.empty():
                heard.append(listener.queue.get_nowait())
        assert not watcher.listeners
        slow = Listener(asyncio.get_running_loop(), frozenset())
        for i in range(MOST_WAITING + 1):
            slow._put({"event": "facts", "n": i})
        assert slow.queue.get_nowait() == {"event": "anew"}
        assert slow.queue.empty()
        return heard

    with ThreadPoolExecutor(1) as pool:  # a thread of its own: this one may be a browser's
        heard = pool.submit(asyncio.run, story()).result()
    told = [m for m in heard if m["event"] == "rows"]
    assert [(m["start"], m["columns"]) for m in told] == [(2, {"round": [3.0], "accuracy": [0.3]})]
    assert [m["facts"]["rounds"] for m in heard if m["event"] == "facts"] == [3]  # type: ignore[index]


def test_a_change_names_the_version_of_the_list_that_it_makes(tmp_path: Path) -> None:
    make(tmp_path / "a")

    async def story() -> tuple[list[str], list[str]]:
        watcher = Watcher(tmp_path)
        watcher.look()
        versions, told = [watcher.listing()[0]], []
        with watcher.listening(frozenset()) as listener:
            for note in ("one", "two words"):
                (tmp_path / "a" / "notes.md").write_text(note)
                for _ in range(TURN):
                    watcher.look()
                await asyncio.sleep(0)
                told.append(listener.queue.get_nowait()["version"])
                versions.append(watcher.listing()[0])
        return versions, told

    with ThreadPoolExecutor(1) as pool:
        versions, told = pool.submit(asyncio.run, story()).result()
    assert told == versions[1:]
    numbers = [int(version.partition("-")[2]) for version in versions]
    assert numbers == sorted(set(numbers))


def test_a_table_that_cannot_be_read_does_not_stop_the_watcher(tmp_path: Path) -> None:
    make(tmp_path / "a", last="finished")
    (tmp_path / "a" / "summary.json").write_text("{}")
    (tmp_path / "a" / "history.csv").write_text(f"round,accuracy\n1,{'9' * 200_000}\n")  # a cell longer than csv reads
    make(tmp_path / "b")

    async def story() -> set[str]:
        watcher = Watcher(tmp_path)
        with watcher.listening(frozenset({"a", "b"})) as listener:
            for _ in range(TURN):
                watcher.look()
            await asyncio.sleep(0)
            heard = [listener.queue.get_nowait() for _ in range(listener.queue.qsize())]
        return {str(message["id"]) for message in heard if message["event"] == "rows"}

    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(asyncio.run, story()).result() == {"b"}


def test_clients_are_counted_searched_and_sorted(tmp_path: Path) -> None:
    (tmp_path / "clients.csv").write_text(
        "round,client,replied,n,weight,failure,rejected\n"
        "1,a,1,5,0.5,,\n1,b,0,0,0,late: no answer,\n2,a,1,6,0.25,,\n2,b,1,3,0.5,,too far\n3,c,1,9,0.9,,\n"
    )
    found = clients_of(Columns(tmp_path / "clients.csv"))
    by = {line["name"]: line for line in map(found.line, range(len(found)))}
    assert [by["a"][k] for k in ("selected", "replied", "last", "n", "weight")] == [2, 2, 2, 6, 0.25]
    assert [by["b"][k] for k in ("replied", "failure", "failed", "group")] == [0, "rejected: too far", 2, ""]
    assert by["a"]["failure"] == ""
    assert [r["name"] for r in page_of(found, "", "lost", 0)["rows"]] == ["b", "a", "c"]
    assert [r["name"] for r in page_of(found, "TOO FAR", "client", 0)["rows"]] == ["b"]
    assert page_of(found, "", "weight", 1)["rows"][0]["name"] == "a"


def test_only_a_process_at_work_in_the_folder_can_be_ended(tmp_path: Path) -> None:
    import socket

    item, control = Item("a", make(tmp_path / "a"), "run"), Control()
    with pytest.raises(Refused, match="nothing is running"):
        control.cancel(item)
    (tmp_path / "a" / ".lock").write_text(f"{socket.gethostname()} {os.getppid()}\n")  # a process that is not at work
    with pytest.raises(Refused):
        control.cancel(item)
    with pytest.raises(Refused, match="cell of the study"):
        control.cancel(Item("a", tmp_path / "a", "run", study="s"))


def test_code_that_a_folder_names_goes_on_only_if_it_was_run_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "own"
    execute("iris:iris", {"rounds": 1}, out)
    item = Item("own", out, "run")
    assert resume_words(item)[:2] == ["run", str(out / "config.toml")]
    with monkeypatch.context() as patch:
        patch.setenv("XDG_CONFIG_HOME", str(tmp_path / "another"))
        with pytest.raises(Refused, match="names code to run, iris:iris, and was not run by you"):
            resume_words(item)
    (out / "config.toml").write_text((out / "config.toml").read_text().replace("iris:iris", "evil:iris"))
    with pytest.raises(Refused, match="names code to run, evil:iris"):
        resume_words(item)


def test_a_carriage_return_in_a_table_does_not_stop_the_page(tmp_path: Path) -> None:
    (tmp_path / "history.csv").write_bytes(b"round\r,accuracy\n1,0.5\n2\r,0.9\n")
    History(tmp_path / "history.csv").read_on()


def test_the_words_of_a_resume_cannot_be_options(tmp_path: Path) -> None:
    item = Item("a", make(tmp_path / "a"), "run")
    assert resume_words(item) == ["run", "iris", "--out", str(tmp_path / "a"), "--resume", "--json"]
    for recipe in ("--help", "/tmp/other.toml", ""):
        (tmp_path / "a" / "config.toml").write_text(f"recipe = {json.dumps(recipe)}\n")
        with pytest.raises(Refused):
            resume_words(item)
    study = Item("s", tmp_path, "study")
    (tmp_path / "study.json").write_text(json.dumps({"file": str(tmp_path / "gone.toml"), "sets": ["rounds=3"]}))
    with pytest.raises(Refused, match="not there any more"):
        resume_words(study)
    (tmp_path / "gone.toml").write_text("")
    assert resume_words(study)[-2:] == ["--set", "rounds=3"]


def test_the_list_has_another_version_only_if_something_changed(tmp_path: Path) -> None:
    make(tmp_path / "a")
    make(tmp_path / "b", last="finished")
    watcher = Watcher(tmp_path)
    watcher.look()
    version, listed = watcher.listing()
    assert {f["id"] for f in json.loads(listed)} == {"a", "b"}
    for _ in range(TURN + 1):
        watcher.look()
    assert watcher.listing() == (version, listed)
    (tmp_path / "b" / "notes.md").write_text("**worth** another look\n\nbecause")
    for _ in range(TURN):  # runs at rest are looked at in turn
        watcher.look()
    assert watcher.listing()[0] != version
    notes = {f["id"]: f["note"] for f in json.loads(watcher.listing()[1])}
    assert notes == {"a": "", "b": "**worth** another look because"}


def test_a_study_counts_its_cells_and_names_its_best_method(tmp_path: Path) -> None:
    for seed in range(2):
        make(tmp_path / "s" / "cells" / "m" / f"seed{seed}", last="finished")
    lines = [{"method": "m", "metric": "loss", "mean": 0.5}, {"method": "n", "metric": "loss", "mean": 0.4}]
    (tmp_path / "s" / "study.json").write_text(
        json.dumps({"recipe": "iris", "cells": ["m/seed0", "m/seed1", "n/seed0"]})
    )
    (tmp_path / "s" / "table.json").write_text(json.dumps({"lines": lines}))
    watcher = Watcher(tmp_path)
    watcher.look()
    facts = watcher.shelf.items["s"].facts
    assert [facts[k] for k in ("rounds", "of", "state", "judge", "winner", "best")] == [
        2,
        3,
        "stopped",
        "loss",
        "n",
        0.4,
    ]
    cell = make(tmp_path / "s" / "cells" / "n" / "seed0", last="finished")
    watcher._walked = 0.0
    watcher.look()
    assert watcher.shelf.items["s"].facts["state"] == "finished"
    assert not watcher.shelf.items[f"s/cells/n/{cell.name}"].facts["resumable"]


def test_a_study_keeps_its_cells_when_only_its_own_files_change(tmp_path: Path) -> None:
    make(tmp_path / "s" / "cells" / "m" / "seed0", last="finished")
    (tmp_path / "s" / "study.json").write_text(json.dumps({"recipe": "iris", "cells": ["m/seed0"]}))
    watcher = Watcher(tmp_path)
    watcher.look()
    (tmp_path / "s" / "table.json").write_text(json.dumps({"lines": [{"method": "m", "metric": "loss", "mean": 0.5}]}))
    (tmp_path / "s" / "notes.md").write_text("look again")
    for _ in range(TURN):
        watcher.look()
    facts = watcher.shelf.items["s"].facts
    assert [facts[k] for k in ("rounds", "of", "state", "note")] == [1, 1, "finished", "look again"]
