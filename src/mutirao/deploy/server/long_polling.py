"""Whoever asks the SuperLink for what is not there yet is answered when it comes, instead of "not yet" at once.

A SuperNode of Flower's that hears of no message asks again after 3 seconds, and whoever is told of a message before all
its parts have come waits one second for them, then two, then four. Neither can be set. So such a question is held until
somebody brings what it asks for, or whoever asked goes away or asks anew, or its time is over. Answers stay what they
are, and are given by Flower alone.
"""

import asyncio
import signal
from collections.abc import MutableMapping
from typing import Any

from mutirao.deploy.server.access_control import FLEET_PATH, App, Receive, Scope, Send

Resource = tuple[str, Any]  # a node for which there is a message, or an object

RUNTIME_PATH = "/v1/runtime/"  # of the server's own
MAX_WAIT = 20.0  # seconds; a SuperNode takes 30 without an answer for a failure
MAX_PENDING = 1000  # questions that are held at once


class LongPolling:
    """Around Flower's handlers: holds questions for messages to a site, and for objects, that are not there yet."""

    def __init__(self, app: App, seconds: float = MAX_WAIT) -> None:
        self.app, self.seconds = app, seconds
        self.awaited: dict[Resource, set[asyncio.Event]] = {}
        self.ending = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or hold it; tell of what it brings."""
        if scope["type"] == "lifespan":
            self.end_with_process()
        request = scope.get("state", {}).get("protobuf_request") if scope["type"] == "http" else None
        side, _, call = str(scope.get("path", "")).rpartition("/")
        if request is None:
            await self.app(scope, receive, send)
        elif (wanted := event_awaited_by(f"{side}/", call, request)) is not None:
            await self.hold(wanted, scope, receive, send)
        else:
            await self.app(scope, receive, send)
            for brought in events_of(f"{side}/", call, request):
                self.tell(brought)

    async def hold(self, wanted: Resource, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer at once if there is anything, else when it comes."""
        if wanted[0] == "node":
            self.tell(wanted)  # a site asks one question at a time: an older one is of a process that is gone
        news = asyncio.Event()
        self.awaited.setdefault(wanted, set()).add(news)  # before we look, so that nothing comes in between unseen
        try:
            answer = await self.ask(scope, receive)
            if is_not_available_yet(scope) and len(self.awaited) <= MAX_PENDING and await self.comes(news, receive):
                answer = await self.ask(scope, receive)
        finally:
            self.awaited[wanted].discard(news)
            if not self.awaited[wanted]:
                del self.awaited[wanted]
        for message in answer:
            await send(message)

    async def ask(self, scope: Scope, receive: Receive) -> list[MutableMapping[str, Any]]:
        """What Flower answers; the request has been read and proven, so that it can be asked again."""
        said: list[MutableMapping[str, Any]] = []

        async def note(message: MutableMapping[str, Any]) -> None:
            said.append(message)

        await self.app(dict(scope), receive, note)
        return said

    async def comes(self, news: asyncio.Event, receive: Receive) -> bool:
        """Wait; whether something came while whoever asked was still there to be told."""
        if self.ending:
            return False
        coming, leaving = asyncio.ensure_future(news.wait()), asyncio.ensure_future(wait_for_disconnect(receive))
        try:
            await asyncio.wait([coming, leaving], timeout=self.seconds, return_when=asyncio.FIRST_COMPLETED)
            return coming.done() and not leaving.done() and not self.ending
        finally:
            coming.cancel()
            leaving.cancel()

    def tell(self, brought: Resource) -> None:
        """Wake those who wait for it."""
        for news in self.awaited.get(brought, ()):
            news.set()

    def end_with_process(self) -> None:
        """Let all go when the process is asked to end: the server waits for its last answer before it does."""
        loop = asyncio.get_running_loop()

        def let_all_go() -> None:
            self.ending = True
            for wanted in list(self.awaited):
                self.tell(wanted)

        def after(before: Any) -> Any:
            def end(number: int, frame: Any) -> None:
                loop.call_soon_threadsafe(let_all_go)
                before(number, frame)

            return end

        for number in (signal.SIGTERM, signal.SIGINT):
            if callable(before := signal.getsignal(number)):
                signal.signal(number, after(before))


def event_awaited_by(side: str, call: str, request: Any) -> Resource | None:
    """What a question is for, if it may be held; the server's own process asks for replies at its own pace."""
    if call == "pull-object" and side in (FLEET_PATH, RUNTIME_PATH):
        return "object", request.object_id
    return ("node", request.node.node_id) if call == "pull-messages" and side == FLEET_PATH else None


def events_of(side: str, call: str, request: Any) -> list[Resource]:
    """What a request brings that others may wait for."""
    if call == "push-object" and side in (FLEET_PATH, RUNTIME_PATH):
        return [("object", request.object_id)]
    if call == "push-messages" and side == RUNTIME_PATH:
        return [("node", message.metadata.dst_node_id) for message in request.messages_list]
    return []


def is_not_available_yet(scope: Scope) -> bool:
    """Whether Flower's answer is that there is nothing now and may be something later."""
    told = scope["state"].get("protobuf_response")
    if hasattr(told, "object_found"):
        return bool(told.object_found and not told.object_available)
    return hasattr(told, "messages_list") and not told.messages_list


async def wait_for_disconnect(receive: Receive) -> None:
    """Wait until whoever asked has hung up."""
    while (await receive())["type"] != "http.disconnect":
        pass
