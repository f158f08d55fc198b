"""One thread looks at the folders for all who watch: a few stats a tick, runs at rest in turn, only new lines read."""

import asyncio
import contextlib
import csv
import itertools
import secrets
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from mutirao.dashboard.run_index import Item, Shelf
from mutirao.dashboard.run_summary import Facts

# seconds between looks at known folders, and between searches for new ones
TICK = 0.2
WALK = 2.0
TURN = 10  # ticks in which every run at rest is looked at once
MOST_WAITING = 500  # messages a slow reader may be behind before it has to begin anew

Message = dict[str, Any]


class Listener:
    """One open page: a queue in its event loop, and the runs of which it wants the rows."""

    def __init__(self, loop: asyncio.AbstractEventLoop, wants: frozenset[str]) -> None:
        self.loop = loop
        self.wants = wants
        self.queue: asyncio.Queue[Message] = asyncio.Queue(MOST_WAITING)

    def tell(self, message: Message) -> None:
        """Hand over a message from the watching thread."""
        with contextlib.suppress(RuntimeError):  # the loop has ended, and the page with it
            self.loop.call_soon_threadsafe(self._put, message)

    def _put(self, message: Message) -> None:
        # A page too far behind requests everything anew: waiting messages must not grow without end.
        if self.queue.full():
            while not self.queue.empty():
                self.queue.get_nowait()
            message = {"event": "anew"}
        self.queue.put_nowait(message)


class Watcher:
    """Keeps the index of runs up to date while a page is open."""

    def __init__(self, root: Path) -> None:
        self.shelf = Shelf(root)
        self.lock = threading.RLock()
        self.listeners: set[Listener] = set()
        # all runs are known of; all are read
        self.walked = threading.Event()
        self.looked = threading.Event()
        self.left = 0  # runs that are known to be there, but were not read yet
        self.changes = itertools.count()
        self.version = f"{secrets.token_hex(4)}-0"  # of the list; another one in another process
        self._stop = threading.Event()
        self._walked = 0.0
        self._tick = 0
        self._told: dict[str, tuple[int, tuple[str, ...]]] = {}  # rows of a run that listeners have heard of
        self._listed: tuple[str, bytes] = ("", b"")
        self.thread = threading.Thread(target=self._run, name="watcher", daemon=True)

    def start(self) -> None:
        """Begin to look."""
        self.thread.start()

    def stop(self) -> None:
        """Look no more."""
        self._stop.set()

    def facts(self, study: str) -> list[Facts]:
        """The runs of a study as of the last look."""
        with self.lock:
            return [item.facts for item in self.shelf.cells_of(study) if item.facts]

    def listing(self) -> tuple[str, bytes]:
        """The version of the list, and the list of runs and studies as JSON."""
        version = self.version
        if self._listed[0] != version:
            with self.lock:
                texts = [item.text for item in self.shelf.items.values() if item.text]
            self._listed = (version, f"[{','.join(texts)}]".encode())
        return self._listed

    def item(self, key: str) -> Item | None:
        """A run or study by its key."""
        with self.lock:
            return self.shelf.items.get(key)

    @contextlib.contextmanager
    def listening(self, wants: frozenset[str]) -> Iterator[Listener]:
        """Hear of changes for as long as the page is open."""
        listener = Listener(asyncio.get_running_loop(), wants)
        self.listeners.add(listener)
        try:
            yield listener
        finally:
            self.listeners.discard(listener)

    def _run(self) -> None:
        while not self._stop.is_set():
            began = time.monotonic()
            self.look()
            self.looked.set()
            spent = time.monotonic() - began
            # However many runs there are, most of the time is left to others.
            self._stop.wait(min(max(TICK, 2 * spent), WALK))

    def look(self) -> None:
        """One look: for new folders now and then, at what is at work each time, at what is at rest in turn."""
        if time.monotonic() - self._walked >= WALK or not self._walked:
            with self.lock:
                came, gone = self.shelf.walk()
            self._walked = time.monotonic()
            for key in gone:
                self._changed({"event": "gone", "id": key})
            self._read_first(came)
        self._tick += 1
        wanted = frozenset().union(*(listener.wants for listener in list(self.listeners)))
        studies = set()
        for place, item in enumerate(list(self.shelf.items.values())):
            # Of the runs at rest, another share is looked at in each tick.
            if item.rests and item.key not in wanted and (place + self._tick) % TURN:
                continue
            with self.lock:
                changed = self._refresh(item)
                rows = None
                if item.key in wanted and item.facts.get("state") != "unreadable":
                    rows = self._rows(item)
            if changed:
                self._changed({"event": "facts", "facts": item.facts})
                studies.add(item.study)
            if rows is not None:
                self._tell({"event": "rows", "id": item.key, **rows}, item.key)
        self._count_cells(studies)

    def _refresh(self, item: Item) -> bool:
        """Read a run again if it changed; a study with what is known of its cells, or it would seem to have none."""
        if item.kind == "run":
            return item.refresh()
        return item.is_due() and item.refresh(self.facts(item.key))

    def _read_first(self, came: list[Item]) -> None:
        """Read runs that came, the latest first; if they are many, pages are notified when all are read."""
        order = sorted(came, key=lambda item: changed_at(item.path), reverse=True)
        self.left = len(order)
        self.walked.set()
        for item in order:
            with self.lock:
                item.refresh()
                self.left -= 1
            if len(order) < MOST_WAITING // 2:
                self._changed({"event": "facts", "facts": item.facts})
            elif self.left % 100 == 0:
                self._changed(None)
        self._count_cells({item.study for item in came} | {item.key for item in came if item.kind == "study"})
        if len(order) >= MOST_WAITING // 2:
            self._changed({"event": "anew"})

    def _count_cells(self, studies: set[str]) -> None:
        """Bring studies with changed cells up to date."""
        for item in [self.shelf.items[key] for key in studies if key in self.shelf.items]:
            with self.lock:
                changed = item.refresh(self.facts(item.key))
            if changed:
                self._changed({"event": "facts", "facts": item.facts})

    def _changed(self, message: Message | None) -> None:
        """The list is another one now; say so, with its version, by which pages see what is newer."""
        self.version = f"{self.version.partition('-')[0]}-{next(self.changes)}"
        if message is not None:
            self._tell(message | {"version": self.version})

    def _rows(self, item: Item) -> Message | None:
        """New rows of a run, if there are any that were not sent."""
        try:
            item.history.read_on()
        except (OSError, csv.Error):  # one odd table must not stop the page for all others
            return None
        count = len(item.history)
        told = self._told.get(item.key, (0, ()))
        mark = (count, tuple(item.history.columns))
        if mark == told:
            return None
        self._told[item.key] = mark
        # With other columns or fewer rows the table has begun anew.
        start = 0
        if told[1] == mark[1] and told[0] <= count:
            start = told[0]
        return {"start": start, "columns": item.history.part(start)}

    def rows(self, key: str, only: Iterable[str] = ()) -> Message | None:
        """All rows of a run by columns; the names of all its columns come with them."""
        item = self.item(key)
        if item is None:
            return None
        with self.lock:
            item.history.read_on()
            self._told.setdefault(key, (len(item.history), tuple(item.history.columns)))
            return {"id": key, "names": item.history.columns, "columns": item.history.part(0, only)}

    def _tell(self, message: Message, key: str = "") -> None:
        for listener in list(self.listeners):
            if not key or key in listener.wants:
                listener.tell(message)


def changed_at(path: Path) -> float:
    """When something came into a folder or left it; 0 if it went itself."""
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0
