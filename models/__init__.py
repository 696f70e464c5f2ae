"""Flax NNX models. They import flax, jax and the parts of `spmd` that are for model code."""
