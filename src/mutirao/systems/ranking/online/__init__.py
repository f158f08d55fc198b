"""Online learning to rank: each client is a user whose clicks on rankings train the ranker."""
