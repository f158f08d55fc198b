"""Mutirão as Flower apps: the `client` of an institution, the `server` that runs a recipe, and a `simulation` of both.

`run_tasks` makes the task that a run's configuration requests. Outside of this folder and `mutirao.flower` only a few
modules of `deploy` import flwr; `flower_patches` alone replaces functions in it.
"""

from mutirao.flower import FlowerFleet, Strategy  # first: it says what to install where Flower is missing

from mutirao.deploy.flower.client import client_app, initial_arrays  # isort: skip
from mutirao.deploy.flower.server_app import server_app  # isort: skip
from mutirao.deploy.flower.ray_simulation import simulate  # isort: skip

__all__ = ["FlowerFleet", "Strategy", "client_app", "initial_arrays", "server_app", "simulate"]
