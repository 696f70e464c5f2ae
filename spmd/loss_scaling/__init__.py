"""Dynamic loss scaling for float16, as a transform of the gradient.

It adds a seed of each differentiation, and the rule that a step whose gradients overflow undoes
what all others did. Its contract is `spmd.model_interface.grad_transform`; a precision policy names
it (`spmd.precision`), and nothing else below the runs may import it.
"""
