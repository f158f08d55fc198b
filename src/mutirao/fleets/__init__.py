"""Fleets: `local` in this process, `flower` over Flower's messages."""
