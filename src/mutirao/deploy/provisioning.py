"""Make the folder of a server or a site: keys, certificates, configuration, a policy, a compose file."""

import contextlib
import re
import shutil
import socket
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from mutirao.config import toml_string
from mutirao.deploy import keys
from mutirao.deploy.layout import FILE, PORT, Node, Server, load_server, save_place
from mutirao.deploy.policy.policy_templates import policy_for
from mutirao.errors import ConfigError
from mutirao.io import write_whole

IMAGE = "mutirao"
CONTAINER_FOLDER = "/srv/mutirao"  # where a container has its folder
CONTAINER_DATA = "/data"  # and its data, which it can only read
COMPOSE_HEADER = "# One service and one volume for each. The folder of a service is made once, in its volume:\n"


def compose_text(places: Sequence[Server | Node]) -> str:
    """The compose file for these, written by hand so that it reads well."""
    hints = "".join(f"#   {init_command(place)}\n" for place in places)
    services = "".join(compose_service(place) for place in places)
    volumes = "".join(f"  {place.name}:\n" for place in places)
    return f"{COMPOSE_HEADER}{hints}services:\n{services}volumes:\n{volumes}"


def init_command(place: Server | Node) -> str:
    """The command that makes the folder of a service in its volume."""
    run = f"docker compose run --rm -T {place.name} site init"
    if isinstance(place, Server):
        hosts = " ".join(f"--host {host}" for host in place.hosts)
        return f"{run} server {CONTAINER_FOLDER} {hosts} --port {place.port}".replace("  ", " ")
    return f"{run} site {CONTAINER_FOLDER} --name {place.name} --superlink {place.superlink} --ca - < ca.crt"


def compose_service(place: Server | Node) -> str:
    """One service. It may not gain rights, writes to its own volume alone, and comes back after a reboot."""
    outside = f"DATA_{re.sub(r'[^A-Za-z0-9]', '_', place.name).upper()}"  # where its data lie
    lines = [
        f"  {place.name}:",
        f"    image: {IMAGE}",
        "    pull_policy: never",  # built locally: an image of that name in a registry is another one
        f'    command: ["site", "up", "{CONTAINER_FOLDER}", "--foreground"]',
        "    init: true",  # reaps zombies, which would be taken for alive
        "    restart: unless-stopped",
        "    read_only: true",
        '    tmpfs: ["/tmp"]',
        '    cap_drop: ["ALL"]',
        '    security_opt: ["no-new-privileges:true"]',
        "    healthcheck:",  # as in the image, which loses its own in formats other than Docker's
        f'      test: ["CMD", "mutirao", "site", "status", "{CONTAINER_FOLDER}"]',
        "      interval: 30s",
        "      timeout: 15s",
        "      start_period: 60s",
        "    volumes:",
        f"      - {place.name}:{CONTAINER_FOLDER}",
        f"      - ${{{outside}:-./data}}:{CONTAINER_DATA}:ro",
    ]
    if isinstance(place, Server):
        lines += ["    ports:", f'      - "{place.port}:{place.port}"']
    return "\n".join(lines) + "\n"


DATA_LINE = '# data = "/srv/mutirao/data"'  # as the template of a policy has it
NEVER_REPLACED = "is there already; keys are never replaced: choose another folder, or move this one away"


def create_server(
    folder: Path, hosts: Sequence[str] = (), port: int = PORT, name: str = "server", host: str = "0.0.0.0"
) -> Server:
    """A certificate authority, a server certificate for these names and addresses, and the configuration."""
    server = Server(folder.resolve(), name, tuple(map(keys.normalized_host, hosts)) or own_host_names(), host, port)
    with new_folder(server.folder):
        keys.create_authority(server.ca, server.ca_key, name)
        keys.create_server_certificate(server.certificate, server.key, server.ca, server.ca_key, server.hosts)
        keys.create_secret(server.secret)
        server.sites.mkdir()
        write_whole(server.folder / "compose.yaml", compose_text([server]))
        save_place(server)
    return server


