"""The run folder: what a run leaves on disk, how it goes on, and who reads it."""
