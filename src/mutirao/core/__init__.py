"""One round and what it is made of, in NumPy alone: start with `rounds`."""
