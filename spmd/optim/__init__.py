"""Optimizers that see layers: configuration, wrappers, narrow state, and where a state is
stored."""
