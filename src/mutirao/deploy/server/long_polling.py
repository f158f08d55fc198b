"""Long polling for Flower's SuperLink.

A SuperNode without a message polls again after 3 seconds, and a node that waits for the objects of a message retries
after 1, 2, 4 ... seconds. Neither interval can be configured. This ASGI middleware holds such requests until a message
or an object arrives, the client disconnects, or `max_wait` seconds have passed. Responses are Flower's, unchanged.
"""

import asyncio
import signal
from collections.abc import MutableMapping
from typing import Any

from mutirao.deploy.server.access_control import FLEET_PATH, App, Receive, Scope, Send

Resource = tuple[str, Any]  # ("node", its id): a message to that node; ("object", its id): an object

RUNTIME_PATH = "/v1/runtime/"  # of the server's own processes
MAX_WAIT = 20.0  # seconds; a SuperNode gives up after 30
MAX_PENDING = 1000  # requests held at once


class LongPolling:
    """ASGI middleware around Flower's handlers: holds requests for messages and objects that have not arrived yet."""

    def __init__(self, app: App, max_wait: float = MAX_WAIT) -> None:
        self.app = app
        self.max_wait = max_wait
        self.pending: dict[Resource, set[asyncio.Event]] = {}
        self.is_closing = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Forward a request, or hold it; then wake the requests that wait for what it brought."""
        request = None
        if scope["type"] == "lifespan":
            self.release_on_signals()
        elif scope["type"] == "http":
            request = scope.get("state", {}).get("protobuf_request")
        folder, _, call = str(scope.get("path", "")).rpartition("/")
        path = f"{folder}/"
        if request is None:
            await self.app(scope, receive, send)
        elif (resource := requested_resource(path, call, request)) is not None:
            await self.hold(resource, scope, receive, send)
        else:
            await self.app(scope, receive, send)
            for arrived in delivered_resources(path, call, request):
                self.wake(arrived)

    async def hold(self, resource: Resource, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer at once if the resource is there, else when it arrives."""
        # A node polls once at a time: an older request belongs to a process that has ended.
        if resource[0] == "node":
            self.wake(resource)
        arrival = asyncio.Event()
        # Registered before the first look, so that nothing can arrive unseen in between.
        self.pending.setdefault(resource, set()).add(arrival)
        try:
            response = await self.respond(scope, receive)
            if is_not_available_yet(scope) and len(self.pending) <= MAX_PENDING and await self.wait(arrival, receive):
                response = await self.respond(scope, receive)
        finally:
            self.pending[resource].discard(arrival)
            if not self.pending[resource]:
                del self.pending[resource]
        for message in response:
            await send(message)

    async def respond(self, scope: Scope, receive: Receive) -> list[MutableMapping[str, Any]]:
        """Flower's response; the request was read and authenticated, so it can be handled twice."""
        messages: list[MutableMapping[str, Any]] = []

        async def collect(message: MutableMapping[str, Any]) -> None:
            messages.append(message)

        await self.app(dict(scope), receive, collect)
        return messages

    async def wait(self, arrival: asyncio.Event, receive: Receive) -> bool:
        """Wait for an arrival; whether it came while the client was still connected."""
        if self.is_closing:
            return False
        arriving = asyncio.ensure_future(arrival.wait())
        leaving = asyncio.ensure_future(wait_for_disconnect(receive))
        try:
            await asyncio.wait([arriving, leaving], timeout=self.max_wait, return_when=asyncio.FIRST_COMPLETED)
            return arriving.done() and not leaving.done() and not self.is_closing
        finally:
            arriving.cancel()
            leaving.cancel()

    def wake(self, resource: Resource) -> None:
        """Wake the requests that wait for this resource."""
        for arrival in self.pending.get(resource, ()):
            arrival.set()

    def release_on_signals(self) -> None:
        """Answer all held requests when the process is asked to end: the server waits for its last response."""
        loop = asyncio.get_running_loop()

        def release_all() -> None:
            self.is_closing = True
            for resource in list(self.pending):
                self.wake(resource)

        def release_before(handler: Any) -> Any:
            def handle(number: int, frame: Any) -> None:
                # A signal may interrupt the loop anywhere: the release has to wait for its turn.
                loop.call_soon_threadsafe(release_all)
                handler(number, frame)

            return handle

        for number in (signal.SIGTERM, signal.SIGINT):
            if callable(handler := signal.getsignal(number)):
                signal.signal(number, release_before(handler))


def requested_resource(path: str, call: str, request: Any) -> Resource | None:
    """The resource that a request may wait for; the server's own process polls for replies at its own pace."""
    if call == "pull-object" and path in (FLEET_PATH, RUNTIME_PATH):
        return "object", request.object_id
    if call == "pull-messages" and path == FLEET_PATH:
        return "node", request.node.node_id
    return None


def delivered_resources(path: str, call: str, request: Any) -> list[Resource]:
    """The resources that a request delivers."""
    if call == "push-object" and path in (FLEET_PATH, RUNTIME_PATH):
        return [("object", request.object_id)]
    if call == "push-messages" and path == RUNTIME_PATH:
        return [("node", message.metadata.dst_node_id) for message in request.messages_list]
    return []


def is_not_available_yet(scope: Scope) -> bool:
    """Whether Flower's response is empty now, and may not be later."""
    response = scope["state"].get("protobuf_response")
    if hasattr(response, "object_found"):
        return bool(response.object_found and not response.object_available)
    return hasattr(response, "messages_list") and not response.messages_list


async def wait_for_disconnect(receive: Receive) -> None:
    """Wait until the client has disconnected."""
    while (await receive())["type"] != "http.disconnect":
        pass
