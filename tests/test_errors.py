"""What can go wrong, told from one process to another."""

import pickle

import pytest

from mutirao import errors

KINDS = [v for v in vars(errors).values() if isinstance(v, type) and v.__module__ == errors.__name__]


@pytest.mark.parametrize("kind", KINDS)
def test_every_error_comes_out_of_a_process_as_it_went_in(kind: type[Exception]) -> None:
    """One that cannot be unpickled leaves a pool of processes waiting for ever."""
    made = kind("rule", "text") if kind is errors.Refused else kind("text")
    there = pickle.loads(pickle.dumps(made))
    assert (type(there), str(there), vars(there)) == (kind, str(made), vars(made))
