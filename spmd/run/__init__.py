"""A training run from its config: building, starting, checking and running it."""
