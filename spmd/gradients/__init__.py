"""Gradient functions from a batch to gradients, and wrappers of gradient functions."""
