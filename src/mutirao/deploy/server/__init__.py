"""The server of a federation: the SuperLink, access to it, and the runs submitted to it."""
