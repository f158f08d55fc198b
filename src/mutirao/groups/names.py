"""What can be asked for by name; what it stands for needs torch."""

HIDDEN = ("none", "skewed", "permuted", "rotated")  # kinds of hidden populations
