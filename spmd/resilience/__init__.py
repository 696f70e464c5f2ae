"""Preemption, watchdogs, divergence, and silent data corruption."""
