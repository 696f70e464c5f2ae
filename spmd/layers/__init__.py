"""Layers that communicate: attention over a split sequence, experts, a split vocabulary."""
