"""The server: runs the recipe that the run configuration names."""

from mutirao.deploy.flower import server_app

app = server_app()
