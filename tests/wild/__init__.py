"""Twelve models as people write them, in plain Flax, each with its loss, its batches and its table of rules.

`vision`, `language` and `structured` have one network each, `several` the models of two networks;
`example` is the form in which they are given to this package, and to the plain loop of Flax and
optax that they are compared with.
"""
