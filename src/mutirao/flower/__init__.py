"""A fleet over Flower's messages: the same flow reaches real institutions, or Flower's own simulation engine.

`flower_fleet` sends requests, `messages` defines their format, `compat` that of Flower's own apps, and `strategy` makes
our parts one of Flower's strategies. The client and server apps are in `deploy.flower`.
"""

import os

from mutirao.errors import ConfigError

# Set before the imports below: flwr reads it once, when it is imported.
os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")
try:
    from mutirao.flower.flower_fleet import FlowerFleet
    from mutirao.flower.strategy import Strategy, errors_on
except ImportError as error:
    if not str(error.name).startswith("flwr"):
        raise
    raise ConfigError("the Flower fleet needs Flower: install mutirao[flower]") from error

__all__ = ["FlowerFleet", "Strategy", "errors_on"]
