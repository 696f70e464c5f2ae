"""Metrics, profiler traces and goodput."""
