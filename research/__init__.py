"""Finished experiments, kept so that the figures on the pages can be made again: see README.md."""
