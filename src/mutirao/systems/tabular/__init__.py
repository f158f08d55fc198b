"""Tabular data: readers, the schema that clients agree on, the client and the recipe."""
