"""Whole slides: read, mask, cut into tiles, choose among them, generate, screen."""
