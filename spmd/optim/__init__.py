"""Optimizers for stacked layers: configuration, wrappers, narrow state, and its storage."""
