"""Training a torch module at a client: samples, the trainer, DP-SGD, and an engine that simulates many clients."""
