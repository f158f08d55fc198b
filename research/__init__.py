"""Finished experiments, kept so that figures in the documentation can be made again: README.md says which."""
