"""Grids of runs, and what may be said of them."""
