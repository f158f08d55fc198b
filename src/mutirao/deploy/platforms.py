"""On which systems a server or a site can run: Linux alone, and whoever asks elsewhere is told so in one line."""

import sys

from mutirao.errors import ConfigError

NAMES = {"win32": "Windows", "darwin": "macOS"}


def need_linux(what: str) -> None:
    """Refuse where there is no /proc, by which processes are known, and no Unix socket that can be relied on."""
    if sys.platform != "linux":
        here = NAMES.get(sys.platform, sys.platform)
        raise ConfigError(
            f"{what} needs Linux, and this is {here}: it looks after processes by /proc and speaks to them over Unix "
            "sockets; take a Linux machine, a container or WSL (runs, studies, reports and the live page work here)"
        )
