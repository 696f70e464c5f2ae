"""Configs and examples that ship with the package; each runs by itself."""
