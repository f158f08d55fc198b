"""Admit and dismiss sites by their public keys; a key also determines which client a site may be."""

from pathlib import Path

from mutirao.config import coerce, read_toml
from mutirao.deploy.keys import client_of_key, key_fingerprint, public_key_pem
from mutirao.deploy.layout import Server, load_server
from mutirao.deploy.policy.privacy_ledger import append_event
from mutirao.deploy.server.control_calls import node_id_in, register, unregister
from mutirao.errors import ConfigError, MutiraoError

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
    except MutiraoError:  # the SuperLink is unreachable for a moment; the fleet asks again
        return False


def admitted_samples(folder: Path) -> dict[str, int]:
    """Number of samples each client was admitted with, from `samples.toml` in the server's folder, if there is one."""
    path = folder / SAMPLES
    table = read_toml(path) if path.exists() else {}
    return {client: coerce(f"{path}: {client}", n, int, low=1) for client, n in table.items()}


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
    append_event(server.trail, "dismissed", site=name, client=client_of_key(key), key=key_fingerprint(key))
    key.replace(key.with_name(f"{name}.pub.dismissed"))