def create_site(
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
    place = ""
    agreed = list(sets)
    if data:
        place = str(Path(data).expanduser().resolve())
        agreed.append(("data", place))
    policy = policy_for(recipes, agreed)
    if data:
        policy = policy.replace(DATA_LINE, f"data = {toml_string(place)}", 1)
    with new_folder(node.folder):
        keys.create_node_key(node.key, node.public_key, client or name)
        if ca is not None:
            if isinstance(ca, Path):
                ca = ca.read_bytes()
            keys.write_new(node.ca, ca)
            # A file that is no certificate fails here rather than at the first connection.
            keys.read_certificate(node.ca)
        keys.write_new(node.policy_file, policy.encode())
        write_whole(node.folder / "compose.yaml", compose_text([node]))
        save_place(node)
    return node


def store_key(folder: Path, public_key: Path, name: str = "", client: str = "") -> Path:
    """Keep a site's public key with the server's; a name or client that is taken by another key is refused.

    `client` is what the site may call itself in recipes, by default what the key's comment says.
    """
    kept, client = check_key(folder, public_key, name, client)
    if public_key.resolve() != kept.resolve():
        write_whole(kept, f"{' '.join(public_key.read_text(encoding='utf-8').split()[:2])} {client}\n")
    return kept


def check_key(folder: Path, public_key: Path, name: str = "", client: str = "") -> tuple[Path, str]:
    """Where `store_key` would keep a key, and as which client; ConfigError if it would refuse it. Changes nothing."""
    server = load_server(folder)
    keys.public_key_pem(public_key)
    kept = server.key_of(name or public_key.stem)
    client = client or keys.client_of_key(public_key)
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
        if keys.client_of_key(other) == client:
            raise ConfigError(f"{other.stem} is {client!r} in recipes already; give this site another with --client")
    return kept, client


def renew(folder: Path, hosts: Sequence[str] = (), days: int = keys.SERVER_DAYS) -> Server:
    """A new server certificate by the same authority, for the same names or for others; sites change nothing."""
    server = load_server(folder)
    server = replace(server, hosts=tuple(map(keys.normalized_host, hosts)) or server.hosts)
    keys.renew_server_certificate(server.certificate, server.key, server.ca, server.ca_key, server.hosts, days)
    save_place(server)
    return server


@contextlib.contextmanager
def new_folder(folder: Path) -> Iterator[None]:
    """Fill a folder that is new or holds nothing of ours; what was begun and failed is taken away again."""
    if (folder / FILE).exists():
        raise ConfigError(f"{folder / FILE} {NEVER_REPLACED}")
    is_new = not folder.is_dir()
    before: set[Path] = set()
    if not is_new:
        before = set(folder.iterdir())
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if is_new:
            folder.chmod(0o700)
        yield
    except BaseException:
        # An interrupt, too, must not leave keys behind: they are never replaced, so that a second try would be refused.
        remove_all_but(before, folder)
        if is_new:
            with contextlib.suppress(OSError):
                folder.rmdir()
        raise


def remove_all_but(kept: set[Path], folder: Path) -> None:
    """Remove what is in a folder, except for these files and folders."""
    if not folder.is_dir():
        return
    for made in set(folder.iterdir()) - kept:
        if made.is_dir():
            shutil.rmtree(made)
        else:
            made.unlink()


def own_host_names() -> tuple[str, ...]:
    """The probable names and address of this machine for others."""
    found = [socket.getfqdn(), socket.gethostname()]
    # Connecting a UDP socket sends nothing, and finds the address that this machine would send from. 192.0.2.1 is
    # reserved for documentation.
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
        s.connect(("192.0.2.1", 9))
        found.append(s.getsockname()[0])
    return tuple(dict.fromkeys(h for h in found if h and h not in keys.LOOPBACK and not h.startswith("localhost")))
