"""A Mutirão recipe as an ordinary Flower app."""
