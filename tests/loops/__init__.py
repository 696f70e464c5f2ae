"""A training script in the style of public repositories: plain, and with this package.

Both are the same program: a small Llama in Linen, a `TrainState` of Flax, a table of `(pattern,
PartitionSpec)` rows for `re.search`, and constraints in the model. `partition_utils` has what such
scripts take from a library.
"""
