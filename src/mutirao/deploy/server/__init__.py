"""What the server of a federation runs: the SuperLink, who may reach it, and the runs handed over to it."""
