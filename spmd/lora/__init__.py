"""Low-rank adapters of frozen parameters: a model and a rule table made from others.

It adds a kind of `spmd.model_interface.wrapped_param.WrappedParam` and nothing else; no module of
the core may import it.
"""
