"""The framework timed against hand-written JAX, one JSON line a run."""
