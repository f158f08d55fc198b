"""The door from Python: `mutirao.run`, `mutirao.compare` and what they give back."""
