"""Dynamic loss scaling for float16, as a transform of the gradient.

It multiplies the loss of each differentiation, and a step whose gradients overflow undoes the
effects of all other transforms. Its contract is `spmd.model_interface.grad_transform`; a precision
policy names it (`spmd.precision`), and nothing else below the runs may import it.
"""
