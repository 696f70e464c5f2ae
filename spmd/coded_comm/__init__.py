"""Parameters and gradients sent as 8-bit or 4-bit codes (ZeRO++).

Where an axis spans slices, they are sent in two hops. It adds a kind of
`spmd.sharding.param_comm.ParamComm`, which `spmd.settings.compress` makes. The plan, the layers,
the gradients and the step may not import it.
"""
