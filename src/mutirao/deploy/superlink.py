"""The SuperLink as a federation runs it: a door in front of it lets strangers reach the sites' part alone.

Flower's SuperLink serves three interfaces on one port: Fleet (for SuperNodes, which sign each request), Control (submit
a run, register a key) and Runtime (for its own processes). The last two ask nobody who they are, so that whoever
reaches the port could admit a key of their own, or run code on the server. The door passes those two only to this
machine itself. It also answers `GET /mutirao`: which versions run here, what time it is, whether a key is admitted.
"""

import base64
import binascii
import importlib
import importlib.metadata
import ipaddress
import json
import ssl
import sys
import time
import urllib.request
from collections.abc import Awaitable, Callable, MutableMapping
from pathlib import Path
from typing import Any

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

FOR_SITES = "/v1/fleet/"
ABOUT = "/mutirao"
KEY_HEADER = "x-mutirao-key"
PACKAGES = ("mutirao", "flwr", "torch", "numpy")  # those that must agree for results to repeat


class Door:
    """Around an ASGI application: from elsewhere only the sites' paths, `/health` and `/mutirao` can be reached."""

    def __init__(self, app: App, node_of: Callable[[bytes], int | None]) -> None:
        self.app, self.node_of = app, node_of

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, answer it, or refuse it."""
        if scope["type"] == "lifespan":
            return await self.app(scope, receive, send)
        path = str(scope.get("path", ""))
        if scope["type"] == "http" and path == ABOUT:
            return await answer(send, 200, self.about(scope))
        if not (is_here(scope) or (scope["type"] == "http" and (path.startswith(FOR_SITES) or path == "/health"))):
            if scope["type"] != "http":
                return await send({"type": "websocket.close", "code": 1008})
            return await answer(send, 403, {"error": "this part of the server is for the server's own machine"})
        return await self.app(scope, receive, send)

    def about(self, scope: Scope) -> dict[str, Any]:
        """What a site's doctor asks."""
        facts: dict[str, Any] = {"time": time.time(), "versions": versions()}
        key = dict(scope.get("headers", [])).get(KEY_HEADER.encode())
        if key is not None:
            try:
                node = self.node_of(base64.b64decode(key, validate=True))
            except (binascii.Error, ValueError):
                node = None
            facts["admitted"] = node is not None
            if is_here(scope):
                facts["node"] = node  # Flower's number of the site, for those who run the server
        return facts


def is_here(scope: Scope) -> bool:
    """Whether a connection comes from this machine: from loopback, or from the very address it was made to."""
    client, server = scope.get("client"), scope.get("server")
    if not client:
        return False
    try:
        address = ipaddress.ip_address(client[0])
    except ValueError:
        return False
    return address.is_loopback or bool(server and client[0] == server[0])


async def answer(send: Send, status: int, content: dict[str, Any]) -> None:
    """Send JSON."""
    body = json.dumps(content).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def versions() -> dict[str, str]:
    """The versions of Python and of the packages that matter, without importing them."""
    found = {"python": ".".join(map(str, sys.version_info[:3]))}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = ""
    return found


def about(
    address: str, ca: Path, public_key: bytes | None = None, seconds: float = 10.0, direct: bool = False
) -> dict[str, Any]:
    """Ask a server about itself over TLS; OSError (ssl.SSLError among them) or ValueError if that does not work.

    Unless `direct`, proxies are those of the environment (`HTTPS_PROXY`, `NO_PROXY`), as for Flower itself.
    """
    headers = {KEY_HEADER: base64.b64encode(public_key).decode()} if public_key is not None else {}
    request = urllib.request.Request(f"https://{address}{ABOUT}", headers=headers)
    try:
        content = json.loads(fetch(request, ca, seconds, direct))
    except RecursionError:
        content = None
    if not isinstance(content, dict) or not isinstance(content.get("versions"), dict):
        raise ValueError("what answers there is no server of Mutirão")
    return content


def register(address: str, ca: Path, public_key: bytes) -> None:
    """Let in whoever holds the private half of this key: `flwr supernode register`, in a tenth of its time."""
    from flwr.proto.control_pb2 import RegisterNodeRequest

    control(address, ca, "register-node", RegisterNodeRequest(public_key=public_key).SerializeToString())


def unregister(address: str, ca: Path, node: int) -> None:
    """Let a site in no more: `flwr supernode unregister`."""
    from flwr.proto.control_pb2 import UnregisterNodeRequest

    control(address, ca, "unregister-node", UnregisterNodeRequest(node_id=node).SerializeToString())


def control(address: str, ca: Path, call: str, content: bytes) -> bytes:
    """Call Flower's Control interface of the SuperLink on this machine, in Flower's own format."""
    kind = {"Content-Type": "application/protobuf", "Accept": "application/protobuf"}
    request = urllib.request.Request(f"https://{address}/v1/control/{call}", content, kind)
    return fetch(request, ca, 30.0, direct=True)


def fetch(request: urllib.request.Request, ca: Path, seconds: float, direct: bool) -> bytes:
    """What is answered to a request, by a server whose certificate is signed by `ca`."""
    context = ssl.create_default_context(cafile=str(ca))
    proxies = urllib.request.ProxyHandler({} if direct else None)
    opener = urllib.request.build_opener(urllib.request.HTTPSHandler(context=context), proxies)
    with opener.open(request, timeout=seconds) as reply:
        return bytes(reply.read(65536))


def main() -> None:
    """`flower-superlink` behind the door; takes the same options."""
    from flwr.superlink.cli import flower_superlink

    place = importlib.import_module("flwr.superlink.main")
    if not hasattr(place, "create_app"):  # another version of Flower: better no server than an open one
        sys.exit("error: this version of Flower has no create_app; install the one that mutirao asks for")
    create_app = place.create_app

    def guarded_app(*args: Any, **options: Any) -> Any:
        app = create_app(*args, **options)

        def node_of(public_key: bytes) -> Any:
            return app.state.linkstate_factory.state().get_node_id_by_public_key(public_key)

        app.add_middleware(Door, node_of=node_of)
        return app

    setattr(place, "create_app", guarded_app)  # noqa: B010, it is Flower's name, not ours
    flower_superlink()


if __name__ == "__main__":
    main()
