"""The SuperNode as a site runs it: one that is not let in yet waits and tries again, instead of ending.

Flower's own ends at once when the server does not know its key yet, and also when it is started again soon after it
was killed: for about a minute the server takes the dead one for alive, and lets in no second one with that key. It
also ends for good when it meets a certificate that is not in order, such as one that has expired.
"""

import contextlib
import logging
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mutirao.deploy import flower_patches

log = logging.getLogger("mutirao")

NOT_ADMITTED = "not let in yet"
SKEWED = "the clocks differ too much, or the key is damaged"
UNKNOWN = "the server does not know this site's key, or takes the process before this one for alive"
UNPROVEN = "the server's certificate is not in order"
EXPIRED = "it has expired: the server renews it with: mutirao site renew"
PAUSE = 3.0


def retry_until_admitted(activate: Callable[[Any, Any], Any], pause: float = PAUSE) -> Callable[[Any, Any], Any]:
    """Flower's request to be let in, repeated until it is granted; trouble with the network is left to Flower."""

    def until_let_in(client: Any, request: Any) -> Any:
        told = None
        while True:
            try:
                return activate(client, request)
            except Exception as error:  # httpx's; only what the server itself answered has a response
                status = getattr(getattr(error, "response", None), "status_code", None)
                if status is None or status in (502, 503, 504):
                    raise
                if status != told:
                    log.warning("%s (%s): %s; trying again", NOT_ADMITTED, status, SKEWED if status == 401 else UNKNOWN)
                    told = status
                time.sleep(pause)

    return until_let_in


def retry_on_bad_certificate(make: Callable[[], Any]) -> Callable[[], Any]:
    """Flower's maker of what tries again, whose makes try again also when the server's certificate is not in order.

    Nothing is sent to such a server, so that to wait costs nothing; one that renews its certificate has its sites back.
    """

    def made() -> Any:
        again = make()
        gives_up, told = again.should_giveup, set[str]()

        def is_over(error: Exception) -> bool:
            why = str(error)
            if "certificate verify failed" not in why.lower():
                return bool(gives_up is not None and gives_up(error))
            if why not in told:
                log.warning("%s: %s; %s", NOT_ADMITTED, UNPROVEN, EXPIRED if "expired" in why else why)
                told.add(why)
            return False

        again.should_giveup = is_over
        return again

    return made


def main() -> None:
    """`flower-supernode`, patient; takes the same options."""
    from flwr.supernode.cli import flower_supernode

    log.addHandler(logging.StreamHandler(sys.stderr))
    at_sites = (
        flower_patches.ACTIVATE,
        flower_patches.RETRY,
        flower_patches.UNPACK,
        flower_patches.FOLDER,
        flower_patches.LOAD,
    )
    if odd := flower_patches.unverified_changes(*at_sites):
        log.warning(odd)
    flower_patches.patch(flower_patches.ACTIVATE, retry_until_admitted)
    flower_patches.patch(flower_patches.RETRY, retry_on_bad_certificate)
    flower_supernode()  # whoever ends it on purpose ends the process
    restart()


def restart(pause: float = 4 * PAUSE) -> None:
    """Begin again as the same process. Flower gives up when the server answers what it does not expect, and then hangs:
    the connection is gone, but a thread of its own keeps the process alive.
    """
    log.warning("Flower gave the connection up; starting anew in %g s", pause)
    for child in children():
        with contextlib.suppress(OSError):
            os.kill(child, signal.SIGTERM)
    time.sleep(pause)
    os.execv(sys.executable, [sys.executable, "-m", "mutirao.deploy.site.supernode", *sys.argv[1:]])


def children() -> list[int]:
    """The processes this one has started, where the system tells."""
    with contextlib.suppress(OSError):
        tasks = Path(f"/proc/{os.getpid()}/task").iterdir()
        return [int(pid) for task in tasks for pid in (task / "children").read_text().split()]
    return []


if __name__ == "__main__":
    main()
