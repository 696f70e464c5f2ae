"""Parameters and gradients sent as 8-bit or 4-bit codes (ZeRO++).

Where an axis spans slices, they are sent in two hops. This package has a subclass of
`spmd.sharding.param_comm.ParamComm`, created by `spmd.settings.compress`. The plan, the layers, the
gradients and the step may not import it.
"""
