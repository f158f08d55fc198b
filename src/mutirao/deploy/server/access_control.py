"""Access control for Flower's SuperLink: without the server's secret, only the paths for sites can be reached.

Flower's SuperLink serves three interfaces on one port: Fleet (for SuperNodes, which sign each request), Control (submit
a run, register a key) and Runtime (for its own processes). Control and Runtime authenticate no client: anyone who
reaches the port could register a key, or run code on the server. This middleware forwards those two only with the
secret in the server's folder. The address of a client proves nothing, as behind a proxy all come from this machine.
It also answers `GET /mutirao`: versions, time, and whether a key is admitted.
"""

import base64
import binascii
import hmac
import json
import time
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from mutirao.core.agreement import versions

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

FLEET_PATH = "/v1/fleet/"
INFO_PATH = "/mutirao"
KEY_HEADER = "x-mutirao-key"
SECRET_HEADER = "x-mutirao-secret"


class AccessControl:
    """ASGI middleware: without the secret, only Fleet, `/health` and `/mutirao` can be reached."""

    def __init__(self, app: App, secret: str, node_of: Callable[[bytes], int | None]) -> None:
        self.app = app
        self.secret = secret.encode()
        self.node_of = node_of

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Forward a request, answer it, or refuse it."""
        if scope["type"] == "lifespan":
            return await self.app(scope, receive, send)
        path = str(scope.get("path", ""))
        is_http = scope["type"] == "http"
        has_secret = self.has_secret(scope)
        if is_http and path == INFO_PATH:
            return await send_json(send, 200, self.info(scope, has_secret))
        is_public = is_http and (path.startswith(FLEET_PATH) or path == "/health")
        if not (has_secret or is_public):
            if not is_http:
                return await send({"type": "websocket.close", "code": 1008})
            return await send_json(send, 403, {"error": "this part of the server requires the server's secret"})
        # The secret goes no further than here.
        headers = [(name, value) for name, value in scope.get("headers", []) if name != SECRET_HEADER.encode()]
        return await self.app({**scope, "headers": headers}, receive, send)

    def has_secret(self, scope: Scope) -> bool:
        """Whether a request carries the secret, exactly once."""
        sent = [value for name, value in scope.get("headers", []) if name == SECRET_HEADER.encode()]
        # In constant time: how long a refusal takes must not reveal how much of a guess is right.
        return len(sent) == 1 and hmac.compare_digest(bytes(sent[0]), self.secret)

    def info(self, scope: Scope, has_secret: bool) -> dict[str, Any]:
        """Time, versions, and whether the key in the headers is admitted; with the secret also its node id."""
        facts: dict[str, Any] = {"time": time.time(), "versions": versions()}
        key = dict(scope.get("headers", [])).get(KEY_HEADER.encode())
        if key is not None:
            try:
                node = self.node_of(base64.b64decode(key, validate=True))
            except (binascii.Error, ValueError):
                node = None
            facts["admitted"] = node is not None
            if has_secret:
                facts["node"] = node
        return facts


async def send_json(send: Send, status: int, content: dict[str, Any]) -> None:
    """Send a JSON response."""
    payload = json.dumps(content).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(payload)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": payload})
