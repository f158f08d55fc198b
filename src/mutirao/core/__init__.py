"""One round and its parts, with NumPy alone: start with `rounds`."""
