"""What can be asked for by name; what it stands for needs torch."""

HIDDEN = ("none", "skewed", "permuted", "rotated")  # kinds of hidden populations

# Epochs of a model that is fitted at a client and stays there: not those of a round, which a site may have pinned.
FIT_EPOCHS = "fit_epochs"
