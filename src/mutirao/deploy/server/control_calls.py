"""HTTP calls to a running server: public information, and Flower's Control API, which requires the secret."""

import base64
import json
import ssl
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mutirao.config import coerce, read_toml
from mutirao.deploy.keys import client_of_key, key_fingerprint, pem_fingerprint, public_key_pem, read_secret
from mutirao.deploy.layout import Server, load_server
from mutirao.deploy.policy.privacy_ledger import append_event
from mutirao.deploy.server.access_control import INFO_PATH, KEY_HEADER, SECRET_HEADER
from mutirao.errors import ConfigError, MutiraoError

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
    headers: dict[str, str] = {}
    if public_key is not None:
        headers[KEY_HEADER] = base64.b64encode(public_key).decode()
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
        # A key that was dismissed and admitted again has two entries; the old one stays unregistered.
        if node.status == "unregistered":
            continue
        online = node.status == "online"
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
    """The remedy if a server's processes and its folder have different secrets, or versions of mutirao."""
    return f"start it again: mutirao site down {server.folder}, then up"


def fetch(request: urllib.request.Request, ca: Path, seconds: float, direct: bool) -> bytes:
    """The response to a request, from a server with a certificate that is signed by `ca`."""
    context = ssl.create_default_context(cafile=str(ca))
    # An empty dict means no proxy; None means those of the environment.
    proxies = urllib.request.ProxyHandler({} if direct else None)
    opener = urllib.request.build_opener(urllib.request.HTTPSHandler(context=context), proxies)
    with opener.open(request, timeout=seconds) as reply:
        return bytes(reply.read(MAX_BYTES))


SAMPLES = "samples.toml"  # one line per client, such as: recife = 4000


def admit(folder: Path, public_key: Path) -> None:
    """Register a site's public key at the running SuperLink; does nothing if it is admitted already."""
    server = load_server(folder)
    if is_admitted(server, public_key):
        return
    try:
        register(server, public_key_pem(public_key))
    except OSError as error:
        raise MutiraoError(f"{public_key} was not admitted: {error}") from error
    append_event(
        server.trail,
        "admitted",
        site=public_key.stem,
        client=client_of_key(public_key),
        key=key_fingerprint(public_key),
    )


def is_admitted(server: Server, public_key: Path) -> bool:
    """Whether this key is registered at the running SuperLink."""
    return node_id_of(server, public_key) is not None


def node_id_of(server: Server, public_key: Path) -> int | None:
    """The node id of the site with this key; None if it was not admitted."""
    try:
        return node_id_in(server, public_key_pem(public_key))
    except (OSError, ValueError) as error:
        raise MutiraoError(
            f"the SuperLink does not answer at {server.here}; start it with: mutirao site up {server.folder}"
        ) from error


def is_entitled(folder: Path, client: str, node: int) -> bool:
    """Whether the site that was admitted as this client has this node id."""
    server = load_server(folder)
    keys = [key for key in server.sites.glob("*.pub") if client_of_key(key) == client]
    try:
        return any(node_id_of(server, key) == node for key in keys)
    except MutiraoError:
        # The SuperLink is unreachable for a moment; the fleet repeats the question.
        return False


def admitted_samples(folder: Path) -> dict[str, int]:
    """Number of samples each client was admitted with, from `samples.toml` in the server's folder, if there is one."""
    path = folder / SAMPLES
    if not path.exists():
        return {}
    return {client: coerce(f"{path}: {client}", n, int, low=1) for client, n in read_toml(path).items()}


def dismiss(folder: Path, name: str) -> None:
    """Shut a site out: its key is revoked, and kept as `NAME.pub.dismissed`."""
    server = load_server(folder)
    key = server.key_of(name)
    if not key.exists():
        raise ConfigError(f"{key} is not there; the sites are in {server.sites}")
    if (node := node_id_of(server, key)) is not None:
        try:
            unregister(server, node)
        except OSError as error:
            raise MutiraoError(f"{name} was not dismissed: {error}") from error
    # The key is moved last: until then a dismissal that was interrupted can be repeated.
    append_event(server.trail, "dismissed", site=name, client=client_of_key(key), key=key_fingerprint(key))
    key.replace(key.with_name(f"{name}.pub.dismissed"))
