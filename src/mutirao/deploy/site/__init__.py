"""What a site runs: the SuperNode, the client app, and the resident worker that trains."""
