"""Flower's SuperLink with three middlewares: access control, ownership of messages, and long polling."""

import logging
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mutirao.deploy import flower_patches
from mutirao.deploy.keys import read_secret
from mutirao.deploy.layout import FOLDER_VARIABLE, load_server
from mutirao.deploy.server.access_control import AccessControl
from mutirao.deploy.server.long_polling import LongPolling
from mutirao.errors import ConfigError

log = logging.getLogger("mutirao")

# They would open ports without access control.
GRPC_SWITCHES = (
    "FLWR_INTERNAL_GRPC_CONTROL_API",
    "FLWR_INTERNAL_GRPC_FLEET_API",
)


def main() -> None:
    """`flower-superlink` with the secret of the server's folder; it takes the same options."""
    try:
        secret = read_secret(load_server(Path(os.environ.get(FOLDER_VARIABLE, ""))).secret)
    except ConfigError as error:
        sys.exit(f"error: {error}; start it with: mutirao site up")
    for name in GRPC_SWITCHES:
        os.environ.pop(name, None)
    log.addHandler(logging.StreamHandler(sys.stderr))
    from flwr.superlink.cli import flower_superlink

    def with_middleware(create_app: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args, **options: add_middleware(create_app(*args, **options), secret)

    if changes := flower_patches.unverified_changes(flower_patches.SERVE, flower_patches.CALL):
        log.warning(changes)
    flower_patches.patch(flower_patches.SERVE, with_middleware)
    flower_superlink()


def add_middleware(app: Any, secret: str) -> Any:
    """Flower's application with all three: access control first, ownership after authentication, long polling last."""
    try:
        from flwr.superlink.routers.fleet.node_auth import NodeAuthMiddleware
        from starlette.middleware import Middleware

        from mutirao.deploy.server.ownership import Ownership
    except ImportError as error:
        flower_patches.exit_incompatible(f"lacks what the check of message ownership needs ({error})")
    if NodeAuthMiddleware not in [layer.cls for layer in app.user_middleware] or not app.state.enable_supernode_auth:
        flower_patches.exit_incompatible("authenticates sites in another way")
    links = app.state.linkstate_factory
    # Starlette calls the first of this list first: these two get requests that Flower has authenticated.
    app.user_middleware += [Middleware(Ownership, state_of=links.state), Middleware(LongPolling)]
    # `add_middleware` inserts at the front: nothing of Flower's runs for a request that is refused.
    app.add_middleware(AccessControl, secret=secret, node_of=lambda key: links.state().get_node_id_by_public_key(key))
    return app


if __name__ == "__main__":
    main()
