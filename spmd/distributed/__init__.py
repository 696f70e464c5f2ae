"""Processes: start-up and clusters, exchange of values, XLA's flags and compilation cache."""
