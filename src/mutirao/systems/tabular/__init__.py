"""Tables of numbers and categories: reading, a schema that clients agree on, and a client that trains on it."""
