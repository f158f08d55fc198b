"""A client: works on its own part of the recipe's task."""

from mutirao.deploy.flower import client_app

app = client_app()
