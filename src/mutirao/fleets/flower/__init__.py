"""A fleet over Flower's messages: the same flow reaches real institutions, or Flower's own simulation engine.

`server` asks, `client` answers, `messages` is what travels between them, `tasks` what a run's configuration asks for,
and `simulation` plays all of them on one machine. Outside this folder only a few in `site` (`clientapp`, `superlink`,
`supernode`, `worker`) import flwr.
"""

import os

from mutirao.errors import ConfigError

os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")  # flwr reads it once, when it is imported
try:
    from mutirao.fleets.flower.client import client_app
    from mutirao.fleets.flower.server import FlowerFleet, server_app
    from mutirao.fleets.flower.simulation import simulate
except ImportError as error:
    if not str(error.name).startswith("flwr"):
        raise
    raise ConfigError("the Flower fleet needs Flower: install mutirao[flower]") from error

__all__ = ["FlowerFleet", "client_app", "server_app", "simulate"]
