"""Low-rank adapters of frozen parameters, which may have 4 or 8 bits: a model and rules from others.

It adds kinds of `spmd.model_interface.wrapped_param.WrappedParam` (adapters) and of its
`StoredParam` (codes), and nothing else; no module of the core may import it.
"""
