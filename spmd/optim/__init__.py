"""Optimizers that see layers: configuration, wrappers, and narrow or offloaded state."""
