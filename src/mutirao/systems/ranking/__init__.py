"""Ranking: documents graded for queries, how they are read and dealt to clients, and the models that rank them."""
