"""Tests; a package only so that `python -m tests.golden` finds them."""
