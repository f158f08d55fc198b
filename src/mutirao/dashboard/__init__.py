"""A live page over a folder of runs and studies, on this machine alone unless told otherwise."""
