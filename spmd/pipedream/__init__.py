"""PipeDream: a pipeline without a flush; microbatches stay in flight between steps.

It adds a gradient function, and the state of what is in flight, as a transform of the gradient
(`spmd.model_interface.grad_transform`). The stages are those of `spmd.pipeline`, which may not
import it; nor may the plan, the gradients and the step.
"""
