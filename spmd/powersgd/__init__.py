"""PowerSGD: gradients sent between devices as products of narrow matrices, with error feedback.

It adds the last stage of `spmd.gradients.deferred_reduction`, and the state that it keeps, as a
transform of the gradient (`spmd.model_interface.grad_transform`). The plan, the gradients and the
step may not import it.
"""
