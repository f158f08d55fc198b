"""Learning to rank: readers of ranking data, their partition over clients, models, metrics and the recipe."""
