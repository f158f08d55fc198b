"""What all parties must have in common, by digest: told with every request, and compared by each with its own.

A handler says it with `agreed()`, such as `{"frozen": digest}`: weights that do not travel, columns and categories, a
class list. The server's own handler says what is asked for; a site with another one refuses, and both are told.
"""

from collections.abc import Mapping

from mutirao.config import Scalar
from mutirao.errors import Refused

AGREED = "agreed."  # how the names of such settings begin in a request


def tell_agreed(agreed: Mapping[str, str]) -> dict[str, Scalar]:
    """What a request says of it.

    >>> tell_agreed({"frozen": "a1b2"})
    {'agreed.frozen': 'a1b2'}
    """
    return {f"{AGREED}{name}": digest for name, digest in agreed.items()}


def hold_agreed(config: Mapping[str, Scalar], own: Mapping[str, str]) -> None:
    """Refused, with its name, if the request speaks of something that this site has not, or has another of."""
    for key, asked in config.items():
        name = key.removeprefix(AGREED)
        if name != key and own.get(name) != asked:
            here = f"here it is {own[name][:12]}" if name in own else "there is none here"
            raise Refused(key, f"{name} {str(asked)[:12]} is agreed on, {here}")
