"""One thread looks at the folders for all who watch: a few stats a tick, and only new lines are read."""

import asyncio
import contextlib
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mutirao.dash.shelf import Facts, Item, Shelf

TICK, WALK = 0.2, 2.0  # seconds between looks at known folders, and between searches for new ones
MOST_WAITING = 500  # messages a slow reader may be behind before it is told to begin anew

Message = dict[str, Any]


class Listener:
    """One open page: a queue in its event loop, and the runs whose rows it wants."""

    def __init__(self, loop: asyncio.AbstractEventLoop, wants: frozenset[str]) -> None:
        self.loop, self.wants = loop, wants
        self.queue: asyncio.Queue[Message] = asyncio.Queue(MOST_WAITING)

    def tell(self, message: Message) -> None:
        """Hand over a message from the watching thread."""
        with contextlib.suppress(RuntimeError):  # the loop has ended, and the page with it
            self.loop.call_soon_threadsafe(self._put, message)

    def _put(self, message: Message) -> None:
        if self.queue.full():
            while not self.queue.empty():
                self.queue.get_nowait()
            message = {"event": "anew"}
        self.queue.put_nowait(message)


class Watcher:
    """Keeps the shelf up to date while somebody looks."""

    def __init__(self, root: Path) -> None:
        self.shelf = Shelf(root)
        self.lock = threading.RLock()
        self.listeners: set[Listener] = set()
        self.looked = threading.Event()  # the first look is done
        self._stop = threading.Event()
        self._walked = 0.0
        self._told: dict[str, tuple[int, tuple[str, ...]]] = {}  # rows of a run that listeners have heard of
        self.thread = threading.Thread(target=self._run, name="watcher", daemon=True)

    def start(self) -> None:
        """Begin to look."""
        self.thread.start()

    def stop(self) -> None:
        """Look no more."""
        self._stop.set()

    def facts(self) -> list[Facts]:
        """The list of runs and studies as of the last look."""
        with self.lock:
            return [item.facts for item in self.shelf.items.values() if item.facts]

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
            self._stop.wait(max(TICK, 2 * spent))  # however many runs there are, most of the time is not ours

    def look(self) -> None:
        """One look at everything."""
        if time.monotonic() - self._walked >= WALK or not self._walked:
            with self.lock:
                gone = self.shelf.walk()
            self._walked = time.monotonic()
            for key in gone:
                self._tell({"event": "gone", "id": key})
        for item in list(self.shelf.items.values()):
            with self.lock:
                changed = item.refresh()
                wanted = any(item.key in listener.wants for listener in self.listeners)
                rows = self._rows(item) if wanted else None
            if changed:
                self._tell({"event": "facts", "facts": item.facts})
            if rows is not None:
                self._tell({"event": "rows", "id": item.key, **rows}, item.key)

    def _rows(self, item: Item) -> Message | None:
        """New rows of a run, if there are any that were not told."""
        item.history.read_on()
        count, told = len(item.history.rows), self._told.get(item.key, (0, ()))
        mark = (count, tuple(item.history.columns))
        if mark == told:
            return None
        self._told[item.key] = mark
        start = told[0] if told[1] == mark[1] and told[0] <= count else 0
        return {"columns": item.history.columns, "start": start, "rows": item.history.rows[start:]}

    def rows(self, key: str) -> Message | None:
        """All rows of a run."""
        item = self.item(key)
        if item is None:
            return None
        with self.lock:
            item.history.read_on()
            self._told.setdefault(key, (len(item.history.rows), tuple(item.history.columns)))
            return {"id": key, "columns": item.history.columns, "start": 0, "rows": list(item.history.rows)}

    def _tell(self, message: Message, key: str = "") -> None:
        for listener in list(self.listeners):
            if not key or key in listener.wants:
                listener.tell(message)
