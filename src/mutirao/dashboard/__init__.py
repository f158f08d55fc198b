"""A live page over a folder of runs and studies, by default on this machine alone."""
