"""A client with torch: its samples, the trainer, private training, and the engine that does it for many at once."""
