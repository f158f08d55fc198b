"""What can go wrong, in one clear line each; the command line prints the line and exits with `code`."""

from collections.abc import Sequence
from typing import Any


class MutiraoError(Exception):
    """A problem the user can act on; its text is one line that names the thing and what would be right."""

    code = 1


class ConfigError(MutiraoError):
    """A setting, name or file given by the user is wrong."""

    code = 2


class TooFewReplies(MutiraoError):
    """A round failed again and again: fewer clients than `min_replies` gave a usable reply."""

    code = 3

    def __init__(self, text: str, rows: Sequence[dict[str, Any]] = ()) -> None:  # without them: as it is unpickled
        super().__init__(text)
        self.rows = list(rows)  # what is known of the clients of the failed round, for clients.csv


class TooFewClients(MutiraoError):
    """The fleet did not gather enough clients in the time allowed."""

    code = 4


class Diverged(MutiraoError):
    """The global model is no longer finite."""

    code = 5


class Damaged(MutiraoError):
    """A file of the run folder is corrupt, truncated or not ours."""

    code = 6


class BudgetSpent(MutiraoError):
    """Another round would cost more privacy than the budget allows; what was made up to here stands."""

    code = 7


class Refused(MutiraoError):
    """A site does not do what it was asked, or does not send what came of it; `rule` says by which rule.

    `detail` is for the site's own records: it is not part of the text that leaves.
    """

    code = 8

    def __init__(self, rule: str, reason: str, detail: str = "") -> None:
        super().__init__(f"{rule}: {reason}")
        self.rule, self.detail = rule, detail

    def __reduce__(self) -> tuple[Any, ...]:
        """How it is made again in another process."""
        return type(self), (self.rule, str(self).removeprefix(f"{self.rule}: "), self.detail)
