"""Metrics, profiler traces, stragglers and goodput."""
