"""The commands of `spmd`, one module each."""
