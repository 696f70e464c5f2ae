"""Checkpoints, verified before use."""
