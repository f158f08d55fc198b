"""The errors: each is one clear line; the command line prints it and exits with `code`."""

from collections.abc import Sequence
from typing import Any


class MutiraoError(Exception):
    """A problem the user can act on; its text is one line that names the thing and what would be right.

    >>> import mutirao
    >>> try:
    ...     mutirao.run("quickstart", rounds=-1)
    ... except MutiraoError as error:
    ...     print(error)
    rounds: -1 is too small, at least 1 is needed
    """

    code = 1


class ConfigError(MutiraoError):
    """A setting, name or file given by the user is wrong.

    >>> from mutirao.config import Common, resolve
    >>> resolve(Common, {"aggregate": "fedavgg"})
    Traceback (most recent call last):
        ...
    mutirao.errors.ConfigError: aggregate: no part is called 'fedavgg'; did you mean 'fedavg'?
    """

    code = 2


class TooFewReplies(MutiraoError):
    """A round failed again and again: fewer clients than `min_replies` gave a usable reply.

    >>> import mutirao
    >>> from mutirao.aggregation import FedAvg
    >>> from mutirao.selection import everyone
    >>> def silent(request, site):
    ...     raise OSError("disk full")
    >>> fleet = mutirao.LocalFleet(silent, {"ana": None})
    >>> list(mutirao.train(mutirao.Run({}), fleet, rounds=1, select=everyone, aggregate=FedAvg()))
    Traceback (most recent call last):
        ...
    mutirao.errors.TooFewReplies: round 1 failed 3 times: 0 usable replies, 1 needed (ana raised: OSError: disk full)
    """

    code = 3

    def __init__(self, text: str, rows: Sequence[dict[str, Any]] = ()) -> None:  # without them: as it is unpickled
        super().__init__(text)
        self.rows = list(rows)  # the client rows of the failed round, for clients.csv


class TooFewClients(MutiraoError):
    """The fleet did not gather enough clients in the time allowed.

    >>> import mutirao
    >>> from mutirao.aggregation import FedAvg
    >>> from mutirao.core.rounds import Patience
    >>> from mutirao.selection import everyone
    >>> fleet = mutirao.LocalFleet(lambda request, site: mutirao.Reply({}, n=1), {"ana": None})
    >>> parts = {"select": everyone, "aggregate": FedAvg(), "patience": Patience(wait=0.0)}
    >>> list(mutirao.train(mutirao.Run({}), fleet, rounds=1, expect=2, **parts))
    Traceback (most recent call last):
        ...
    mutirao.errors.TooFewClients: waited 0 s for 2 clients, 1 came: ana; start more clients or lower min_replies
    """

    code = 4


class Diverged(MutiraoError):
    """The global model is no longer finite.

    >>> import mutirao
    >>> import numpy as np
    >>> from mutirao.selection import everyone
    >>> fleet = mutirao.LocalFleet(lambda request, site: mutirao.Reply(request.arrays, n=1), {"ana": None})
    >>> def explode(current, replies, memory):
    ...     return mutirao.Merged({"w": np.array([np.inf])}, {"ana": 1.0})
    >>> list(mutirao.train(mutirao.Run({"w": np.zeros(1)}), fleet, rounds=1, select=everyone, aggregate=explode))
    Traceback (most recent call last):
        ...
    mutirao.errors.Diverged: diverged at round 1: the global model holds NaN or infinity; try a smaller learning rate
    """

    code = 5


class Damaged(MutiraoError):
    """A file of the run folder is corrupt, truncated or not ours.

    >>> from pathlib import Path
    >>> import mutirao
    >>> Path("emptied/checkpoints").mkdir(parents=True)
    >>> mutirao.load_run("emptied")
    Traceback (most recent call last):
        ...
    mutirao.errors.Damaged: emptied has no intact checkpoint
    """

    code = 6


class BudgetSpent(MutiraoError):
    """Another round would cost more privacy than the budget allows; the rounds made so far are kept.

    >>> import mutirao
    >>> mutirao.run("quickstart", rounds=3, privacy={"name": "central", "noise": 1.0, "budget": 3.0}, out="runs/spent")
    Traceback (most recent call last):
        ...
    mutirao.errors.BudgetSpent: the privacy budget ends the run after round 1 of 3: epsilon is 2.868 of 3, and ...
    """

    code = 7


class Refused(MutiraoError):
    """A site refuses a request, or refuses to send its result; `rule` says by which rule.

    `detail` is for the site's own records: it is not part of the text that leaves.

    >>> refused = Refused("max_rounds", "it has trained in 100 rounds", detail="asked by run 7")
    >>> refused.rule, str(refused)
    ('max_rounds', 'max_rounds: it has trained in 100 rounds')
    """

    code = 8

    def __init__(self, rule: str, reason: str, detail: str = "") -> None:
        super().__init__(f"{rule}: {reason}")
        self.rule = rule
        self.detail = detail

    def __reduce__(self) -> tuple[Any, ...]:
        """How it is made again in another process."""
        return type(self), (self.rule, str(self).removeprefix(f"{self.rule}: "), self.detail)
