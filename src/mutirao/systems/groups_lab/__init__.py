"""Client groups on simulated populations."""
