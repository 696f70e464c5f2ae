"""Declarations of a model: its functions, rematerialization, attention and contracts.

The contracts are for what surrounds a model.
"""
