"""The systems of this project: one folder each, with its recipe, readers, models and metrics."""
