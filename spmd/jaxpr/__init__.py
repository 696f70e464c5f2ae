"""Traced programs: their equations, plain values and operations, and the shardings of all values."""
