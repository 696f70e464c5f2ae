"""Processes: start-up and clusters, exchange of values, and XLA's flags."""
