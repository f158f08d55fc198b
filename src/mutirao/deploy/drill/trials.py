"""What can be drilled, and how it is told."""

from dataclasses import dataclass, field
from typing import Any

from mutirao.errors import MutiraoError

# What can be drilled, said here so that listing it imports nothing.
TRIALS = {
    "kills": "SIGKILL at random moments: server process, SuperLink, SuperNode, worker",
    "in-process": "SIGKILL at random moments of a run on the local fleet, which is resumed",
    "cut": "the network between a site and the server is down for a minute",
    "slow": "a link of 64 kbit/s between a site and the server",
    "disk": "the disk with the run folder is full for a while",
    "site-disk": "the disk with a site's audit trail is full for a while",
    "certificate": "the server's certificate expires, and is renewed",
    "clock": "a site's clock is an hour ahead, and is set right",
    "duplicate": "a site sends each reply twice",
    "garbage": "a site answers garbage",
    "impostor": "a site answers, fetches and orders in the name of others",
    "forwarder": "a stranger comes through a TCP forwarder on the server's machine",
    "leak": "a server reads samples out of an update: plain, under a policy, with noise",
    "ratings": "a server reads a recommender's users: plain, noised, masked",
}


@dataclass
class Trial:
    """What was done to a run, what happened, and whether it ended as it should."""

    name: str
    done: str
    happened: str = ""
    good: bool = False
    skipped: bool = False
    kills: int = 0
    seconds: float = 0.0
    facts: dict[str, Any] = field(default_factory=dict)

    @property
    def verdict(self) -> str:
        """In one word."""
        return "not run" if self.skipped else "good" if self.good else "BAD"


class Impossible(MutiraoError):
    """This machine does not allow what a trial needs."""
