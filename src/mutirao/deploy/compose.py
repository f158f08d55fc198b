"""A compose file: one service and one volume for each server or site; it runs `mutirao site up --foreground`."""

import re
from collections.abc import Sequence

from mutirao.deploy.layout import Node, Server

IMAGE = "mutirao"
INSIDE = "/srv/mutirao"  # where a container has its folder
DATA = "/data"  # and its data, which it can only read
HEAD = "# One service and one volume for each. The folder of a service is made once, in its volume:\n"


def compose_text(places: Sequence[Server | Node]) -> str:
    """The compose file for these, written by hand so that it reads well."""
    hints = "".join(f"#   {hint(place)}\n" for place in places)
    services = "".join(service(place) for place in places)
    volumes = "".join(f"  {place.name}:\n" for place in places)
    return f"{HEAD}{hints}services:\n{services}volumes:\n{volumes}"


def hint(place: Server | Node) -> str:
    """The command that makes the folder of a service in its volume."""
    run = f"docker compose run --rm -T {place.name} site init"
    if isinstance(place, Server):
        hosts = " ".join(f"--host {host}" for host in place.hosts)
        return f"{run} server {INSIDE} {hosts} --port {place.port}".replace("  ", " ")
    return f"{run} site {INSIDE} --name {place.name} --superlink {place.superlink} --ca - < ca.crt"


def service(place: Server | Node) -> str:
    """One service. It may not gain rights, writes to its own volume alone, and comes back after a reboot."""
    outside = f"DATA_{re.sub(r'[^A-Za-z0-9]', '_', place.name).upper()}"  # where its data lie
    lines = [
        f"  {place.name}:",
        f"    image: {IMAGE}",
        "    pull_policy: never",  # it is built here: whoever has that name in a registry is somebody else
        f'    command: ["site", "up", "{INSIDE}", "--foreground"]',
        "    init: true",  # what ends is buried, so that nobody takes it for alive
        "    restart: unless-stopped",
        "    read_only: true",
        '    tmpfs: ["/tmp"]',
        '    cap_drop: ["ALL"]',
        '    security_opt: ["no-new-privileges:true"]',
        "    healthcheck:",  # as in the image, which loses its own in formats other than Docker's
        f'      test: ["CMD", "mutirao", "site", "status", "{INSIDE}"]',
        "      interval: 30s",
        "      timeout: 15s",
        "      start_period: 60s",
        "    volumes:",
        f"      - {place.name}:{INSIDE}",
        f"      - ${{{outside}:-./data}}:{DATA}:ro",
    ]
    if isinstance(place, Server):
        lines += ["    ports:", f'      - "{place.port}:{place.port}"']
    return "\n".join(lines) + "\n"
