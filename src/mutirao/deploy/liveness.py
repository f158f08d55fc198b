"""Whether a server or site does now what it is there for: not what it once said, but what is so at this moment."""

from mutirao.deploy.doctor import unreachable
from mutirao.deploy.keys import public_key_pem
from mutirao.deploy.layout import Node, Server
from mutirao.deploy.processes import Process, answers, certificate_trouble, is_connected, waits
from mutirao.deploy.server.control_calls import about

SECONDS = 5.0  # for the server to answer


def out_of_work(place: Server | Node, process: Process) -> str:
    """Why the SuperLink does not answer, or the SuperNode is not connected; empty if it is."""
    if isinstance(place, Server):
        return "" if answers(place) else certificate_trouble(place) or process.reason()
    try:
        told = about(place.superlink, place.ca, public_key_pem(place.public_key), SECONDS)
    except (OSError, ValueError) as error:
        return unreachable(error, place).text
    if not told.get("admitted"):
        return "the server does not know this site's key"
    return "" if is_connected(process) else waits(process) or "it has lost the server, and is about to try again"
