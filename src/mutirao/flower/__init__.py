"""A fleet over Flower's messages: the same flow reaches real institutions, or Flower's own simulation engine.

`fleet` asks, `messages` is what travels, `stock` what travels between Flower's own apps, and `strategy` is our parts as
one of Flower's strategies; who answers, and what a run's configuration asks for, is in `deploy.flower`.
"""

import os

from mutirao.errors import ConfigError

os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")  # flwr reads it once, when it is imported
try:
    from mutirao.flower.flower_fleet import FlowerFleet
    from mutirao.flower.strategy import Strategy, errors_on
except ImportError as error:
    if not str(error.name).startswith("flwr"):
        raise
    raise ConfigError("the Flower fleet needs Flower: install mutirao[flower]") from error

__all__ = ["FlowerFleet", "Strategy", "errors_on"]
