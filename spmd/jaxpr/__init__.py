"""Traced programs: their equations, plain values and operations, and all shardings."""
