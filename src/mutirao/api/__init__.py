"""The Python API: `mutirao.run`, `mutirao.compare` and their results."""
