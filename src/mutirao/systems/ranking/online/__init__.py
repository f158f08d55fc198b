"""Online learning to rank: each client is a user who trains the ranker by clicks on rankings."""
