"""Flax NNX models. They import flax, jax and what model code may say to a plan; nothing else of `spmd`."""
