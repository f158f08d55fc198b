"""Flower's commands (`flwr`, and those that its SuperLink starts) with the server's secret in their requests.

`mutirao site up` writes them into `FOLDER/bin`, which comes first in the SuperLink's PATH.
"""

import importlib
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mutirao.deploy import flower_patches
from mutirao.deploy.keys import read_secret
from mutirao.deploy.layout import FOLDER_VARIABLE, Server, bracket, load_server
from mutirao.deploy.server.access_control import SECRET_HEADER
from mutirao.errors import ConfigError

COMMANDS = {
    "flwr": "flwr.cli.app:app",
    "flower-superexec": "flwr.supercore.cli:flower_superexec",
    "flwr-serverapp": "flwr.superlink.cli:flwr_serverapp",
}


def main() -> None:
    """`flwr_command FOLDER COMMAND ...`: one of Flower's commands with its arguments, for the server of this folder."""
    folder = Path(sys.argv[1])
    name = sys.argv[2]
    sys.argv = [name, *sys.argv[3:]]
    try:
        server = load_server(folder)
        secret = read_secret(server.secret)
    except ConfigError as error:
        sys.exit(f"error: {error}")
    quiet = {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1"}
    for key, value in ({"FLWR_HOME": str(server.flower_home), FOLDER_VARIABLE: str(server.folder)} | quiet).items():
        os.environ.setdefault(key, value)
    send_secret(server, secret)
    module, _, function = COMMANDS[name].partition(":")
    sys.exit(getattr(importlib.import_module(module), function)())


def send_secret(server: Server, secret: str) -> None:
    """Add the secret to each request of Flower's clients to this server, over TLS, and to no other server."""
    from flwr.supercore.address import resolve_bind_address

    own = {f"https://{server.here}", f"https://{resolve_bind_address(f'{bracket(server.host)}:{server.port}')}"}

    def with_secret(begin: Callable[..., None]) -> Callable[..., None]:
        def begin_with_secret(self: Any, base_url: str, **options: Any) -> None:
            begin(self, base_url, **options)
            if base_url.rstrip("/") in own:
                self._client.headers[SECRET_HEADER] = secret

        return begin_with_secret

    flower_patches.patch(flower_patches.CALL, with_secret)


if __name__ == "__main__":
    main()
