"""The SuperLink as a federation runs it: Flower's own, with a door in front and a look at whose message is whose."""

import importlib
import logging
import os
import sys
from pathlib import Path
from typing import Any, NoReturn

from mutirao.deploy.door import Door
from mutirao.deploy.keys import secret_in
from mutirao.deploy.layout import MARK, server_in
from mutirao.errors import ConfigError

OTHER_WAYS = ("FLWR_INTERNAL_GRPC_CONTROL_API", "FLWR_INTERNAL_GRPC_FLEET_API")  # ports that no door stands before


def main() -> None:
    """`flower-superlink` behind the door of the server's folder; takes the same options."""
    try:
        secret = secret_in(server_in(Path(os.environ.get(MARK, ""))).secret)
    except ConfigError as error:
        sys.exit(f"error: {error}; start it with: mutirao site up")
    for name in OTHER_WAYS:
        os.environ.pop(name, None)
    logging.getLogger("mutirao").addHandler(logging.StreamHandler(sys.stderr))
    from flwr.superlink.cli import flower_superlink

    place = importlib.import_module("flwr.superlink.main")
    create_app = getattr(place, "create_app", None)

    def guarded_app(*args: Any, **options: Any) -> Any:
        return guard(create_app(*args, **options), secret) if create_app is not None else other_version()

    setattr(place, "create_app", guarded_app)  # noqa: B010, it is Flower's name, not ours
    flower_superlink()


def guard(app: Any, secret: str) -> Any:
    """Flower's application with both: the door outermost, and ownership innermost, where keys have been proven."""
    try:
        from flwr.superlink.routers.fleet.node_auth import NodeAuthMiddleware
        from starlette.middleware import Middleware

        from mutirao.deploy.ownership import Ownership
    except ImportError:
        other_version()
    if NodeAuthMiddleware not in [layer.cls for layer in app.user_middleware] or not app.state.enable_supernode_auth:
        other_version()
    links = app.state.linkstate_factory
    app.user_middleware.append(Middleware(Ownership, state_of=links.state))
    app.add_middleware(Door, secret=secret, node_of=lambda key: links.state().get_node_id_by_public_key(key))
    return app


def other_version() -> NoReturn:
    """End: better no server than an open one."""
    sys.exit("error: this version of Flower checks keys in another way; install the one that mutirao asks for")


if __name__ == "__main__":
    main()
