"""Gradient functions: each turns a batch into gradients, or wraps one that does."""
