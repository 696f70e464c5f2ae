"""Metrics, traces, and where the time of a run went."""
