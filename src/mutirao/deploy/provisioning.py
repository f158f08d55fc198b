"""Make the folder of a server or a site: keys, certificates, configuration, a policy, a compose file."""

import contextlib
import shutil
import socket
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from mutirao.config import toml_string
from mutirao.deploy import keys
from mutirao.deploy.compose import compose_text
from mutirao.deploy.layout import FILE, PORT, Node, Server, save_place, server_in
from mutirao.deploy.policy.policy_templates import fitting_policy
from mutirao.errors import ConfigError
from mutirao.io import write_whole

DATA_LINE = '# data = "/srv/mutirao/data"'  # as the template of a policy has it
NEVER_REPLACED = "is there already; keys are never replaced: choose another folder, or move this one away"


def found_server(
    folder: Path, hosts: Sequence[str] = (), port: int = PORT, name: str = "server", host: str = "0.0.0.0"
) -> Server:
    """A certificate authority, a server certificate for these names and addresses, and the configuration."""
    server = Server(folder.resolve(), name, tuple(map(keys.plain_host, hosts)) or own_names(), host, port)
    with making(server.folder):
        keys.write_authority(server.ca, server.ca_key, name)
        keys.write_server(server.certificate, server.key, server.ca, server.ca_key, server.hosts)
        keys.keep_secret(server.secret)
        server.sites.mkdir()
        write_whole(server.folder / "compose.yaml", compose_text([server]))
        save_place(server)
    return server


def found_site(
    folder: Path,
    name: str,
    superlink: str,
    ca: Path | bytes | None = None,
    data: str = "",
    recipes: Sequence[str] = (),
    task: str = "",
    client: str = "",
    sets: Sequence[tuple[str, Any]] = (),
) -> Node:
    """A key pair, a policy, and the configuration; `ca` may be added later as `ca.crt`.

    The policy lets leave what these recipes need, and without any nothing; it pins them to their settings: the
    defaults, or those in `sets`.
    """
    node = Node(folder.resolve(), name, superlink, client, task=task)
    place = str(Path(data).expanduser().resolve()) if data else ""
    policy = fitting_policy(recipes, [*sets, *([("data", place)] if data else [])])
    if data:
        policy = policy.replace(DATA_LINE, f"data = {toml_string(place)}", 1)
    with making(node.folder):
        keys.write_node_key(node.key, node.public_key, client or name)
        if ca is not None:
            keys.write_new(node.ca, ca.read_bytes() if isinstance(ca, Path) else ca)
            keys.certificate_in(node.ca)  # a clear word now rather than at the first connection
        keys.write_new(node.policy_file, policy.encode())
        write_whole(node.folder / "compose.yaml", compose_text([node]))
        save_place(node)
    return node


def take_key(folder: Path, public_key: Path, name: str = "", client: str = "") -> Path:
    """Keep a site's public key with the server's; a name or client that is taken by another key is refused.

    `client` is what the site may call itself in recipes, by default what the key's comment says.
    """
    kept, client = check_key(folder, public_key, name, client)
    if public_key.resolve() != kept.resolve():
        write_whole(kept, f"{' '.join(public_key.read_text(encoding='utf-8').split()[:2])} {client}\n")
    return kept


def check_key(folder: Path, public_key: Path, name: str = "", client: str = "") -> tuple[Path, str]:
    """Where `take_key` would keep a key, and as which client; ConfigError if it would refuse it. Changes nothing."""
    server = server_in(folder)
    keys.public_key_pem(public_key)
    kept, client = server.key_of(name or public_key.stem), client or keys.client_in(public_key)
    if not client.isprintable():
        raise ConfigError(f"{public_key} holds more than one line; a public key is one")
    if public_key.resolve() == kept.resolve():
        return kept, client
    fingerprint = keys.key_fingerprint(public_key)
    if kept.exists() and keys.key_fingerprint(kept) != fingerprint:
        raise ConfigError(f"{kept} holds another key; a site that made a new one needs a new name, or remove the file")
    for other in sorted(set(server.sites.glob("*.pub")) - {kept}):
        if keys.key_fingerprint(other) == fingerprint:
            raise ConfigError(f"{other} holds this key already, under another name")
        if keys.client_in(other) == client:
            raise ConfigError(f"{other.stem} is {client!r} in recipes already; give this site another with --client")
    return kept, client


def renew(folder: Path, hosts: Sequence[str] = (), days: int = keys.SERVER_DAYS) -> Server:
    """A new server certificate by the same authority, for the same names or for others; sites change nothing."""
    server = server_in(folder)
    server = replace(server, hosts=tuple(map(keys.plain_host, hosts)) or server.hosts)
    keys.renew_server(server.certificate, server.key, server.ca, server.ca_key, server.hosts, days)
    save_place(server)
    return server


@contextlib.contextmanager
def making(folder: Path) -> Iterator[None]:
    """Fill a folder that is new or holds nothing of ours; what was begun and failed is taken away again."""
    if (folder / FILE).exists():
        raise ConfigError(f"{folder / FILE} {NEVER_REPLACED}")
    before = set(folder.iterdir()) if folder.is_dir() else None
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if before is None:
            folder.chmod(0o700)
        yield
    except BaseException:
        for made in set(folder.iterdir()) - (before or set()) if folder.is_dir() else ():
            shutil.rmtree(made) if made.is_dir() else made.unlink()
        if before is None:
            with contextlib.suppress(OSError):
                folder.rmdir()
        raise


def own_names() -> tuple[str, ...]:
    """The names and the address by which others probably reach this machine."""
    found = [socket.getfqdn(), socket.gethostname()]
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
        s.connect(("192.0.2.1", 9))  # sends nothing: it only asks which address would be used
        found.append(s.getsockname()[0])
    return tuple(dict.fromkeys(h for h in found if h and h not in keys.LOOPBACK and not h.startswith("localhost")))
