"""HTTP calls to a running server: public information, and Flower's Control API, which requires the secret."""

import base64
import json
import ssl
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mutirao.deploy.keys import pem_fingerprint, read_secret
from mutirao.deploy.layout import Server
from mutirao.deploy.server.access_control import INFO_PATH, KEY_HEADER, SECRET_HEADER
from mutirao.errors import MutiraoError

MAX_BYTES = 2**24  # of an answer that are read: enough for some ten thousand sites


def server_info(
    address: str,
    ca: Path,
    public_key: bytes | None = None,
    seconds: float = 10.0,
    direct: bool = False,
    secret: str = "",
) -> dict[str, Any]:
    """Ask a server about itself over TLS; OSError (ssl.SSLError among them) or ValueError if that does not work.

    Unless `direct`, proxies are those of the environment (`HTTPS_PROXY`, `NO_PROXY`), as for Flower itself.
    """
    headers = {KEY_HEADER: base64.b64encode(public_key).decode()} if public_key is not None else {}
    if secret:
        headers[SECRET_HEADER] = secret
    request = urllib.request.Request(f"https://{address}{INFO_PATH}", headers=headers)
    try:
        content = json.loads(fetch(request, ca, seconds, direct))
    except RecursionError:
        content = None
    if not isinstance(content, dict) or not isinstance(content.get("versions"), dict):
        raise ValueError("the answer is not from a server of Mutirão")
    return content


def node_id_in(server: Server, public_key: bytes) -> int | None:
    """The node id of the site with this key, by the server on this machine; None if the key is unknown."""
    facts = server_info(server.here, server.ca, public_key, direct=True, secret=read_secret(server.secret))
    if "node" not in facts:
        raise MutiraoError(
            f"the SuperLink was started with a secret other than that in {server.secret}; {restart_command(server)}"
        )
    if facts["node"] is not None:
        return int(facts["node"])
    return None


def register(server: Server, public_key: bytes) -> None:
    """Register a site's public key: as `flwr supernode register`, in a tenth of its time."""
    from flwr.proto.control_pb2 import RegisterNodeRequest

    control_call(server, "register-node", RegisterNodeRequest(public_key=public_key).SerializeToString())


def unregister(server: Server, node: int) -> None:
    """Unregister a site: as `flwr supernode unregister`."""
    from flwr.proto.control_pb2 import UnregisterNodeRequest

    control_call(server, "unregister-node", UnregisterNodeRequest(node_id=node).SerializeToString())


@dataclass(frozen=True)
class SiteConnection:
    """Whether an admitted site is connected, and since when that has been so (UTC)."""

    online: bool = False
    since: str = ""


def site_connections(server: Server) -> dict[str, SiteConnection]:
    """The admitted sites by key fingerprint: as `flwr supernode list`. OSError or ValueError if it fails."""
    from flwr.proto.control_pb2 import ListNodesRequest, ListNodesResponse
    from google.protobuf.message import DecodeError  # type: ignore[import-untyped]

    try:
        response = ListNodesResponse.FromString(
            control_call(server, "list-nodes", ListNodesRequest().SerializeToString())
        )
    except DecodeError as error:
        raise ValueError(f"the list of sites cannot be read: {error}") from error
    found: dict[str, SiteConnection] = {}
    for node in response.nodes_info:
        online = node.status == "online"
        if node.status != "unregistered":  # a key that was dismissed and admitted again has two entries
            since = node.last_activated_at if online else node.last_deactivated_at
            found[pem_fingerprint(node.public_key)] = SiteConnection(online, since)
    return found


def control_call(server: Server, call: str, content: bytes) -> bytes:
    """Call Flower's Control interface of the SuperLink on this machine, in Flower's own format."""
    headers = dict.fromkeys(("Content-Type", "Accept"), "application/protobuf")
    headers[SECRET_HEADER] = read_secret(server.secret)
    request = urllib.request.Request(f"https://{server.here}/v1/control/{call}", content, headers)
    return fetch(request, server.ca, 30.0, direct=True)


def restart_command(server: Server) -> str:
    """The remedy for a server whose processes and folder have different secrets, or versions of mutirao."""
    return f"start it again: mutirao site down {server.folder}, then up"


def fetch(request: urllib.request.Request, ca: Path, seconds: float, direct: bool) -> bytes:
    """The response to a request, from a server whose certificate is signed by `ca`."""
    context = ssl.create_default_context(cafile=str(ca))
    proxies = urllib.request.ProxyHandler({} if direct else None)
    opener = urllib.request.build_opener(urllib.request.HTTPSHandler(context=context), proxies)
    with opener.open(request, timeout=seconds) as reply:
        return bytes(reply.read(MAX_BYTES))
