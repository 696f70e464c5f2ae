"""Flax NNX models, with imports of flax, jax and the parts of `spmd` for model code only."""
