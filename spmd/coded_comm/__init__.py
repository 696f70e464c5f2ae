"""Parameters and gradients sent as 8-bit or 4-bit codes, in two hops where an axis spans slices
(ZeRO++).

It adds a kind of `spmd.sharding.param_comm.ParamComm`, which `spmd.settings.compress` makes. The
plan, the layers, the gradients and the step may not import it.
"""
