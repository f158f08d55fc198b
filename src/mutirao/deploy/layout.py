"""The folder of a server or a site: one small `site.toml`, and a fixed place for keys, logs and records beside it."""

import re
import socket
import sys
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from mutirao.config import coerce, nearest, read_toml, toml_lines, toml_string
from mutirao.errors import ConfigError
from mutirao.io import write_whole

FILE = "site.toml"
FOLDER_VARIABLE = "MUTIRAO_SITE"  # in the environment of all processes of a folder: which folder that is
PORT = 9092
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,62}")


class FolderFile:
    """A file or folder that lies beside `site.toml` under a fixed name."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __get__(self, place: "Place", kind: type) -> Path:
        return place.folder / self.name


def check_name(name: str) -> str:
    """A name that may become one of a file; ConfigError for any other."""
    if not NAME.fullmatch(name):
        raise ConfigError(f"{name!r} is no name: letters, digits, '-', '_' and '.', at most 63 of them")
    return name


@dataclass(frozen=True)
class Place:
    """What both kinds of folder have."""

    folder: Path
    name: str

    ca = FolderFile("ca.crt")  # the certificate of the federation's own authority: public, the same file everywhere
    flower_home = FolderFile("flwr")  # where Flower keeps what it keeps; never the user's own ~/.flwr
    logs = FolderFile("logs")  # what the processes say, a file a start

    def __post_init__(self) -> None:
        check_name(self.name)


@dataclass(frozen=True)
class Server(Place):
    """The one machine that sites connect to: it runs a SuperLink."""

    hosts: tuple[str, ...] = ()  # the names and addresses in its certificate
    host: str = "0.0.0.0"  # the address it listens on
    port: int = PORT

    role = "server"
    process = "superlink"
    certificate = FolderFile("server.crt")  # signed by the authority
    key = FolderFile("server.key")  # the private key of that certificate
    secret = FolderFile("secret")  # required for Control and Runtime; `up` creates it
    commands = FolderFile("bin")  # Flower's own commands, with that secret
    ca_key = FolderFile("ca.key")  # the authority's private key: needed only to sign; it may be kept elsewhere
    sites = FolderFile("sites")  # the public keys of the sites that may connect
    runs = FolderFile("runs")  # where runs are written by default
    trail = FolderFile("audit.jsonl")  # who was admitted and dismissed, and which runs were submitted

    def key_of(self, site: str) -> Path:
        """Where the public key of a site lies: nowhere but among those of the sites."""
        return self.sites / f"{check_name(site)}.pub"

    @property
    def here(self) -> str:
        """The address at which this machine reaches its own SuperLink."""
        host = bracket(self.host)
        # These two stand for all addresses of the machine, and are none to connect to.
        if self.host in ("0.0.0.0", "::"):
            host = "127.0.0.1"
        return f"{host}:{self.port}"


@dataclass(frozen=True)
class Node(Place):
    """One institution: it runs a SuperNode, which connects to the server and accepts no connection itself."""

    superlink: str = ""  # host:port
    client: str = ""  # the client that it is in recipes; empty: its name
    policy: str = "policy.toml"
    task: str = ""  # the site's own function from Flower's context to a task, instead of recipes
    port: int = 0  # of its own processes, on loopback; 0: any that is free

    role = "site"
    process = "supernode"
    key = FolderFile("node.key")  # the private key that identifies this site

    def __post_init__(self) -> None:
        super().__post_init__()
        split_address(self.superlink)

    @property
    def public_key(self) -> Path:
        """The one file the site sends to the server."""
        return self.folder / f"{self.name}.pub"

    @property
    def policy_file(self) -> Path:
        """What the site allows, and where its data lie (`settings.data`)."""
        return self.folder / self.policy


ROLES: dict[str, type[Server] | type[Node]] = {"server": Server, "site": Node}


def load_place(folder: Path) -> Server | Node:
    """What a folder is for; ConfigError if it was not made by `mutirao site init`, or says something wrong."""
    path = folder / FILE
    if not path.is_file():
        raise ConfigError(f"{path} is not there; make the folder with: mutirao site init")
    table = read_toml(path)
    role = table.pop("role", None)
    if role not in ROLES:
        raise ConfigError(f'{path}: role is "server" or "site", not {role!r}')
    known = {f.name: f for f in fields(ROLES[role]) if f.name != "folder"}
    values: dict[str, Any] = {}
    for key, value in table.items():
        if key not in known:
            raise ConfigError(f"{path}: unknown key {key!r}{nearest(key, known)}")
        if key == "hosts":
            if not isinstance(value, list) or not all(isinstance(v, str) for v in value):
                raise ConfigError(f"{path}: hosts: {value!r} is not a list of texts")
            values[key] = tuple(value)
        elif key == "port":
            # Port 0 is any free one: sites could not find a server there.
            values[key] = coerce(f"{path}: port", value, int, low=1 if role == "server" else 0, high=65535)
        else:
            values[key] = coerce(f"{path}: {key}", value, str)
    if "name" not in values:
        raise ConfigError(f"{path}: name is missing")
    try:
        return ROLES[role](folder=folder.resolve(), **values)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error


def save_place(place: Server | Node) -> None:
    """Write `site.toml`."""
    values = {f.name: getattr(place, f.name) for f in fields(place) if f.name not in ("folder", "hosts")}
    text = [f'role = "{place.role}"', *toml_lines(values)]
    if isinstance(place, Server):
        text.append(f"hosts = [{', '.join(map(toml_string, place.hosts))}]")
    write_whole(place.folder / FILE, "\n".join(text) + "\n")


def load_server(folder: Path) -> Server:
    """The server of this folder; ConfigError if it is a site's."""
    place = load_place(folder)
    if not isinstance(place, Server):
        raise ConfigError(f"{folder} is the folder of the site {place.name!r}; this needs the server's")
    return place


def load_node(folder: Path) -> Node:
    """The site of this folder; ConfigError if it is the server's."""
    place = load_place(folder)
    if not isinstance(place, Node):
        raise ConfigError(f"{folder} is the server's folder; this needs a site's")
    return place


def split_address(text: str) -> tuple[str, int]:
    """Host and port of `host:port` or `[v6]:port`."""
    match = re.fullmatch(r"(\[[0-9a-fA-F:.]+\]|[^:\s/]+):(\d{1,5})", text)
    if not match or not 0 < int(match[2]) < 65536:
        raise ConfigError(f"{text!r} is no address; write host:port, such as server.example.org:{PORT}")
    return match[1].strip("[]"), int(match[2])


def bracket(host: str) -> str:
    """A host as it stands in an address."""
    if ":" in host:
        return f"[{host}]"
    return host


def free_port(host: str = "127.0.0.1") -> int:
    """A port that is free at this moment."""
    with socket.socket() as s:
        s.bind((host, 0))
        return int(s.getsockname()[1])


SYSTEM_NAMES = {"win32": "Windows", "darwin": "macOS"}


def need_linux(what: str) -> None:
    """Refuse where there is no /proc, by which processes are known, and no Unix socket that can be relied on."""
    if sys.platform != "linux":
        here = SYSTEM_NAMES.get(sys.platform, sys.platform)
        raise ConfigError(
            f"{what} needs Linux, and this is {here}: it looks after processes by /proc and speaks to them over Unix "
            "sockets; take a Linux machine, a container or WSL (runs, studies, reports and the live page work here)"
        )
