"""Declarations of a model: its functions, rematerialization and attention; contracts of what
surrounds it."""
