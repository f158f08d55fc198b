"""The server: runs the recipe that the run configuration names."""

from mutirao.fleets.flower import server_app

app = server_app()
