"""Optimizers that see layers: configuration, wrappers, narrow state, and its storage."""
