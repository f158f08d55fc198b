"""Who carries requests: in this process, over Flower, and the wrappers around either."""
