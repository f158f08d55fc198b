"""A site's state on disk, one file a round: it outlives the SuperNode, and a repeated round starts from the same state.

Flower keeps the state of a node in memory, for one Flower run. A run of ours may take several Flower runs, and repeat a
round if a reply was lost. So states are stored by run (identified by the first hash of the server's audit trail) and
by round.
"""

import logging
import os
import re
import shutil
from pathlib import Path

from mutirao.core.arrays import Arrays
from mutirao.core.fleet import FLEETING
from mutirao.errors import Damaged
from mutirao.io import load_arrays, save_arrays

log = logging.getLogger("mutirao")

ROUNDS = 5  # latest rounds of a run that are kept
RUNS = 8  # latest runs that are kept


class States:
    """The states of one run at this site, in `folder/<run>`."""

    def __init__(self, folder: Path, run: str) -> None:
        self.top = folder
        self.folder = folder / run[:32]
        self.now = self.folder / "now.safetensors"

    def before(self, do: str, number: int) -> tuple[int, Arrays]:
        """The round and the state with which a request begins.

        Training starts from the state after an earlier round; other requests see the latest state.
        """
        last = number - 1 if do == "train" else number
        for n in sorted(self.rounds(), reverse=True):
            if n <= last:
                try:
                    return n, load_arrays(self.file(n))[0]
                except Damaged as error:
                    log.warning("%s; going back to an earlier state", error)
        if self.rounds() and last > 0:
            log.warning("no state of a round before %d is kept here; beginning with none", number)
        return 0, {}

    def keep(self, number: int, state: Arrays) -> None:
        """Write the state after a round, and remove those of old rounds and runs."""
        now = {k: v for k, v in state.items() if k.startswith(FLEETING)}
        if now:
            save_arrays(self.now, now, {})
            self.now.chmod(0o600)
        else:
            self.now.unlink(missing_ok=True)
        if number or len(state) > len(now):
            save_arrays(self.file(number), {k: v for k, v in state.items() if k not in now}, {"round": number})
        for old in sorted(self.rounds())[:-ROUNDS]:
            self.file(old).unlink(missing_ok=True)
        runs = sorted((f for f in self.top.iterdir() if f.is_dir()), key=lambda f: f.stat().st_mtime)
        for folder in runs[:-RUNS]:
            shutil.rmtree(folder, ignore_errors=True)

    def take_fleeting(self) -> Arrays:
        """Take the secrets of the current round's secure sum from disk.

        They are gone until they are saved again: of two concurrent processes only one gets them.
        """
        mine = self.now.with_name(f"taken.{os.getpid()}.safetensors")
        try:
            self.now.replace(mine)
            return load_arrays(mine)[0]
        except FileNotFoundError:
            return {}
        except Damaged as error:
            log.warning("%s; the sum goes on without this site", error)
            return {}
        finally:
            mine.unlink(missing_ok=True)

    def rounds(self) -> list[int]:
        """The rounds with a stored state."""
        found = (re.fullmatch(r"state_(\d+)\.safetensors", f.name) for f in self.folder.glob("state_*"))
        return [int(m[1]) for m in found if m]

    def file(self, number: int) -> Path:
        """The file of the state after a round."""
        return self.folder / f"state_{number:06d}.safetensors"
