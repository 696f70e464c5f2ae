"""Declarations of a model: its functions, precision, rematerialization and attention."""
