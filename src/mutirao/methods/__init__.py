"""Methods of the field, a file each: the formula, the paper, and what passes between server and clients."""
