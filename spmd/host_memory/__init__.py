"""Optimizer state and parameters in host memory, updated in chunks and fetched layer by layer.

It adds a kind of `spmd.optim.storage.Storage`, which `spmd.settings.offload` makes, and of
`spmd.model_interface.wrapped_param.WrappedParam`. The plan, the layers, the gradients and the step
may not import it.
"""
