"""The door in front of Flower's SuperLink: strangers reach the sites' part alone, and only a secret opens the rest.

Flower's SuperLink serves three interfaces on one port: Fleet (for SuperNodes, which sign each request), Control (submit
a run, register a key) and Runtime (for its own processes). The last two ask nobody who they are, so that whoever
reaches the port could admit a key of their own, or run code on the server. The door passes those two only to who sends
the secret in the server's folder; from where a request comes says nothing, since behind a forwarder all come from here.
It also answers `GET /mutirao`: which versions run here, what time it is, whether a key is admitted.
"""

import base64
import binascii
import hmac
import json
import time
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from mutirao.core.versions import versions

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

FLEET_PATH = "/v1/fleet/"
INFO_PATH = "/mutirao"
KEY_HEADER = "x-mutirao-key"
SECRET_HEADER = "x-mutirao-secret"


class AccessControl:
    """Around an ASGI application: without the secret only the sites' paths, `/health` and `/mutirao` can be reached."""

    def __init__(self, app: App, secret: str, node_of: Callable[[bytes], int | None]) -> None:
        self.app, self.secret, self.node_of = app, secret.encode(), node_of

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, answer it, or refuse it."""
        if scope["type"] == "lifespan":
            return await self.app(scope, receive, send)
        path, inside = str(scope.get("path", "")), self.is_inside(scope)
        if scope["type"] == "http" and path == INFO_PATH:
            return await send_json(send, 200, self.about(scope, inside))
        if not (inside or (scope["type"] == "http" and (path.startswith(FLEET_PATH) or path == "/health"))):
            if scope["type"] != "http":
                return await send({"type": "websocket.close", "code": 1008})
            return await send_json(send, 403, {"error": "this part of the server asks for the server's secret"})
        headers = [(name, value) for name, value in scope.get("headers", []) if name != SECRET_HEADER.encode()]
        return await self.app({**scope, "headers": headers}, receive, send)

    def is_inside(self, scope: Scope) -> bool:
        """Whether a request carries the secret, exactly once."""
        sent = [value for name, value in scope.get("headers", []) if name == SECRET_HEADER.encode()]
        return len(sent) == 1 and hmac.compare_digest(bytes(sent[0]), self.secret)

    def about(self, scope: Scope, inside: bool) -> dict[str, Any]:
        """What a site's doctor asks; those who run the server are told Flower's number of a site, too."""
        facts: dict[str, Any] = {"time": time.time(), "versions": versions()}
        key = dict(scope.get("headers", [])).get(KEY_HEADER.encode())
        if key is not None:
            try:
                node = self.node_of(base64.b64decode(key, validate=True))
            except (binascii.Error, ValueError):
                node = None
            facts["admitted"] = node is not None
            if inside:
                facts["node"] = node
        return facts


async def send_json(send: Send, status: int, content: dict[str, Any]) -> None:
    """Send JSON."""
    body = json.dumps(content).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
