"""Simulated clients in this process, and wrappers that simulate their devices, availability, delays and drift."""
