"""Processes: how they find each other, exchange values, and configure XLA."""
