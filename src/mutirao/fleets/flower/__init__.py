"""A fleet over Flower's messages: the same flow reaches real institutions, or Flower's own simulation engine.

`fleet` asks, `messages` is what travels; who answers, and what a run's configuration asks for, is in `deploy.flower`.
"""

import os

from mutirao.errors import ConfigError

os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")  # flwr reads it once, when it is imported
try:
    from mutirao.fleets.flower.fleet import FlowerFleet
except ImportError as error:
    if not str(error.name).startswith("flwr"):
        raise
    raise ConfigError("the Flower fleet needs Flower: install mutirao[flower]") from error

__all__ = ["FlowerFleet"]
